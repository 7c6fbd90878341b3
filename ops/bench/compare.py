#!/usr/bin/env python3
"""Run Looseleaf and its peers in turn on this machine, several rounds, and print medians and ratios.

    python ops/bench/compare.py                         # W1 at 1, 4, 16, 32; three rounds
    python ops/bench/compare.py --peers looseleaf vllm --rounds 5 --json build/compare.json
    python ops/bench/compare.py --cases w1:16 w2:16 w3:1
    python ops/bench/compare.py --prepare               # only make the environments

One peer runs at a time. In a round every peer gets the same prompts; the next round has others, and starts with the
next peer. Ratios are taken within a round, so that a slow hour of the machine slows both sides. Exits with 1 if
anything failed. See README.md for what each number means.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from environments import PeerUnavailable, ensure_environment
from hf_from_gguf import ConversionError, convert
from machine import describe_machine, machine_busy_s, machine_facts
from peers import RECIPES, Place, RunningPeer, start
from prompts import WORKLOADS, PromptBook, Workload
from report import summarise
from results import Case, CaseRun, PeerRun, case_table, start_table
from serve import DEFAULT_TEXT, DEFAULT_TOKENIZER, ROOT, default_requests, positive, read_tokenizer, warm_up
from serve import wall_seconds as wall_seconds_of

from service.errors import ModelLoadError
from service.model.fetch import resolve_model

DEFAULT_PEERS = ("looseleaf", "vllm", "transformers")
ENVIRONMENTS = {"vllm": "vllm", "vllm-eager": "vllm", "transformers": "transformers"}
# Above this share of a core taken by others, a run says more about them than about the peer.
MAX_OTHERS_CORES = 0.15


def main(argv: Sequence[str] | None = None) -> int:
    """Compare what the command line names, print the tables, and return the exit status."""
    args = parse_arguments(argv)
    try:
        place = prepare(args)
    except (PeerUnavailable, ConversionError, ModelLoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.prepare:
        return 0
    runs: list[PeerRun] = []
    for round_number in range(args.rounds):
        for peer in rotated(args.peers, round_number):
            print(f"round {round_number + 1} of {args.rounds}: {peer}", file=sys.stderr, flush=True)
            runs.append(take_turn(peer, round_number, args, place))
            write_json(args, runs)  # after each turn: an interrupted comparison keeps what it has
    labels = [case.label for case in args.cases]
    for label in labels:
        print(f"\n### {label}\n\n{case_table(label, args.peers, runs)}")
    print(f"\n### Start and memory\n\n{start_table(args.peers, runs)}\n\n{describe_machine(machine_facts())}")
    return report_problems(runs)


def prepare(args: argparse.Namespace) -> Place:
    """Make the environments and the model directory that the chosen peers need, unless they are there."""
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
    return place


def take_turn(peer: str, round_number: int, args: argparse.Namespace, place: Place) -> PeerRun:
    """Start one peer, measure every case on it, and stop it."""
    turn = PeerRun(peer, round_number)
    tokenizer = read_tokenizer(args.tokenizer)
    # The seed leaves the peer's name out: all peers of a round get the same prompts.
    book = PromptBook(args.text.read_text(), seed=f"{args.seed}/{round_number}", tokenizer=tokenizer)
    log = args.work_dir / "logs" / f"{peer}-{round_number}.log"
    try:
        running = start(peer, place, args.extra.get(peer, ""), log)
    except PeerUnavailable as error:
        turn.failure = str(error)
        return turn
    try:
        turn.first_token_s = first_token_seconds(running, book)
        for case in args.cases:
            turn.cases.append(measure_case(case, running, book))
            print(f"  {progress(turn.cases[-1])}", file=sys.stderr, flush=True)
        turn.pss_bytes = running.group.pss_bytes()
        turn.peak_rss_bytes = running.group.peak_rss_bytes()
    except PeerUnavailable as error:
        turn.failure = str(error)
    finally:
        running.group.stop()
    return turn


def first_token_seconds(running: RunningPeer, book: PromptBook) -> float:
    """Return the seconds from the program's start to its first token. Raises PeerUnavailable if none comes."""
    (prompt,) = book.take(Workload("first", prompt_tokens=16, max_tokens=1), 1)
    (answer,) = running.run([prompt], 1)
    if answer.error is not None or answer.first is None:
        raise PeerUnavailable(f"the first request failed: {answer.error}")
    return answer.first - running.group.started


def measure_case(case: Case, running: RunningPeer, book: PromptBook) -> CaseRun:
    """Warm up with one short request for each place, then measure."""
    running.run(book.take(warm_up(case.workload), case.concurrency), case.concurrency)
    prompts = book.take(case.workload, default_requests(case.workload, case.concurrency))
    busy, peer_cpu, own_cpu = machine_busy_s(), running.group.cpu_s(), time.process_time()
    begin = time.perf_counter()
    answers = running.run(prompts, case.concurrency)
    wall_s = wall_seconds_of(answers, begin)
    elapsed = time.perf_counter() - begin
    peer_cpu = running.group.cpu_s() - peer_cpu
    others = machine_busy_s() - busy - peer_cpu - (time.process_time() - own_cpu)
    return CaseRun(case.label, summarise(answers, wall_s), peer_cpu, max(0.0, others / elapsed))


def rotated(peers: Sequence[str], by: int) -> list[str]:
    """Return the peers, beginning `by` places later: nobody always runs first, or right after the same one."""
    shift = by % len(peers)
    return [*peers[shift:], *peers[:shift]]


def progress(run: CaseRun) -> str:
    """Write one line about a run that has just ended."""
    line = f"{run.label}: {run.summary.output_tokens_per_s:.1f} out tok/s"
    if run.others_cores > MAX_OTHERS_CORES:
        line += f"; NOISY, others kept {run.others_cores:.2f} cores busy"
    if not run.is_good:
        line += f"; FAILED {run.summary.errors}"
    return line


def report_problems(runs: Sequence[PeerRun]) -> int:
    """Print each failure and each noisy run; return 1 if anything failed, else 0."""
    status = 0
    for turn in runs:
        where = f"{turn.peer}, round {turn.round_number + 1}"
        if turn.failure:
            print(f"FAILED {where}: {turn.failure}", file=sys.stderr)
            status = 1
        for run in turn.cases:
            for error, count in run.summary.errors.items():
                print(f"FAILED {where}, {run.label}: {count} x {error}", file=sys.stderr)
                status = 1
            if run.others_cores > MAX_OTHERS_CORES:
                print(f"noisy: {where}, {run.label}: others {run.others_cores:.2f} cores", file=sys.stderr)
    return status


def write_json(args: argparse.Namespace, runs: Sequence[PeerRun]) -> None:
    """Write every run so far, with what they ran on, if a file was named."""
    if not args.json:
        return
    document = {
        "machine": machine_facts(),
        "seed": args.seed,
        "extra": args.extra,
        "cases": [dataclasses.asdict(case) for case in args.cases],
        "turns": [dataclasses.asdict(turn) for turn in runs],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a .gguf file, or the server's built-in model")
    parser.add_argument("--peers", choices=RECIPES, nargs="+", default=list(DEFAULT_PEERS), help="the first is 'ours'")
    parser.add_argument("--rounds", type=positive(int), default=3)
    parser.add_argument(
        "--cases",
        type=parse_case,
        nargs="+",
        default=[parse_case(f"w1:{c}") for c in (1, 4, 16, 32)],
        metavar="WORKLOAD:CONCURRENCY",
    )
    parser.add_argument(
        "--max-tokens", type=positive(int), help="instead of the workload's own: a quick look, no result"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--extra", type=parse_extra, action="append", default=[], metavar="PEER=ARGS", help="more arguments for a peer"
    )
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="the book that prompts are cut from")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help="the model's tokenizer.json")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build/peers", help="environments, models, logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run here, too")
    parser.add_argument("--prepare", action="store_true", help="make what the peers need, measure nothing")
    args = parser.parse_args(argv)
    args.extra = dict(args.extra)
    args.work_dir = args.work_dir.resolve()
    if unknown := set(args.extra) - set(RECIPES):
        parser.error(f"--extra names no peer: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    if args.max_tokens:
        args.cases = [
            dataclasses.replace(case, workload=dataclasses.replace(case.workload, max_tokens=args.max_tokens))
            for case in args.cases
        ]
    return args


def parse_case(text: str) -> Case:
    """Parse `w1:16`. Raises ValueError for anything else."""
    name, _, concurrency = text.partition(":")
    if name not in WORKLOADS or int(concurrency) < 1:
        raise ValueError(text)
    return Case(WORKLOADS[name], int(concurrency))


def parse_extra(text: str) -> tuple[str, str]:
    """Parse `looseleaf=--max-num-seqs 64`. Raises ValueError without the equals sign."""
    peer, equals, arguments = text.partition("=")
    if not equals:
        raise ValueError(text)
    return peer, arguments


if __name__ == "__main__":
    # As an interrupt: the peer that is running must be stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
