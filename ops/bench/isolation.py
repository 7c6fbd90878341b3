"""Does the time to first token tell a tenant what another tenant has sent? An experiment with its statistic.

    OMP_NUM_THREADS=1 python ops/bench/isolation.py --json build/isolation.json

A victim sends a random prompt of 480 tokens; then a prober sends one, and the seconds until its first token are taken on the real
core, scheduler, allocator and model runner (a random model of two layers, CPU). Each trial draws one of five conditions, in random order:

    own, seen        the prober is the victim: the prompt is cached for it
    own, unseen      the same with a prompt that nobody has sent
    other, seen      the prober is another tenant: what an attacker does who guesses the prompt
    other, unseen    the attacker's wrong guess
    other, unseen'   the same again, to see how far chance alone goes

Both clocks are read: the wall's, which an attacker sees, and the process's CPU time, which is what the wall would show on an idle machine
with nobody else's noise: the attacker's best case.

AUC is the probability that a "seen" probe is faster than an "unseen" one (ties count half): 0.5 tells nothing, 1 tells everything. p is
the two-sided Mann-Whitney test (normal approximation, corrected for ties), the interval that of the AUC (Hanley and McNeil 1982).
The pool is big enough that nobody's blocks are evicted: what tenants learn from sharing a full pool is bounded by floors, not by time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
from machine import describe_machine, machine_facts

from service.assembly import Assembly, assemble
from service.config import BackendConfig, CacheConfig, Config, ModelConfig
from service.engine.request import ChoiceAdvanced, RequestStarted
from service.messages import SamplingParams

MODEL = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden" / "tiny-llama"
PROMPT = 480
CONDITIONS = ("own, seen", "own, unseen", "other, seen", "other, unseen", "other, unseen'")
COMPARED = (("own, seen", "own, unseen"), ("other, seen", "other, unseen"), ("other, unseen", "other, unseen'"))


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How well the times of `first` can be told from those of `second`."""

    clock: str
    first: str
    second: str
    auc: float
    low: float  # of the 95 % interval
    high: float
    p: float


def compare(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float, float]:
    """Return (AUC, low, high, p) of "a value of `first` is smaller than one of `second`"."""
    n, m = len(first), len(second)
    pooled = sorted([*first, *second])
    ranks: dict[float, float] = {}
    ties = 0.0
    position = 0
    for value, group in itertools.groupby(pooled):
        size = len(list(group))
        ranks[value] = position + (size + 1) / 2
        ties += size**3 - size
        position += size
    wins = n * m + m * (m + 1) / 2 - sum(ranks[value] for value in second)  # pairs in which `second` is the smaller
    auc = 1 - wins / (n * m)
    spread = math.sqrt(n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1))))
    z = (wins - n * m / 2) / spread if spread else 0.0
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    error = math.sqrt(max(0.0, auc * (1 - auc) + (n - 1) * (q1 - auc**2) + (m - 1) * (q2 - auc**2)) / (n * m))
    return auc, max(0.0, auc - 1.96 * error), min(1.0, auc + 1.96 * error), math.erfc(abs(z) / math.sqrt(2))


def first_token(assembly: Assembly, prompt: tuple[int, ...], tenant: str) -> tuple[float, float, int]:
    """Send a prompt and return (seconds to its first token, CPU seconds to it, cached tokens)."""
    core, runner = assembly.core, assembly.runner
    started, cpu_started = time.perf_counter(), time.process_time()
    core.add(prompt, SamplingParams(max_tokens=1, temperature=0.0), seed=0, namespace=tenant)
    cached = 0
    while True:
        batch = core.schedule(started)
        assert batch is not None, "a request ended without a token"
        for event in core.apply(runner.execute(batch)):
            if isinstance(event, RequestStarted):
                cached = event.cached_tokens
            if isinstance(event, ChoiceAdvanced):
                return time.perf_counter() - started, time.process_time() - cpu_started, cached


def main() -> int:
    """Run the trials, print and write what they show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="of each condition")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(describe_machine(facts))
    trials = [condition for condition in CONDITIONS for _ in range(options.trials)]
    draw = random.Random(options.seed)
    draw.shuffle(trials)
    blocks = (len(trials) + 50) * 2 * (PROMPT // 16 + 1)
    assembly = assemble(
        Config(
            model=ModelConfig(path=str(MODEL)),
            cache=CacheConfig(num_blocks=blocks),
            backend=BackendConfig(threads=1),
        ),
        report=lambda _: None,
    )

    def prompt() -> tuple[int, ...]:
        return tuple(draw.randrange(5, 320) for _ in range(PROMPT))

    for _ in range(20):
        first_token(assembly, prompt(), "warm-up")
    times: dict[str, dict[str, list[float]]] = {
        clock: {condition: [] for condition in CONDITIONS} for clock in ("wall", "CPU")
    }
    cached: dict[str, set[int]] = {condition: set() for condition in CONDITIONS}
    gc.disable()
    for condition in trials:
        secret, guess = prompt(), prompt()  # both beforehand, so that nothing is done between the victim and the probe
        first_token(assembly, secret, "victim")
        prober, knowledge = condition.split(", ")
        # A copy, made the same way for all: an attacker's request shares no object with the victim's.
        probe = tuple(array("I", secret if knowledge == "seen" else guess))
        seconds, cpu_s, hits = first_token(assembly, probe, "victim" if prober == "own" else "attacker")
        times["wall"][condition].append(seconds)
        times["CPU"][condition].append(cpu_s)
        cached[condition].add(hits)
    gc.enable()
    assembly.core.check()
    for condition in CONDITIONS:
        medians = [f"{clock} {1000 * statistics.median(of[condition]):.3f} ms" for clock, of in times.items()]
        print(f"{condition:>15}: median {', '.join(medians)}; cached tokens {sorted(cached[condition])}")
    results = []
    for clock, of in times.items():
        for first, second in COMPARED:
            auc, low, high, p = compare(of[first], of[second])
            results.append(Comparison(clock=clock, first=first, second=second, auc=auc, low=low, high=high, p=p))
            print(f"{clock}, {first} against {second}: AUC {auc:.3f} [{low:.3f}, {high:.3f}], p = {p:.3g}")
    if options.json:
        document = {"machine": facts, "trials": options.trials, "times_s": times, "comparisons": results}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
