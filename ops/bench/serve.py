#!/usr/bin/env python3
"""Measure any server that speaks the OpenAI completions API.

    python ops/bench/serve.py --url http://127.0.0.1:8000 -c 1 4 16 32
    python ops/bench/serve.py --workload w2 -c 16            # a shared prefix of 512 tokens
    python ops/bench/serve.py --workload w3 -c 1             # one prompt of 1900 tokens
    python ops/bench/serve.py --rate 2.5 -n 60               # open loop, Poisson arrivals

Every request is greedy, streamed, and runs to exactly its number of new tokens. Exits with 1 if any request failed or
got other token counts than asked for: such a run is no result. See README.md for what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from load import Answer, Target, closed_loop, first_model, open_loop, open_session
from prompts import WORKLOADS, PromptBook, PromptError, Tokenizer, Workload
from report import Summary, number, summarise, table

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TEXT = ROOT / "tests/data/text/alice.txt"
DEFAULT_TOKENIZER = ROOT / "tests/data/golden/smollm2-135m/tokenizer.json"

HEADER = ("load", "ok", "out tok/s", "total tok/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "TPOT ms", "cached")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, print the table, and return the exit status."""
    args = parse_arguments(argv)
    try:
        rows = asyncio.run(measure_all(args))
    except (PromptError, aiohttp.ClientError, OSError) as error:
        print(f"error: {args.url}: {error}", file=sys.stderr)
        return 1
    print(table(HEADER, [summary_row(label, summary) for label, summary in rows]))
    if args.json:
        document = {
            "url": args.url,
            "workload": dataclasses.asdict(workload_of(args)),
            "seed": args.seed,
            "runs": [{"load": label, **summary.as_json()} for label, summary in rows],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return report_errors(rows)


async def measure_all(args: argparse.Namespace) -> list[tuple[str, Summary]]:
    """Measure each load in turn, every one with prompts of its own so that no cache remembers them."""
    workload = workload_of(args)
    book = PromptBook(args.text.read_text(), seed=args.seed, tokenizer=read_tokenizer(args.tokenizer))
    rows = []
    async with open_session(args.timeout) as session:
        target = Target(args.url, args.model or await first_model(session, args.url))
        for concurrency in args.concurrency:
            await closed_loop(session, target, book.take(warm_up(workload), args.warm_up), concurrency)
            prompts = book.take(workload, args.requests or default_requests(workload, concurrency))
            start = time.perf_counter()
            answers = await closed_loop(session, target, prompts, concurrency)
            rows.append((f"{workload.name} c={concurrency}", summarise(answers, wall_seconds(answers, start))))
        for rate in args.rate:
            await closed_loop(session, target, book.take(warm_up(workload), args.warm_up), args.warm_up)
            prompts = book.take(workload, args.requests or 60)
            start = time.perf_counter()
            answers = await open_loop(session, target, prompts, rate, args.seed)
            rows.append((f"{workload.name} {rate:g}/s", summarise(answers, wall_seconds(answers, start))))
    return rows


def default_requests(workload: Workload, concurrency: int) -> int:
    """Return how many requests measure a concurrency: the workload's waves for each place, three at least."""
    if workload.name == "w3":
        return 3
    return max(3, workload.waves * concurrency)


def warm_up(workload: Workload) -> Workload:
    """Return the same prompts with few new tokens: enough to meet every shape of step once."""
    return dataclasses.replace(workload, max_tokens=8)


def wall_seconds(answers: Sequence[Answer], start: float) -> float:
    """Return the seconds from `start` to the last answer's end."""
    return max(answer.done for answer in answers if answer.done is not None) - start


def read_tokenizer(path: Path | None) -> Tokenizer | None:
    """Read a `tokenizer.json`; None stays None, and then prompt lengths are only about right."""
    if path is None:
        return None
    # Imported here so that a run without a tokenizer needs aiohttp and nothing else.
    from tokenizers import Tokenizer as JsonTokenizer

    tokenizer: Tokenizer = JsonTokenizer.from_file(str(path))
    return tokenizer


def summary_row(label: str, summary: Summary) -> tuple[str, ...]:
    """Lay out one run as cells of the table."""
    num_failed = sum(summary.errors.values())
    return (
        label,
        f"{summary.num_requests - num_failed}/{summary.num_requests}",
        number(summary.output_tokens_per_s),
        number(summary.total_tokens_per_s),
        number(summary.ttft_p50_ms),
        number(summary.ttft_p95_ms),
        number(summary.itl_p50_ms),
        number(summary.itl_p95_ms),
        number(summary.tpot_median_ms),
        str(summary.cached_tokens),
    )


def report_errors(rows: Sequence[tuple[str, Summary]]) -> int:
    """Print every kind of failure with its count; return 1 if there was any, else 0."""
    status = 0
    for label, summary in rows:
        for error, count in summary.errors.items():
            print(f"FAILED {label}: {count} x {error}", file=sys.stderr)
            status = 1
    return status


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the named workload with the sizes that the command line changes."""
    workload = WORKLOADS[args.workload]
    return dataclasses.replace(
        workload,
        prompt_tokens=args.prompt_tokens or workload.prompt_tokens,
        max_tokens=args.max_tokens or workload.max_tokens,
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL, with or without /v1")
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("-c", "--concurrency", type=positive(int), nargs="+", help="closed loop: requests under way")
    parser.add_argument("--rate", type=positive(float), nargs="+", default=[], help="open loop: arrivals a second")
    parser.add_argument("-n", "--requests", type=positive(int), help="requests a run (default: by concurrency)")
    parser.add_argument("--prompt-tokens", type=positive(int), help="instead of the workload's own length")
    parser.add_argument("--max-tokens", type=positive(int), help="instead of the workload's own number")
    parser.add_argument("--warm-up", type=positive(int), default=2, help="short requests before each run, not counted")
    parser.add_argument("--seed", type=int, default=1, help="change it to measure the same running server again")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="the book that prompts are cut from")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help="the model's tokenizer.json")
    parser.add_argument(
        "--no-tokenizer", dest="tokenizer", action="store_const", const=None, help="about right lengths, unchecked"
    )
    parser.add_argument("--timeout", type=positive(float), default=600.0, help="seconds a request may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    args = parser.parse_args(argv)
    if args.concurrency is None:
        args.concurrency = [] if args.rate else [1, 4, 16, 32]
    args.url = args.url.rstrip("/").removesuffix("/v1")
    return args


class positive:  # noqa: N801 - reads as a type in the arguments above
    """An argparse type: a number above zero."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind
        self.__name__ = f"positive {kind.__name__}"  # argparse names the type in its message

    def __call__(self, text: str) -> float:
        value = self._kind(text)
        if value <= 0:
            raise ValueError(text)
        return value


if __name__ == "__main__":
    sys.exit(main())
