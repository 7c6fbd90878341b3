"""One consistent picture of a pool, cheap enough to be polled by a web page.

Every number but the tail waste is a counter the pool keeps anyway.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from allocator.pool import BlockPool
from allocator.table import BlockTable


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of blocks at one moment: `used + cached + free == total`."""

    total: int  # blocks that can be handed out (all but the null block)
    used: int  # held by somebody
    cached: int  # free, and findable by their hash until reused
    free: int  # free and not findable
    shared: int  # used by more than one table
    references: int  # table entries that point at used blocks
    tail_waste_slots: int  # reserved slots without a token, in the last blocks of the given tables
    evictions: int  # findable blocks reused since the start
    lookup_tokens: int  # prompt tokens looked up by admitted sequences since the start
    hit_tokens: int  # and how many were found

    @classmethod
    def of(cls, pool: BlockPool, tables: Iterable[BlockTable] = ()) -> "PoolStats":
        """Read a pool's counters; O(1) and O(1) more per table."""
        cached = pool.num_free_findable
        return cls(
            total=pool.num_usable,
            used=pool.num_used,
            cached=cached,
            free=pool.num_free - cached,
            shared=pool.num_shared,
            references=pool.num_references,
            tail_waste_slots=sum(table.num_tail_slots for table in tables),
            evictions=pool.num_evictions,
            lookup_tokens=pool.lookup_tokens,
            hit_tokens=pool.hit_tokens,
        )

    @property
    def utilisation(self) -> float:
        """The share of blocks somebody holds, 0 to 1."""
        return self.used / self.total

    @property
    def residency(self) -> float:
        """The share of blocks with content somebody holds or could still find, 0 to 1."""
        return (self.used + self.cached) / self.total

    @property
    def sharing_ratio(self) -> float:
        """How many tables point at a used block on average; 1 without sharing, 0 in an idle pool."""
        return self.references / self.used if self.used else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found, 0 to 1."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
