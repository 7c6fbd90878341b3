"""Who owns which block of the paged KV cache. Standard library only; see README.md for the invariants."""

from allocator.errors import (
    AllocatorError,
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    PublishConflict,
    RefCountError,
    StaleBlock,
    TableNotEmpty,
    WeakHash,
)
from allocator.pool import NULL_BLOCK, BlockPool
from allocator.prefix import HashBlock, Match, PrefixCache, sha256_block
from allocator.stats import PoolStats
from allocator.table import NO_GROWTH, BlockTable, Growth

__all__ = [
    "NO_GROWTH",
    "NULL_BLOCK",
    "AllocatorError",
    "BlockPool",
    "BlockTable",
    "Growth",
    "HashBlock",
    "InvariantBroken",
    "Match",
    "OutOfBlocks",
    "OutOfRange",
    "PoolStats",
    "PrefixCache",
    "PublishConflict",
    "RefCountError",
    "StaleBlock",
    "TableNotEmpty",
    "WeakHash",
    "sha256_block",
]
