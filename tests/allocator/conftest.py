"""Small builders the allocator's tests share; they use only the package's public names."""

from collections.abc import Callable, Sequence

import pytest

from allocator import BlockPool, BlockTable, PrefixCache

Fill = Callable[..., BlockTable]
StateOf = Callable[[BlockPool], object]


@pytest.fixture
def fill() -> Fill:
    """Give a function that serves a prompt as an engine would: match, adopt, compute, publish full blocks."""

    def fill(pool: BlockPool, cache: PrefixCache, token_ids: Sequence[int], namespace: bytes = b"") -> BlockTable:
        hashes = cache.block_hashes(token_ids, namespace)
        match = cache.match(hashes, len(token_ids) - 1)
        table = BlockTable(pool)
        table.adopt(match, len(token_ids) - match.num_tokens)
        for block, key in zip(table.block_ids, hashes, strict=False):
            cache.publish(block, key)
        return table

    return fill


@pytest.fixture
def state_of() -> StateOf:
    """Give a function that reads everything a pool's user can see, to show that a call changed nothing."""

    def state_of(pool: BlockPool) -> object:
        blocks = range(1, pool.num_blocks)
        return (
            pool.free_blocks(),
            [pool.ref_count(block) for block in blocks],
            [pool.key_of(block) for block in blocks],
            pool.num_free,
            pool.num_findable,
            pool.num_free_findable,
            pool.num_shared,
            pool.num_references,
            pool.num_copies_in_flight,
            pool.num_evictions,
            pool.lookup_tokens,
            pool.hit_tokens,
        )

    return state_of
