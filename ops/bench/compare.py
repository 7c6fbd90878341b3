#!/usr/bin/env python3
"""Run Looseleaf and its peers in turn on this machine, several rounds, and print medians and ratios.

    python ops/bench/compare.py --prepare --preset reported     # only make the environments
    python ops/bench/compare.py --preset reported --json build/compare.json
    python ops/bench/compare.py --preset reported --json build/compare.json --resume
    python ops/bench/compare.py --peers looseleaf vllm --cases w1:16 w2:16 w4:3 w1:16+busy@1 --rounds 5
    python ops/bench/compare.py --report build/a.json build/b.json --json build/both.json

One peer runs at a time. In a round every peer gets the same prompts; the next round has others, and starts with the
next peer. Ratios are taken within a round, so that a slow hour of the machine slows both sides. Exits with 1 if
anything failed. See README.md for what each number means, and cases.py for how a case is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cases import CHATS, Case, parse_case
from document import Document, DocumentError, check_resumable, merge, read, write
from environments import PeerUnavailable, ensure_environment, pinned_versions
from hf_from_gguf import ConversionError, convert
from llama_cpp import ensure_llama_cpp, quantised
from machine import machine_facts
from measuring import Plan, take_turn
from prompts import PromptError
from recipes import RECIPES, STATIC_PEERS, Place
from roofline import Roofline
from serve import DEFAULT_TEXT, DEFAULT_TOKENIZER, ROOT, positive, read_tokenizer
from tables import problems, report

from service.errors import ConfigError, ModelLoadError
from service.model.fetch import resolve_model
from service.simulate import read_trace

DEFAULT_PEERS = ("looseleaf", "vllm", "transformers")
DEFAULT_CASES = ("w1:1", "w1:4", "w1:16", "w1:32")
DEFAULT_LABELS = tuple(parse_case(case).label for case in DEFAULT_CASES)
CHAT_TRACE = ROOT / "tests/data/traces/mooncake_conversation.jsonl.gz"
ENVIRONMENTS = {
    "vllm": "vllm",
    "vllm-eager": "vllm",
    "transformers": "transformers",
    "transformers-cb": "transformers",
    "openvino-bf16": "openvino",
    "openvino-int8": "openvino",
}
GGUF_KINDS = {"llama-q8_0": "Q8_0", "openvino-bf16": "F16", "openvino-int8": "Q8_0"}
FAILURES = (
    PeerUnavailable,
    ConversionError,
    ModelLoadError,
    ConfigError,
    PromptError,
    DocumentError,
    subprocess.CalledProcessError,
)
# What README.md reports: everything that claims are made about.
REPORTED_PEERS = (
    "looseleaf",
    "looseleaf-int8",
    "looseleaf-int4",
    "looseleaf-plain",
    "looseleaf-int8-plain",
    "looseleaf-int4-plain",
    "vllm",
    "llama-q4_1",
    "llama-q8_0",
    "openvino-bf16",
    "openvino-int8",
    "transformers-cb",
)
REPORTED_CASES = (*DEFAULT_CASES, "w2:16", "w3:1", "w4:3@1", "w1:1+busy@1", "w1:16+busy@1")
REPORTED_ONLY = {
    "transformers-cb": ("w1 c=1", "w1 c=16"),  # takes minutes for each
    **dict.fromkeys(("looseleaf-plain", "looseleaf-int8-plain", "looseleaf-int4-plain"), (*DEFAULT_LABELS, "w2 c=16")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare what the command line names, print the tables, and return the exit status."""
    args = parse_arguments(argv)
    try:
        if args.report:
            document = merge([(path, read(path)) for path in args.report])
            if args.json:
                write(document, args.json)
        else:
            document = compare(args)
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.prepare:
        return 0
    print(report(document))
    failures, noisy = problems(document)
    for line in [*failures, *noisy]:
        print(line, file=sys.stderr)
    return 1 if failures else 0


def compare(args: argparse.Namespace) -> Document:
    """Measure every round, or what is missing of it. With `--prepare` only make what that needs."""
    place = prepare(args)
    facts = {**machine_facts(), "versions": pinned_versions()}
    document = Document(facts, args.seed, args.max_tokens, args.extra, args.cases, args.peers)
    if args.prepare:
        return document
    if args.resume and args.json.exists():
        old = read(args.json)
        check_resumable(old, document, args.json)
        document.rooflines, document.turns = old.rooflines, old.turns
    has_chats = any(case.rate is not None for case in args.cases)
    tokenizer = read_tokenizer(args.tokenizer)
    assert tokenizer is not None  # only a missing path gives none
    plan = Plan(
        place=place,
        cases=args.cases,
        book=args.text.read_text(),
        tokenizer=tokenizer,
        trace=read_trace(CHAT_TRACE) if has_chats else (),
        seed=args.seed,
        extra=args.extra,
        max_tokens=args.max_tokens,
        limit_s=args.limit,
        busy_limit_s=args.busy_limit,
        chat_s=args.chat_seconds,
        idle_s=args.idle_seconds,
    )

    def save() -> None:
        if args.json:
            write(document, args.json)

    for round_number in range(args.rounds):
        if args.roofline and len(document.rooflines) <= round_number:
            document.rooflines.append(measure_roofline(place.gguf))
        for peer in rotated(args.peers, round_number):
            turn = document.turn(peer, round_number)
            due = [case for case in args.cases if case.is_due(round_number) and is_wanted(case, peer, args.only)]
            missing = [case for case in due if turn.case(case.label) is None]
            if not missing:
                continue
            turn.cases = [run for run in turn.cases if run.is_good]
            print(f"round {round_number + 1} of {args.rounds}: {peer}", file=sys.stderr, flush=True)
            take_turn(turn, missing, plan, save)
    return document


def prepare(args: argparse.Namespace) -> Place:
    """Make the environments and the model files that the chosen peers need, unless they are there."""
    gguf = resolve_model(args.model, report=lambda line: print(line, file=sys.stderr, flush=True)).resolve()
    if gguf.suffix != ".gguf":
        raise PeerUnavailable(f"--model: {gguf} is no .gguf file, which the peers' copy is made from")
    place = Place(gguf, args.work_dir / "models" / f"{gguf.stem}-bf16", args.work_dir)
    (args.work_dir / "logs").mkdir(parents=True, exist_ok=True)
    environments = {ENVIRONMENTS[peer] for peer in args.peers if peer in ENVIRONMENTS}
    for environment in sorted(environments):
        ensure_environment(environment, args.work_dir)
    if environments and not place.hf_dir.exists():
        convert(place.gguf, place.hf_dir, args.tokenizer.parent)
    if any(peer.startswith("llama-") for peer in args.peers):
        ensure_llama_cpp(args.work_dir)
    for kind in sorted({GGUF_KINDS[peer] for peer in args.peers if peer in GGUF_KINDS}):
        quantised(gguf, kind, args.work_dir)
    return place


def measure_roofline(gguf: Path) -> Roofline:
    """Measure what the machine can do, in a process of its own whose threads end with it."""
    command = [sys.executable, str(Path(__file__).with_name("roofline.py")), str(gguf)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(found.stdout, type=Roofline)


def rotated(peers: Sequence[str], by: int) -> list[str]:
    """Return the peers, beginning `by` places later: nobody always runs first, or right after the same one."""
    shift = by % len(peers)
    return [*peers[shift:], *peers[:shift]]


def is_wanted(case: Case, peer: str, only: dict[str, Sequence[str]]) -> bool:
    """Say whether a peer takes part in a case: in all that it can, unless `only` names its own."""
    if case.rate is not None and peer in STATIC_PEERS:
        return False
    return peer not in only or case.label in only[peer]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a .gguf file, or the server's built-in model")
    parser.add_argument("--preset", choices=["reported"], help="the peers and cases of README.md")
    parser.add_argument("--peers", choices=RECIPES, nargs="+", help="the first is 'ours'")
    parser.add_argument("--rounds", type=positive(int), default=3)
    parser.add_argument("--cases", type=parse_case, nargs="+", metavar="WORKLOAD:CONCURRENCY[+busy][@ROUNDS]")
    parser.add_argument(
        "--only", type=parse_only, action="append", metavar="PEER=CASE,...", help="measure no other cases on a peer"
    )
    parser.add_argument(
        "--max-tokens", type=positive(int), help="instead of the workload's own: a quick look, no result"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--extra", type=parse_extra, action="append", default=[], metavar="PEER=ARGS", help="more arguments for a peer"
    )
    parser.add_argument("--limit", type=positive(float), default=120.0, help="seconds until a case is cut")
    parser.add_argument("--busy-limit", type=positive(float), default=25.0, help="the same of a disturbed case")
    parser.add_argument("--chat-seconds", type=positive(float), default=30.0, help="how long w4 sends")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long an idle peer is watched; 0: not")
    parser.add_argument("--no-roofline", dest="roofline", action="store_false", help="measure no ideal")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="the book that prompts are cut from")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help="the model's tokenizer.json")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build/peers", help="environments, models, logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here, too, after every case")
    parser.add_argument("--resume", action="store_true", help="go on with what --json holds")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="measure nothing: merge these files")
    parser.add_argument("--prepare", action="store_true", help="make what the peers need, measure nothing")
    args = parser.parse_args(argv)
    is_reported = args.preset == "reported"
    args.peers = args.peers or list(REPORTED_PEERS if is_reported else DEFAULT_PEERS)
    args.cases = args.cases or [parse_case(text) for text in (REPORTED_CASES if is_reported else DEFAULT_CASES)]
    args.only = dict(args.only) if args.only else dict(REPORTED_ONLY if is_reported else {})
    args.extra = dict(args.extra)
    args.work_dir = args.work_dir.resolve()
    if unknown := (set(args.extra) | set(args.only)) - set(RECIPES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    if args.resume and not args.json:
        parser.error("--resume goes on with the file that --json names")
    if len({case.label for case in args.cases}) != len(args.cases):
        parser.error("--cases names one twice")
    if args.max_tokens:
        args.cases = [_shortened(case, args.max_tokens) for case in args.cases]
    return args


def parse_extra(text: str) -> tuple[str, str]:
    """Parse `looseleaf=--max-num-seqs 64`. Raises ValueError without the equals sign."""
    peer, equals, arguments = text.partition("=")
    if not equals:
        raise ValueError(text)
    return peer, arguments


def parse_only(text: str) -> tuple[str, list[str]]:
    """Parse `vllm=w1:1,w1:16`. Raises ValueError for anything else."""
    peer, arguments = parse_extra(text)
    return peer, [parse_case(case).label for case in arguments.split(",")]


def _shortened(case: Case, max_tokens: int) -> Case:
    if case.workload == CHATS:
        return case  # has no length of its own
    return dataclasses.replace(case, workload=dataclasses.replace(case.workload, max_tokens=max_tokens))


if __name__ == "__main__":
    # As an interrupt: the peer that is running must be stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
