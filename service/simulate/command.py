"""`looseleaf simulate`: replay a trace and print a table, one row for each combination of what-ifs."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from allocator import POLICIES
from service.config import SchedulerConfig, check_scheduler
from service.errors import ConfigError
from service.simulate.cost import COSTS, StepCost
from service.simulate.simulator import Engine, Report, simulate
from service.simulate.trace import TraceRequest, assign_tenants, num_common_ids, read_trace, resample

DEFAULT_COST = "llama-3.1-8b-h100"
COEFFICIENTS = tuple(StepCost.__struct_fields__)


class WhatIf(Struct, frozen=True, kw_only=True):
    """One row's question."""

    block_size: int
    pool_tokens: int
    policy: str
    tenants: int


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options; those that accept several values span the table."""
    command.add_argument("trace", type=Path, help="CSV or JSON lines, gzipped or not (see service/simulate/trace.py)")
    what_ifs = command.add_argument_group("what if (several values make several rows)")
    what_ifs.add_argument("--block-size", type=_positive, nargs="+", default=[16], metavar="TOKENS")
    what_ifs.add_argument("--pool-tokens", type=_positive, nargs="+", default=[400_000], metavar="TOKENS")
    what_ifs.add_argument("--policy", choices=sorted(POLICIES), nargs="+", default=["lru"], help="of eviction")
    what_ifs.add_argument(
        "--tenants", type=_positive, nargs="+", metavar="N", help="spread the trace over so many (default: as it is)"
    )
    load = command.add_argument_group("load")
    load.add_argument("--requests", type=_positive, help="draw so many from the trace, without its hash ids")
    load.add_argument("--rate", type=_rate, help="requests a second: arrivals are stretched, or drawn with --requests")
    load.add_argument("--seed", type=int, default=0)
    engine = command.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=_positive, default=256)
    engine.add_argument("--token-budget", type=_positive, default=2048)
    engine.add_argument(
        "--prefill-budget",
        type=_positive,
        metavar="TOKENS",
        help="of a step without decodes (default: the token budget)",
    )
    engine.add_argument("--max-waiting", type=_positive, default=10**9)
    engine.add_argument("--max-model-len", type=_positive, default=2**20)
    engine.add_argument("--no-prefix-caching", action="store_true")
    cost = command.add_argument_group("cost of a step, in seconds")
    cost.add_argument("--cost", choices=sorted(COSTS), default=DEFAULT_COST, help="coefficients from data sheets")
    for name in COEFFICIENTS:
        cost.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="S", help=f"replaces the cost's {name}")
    command.add_argument("--json", type=Path, metavar="FILE", help="write every number there")


def run(options: argparse.Namespace) -> int:
    """Simulate each combination; raises `ConfigError`."""
    trace = read_trace(options.trace)
    cost = COSTS[options.cost]
    given = {name: getattr(options, name) for name in COEFFICIENTS if getattr(options, name) is not None}
    try:
        cost = msgspec.convert(msgspec.structs.asdict(cost) | given, StepCost)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad cost: {error}") from error
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        token_budget=options.token_budget,
        prefill_budget=options.prefill_budget,
        max_waiting=options.max_waiting,
    )
    check_scheduler(scheduler)
    rows = []
    for block_size, pool_tokens, policy, tenants in itertools.product(
        options.block_size, options.pool_tokens, options.policy, options.tenants or [0]
    ):
        what_if = WhatIf(block_size=block_size, pool_tokens=pool_tokens, policy=policy, tenants=tenants)
        engine = Engine(
            cost=cost,
            num_blocks=max(1, pool_tokens // block_size) + 1,
            block_size=block_size,
            scheduler=scheduler,
            max_model_len=options.max_model_len,
            policy=policy,
            # Without hash ids no two prompts are known to be alike, and hashing them would only cost time.
            prefix_caching=not options.no_prefix_caching and not options.requests and any(r.hash_ids for r in trace),
        )
        started = time.process_time()
        report = simulate(_load(trace, tenants, options), engine)
        rows.append((what_if, report, time.process_time() - started))
    print(table(rows))
    if options.json is not None:
        _write_json(options.json, engine, rows)
    return 0


def table(rows: Iterable[tuple[WhatIf, Report, float]]) -> str:
    """Lay the reports out, a row each."""
    columns = (
        *(
            "block",
            "pool tokens",
            "policy",
            "tenants",
            "finished",
            "refused",
            "req/s",
            "hit %",
            "TTFT p50 ms",
            "p99 ms",
        ),
        *("ms/token p50", "p99", "running", "peak", "used %", "waste %", "preempted", "steps", "cpu s"),
    )
    lines = [columns]
    for what_if, report, cpu_s in rows:
        lines.append(
            (
                str(what_if.block_size),
                str(what_if.pool_tokens),
                what_if.policy,
                str(what_if.tenants or "-"),
                str(report.finished),
                str(report.refused_full + report.refused_long),
                f"{report.requests_per_s:.2f}",
                f"{100 * report.hit_rate:.1f}",
                f"{1000 * report.ttft_s.p50:.0f}",
                f"{1000 * report.ttft_s.p99:.0f}",
                f"{1000 * report.token_s.p50:.1f}",
                f"{1000 * report.token_s.p99:.1f}",
                f"{report.mean_running:.1f}",
                str(report.peak_running),
                f"{100 * report.mean_used_share:.1f}",
                f"{100 * report.mean_waste_share:.2f}",
                str(report.preemptions),
                str(report.steps),
                f"{cpu_s:.1f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _load(trace: Sequence[TraceRequest], tenants: int, options: argparse.Namespace) -> Iterable[TraceRequest]:
    requests: Iterable[TraceRequest] = trace
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    if options.requests:
        if options.rate is None and not span_s:
            raise ConfigError("the trace has no arrival times, so --requests needs --rate")
        rate = options.rate or len(trace) / span_s
        requests = resample(trace, options.requests, rate=rate, seed=options.seed)
    elif options.rate is not None:
        scale = len(trace) / options.rate / span_s if span_s else 0.0
        requests = (msgspec.structs.replace(r, arrival_s=r.arrival_s * scale) for r in trace)
    return assign_tenants(requests, tenants, num_common=num_common_ids(trace)) if tenants else requests


def _write_json(path: Path, engine: Engine, rows: Iterable[tuple[WhatIf, Report, float]]) -> None:
    entries = [
        {
            "what_if": what_if,
            "report": report,
            "requests_per_s": report.requests_per_s,
            "hit_rate": report.hit_rate,
            "cpu_s": cpu_s,
        }
        for what_if, report, cpu_s in rows
    ]
    document = {"cost": engine.cost, "scheduler": engine.scheduler, "rows": entries}
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number
