"""How far a policy comes that was fitted to the very trace it is then judged on, with facts that any policy could know.

    python ops/bench/fitted_eviction.py

Each time a block is used it is put into a class by what a policy can know then: how often it was used before, how far it is from the end
of its prompt, how much of the prompt was found, how long the prompt is. For each class and age the whole trace says how likely the
next use was within a horizon; the block for which that is least likely is evicted. No real policy has these statistics beforehand. It is
a strong hint of what such facts are worth, not a proof: greedy eviction by a fitted chance need not be the best use of them. Ages and horizons are counted in requests; the best horizon is chosen afterwards.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from machine import describe_machine, machine_facts
from prefix_reuse import NAMES, TRACES, belady_hits, lru_hits

from service.simulate.trace import HASH_TOKENS, block_hashes, read_trace

AGE = 100  # requests in an age bucket
AGES = 120
HORIZONS = (3, 8, 20, 50)  # age buckets
USES, FROM_END, FOUND, LENGTH = 6, 8, 6, 8  # buckets; all but uses are powers of two
CLASSES = USES * FROM_END * FOUND * LENGTH
NEVER = 10**9


def classify(prompts: list[np.ndarray], num_ids: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return each prompt's classes, and the class and the gap to the next use of every use."""
    uses = np.zeros(num_ids, np.int64)
    last = np.full(num_ids, -1)
    open_event = np.full(num_ids, -1)
    classes, event_class, event_gap = [], [], []
    for now, prompt in enumerate(prompts):
        was_seen = last[prompt] >= 0
        uses[prompt] = np.minimum(np.where(was_seen, uses[prompt] + 1, 0), USES - 1)
        from_end = np.minimum(np.log2(len(prompt) - np.arange(len(prompt))).astype(int), FROM_END - 1)
        found = min(int(was_seen.sum()).bit_length(), FOUND - 1)
        length = min(len(prompt).bit_length(), LENGTH - 1)
        kinds = ((uses[prompt] * FROM_END + from_end) * FOUND + found) * LENGTH + length
        classes.append(kinds)
        for block, kind in zip(prompt.tolist(), kinds.tolist(), strict=True):
            if open_event[block] >= 0:
                event_gap[open_event[block]] = now - last[block]
            open_event[block] = len(event_class)
            event_class.append(kind)
            event_gap.append(NEVER)
        last[prompt] = now
    return classes, np.array(event_class), np.array(event_gap)


def scores(event_class: np.ndarray, event_gap: np.ndarray, horizon: int) -> np.ndarray:
    """Return the chance of a use within `horizon` age buckets, by class and age: [CLASSES, AGES + 1]."""
    counts = np.zeros((CLASSES, AGES + 1))
    np.add.at(counts, (event_class, np.minimum(event_gap // AGE, AGES)), 1)
    before = np.concatenate([np.zeros((CLASSES, 1)), np.cumsum(counts, axis=1)], axis=1)  # gaps shorter than an age
    result = np.zeros((CLASSES, AGES + 1))
    for age in range(AGES):
        still_unused = before[:, -1] - before[:, age]
        result[:, age] = (before[:, min(AGES, age + horizon)] - before[:, age]) / np.maximum(still_unused, 1e-9)
    return result


def fitted_hits(
    prompts: list[np.ndarray], classes: list[np.ndarray], score: np.ndarray, num_ids: int, size: int
) -> int:
    """Count the hits of a cache of `size` blocks that evicts by `score`."""
    is_cached = np.zeros(num_ids, bool)
    touched, kind = np.zeros(num_ids, np.int64), np.zeros(num_ids, np.int64)
    members = np.zeros(0, np.int64)
    hits = 0
    for now, prompt in enumerate(prompts):
        found = is_cached[prompt]
        hits += len(prompt) if found.all() else int(np.argmin(found))
        members = np.concatenate([members, prompt[~found]])
        is_cached[prompt], touched[prompt], kind[prompt] = True, now, classes[now]
        excess = len(members) - size
        if excess > 0:
            value = score[kind[members], np.minimum((now - touched[members]) // AGE, AGES)]
            victims = np.argpartition(value, excess - 1)[:excess]
            is_cached[members[victims]] = False
            members = np.delete(members, victims)
    return hits


def main() -> int:
    """Fit, replay and print for both traces, at a tenth of the working set."""
    print(describe_machine(machine_facts()))
    for name in NAMES:
        named = [block_hashes(request, HASH_TOKENS) for request in read_trace(TRACES / f"{name}.jsonl.gz")]
        named = [prompt for prompt in named if prompt]
        numbers: dict[bytes, int] = {}
        prompts = [np.array([numbers.setdefault(key, len(numbers)) for key in prompt]) for prompt in named]
        size = math.ceil(len(numbers) / 10)
        optimum = belady_hits(named, size)
        classes, event_class, event_gap = classify(prompts, len(numbers))
        shares = {
            horizon * AGE: fitted_hits(prompts, classes, scores(event_class, event_gap, horizon), len(numbers), size)
            / optimum
            for horizon in HORIZONS
        }
        print(
            f"{name}, {size} blocks: LRU {lru_hits(named, size) / optimum:.1%} of the optimum's {optimum} hits; "
            f"fitted, by horizon in requests: {', '.join(f'{horizon}: {share:.1%}' for horizon, share in shares.items())}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
