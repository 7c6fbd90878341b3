"""How long cached blocks live and how soon they are used again, as histograms over the pool's clock.

Residence (publication to eviction) says whether the cache turns over faster than users come back; the gap between
the last release and the next hit says how long it would have to last.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator.observer import Observer, Publication

if TYPE_CHECKING:
    from allocator.pool import BlockPool

BOUNDS_S = tuple(2.0**exponent for exponent in range(-7, 18))  # 8 ms to 36 hours; the last bucket has no bound


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of durations: `counts[i]` of them were at most `BOUNDS_S[i]` seconds and above the bound before."""

    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Count the durations."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float | None:
        """Return the bound below which this share of the durations lies; None without any."""
        left = share * self.count
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            left -= count
            if left <= 0 and count:
                return bound
        return None


class Timeline(Observer):
    """Time one pool's blocks, from the making of this on. Two floats a block."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self._stored_at: list[float | None] = [None] * pool.num_blocks
        self._freed_at: list[float | None] = [None] * pool.num_blocks
        self._residence, self._reuse_gap = _Durations(), _Durations()
        pool.observe(self)

    @property
    def residence_s(self) -> Histogram:
        """From publication to eviction."""
        return self._residence.histogram()

    @property
    def reuse_gap_s(self) -> Histogram:
        """From the last holder's release to the next hit."""
        return self._reuse_gap.histogram()

    def stored(self, publication: Publication) -> None:
        """Start the clock of a block."""
        self._stored_at[publication.block] = self._pool.now
        self._freed_at[publication.block] = None

    def freed(self, block: int) -> None:
        """Note when the last holder left."""
        self._freed_at[block] = self._pool.now

    def reused(self, block: int) -> None:
        """Measure the gap, if the block had been without a holder."""
        freed_at = self._freed_at[block]
        if freed_at is not None:
            self._reuse_gap.add(self._pool.now - freed_at)
            self._freed_at[block] = None

    def removed(self, block: int, _key: bytes) -> None:
        """Measure how long it could be found."""
        stored_at = self._stored_at[block]
        if stored_at is not None:
            self._residence.add(self._pool.now - stored_at)
            self._stored_at[block] = self._freed_at[block] = None

    def cleared(self) -> None:
        """Stop all clocks; a cache that was cleared says nothing about eviction."""
        self._stored_at = [None] * self._pool.num_blocks
        self._freed_at = [None] * self._pool.num_blocks


class _Durations:
    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        self._counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._sum_s)
