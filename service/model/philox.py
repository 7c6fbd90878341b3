"""Counter-based random numbers: Philox4x32-10, vectorised over rows. A number is a pure function of (seed, position); there is no state.

So a sample never depends on who else is in the batch or on how often a sequence was preempted and computed again. Source: Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Invariant: the mapping is part of the service's promise that a seed
reproduces a text, and is pinned by known answers in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
SEED_MASK = 2**64 - 1

Words = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per (seed, position); seeds are taken modulo 2**64, positions are not negative."""
    key = np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    zeros = np.zeros_like(counter)
    first, second, _, _ = philox((counter & LOW, counter >> HALF, zeros, zeros), (key & LOW, key >> HALF))
    bits = (first << HALF | second) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(counter: Words, key: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]) -> Words:
    """Encrypt counters [R] with keys [R]; each array holds 32-bit words in uint64, so that a product fits."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (right >> HALF) ^ b ^ k0, right & LOW, (left >> HALF) ^ d ^ k1, left & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return a, b, c, d
