"""One consistent picture of a pool, cheap enough to be polled by a web page.

Every number but those about tails is a counter the pool keeps anyway.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from allocator.pool import BlockPool
from allocator.table import BlockTable
from allocator.timeline import Histogram, Timeline


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of blocks at one moment: `used + cached + free == total`.

    The numbers about slots and bytes are exact if `tables` are all that hold blocks.
    """

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
    quarantined: int  # out of service, not in `total`
    incidents: int  # blocks put into quarantine since the start
    filled_slots: int  # slots of used blocks with a token, each counted once however often it is shared
    block_size: int
    bytes_per_token: int  # 0: not given
    residence_s: Histogram | None = None  # publication to eviction
    reuse_gap_s: Histogram | None = None  # last release to next hit

    @classmethod
    def of(
        cls,
        pool: BlockPool,
        tables: Iterable[BlockTable] = (),
        *,
        bytes_per_token: int = 0,
        timeline: Timeline | None = None,
    ) -> "PoolStats":
        """Read a pool's counters; O(1) and O(1) more per table. `bytes_per_token`: of KV, over all layers."""
        cached = pool.num_free_findable
        tail_slots = 0
        tails: dict[int, int] = {}  # last block → slots that no table uses
        for table in tables:
            tail_slots += table.num_tail_slots
            if table.num_tail_slots:
                last = table.block_ids[-1]
                tails[last] = min(table.num_tail_slots, tails.get(last, pool.block_size))
        return cls(
            total=pool.num_usable,
            used=pool.num_used,
            cached=cached,
            free=pool.num_free - cached,
            shared=pool.num_shared,
            references=pool.num_references,
            tail_waste_slots=tail_slots,
            evictions=pool.num_evictions,
            lookup_tokens=pool.lookup_tokens,
            hit_tokens=pool.hit_tokens,
            quarantined=len(pool.quarantined),
            incidents=pool.num_incidents,
            filled_slots=pool.num_used * pool.block_size - sum(tails.values()),
            block_size=pool.block_size,
            bytes_per_token=bytes_per_token,
            residence_s=None if timeline is None else timeline.residence_s,
            reuse_gap_s=None if timeline is None else timeline.reuse_gap_s,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the used blocks."""
        return self.used * self.block_size * self.bytes_per_token

    @property
    def theoretical_bytes(self) -> int:
        """Bytes that the tokens in them need, shared ones once: what an allocator without any waste would use."""
        return self.filled_slots * self.bytes_per_token

    @property
    def waste(self) -> float:
        """The share of the used slots without a token, 0 to 1."""
        return 1.0 - self.filled_slots / (self.used * self.block_size) if self.used else 0.0

    @property
    def utilisation(self) -> float:
        """The share of blocks somebody holds, 0 to 1."""
        return self.used / self.total if self.total else 0.0

    @property
    def residency(self) -> float:
        """The share of blocks with content somebody holds or could still find, 0 to 1."""
        return (self.used + self.cached) / self.total if self.total else 0.0

    @property
    def sharing_ratio(self) -> float:
        """How many tables point at a used block on average; 1 without sharing, 0 in an idle pool."""
        return self.references / self.used if self.used else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found, 0 to 1."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
