"""Hashes name whole prefixes, matching changes nothing, and the right blocks are evicted."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import BlockPool, BlockTable, OutOfRange, PrefixCache, WeakHash, sha256_block

Fill = Callable[..., BlockTable]
StateOf = Callable[[BlockPool], object]


def cache_of(block_size: int, num_blocks: int = 8, secret: bytes | None = b"secret") -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks, block_size), secret=secret)


def test_only_full_blocks_have_a_hash() -> None:
    cache = cache_of(block_size=4)
    assert [len(cache.block_hashes(range(n))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(digest) == 32 for digest in cache.block_hashes(range(8)))


def test_a_hash_names_the_whole_prefix_not_the_block_alone() -> None:
    cache = cache_of(block_size=2)
    first, second = cache.block_hashes([1, 2, 3, 4]), cache.block_hashes([9, 9, 3, 4])
    assert first[1] != second[1]
    assert cache.block_hashes([1, 2, 5, 6])[0] == first[0]
    assert cache.block_hashes([3, 4])[0] not in first


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    block_size=st.integers(1, 5),
)
def test_hashes_extended_step_by_step_equal_those_computed_at_once(
    tokens: list[int], cuts: list[int], block_size: int
) -> None:
    cache = cache_of(block_size)
    whole = cache.block_hashes(tokens, b"tenant")
    grown: list[bytes] = []
    for cut in [*sorted(cuts), len(tokens)]:
        grown = cache.block_hashes(tokens[: max(cut, len(grown) * block_size)], b"tenant", grown)
    assert grown == whole


def test_more_known_hashes_than_full_blocks_are_refused() -> None:
    cache = cache_of(block_size=4)
    with pytest.raises(OutOfRange, match="previous"):
        cache.block_hashes(range(7), b"", cache.block_hashes(range(8)))


def test_every_namespace_secret_and_block_size_has_its_own_hashes() -> None:
    tokens = list(range(8))
    digests = [
        cache_of(4).block_hashes(tokens)[0],
        cache_of(4).block_hashes(tokens, b"a")[0],
        cache_of(4).block_hashes(tokens, b"a\0")[0],
        cache_of(8).block_hashes(tokens)[0],
        cache_of(4, secret=b"other").block_hashes(tokens)[0],
        cache_of(4, secret=b"").block_hashes(tokens, b"secret")[0],
        cache_of(4, secret=b"secreta").block_hashes(tokens)[0],
        cache_of(4, secret=b"").block_hashes(tokens, b"secreta")[0],
    ]
    assert len(set(digests)) == len(digests)
    assert cache_of(4).block_hashes(tokens, b"a")[0] == digests[1]


def test_two_caches_without_a_given_secret_never_agree() -> None:
    first, second = cache_of(4, secret=None), cache_of(4, secret=None)
    assert first.block_hashes(range(4)) != second.block_hashes(range(4))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_named(token: int) -> None:
    with pytest.raises(OutOfRange, match="token id") as error:
        cache_of(4).block_hashes([0, 1, token, 3])
    assert error.value.value == token


def test_a_match_is_capped_and_changes_nothing(fill: Fill, state_of: StateOf) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(12))
    fill(pool, cache, prompt).release()
    hashes = cache.block_hashes(prompt)
    before = state_of(pool)
    assert [cache.match(hashes, n).num_tokens for n in (0, 3, 4, 11, 12, 99)] == [0, 0, 4, 8, 12, 12]
    with pytest.raises(OutOfRange, match="max_tokens"):
        cache.match(hashes, -1)
    assert state_of(pool) == before


def test_a_match_tells_held_hits_from_free_ones(fill: Fill) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(13))
    whole = fill(pool, cache, prompt)
    beginning = fill(pool, cache, prompt[:9])
    assert beginning.block_ids[:2] == whole.block_ids[:2]
    whole.release()
    match = cache.match(cache.block_hashes(prompt), 12)
    assert (len(match.block_ids), match.num_free_hits) == (3, 1)
    assert BlockTable(pool).blocks_needed(1, match) == 2


def test_a_match_stops_at_the_first_missing_block(fill: Fill) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(12))
    table = fill(pool, cache, prompt)
    hashes = cache.block_hashes(prompt)
    missing = cache.block_hashes([7] * 4)
    assert cache.match([hashes[0], missing[0], hashes[2]], 12).block_ids == table.snapshot()[:1]


def test_clear_forgets_every_hash_and_keeps_what_tables_hold(fill: Fill) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    fill(pool, cache, [5] * 9).release()
    held = fill(pool, cache, range(9))
    assert cache.num_cached == 4
    cache.clear()
    assert (cache.num_cached, pool.num_free_findable) == (0, 0)
    assert cache.match(cache.block_hashes(range(9)), 8).block_ids == ()
    pool.check([held.block_ids])
    held.release()
    pool.check([])


def test_many_short_one_off_prompts_do_not_evict_a_long_shared_prefix(fill: Fill) -> None:
    """Blocks that can never be hit are reused first, so they push nothing out (mechanisms, note 3)."""
    pool = BlockPool(num_blocks=33, block_size=16)
    cache = PrefixCache(pool)
    shared = list(range(16 * 30))
    fill(pool, cache, shared).release()
    for number in range(500):
        fill(pool, cache, [10_000 + number] * (1 + number % 15)).release()
    assert cache.match(cache.block_hashes(shared), len(shared)).num_tokens == len(shared)
    assert pool.num_evictions == 0


def test_a_prefix_in_use_again_and_again_outlives_one_off_prompts_that_fill_blocks(fill: Fill) -> None:
    pool = BlockPool(num_blocks=33, block_size=16)
    cache = PrefixCache(pool)
    shared = list(range(16 * 20))
    fill(pool, cache, shared).release()
    for number in range(200):
        fill(pool, cache, [10_000 + number] * 40).release()
        if number % 3 == 0:
            fill(pool, cache, [*shared, number]).release()
            assert cache.match(cache.block_hashes(shared), len(shared)).num_tokens == len(shared)
    assert pool.num_evictions > 100


def test_under_pressure_a_cached_prompt_shrinks_from_its_end(fill: Fill) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    cache = PrefixCache(pool)
    prompt = list(range(32))
    fill(pool, cache, prompt).release()
    hashes = cache.block_hashes(prompt)
    holder = BlockTable(pool)
    found = []
    for _ in range(8):
        found.append(cache.match(hashes, 32).num_tokens)
        holder.append(4)
    assert found == [32, 28, 24, 20, 16, 12, 8, 4]
    assert all(before > after for before, after in pairwise(found))


def test_a_hash_that_cannot_keep_prefixes_apart_is_refused() -> None:
    """BLK-07: a constant, an 8-bit, a short, and a hash that forgets the parent."""
    pool = BlockPool(num_blocks=9, block_size=4)
    for weak in (
        lambda parent, tokens: bytes(32),
        lambda parent, tokens: sha256_block(parent, tokens)[:1] + bytes(31),
        lambda parent, tokens: sha256_block(parent, tokens)[:8],
        lambda parent, tokens: sha256_block(b"", tokens),
        lambda parent, tokens: sha256_block(parent, b""),
    ):
        with pytest.raises(WeakHash):
            PrefixCache(pool, hash_block=weak)


def test_another_strong_hash_can_be_injected(fill: Fill) -> None:
    calls = []

    def counting(parent: bytes, tokens: bytes) -> bytes:
        calls.append(tokens)
        return sha256_block(tokens, parent)

    pool = BlockPool(num_blocks=9, block_size=2)
    cache = PrefixCache(pool, hash_block=counting)
    calls.clear()
    fill(pool, cache, [1, 2, 3, 4, 5])
    assert calls == [b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0"]
    assert cache.match(cache.block_hashes([1, 2, 3, 4]), 4).num_tokens == 4
