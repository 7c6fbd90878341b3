"""Counter-based random numbers: Philox4x32-10, vectorised over rows. A number is a pure function of (seed, position); there is no state.

So a sample never depends on who else is in the batch or on how often a sequence was preempted and computed again. Source: Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Invariant: the mapping is part of the service's promise that a seed
reproduces a text, and is pinned by known answers in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
SEED_MASK = 2**64 - 1

Words = npt.NDArray[np.uint64]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per (seed, position); seeds are taken modulo 2**64, positions are not negative."""
    key = np.array([seed & SEED_MASK for seed in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = np.zeros((4, len(position)), dtype=np.uint64)
    counter[0], counter[1] = position & LOW, position >> HALF
    words = philox(counter, np.stack([key & LOW, key >> HALF]))
    bits = (words[0] << HALF | words[1]) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


def philox(counter: Words, key: Words) -> Words:
    """Encrypt counters [4, R] with keys [2, R] → [4, R]; the 32-bit words stand in uint64, so that a product fits."""
    even, odd = counter[0::2], counter[1::2]  # the words that are multiplied and the others
    for round_key in (key + ROUNDS * KEY_STEPS) & LOW:
        product = (even * MULTIPLIERS)[::-1]
        even, odd = (product >> HALF) ^ odd ^ round_key, product & LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])
