"""How long a step of the model runner takes alone, without engine, server or socket, and which kernels the time goes to.

    python ops/bench/steps.py [--quantize none int8 int4] [--kv-dtype auto] [--decode 1 4 16 32] [--prefill 512 1900] [--seconds 2] [--kernels]

The contexts of the decodes are between `--context` and half of it more, their blocks in the order in which the pool gives them out. Several
`--quantize` take turns in one process, so that their ratios hold on a machine whose speed drifts. Times are the least and the median.
`--kernels` adds a table for each step: every kernel is launched by itself there, which costs some microseconds a launch, and what none of
them accounts for is *the rest*: planning, packing, torch's own operations and Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from kernel_timing import read_bandwidth

from backends.numba_kernels.threads import Kernel
from service.assembly import Assembly, assemble
from service.config import BackendConfig, CacheConfig, Config, ModelConfig
from service.engine.batch import SequenceId, StepBatch, StepEntry
from service.messages import SamplingParams
from service.model.graphs import RecordedStep
from service.model.quantisation import Quantisation

GREEDY = SamplingParams(temperature=0.0)
MAX_LEN = 2048


def main() -> None:
    """Print the least and the median time of every step and format, then where it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantize", nargs="+", choices=("none", "int8", "int4", "stored"), default=["none"])
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16, 32], help="sequences")
    parser.add_argument("--context", type=int, default=216, help="tokens of the shortest")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens, at most 2048")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each step and format")
    parser.add_argument("--kernels", action="store_true", help="also where the time goes")
    options = parser.parse_args()

    stopwatch = Stopwatch()
    stopwatch.install()
    runs = {name: _assembled(options, name) for name in options.quantize}
    steps = {f"decode {count}": decodes(count, options.context) for count in options.decode}
    steps |= {f"prefill {count}": (entry(0, 0, count, 0),) for count in options.prefill}
    print(f"read bandwidth {read_bandwidth() / 1e9:.1f} GB/s; ms, least (median)")
    print(f"{'step':<14}" + "".join(f"{name:>18}" for name in runs))
    for step, entries in steps.items():
        turns: dict[str, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + options.seconds * len(runs)
        while time.perf_counter() < end:
            for name, parts in runs.items():
                turns[name].append(execute(parts, entries))
        cells = [f"{min(seconds) * 1e3:.2f} ({statistics.median(seconds) * 1e3:.2f})" for seconds in turns.values()]
        print(f"{step:<14}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    if options.kernels:
        for (name, parts), (step, entries) in ((run, step) for run in runs.items() for step in steps.items()):
            print(f"\n{name}, {step}: ms, medians")
            for kernel, seconds in kernel_times(
                stopwatch, lambda p=parts, e=entries: execute(p, e), options.seconds
            ).items():
                print(f"  {kernel:<32}{seconds * 1e3:8.2f}")


def _assembled(options: argparse.Namespace, quantise: Quantisation) -> Assembly:
    config = Config(
        model=ModelConfig(path=options.model, dtype="bfloat16", max_model_len=MAX_LEN, quantize=quantise),
        backend=BackendConfig(threads=options.threads),
        cache=CacheConfig(kv_dtype=options.kv_dtype),
    )
    return assemble(config, lambda _: None)


def entry(index: int, start: int, count: int, first_block: int, block_size: int = 16) -> StepEntry:
    """Compute `count` tokens behind `start`, and sample the last one; block 0 is nobody's."""
    blocks = -(-(start + count) // block_size)
    return StepEntry(
        sequence_id=SequenceId(index),
        token_ids=tuple(1000 + 37 * i % 40000 for i in range(index, index + count)),
        start=start,
        block_ids=tuple(range(first_block + 1, first_block + 1 + blocks)),
        sampling=GREEDY,
        seeds=(0,),
    )


def decodes(count: int, context: int) -> tuple[StepEntry, ...]:
    """Decode one token for each of `count` sequences of different lengths."""
    longest = -(-context * 3 // 2 // 16) + 1
    return tuple(entry(index, context + context * index // (2 * count), 1, index * longest) for index in range(count))


def execute(parts: Assembly, entries: Sequence[StepEntry]) -> float:
    """Run a step; return its seconds."""
    begin = time.perf_counter()
    parts.runner.execute(StepBatch(step_id=0, entries=tuple(entries)))
    return time.perf_counter() - begin


def kernel_times(stopwatch: Stopwatch, step: Callable[[], float], seconds: float) -> dict[str, float]:
    """Run `step` for `seconds`, launch by launch; return the median of each kernel's time in a step, the longest first, and the rest."""
    found: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with stopwatch.running() as launched:
            whole = step()
        for name, spent in launched.items():
            found[name].append(spent)
        found["(the rest)"].append(whole - sum(launched.values()))
    medians = {name: statistics.median(spent) for name, spent in found.items()}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


class Stopwatch:
    """Sums up the seconds of launches by kernel. Linears keep the launch of their kernel, so it must be installed before they are made."""

    def __init__(self) -> None:
        self._spent: dict[str, float] | None = None

    def install(self) -> None:
        """Look at every launch from now on; `start` ends in one of the two."""
        for way in ("launch", "run"):
            setattr(Kernel, way, self._timed(getattr(Kernel, way)))

    def _timed(self, launch: Callable[..., None]) -> Callable[..., None]:
        def call(kernel: Kernel, *arguments: int) -> None:
            begin = time.perf_counter()
            launch(kernel, *arguments)
            if self._spent is not None:
                self._spent[kernel.name] += time.perf_counter() - begin

        return call

    @contextmanager
    def running(self) -> Iterator[dict[str, float]]:
        """Sum up those inside the block, where nothing is replayed."""
        spent: dict[str, float] = defaultdict(float)
        self._spent = spent
        try:
            with patch.object(RecordedStep, "forward", return_value=None):
                yield spent
        finally:
            self._spent = None


if __name__ == "__main__":
    main()
