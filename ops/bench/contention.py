"""What is left of the decode speed when other processes want the cores: our worker threads against a team of torch's pool.

    python ops/bench/contention.py [--threads 2] [--batches 1 16] [--competitors 0 1 2] [--rounds 5] [--seconds 1.5]

Whole steps of SmolLM2-135M in bfloat16 through the model runner, greedy, and single launches of a 576 x 576 linear. Competitors are
Python processes that count; they are stopped, not ended, while a quiet cell runs. Every round visits all cells, so that contenders share
the machine's good and bad moments; ratios are taken within a round. `team` runs the same bodies by GOMP_parallel of torch's libgomp,
which waits for every thread of the team after each launch; `alone` is one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.numba_kernels.pool import worker_pool
from backends.numba_linear import PackedLinear
from backends.registry import select_backend
from service.engine.batch import SequenceId, StepBatch, StepEntry
from service.messages import SamplingParams
from service.model.fetch import resolve_model
from service.model.loading import load_model
from service.model.runner import ModelRunner

Launch = Callable[[int, int, int], None]
BLOCK_SIZE, CONTEXT, VOCABULARY = 16, 256, 49152


def main() -> None:
    """Print one line per cell, then what competitors leave of the undisturbed speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--competitors", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", choices=["team", "workers", "alone"], default=["team", "workers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each cell")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    pool = worker_pool()
    assert pool is not None, "this system has no worker pool"
    contenders: dict[str, Launch] = {"team": torch_team(), "workers": pool.launch, "alone": launch_alone}
    works: dict[str, Callable[[], int]] = {"linear 576 x 576": one_launch()}
    runner = open_runner(max(options.batches))
    for size in options.batches:
        works[f"step of {size}"] = one_step(runner, size, options.temperature)

    rates: dict[tuple[str, int, str], list[float]] = {}
    slowest: dict[tuple[str, int, str], list[float]] = {}
    with competitors(max(options.competitors)) as processes:
        for round_number in range(options.rounds):
            for count in options.competitors:
                for number, process in enumerate(processes):
                    process.send_signal(signal.SIGCONT if number < count else signal.SIGSTOP)
                for work, run in works.items():
                    for name in options.contenders[:: -1 if round_number % 2 else 1]:
                        with patch.object(pool, "launch", contenders[name]):
                            rate, p95 = measure(run, options.seconds)
                        rates.setdefault((work, count, name), []).append(rate)
                        slowest.setdefault((work, count, name), []).append(p95)
    print(f"{options.threads} threads, {options.rounds} rounds of {options.seconds} s; medians over rounds")
    print(f"{'':18} {'competitors':>11} {'':8} {'per second':>11} {'p95':>9} {'of quiet':>9} {'of team':>8}")
    for (work, count, name), values in rates.items():
        quiet = rates[work, options.competitors[0], name]
        team = rates.get((work, count, "team"), values)
        print(
            f"{work:18} {count:>11} {name:8} {statistics.median(values):>11.1f}"
            f" {statistics.median(slowest[work, count, name]) * 1e3:>6.2f} ms {ratio(values, quiet):>9.2f} {ratio(values, team):>8.2f}"
        )


def ratio(values: list[float], others: list[float]) -> float:
    """Return the median of the ratios within the rounds."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def measure(run: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Repeat `run` for so long; return its results (tokens, launches) per second and the 95th percentile of its time."""
    run()
    times: list[float] = []
    total = 0
    start = before = time.perf_counter()
    while before - start < seconds:
        total += run()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    times.sort()
    return total / (before - start), times[len(times) * 95 // 100]


@contextmanager
def competitors(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes that want a core each, and end them."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def torch_team() -> Launch:
    """Return a launch on the threads of torch's libgomp."""
    paths = [*Path(torch.__file__).parent.glob("lib/libgomp*.so*"), "libgomp.so.1"]
    parallel = ctypes.CDLL(str(paths[0])).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def launch(function: int, argument: int, num_threads: int) -> None:
        parallel(function, argument, num_threads, 0)

    return launch


def launch_alone(function: int, argument: int, _num_threads: int) -> None:
    """Run on the calling thread."""
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)(argument)


def one_launch() -> Callable[[], int]:
    """Return a function that multiplies one row by matrices which do not all fit the caches."""
    linears = [PackedLinear(torch.randn(576, 576).bfloat16()) for _ in range(100)]
    x = torch.randn(1, 576).bfloat16()
    turn = iter(range(1 << 62))

    def run() -> int:
        linears[next(turn) % len(linears)](x)
        return 1

    return run


def open_runner(num_sequences: int) -> ModelRunner:
    """Load the model with room for `num_sequences` sequences."""
    model = load_model(resolve_model("smollm2-135m", report=print), dtype="bfloat16")
    spec = model.decoder.kv_cache_spec(BLOCK_SIZE)
    backend = select_backend("auto", spec, DeviceInfo("cpu")).backend
    cache = KVCache(spec, num_sequences * CONTEXT // BLOCK_SIZE + 1, torch.device("cpu"))
    return ModelRunner(model.decoder, backend, cache, num_valid_ids=VOCABULARY, max_model_len=CONTEXT)


def one_step(runner: ModelRunner, size: int, temperature: float) -> Callable[[], int]:
    """Return a function that computes one decode step of `size` sequences with full contexts, and counts its tokens."""
    each = CONTEXT // BLOCK_SIZE
    sampling = SamplingParams(temperature=temperature)
    entries = tuple(
        StepEntry(
            sequence_id=SequenceId(number),
            token_ids=(1000 + number,),
            start=CONTEXT - 1,
            block_ids=tuple(range(1 + number * each, 1 + (number + 1) * each)),
            sampling=sampling,
            seeds=(number,),
        )
        for number in range(size)
    )

    def run() -> int:
        output = runner.execute(StepBatch(step_id=0, entries=entries))
        return len(output.outputs)

    return run


if __name__ == "__main__":
    main()
