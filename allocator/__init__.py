"""Who owns which block of the paged KV cache. Standard library only; see README.md for the invariants."""

from allocator.audit import Finding
from allocator.errors import (
    AllocatorError,
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
from allocator.eviction import HIGH, LOW, NORMAL, POLICIES, EvictionOrder
from allocator.ledger import Account, Owner
from allocator.observer import Observer, Publication
from allocator.pool import NULL_BLOCK, BlockHandle, BlockPool, Incident
from allocator.prefix import HashBlock, Match, PrefixCache, namespace_key, sha256_block
from allocator.quota import PUBLIC, Quota, Quotas
from allocator.stats import PoolStats
from allocator.table import NO_GROWTH, BlockTable, Growth

__all__ = [
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
    "EvictionOrder",
    "Finding",
    "Growth",
    "HashBlock",
    "Incident",
    "InvariantBroken",
    "Match",
    "Observer",
    "OutOfBlocks",
    "OutOfRange",
    "Owner",
    "PoolStats",
    "PrefixCache",
    "Publication",
    "PublishConflict",
    "Quota",
    "QuotaExceeded",
    "Quotas",
    "RefCountError",
    "StaleBlock",
    "TableNotEmpty",
    "UnknownPolicy",
    "WeakHash",
    "namespace_key",
    "sha256_block",
]
