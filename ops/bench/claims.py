"""What paging saves against contiguous reservation, on real lengths: waste, sessions held, requests a second, bytes of a long context.

    python ops/bench/claims.py --json build/claims.json     # several minutes on one core

Baselines, per trace: every request reserves the longest request of the trace, or twice the 99th percentile of prompt + output (requests
longer than that are left out of both sides and counted). Best fit reserves exactly that, buddies the next power of two.

* waste: slots held without a token ÷ slots held, summed over every decode step of every request; exact, no simulation.
* sessions: requests at a random moment of their lives (so long ones are met more often) put into one pool, by the allocators
  themselves, until one does not fit; mean of many draws.
* requests/s: all requests wait at time 0; the service's scheduler serves them through the simulator under one cost model of a step. The
  contiguous side is the same scheduler over blocks of the reservation's size, so one sequence takes exactly one.
* 32 k context: bytes that one context of 32,768 tokens holds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from machine import describe_machine, machine_facts

from allocator import BlockPool, BlockTable, OutOfBlocks
from allocator.contiguous import Arena, BestFitArena, BuddyArena, Reservation
from allocator.errors import OutOfSlots
from service.config import SchedulerConfig
from service.simulate import COSTS, Engine, TraceRequest, read_trace, simulate

TRACES = Path(__file__).resolve().parents[2] / "tests" / "data" / "traces"
SHORT = {  # trace → the name in tables
    "azure2023_conv.csv.gz": "Azure conversation",
    "azure2023_code.csv.gz": "Azure code",
    "arxiv_summarization_lengths.csv.gz": "arXiv summarization",
}
LONG = {"mooncake_conversation.jsonl.gz": "Mooncake conversation", "mooncake_synthetic.jsonl.gz": "Mooncake synthetic"}
BLOCK = 16
LONG_CONTEXT = 32_768
# name → cost, KV slots left beside 16-bit weights in 90 % of 80 GB (2 GB for activations), KV bytes of a token
DEVICES = {
    "Llama-3.1-8B, H100 80 GB": ("llama-3.1-8b-h100", 400_000, 131_072),
    "Llama-2-13B, A100 80 GB": ("llama-2-13b-a100", 53_000, 819_200),
}


def reservations(trace: Sequence[TraceRequest]) -> dict[str, int]:
    """Return the two maxima a service could set, in tokens: prompt + output."""
    lengths = sorted(request.num_prompt + request.num_output for request in trace)
    return {"longest": lengths[-1], "2 × p99": 2 * lengths[math.ceil(0.99 * len(lengths)) - 1]}


def power_of_two(number: int) -> int:
    """Round up to a power of two, as buddies do."""
    return 1 << (number - 1).bit_length()


def waste(trace: Iterable[TraceRequest], slots_for: Callable[[int], int]) -> float:
    """Return the wasted share of slots × steps; `slots_for(n)` are held by a sequence of n tokens.

    A request of p + o tokens holds p, p + 1, … p + o - 1 at its o steps (its last token is never computed).
    """
    held = used = 0
    for request in trace:
        for num_tokens in range(request.num_prompt, request.num_prompt + request.num_output):
            held += slots_for(num_tokens)
            used += num_tokens
    return 1 - used / held


def paged_sessions(draws: Iterable[tuple[int, int]], num_slots: int) -> int:
    """Count the sessions, each as long as it is at the moment, that fit into a block pool."""
    pool = BlockPool(num_slots // BLOCK + 1, BLOCK)
    count = 0
    for num_tokens, _ in draws:
        try:
            BlockTable(pool).append(num_tokens)
        except OutOfBlocks:
            break
        count += 1
    return count


def contiguous_sessions(draws: Iterable[tuple[int, int]], arena: Arena, reservation: int) -> int:
    """Count the sessions that fit into an arena, each with a full reservation."""
    count = 0
    for num_tokens, _ in draws:
        try:
            Reservation(arena, reservation).append(num_tokens)
        except OutOfSlots:
            break
        count += 1
    return count


def moments(trace: Sequence[TraceRequest], seed: int) -> Iterable[tuple[int, int]]:
    """Draw (tokens now, tokens at the end) of requests met at a random step of their lives, without end."""
    draw = random.Random(seed)
    weights = [request.num_output for request in trace]
    while True:
        for request in draw.choices(trace, weights, k=64):
            end = request.num_prompt + request.num_output - 1
            yield draw.randint(request.num_prompt, end), end


def sessions(trace: Sequence[TraceRequest], num_slots: int, reservation: int, rounds: int) -> dict[str, float]:
    """Fill a pool of `num_slots` with each allocator; paged ones are averaged over draws, the same for each."""
    seeds = range(rounds)
    return {
        "best fit": contiguous_sessions(moments(trace, 0), BestFitArena(num_slots), reservation),
        "buddy": contiguous_sessions(moments(trace, 0), BuddyArena(num_slots), reservation),
        "paged": statistics.fmean(paged_sessions(moments(trace, seed), num_slots) for seed in seeds),
        "paged, at their ends": statistics.fmean(
            paged_sessions(((end, end) for _, end in moments(trace, seed)), num_slots) for seed in seeds
        ),
    }


def throughput(trace: Sequence[TraceRequest], cost: str, num_slots: int, block_size: int) -> dict[str, Any]:
    """Serve a backlog and return what came out."""
    engine = Engine(
        cost=COSTS[cost],
        num_blocks=num_slots // block_size + 1,
        block_size=block_size,
        scheduler=SchedulerConfig(max_num_seqs=256, token_budget=2048, max_waiting=10**9),
        max_model_len=10**6,
        prefix_caching=False,
    )
    started = time.process_time()
    report = simulate((msgspec.structs.replace(request, arrival_s=0.0) for request in trace), engine)
    return {
        "requests_per_s": report.requests_per_s,
        "mean_running": report.mean_running,
        "finished": report.finished,
        "refused": report.refused_long,
        "preemptions": report.preemptions,
        "cpu_s": time.process_time() - started,
    }


def measure_trace(name: str, trace: Sequence[TraceRequest], rounds: int, backlog: int) -> list[dict[str, Any]]:
    """Measure one trace at both reservations."""
    rows = []
    for label, reservation in reservations(trace).items():
        kept = [r for r in trace if r.num_prompt + r.num_output <= reservation and r.num_output]
        buddy = power_of_two(reservation)
        row: dict[str, Any] = {
            "trace": name,
            "reservation": label,
            "tokens": reservation,
            "left_out": len(trace) - len(kept),
            "waste": {
                "best fit": waste(kept, lambda _, slots=reservation: slots),
                "buddy": waste(kept, lambda _, slots=buddy: slots),
            }
            | {
                f"paged {size}": waste(kept, lambda n, size=size: -(-n // size) * size) for size in (8, 16, 32, 64, 128)
            },
            "sessions": {},
            "throughput": {},
        }
        for pool_label, num_slots in (("400,000 slots", 400_000), ("12 reservations", 12 * reservation)):
            row["sessions"][pool_label] = sessions(kept, num_slots, reservation, rounds)
        for device, (cost, num_slots, _) in DEVICES.items():
            row["throughput"][device] = {
                "best fit": throughput(kept[:backlog], cost, num_slots, reservation),
                "buddy": throughput(kept[:backlog], cost, num_slots, buddy) if buddy <= num_slots else None,
                "paged": throughput(kept[:backlog], cost, num_slots, BLOCK),
            }
        rows.append(row)
        print_row(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    """Print what was measured for one trace and reservation."""
    print(
        f"\n{row['trace']}, reservation {row['reservation']} = {row['tokens']} tokens, {row['left_out']} requests left out"
    )
    print("  waste:", ", ".join(f"{name} {share:.2%}" for name, share in row["waste"].items()))
    for pool, sessions in row["sessions"].items():
        print(f"  sessions in {pool}:", ", ".join(f"{name} {count:.1f}" for name, count in sessions.items()))
    for device, sides in row["throughput"].items():
        texts = [
            f"{name} {side['requests_per_s']:.2f} ({side['mean_running']:.0f} running)"
            for name, side in sides.items()
            if side
        ]
        ratio = sides["paged"]["requests_per_s"] / sides["best fit"]["requests_per_s"]
        print(f"  requests/s on {device}: {', '.join(texts)}; paged ÷ best fit {ratio:.2f}", flush=True)


def long_context(name: str, trace: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """Compare the bytes of a context of 32 k tokens with what a service for this trace would reserve for it."""
    rows = []
    for label, reservation in (*reservations(trace).items(), ("window of 32 k", LONG_CONTEXT)):
        fitting = [r for r in trace if r.num_prompt + r.num_output <= reservation and r.num_output]
        steps = sum(r.num_output for r in fitting)
        tokens = sum(r.num_output * r.num_prompt + r.num_output * (r.num_output - 1) // 2 for r in fitting)
        slots = -(-LONG_CONTEXT // BLOCK) * BLOCK
        row = {"trace": name, "reservation": label, "tokens": reservation, "left_out": len(trace) - len(fitting)}
        row["mean_tokens_held"] = tokens / steps
        for device, (_, _, kv_bytes) in DEVICES.items():
            row[device] = {
                "paged_bytes": slots * kv_bytes,
                "best_fit_bytes": max(reservation, LONG_CONTEXT) * kv_bytes,
                "buddy_bytes": power_of_two(max(reservation, LONG_CONTEXT)) * kv_bytes,
            }
        rows.append(row)
        sizes = row["Llama-3.1-8B, H100 80 GB"]
        print(
            f"{name}, {label} = {reservation}: 32 k tokens hold {sizes['paged_bytes'] / 1e9:.2f} GB paged, "
            f"{sizes['best_fit_bytes'] / 1e9:.2f} GB best fit, {sizes['buddy_bytes'] / 1e9:.2f} GB buddy; "
            f"the mean request holds {row['mean_tokens_held']:.0f} tokens"
        )
    return rows


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="draws of sessions")
    parser.add_argument("--backlog", type=int, default=6000, help="requests of a trace that wait at time 0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(describe_machine(facts))
    rows = []
    for file, name in SHORT.items():
        rows += measure_trace(name, read_trace(TRACES / file), options.rounds, options.backlog)
    print()
    contexts = [row for file, name in LONG.items() for row in long_context(name, read_trace(TRACES / file))]
    if options.json:
        document = {"machine": facts, "options": {"rounds": options.rounds, "backlog": options.backlog}, "rows": rows}
        options.json.write_text(json.dumps(document | {"contexts": contexts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
