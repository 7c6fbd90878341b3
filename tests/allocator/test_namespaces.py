"""Tenants: whose cache is found by whom, and how many blocks each may have and keep."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import (
    PUBLIC,
    BlockPool,
    BlockTable,
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    Owner,
    PrefixCache,
    Quota,
    QuotaExceeded,
    Quotas,
    namespace_key,
)

StateOf = Callable[[BlockPool], object]
B = 4
SECRET = b"s" * 32
A, C, D = (namespace_key(SECRET, name) for name in (b"a", b"c", b"d"))


def serve(
    pool: BlockPool, cache: PrefixCache, prompt: Sequence[int], namespace: bytes, number: int = 0
) -> tuple[BlockTable, int]:
    """Match, adopt, compute and publish; returns the table and how many tokens were cached."""
    hashes = cache.block_hashes(prompt, namespace)
    match = cache.match(hashes, len(prompt) - 1)
    table = BlockTable(pool, Owner("sequence", str(number), namespace))
    table.adopt(match, len(prompt) - match.num_tokens)
    for depth, key in enumerate(hashes):
        cache.publish(table.block_ids[depth], key, hashes[depth - 1] if depth else None, depth)
    return table, match.num_tokens


# ── Who finds what ───────────────────────────────────────────────────────────────────────────────


def test_a_namespace_is_a_keyed_hash_of_the_identity() -> None:
    cache = PrefixCache(BlockPool(4, B), secret=SECRET)
    assert cache.namespace_of(b"a") == A
    assert len({A, C, namespace_key(b"other secret", b"a"), namespace_key(SECRET, b"a\0")}) == 4
    assert b"a" not in (A[:1], A[-1:])


def test_the_same_tenant_hits_another_never_and_a_public_segment_is_shared() -> None:
    pool = BlockPool(40, B, quotas=Quotas())
    cache = PrefixCache(pool, secret=SECRET)
    system, question = list(range(100, 100 + 2 * B)), list(range(3 * B))
    assert cache.declare_public([*system, 7]) == 2
    prompt = [*system, *question]
    assert serve(pool, cache, prompt, A)[1] == 0
    assert serve(pool, cache, prompt, A)[1] == len(prompt) - B  # one token at least is computed
    assert serve(pool, cache, prompt, C)[1] == len(system)
    assert serve(pool, cache, question, C)[1] == 0
    pool.check()


def test_blocks_after_a_public_segment_are_private_even_with_the_same_tokens() -> None:
    cache = PrefixCache(BlockPool(4, B), secret=SECRET)
    cache.declare_public(range(2 * B))
    tokens = list(range(4 * B))
    a, c = cache.block_hashes(tokens, A), cache.block_hashes(tokens, C)
    assert a[:2] == c[:2]
    assert not {*a[2:]} & {*c[2:]}
    assert [cache.is_public(key) for key in a] == [True, True, False, False]
    undeclared = PrefixCache(BlockPool(4, B), secret=SECRET)
    assert not {*a} & {*undeclared.block_hashes(tokens, A)}


def test_hashes_inside_a_public_segment_can_be_extended_block_by_block() -> None:
    cache = PrefixCache(BlockPool(4, B), secret=SECRET)
    cache.declare_public(range(3 * B))
    tokens = list(range(5 * B))
    grown: list[bytes] = []
    for end in range(B, 5 * B + 1, B):
        grown = cache.block_hashes(tokens[:end], A, grown)
    assert grown == cache.block_hashes(tokens, A)
    assert [cache.is_public(key) for key in grown] == [True, True, True, False, False]


def test_a_public_segment_is_public_only_from_the_beginning_and_within_its_scope() -> None:
    cache = PrefixCache(BlockPool(4, B), secret=SECRET)
    cache.declare_public(range(2 * B), scope=b"adapter 1")
    tokens = list(range(2 * B))
    assert all(map(cache.is_public, cache.block_hashes(tokens, A, scope=b"adapter 1")))
    for hashes in (
        cache.block_hashes(tokens, A),
        cache.block_hashes(tokens, A, scope=b"adapter 2"),
        cache.block_hashes(tokens[B:], A, scope=b"adapter 1"),
        cache.block_hashes([9] * B + tokens, A, scope=b"adapter 1"),
    ):
        assert not any(map(cache.is_public, hashes))
    assert cache.block_hashes(tokens, A) != cache.block_hashes(tokens, A, scope=b"x")


@given(
    tokens=st.lists(st.integers(0, 1), max_size=30),
    segments=st.lists(st.lists(st.integers(0, 1), max_size=16), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
def test_hashes_with_public_segments_do_not_depend_on_how_they_were_extended(
    tokens: list[int], segments: list[list[int]], cuts: list[int]
) -> None:
    cache = PrefixCache(BlockPool(4, 2), secret=SECRET)
    for segment in segments:
        cache.declare_public(segment)
    whole = cache.block_hashes(tokens, A)
    grown: list[bytes] = []
    for cut in [*sorted(cuts), len(tokens)]:
        grown = cache.block_hashes(tokens[: max(cut, 2 * len(grown))], A, grown)
    assert grown == whole
    longest = max(
        (len(s) // 2 for s in segments for n in [len(s) // 2 * 2] if s[:n] == tokens[:n]),
        default=0,
    )
    common = [a == c for a, c in zip(whole, cache.block_hashes(tokens, C), strict=True)]
    assert common[:longest] == [True] * longest
    for index, is_common in enumerate(common):
        assert is_common == any(
            s[: 2 * index + 2] == tokens[: 2 * index + 2] and len(s) >= 2 * index + 2 for s in segments
        )


# ── Caps ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_namespace_at_its_cap_is_refused_although_blocks_are_free(state_of: StateOf) -> None:
    pool = BlockPool(20, B, quotas=Quotas({A: Quota(cap=3)}))
    table = BlockTable(pool, Owner("sequence", "1", A))
    table.append(3 * B)
    before = state_of(pool)
    with pytest.raises(QuotaExceeded, match="may have 0 more") as error:
        table.append(1)
    assert (error.value.needed, error.value.free, error.value.namespace) == (1, 0, A)
    assert isinstance(error.value, OutOfBlocks)
    assert (state_of(pool), table.num_tokens) == (before, 3 * B)
    assert pool.num_available(table.account) == 0
    assert (pool.num_obtainable(table.account), pool.num_obtainable()) == (3, 19)
    BlockTable(pool, Owner("sequence", "2", C)).append(16 * B)
    pool.check()


def test_a_namespace_at_its_cap_recycles_its_own_cache_and_no_one_elses() -> None:
    pool = BlockPool(20, B, quotas=Quotas({A: Quota(cap=4)}))
    cache = PrefixCache(pool, secret=SECRET)
    serve(pool, cache, range(4 * B), C)[0].release()
    for number in range(5):
        serve(pool, cache, [number] * (3 * B), A)[0].release()
        assert pool.quotas is not None
        assert pool.quotas.space(A).resident <= 4
        pool.check()
    assert pool.num_evictions == 11  # 15 blocks were published and 4 may stay, though 11 others were never used
    assert cache.match(cache.block_hashes(range(4 * B), C), 4 * B).num_tokens == 4 * B


# ── Floors ───────────────────────────────────────────────────────────────────────────────────────


def test_a_floor_is_left_free_for_its_namespace(state_of: StateOf) -> None:
    pool = BlockPool(11, B, quotas=Quotas({A: Quota(floor=4)}))
    noisy = BlockTable(pool, Owner("sequence", "1", C))
    assert (pool.num_available(noisy.account), pool.num_obtainable(noisy.account)) == (6, 6)
    noisy.append(6 * B)
    before = state_of(pool)
    with pytest.raises(QuotaExceeded):
        noisy.append(1)
    assert state_of(pool) == before
    quiet = BlockTable(pool, Owner("sequence", "2", A))
    quiet.append(4 * B)
    assert pool.num_free == 0
    quiet.truncate(2 * B)
    with pytest.raises(QuotaExceeded):
        noisy.append(1)
    pool.check()


def test_above_its_floor_a_namespace_competes_like_any_other() -> None:
    pool = BlockPool(11, B, quotas=Quotas({A: Quota(floor=2)}))
    table = BlockTable(pool, Owner("sequence", "1", A))
    table.append(10 * B)
    with pytest.raises(OutOfBlocks):
        BlockTable(pool, Owner("sequence", "2", C)).append(1)
    pool.check()


def test_anothers_cache_is_never_evicted_below_its_floor() -> None:
    pool = BlockPool(13, B, quotas=Quotas({A: Quota(floor=4), C: Quota(weight=100.0)}))
    cache = PrefixCache(pool, secret=SECRET)
    prompt = list(range(6 * B))
    serve(pool, cache, prompt, A)[0].release()
    for number in range(20):
        serve(pool, cache, [50 + number] * (4 * B), C, number)[0].release()
        pool.check()
    assert cache.match(cache.block_hashes(prompt, A), len(prompt)).num_tokens == 4 * B
    noisy = BlockTable(pool, Owner("sequence", "1", C))
    noisy.append(8 * B)
    with pytest.raises(QuotaExceeded):
        noisy.append(1)
    assert cache.match(cache.block_hashes(prompt, A), len(prompt)).num_tokens == 4 * B
    own = BlockTable(pool, Owner("sequence", "2", A))  # its owner may evict it, of course
    own.append(4 * B)
    assert cache.match(cache.block_hashes(prompt, A), len(prompt)).num_tokens == 0
    pool.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_tenant_cannot_push_another_below_its_floor(seed: int) -> None:
    """At any moment of a noisy tenant's worst, the quiet one can bring its holdings to its floor."""
    random = Random(seed)
    floor = 8
    pool = BlockPool(41, B, quotas=Quotas({A: Quota(floor=floor), D: Quota(floor=5, cap=9)}))
    cache = PrefixCache(pool, secret=SECRET)
    tables: dict[bytes, list[BlockTable]] = {A: [], C: [], D: []}
    refused = 0
    for step in range(1500):
        namespace = random.choice([A, C, C, C, C, D])
        mine = tables[namespace]
        if mine and random.random() < 0.3:
            mine.pop(random.randrange(len(mine))).release()
            continue
        prompt = [random.randint(0, 3)] * random.randint(1, 12) + [step] * random.randint(0, 30)
        try:
            mine.append(serve(pool, cache, prompt, namespace, step)[0])
        except OutOfBlocks:
            refused += 1
            if mine:
                mine.pop(0).release()
        assert pool.quotas is not None
        space = pool.quotas.space(A)
        assert space.held + pool.quotas.available(space, pool.num_free) >= floor
        if step % 50 == 0:
            pool.check()
            missing = max(0, floor - space.held)
            probe = BlockTable(pool, Owner("sequence", "probe", A))
            probe.append(missing * B)  # must not raise
            probe.release()
    assert refused > 50
    assert pool.num_evictions > 50


# ── Weights and public segments ──────────────────────────────────────────────────────────────────


def test_cache_is_evicted_in_proportion_to_weights() -> None:
    pool = BlockPool(61, B, quotas=Quotas({A: Quota(weight=2.0), C: Quota(weight=1.0)}))
    cache = PrefixCache(pool, secret=SECRET)
    for number in range(60):
        for namespace in (A, C):
            serve(pool, cache, [number] * (2 * B), namespace)[0].release()
    assert pool.quotas is not None
    assert (pool.quotas.space(A).resident, pool.quotas.space(C).resident) == (40, 20)
    pool.check()


def test_a_single_busy_tenant_uses_the_whole_pool() -> None:
    pool = BlockPool(61, B, quotas=Quotas({A: Quota(weight=2.0)}))
    cache = PrefixCache(pool, secret=SECRET)
    for number in range(60):
        serve(pool, cache, [number] * (2 * B), C)[0].release()
    assert pool.quotas is not None
    assert pool.quotas.space(C).resident == 60


def test_public_blocks_weigh_on_nobody_and_can_have_a_floor_of_their_own() -> None:
    pool = BlockPool(11, B, quotas=Quotas({A: Quota(cap=3), PUBLIC: Quota(floor=2)}))
    cache = PrefixCache(pool, secret=SECRET)
    system = list(range(2 * B))
    cache.declare_public(system)
    table, _ = serve(pool, cache, [*system, 5], A)
    assert pool.quotas is not None
    assert (pool.quotas.space(A).held, pool.quotas.space(PUBLIC).held) == (1, 2)
    assert [pool.namespace_of(block) for block in table.block_ids] == [PUBLIC, PUBLIC, A]
    pool.check()
    table.release()
    for number in range(10):
        serve(pool, cache, [50 + number] * (3 * B), C)[0].release()
        pool.check()
    assert cache.match(cache.block_hashes(system, D), len(system)).num_tokens == 2 * B


@pytest.mark.parametrize(
    ("quota", "field"),
    [({"cap": 0}, "cap"), ({"floor": -1}, "floor"), ({"cap": 2, "floor": 3}, "floor"), ({"weight": 0.0}, "weight")],
)
def test_impossible_rights_are_refused_by_name(quota: dict[str, int], field: str) -> None:
    with pytest.raises(OutOfRange, match=field):
        Quota(**quota)


def test_floors_that_nobody_can_guarantee_are_refused() -> None:
    with pytest.raises(OutOfRange, match=r"default\.floor"):
        Quotas(default=Quota(floor=1))
    with pytest.raises(OutOfRange, match="sum of floors"):
        BlockPool(9, B, quotas=Quotas({A: Quota(floor=5), C: Quota(floor=4)}))


def test_namespaces_that_left_take_no_more_memory_than_the_pool_has_blocks() -> None:
    pool = BlockPool(9, B, quotas=Quotas())
    assert pool.quotas is not None
    for number in range(100):
        table = BlockTable(pool, Owner("sequence", str(number), number.to_bytes(2, "big")))
        table.append(3)
        table.release()
    assert len(pool.quotas.spaces()) <= pool.num_blocks


def test_a_public_block_stays_charged_to_its_tenant_where_the_tenants_floor_could_not_be_filled_again() -> None:
    pool = BlockPool(3, B, quotas=Quotas({A: Quota(floor=2)}))
    cache = PrefixCache(pool, secret=SECRET)
    cache.declare_public(range(2 * B))
    table, _ = serve(pool, cache, range(2 * B), A)
    assert pool.num_free == 0
    assert [pool.namespace_of(block) for block in table.block_ids] == [A, A]
    assert cache.match(cache.block_hashes(range(2 * B), C), 2 * B).num_tokens == 2 * B
    pool.check()


@pytest.mark.parametrize("field", ["held", "resident", "unmet"])
def test_a_wrong_charge_is_found_and_counted_again(field: str) -> None:
    pool = BlockPool(11, B, quotas=Quotas({A: Quota(floor=4)}))
    table = BlockTable(pool, Owner("sequence", "1", A))
    table.append(2 * B)
    assert pool.quotas is not None
    if field == "unmet":
        pool.quotas._unmet += 1
    else:
        setattr(pool.quotas.space(A), field, 7)
    with pytest.raises(InvariantBroken, match=r"charged for|unmet floors"):
        pool.check()
    assert pool.audit()
    pool.check()
    assert (pool.quotas.space(A).held, pool.quotas.space(A).resident, pool.quotas.unmet) == (2, 2, 2)
    assert pool.quarantined == set()
