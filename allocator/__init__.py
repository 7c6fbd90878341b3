"""Who owns which block of the paged KV cache. Standard library only; see README.md for the invariants."""

from allocator.audit import Finding
from allocator.errors import (
    AllocatorError,
    EventsLost,
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    PublishConflict,
    QuotaExceeded,
    RefCountError,
    StaleBlock,
    TableNotEmpty,
    UnknownPolicy,
    WeakHash,
)
from allocator.events import DEVICE, Cleared, Event, EventLog, Quarantined, Removed, Stored
from allocator.eviction import HIGH, LOW, NORMAL, POLICIES, EvictionOrder
from allocator.file_tier import FileTier, load_secret, make_stamp
from allocator.free_order import NULL_BLOCK, Incident
from allocator.ledger import Account, Owner
from allocator.observer import Observer, Publication
from allocator.pool import BlockHandle, BlockPool
from allocator.prefix import HashBlock, Match, PrefixCache, namespace_key, sha256_block
from allocator.quota import PUBLIC, Quota, Quotas
from allocator.stats import PoolStats
from allocator.subblock import PartialHit
from allocator.table import NO_GROWTH, BlockTable, Growth
from allocator.tiers import HostTier, Load, OffloadQueue, Store, Tier, TierLink
from allocator.timeline import BOUNDS_S, Histogram, Timeline

__all__ = [
    "BOUNDS_S",
    "DEVICE",
    "HIGH",
    "LOW",
    "NORMAL",
    "NO_GROWTH",
    "NULL_BLOCK",
    "POLICIES",
    "PUBLIC",
    "Account",
    "AllocatorError",
    "BlockHandle",
    "BlockPool",
    "BlockTable",
    "Cleared",
    "Event",
    "EventLog",
    "EventsLost",
    "EvictionOrder",
    "FileTier",
    "Finding",
    "Growth",
    "HashBlock",
    "Histogram",
    "HostTier",
    "Incident",
    "InvariantBroken",
    "Load",
    "Match",
    "Observer",
    "OffloadQueue",
    "OutOfBlocks",
    "OutOfRange",
    "Owner",
    "PartialHit",
    "PoolStats",
    "PrefixCache",
    "Publication",
    "PublishConflict",
    "Quarantined",
    "Quota",
    "QuotaExceeded",
    "Quotas",
    "RefCountError",
    "Removed",
    "StaleBlock",
    "Store",
    "Stored",
    "TableNotEmpty",
    "Tier",
    "TierLink",
    "Timeline",
    "UnknownPolicy",
    "WeakHash",
    "load_secret",
    "make_stamp",
    "namespace_key",
    "sha256_block",
]
