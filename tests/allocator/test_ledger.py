"""The ledger: every reference has an owner, handles go stale, and an imbalance is explained, quarantined and survived."""

from collections.abc import Callable, Iterator
from random import Random

import pytest

from allocator import (
    BlockPool,
    BlockTable,
    InvariantBroken,
    OutOfBlocks,
    Owner,
    PrefixCache,
    Quota,
    Quotas,
    RefCountError,
    StaleBlock,
)

StateOf = Callable[[BlockPool], object]
B = 4


def sequence(number: int, namespace: bytes = b"") -> Owner:
    return Owner("sequence", str(number), namespace)


def ledger_pool(num_blocks: int = 17) -> BlockPool:
    return BlockPool(num_blocks, B, ledger=True)


def test_every_reference_is_booked_under_its_owner_and_the_books_balance() -> None:
    pool = ledger_pool()
    table = BlockTable(pool, sequence(7))
    table.append(2 * B + 1)
    lease = table.fork(Owner("lease", "session 3"))
    growth = lease.append(1)
    pool.check()
    assert pool.ledger is not None
    shared, tail = table.block_ids[0], table.block_ids[2]
    assert [str(a.owner) for a in pool.ledger.holders(shared)] == ["sequence 7", "lease session 3"]
    assert [str(a.owner) for a in pool.ledger.holders(tail)] == ["sequence 7"]
    assert pool.ledger.copiers[growth.copies[0][1]] is lease.account
    pool.finish_copies(growth.copies)
    assert pool.ledger.copiers == {}
    lease.release()
    table.release()
    assert pool.ledger.accounts == {}
    pool.check([])


def test_calls_without_an_account_are_booked_too() -> None:
    pool = ledger_pool()
    blocks = pool.take(3)
    pool.share(blocks[0])
    pool.check()
    assert pool.ledger is not None
    assert pool.ledger.anonymous.entries == {blocks[0]: 2, blocks[1]: 1, blocks[2]: 1}
    pool.release([*blocks, blocks[0]])
    assert pool.ledger.accounts == {}


def test_giving_back_what_another_owner_holds_is_refused_at_once_and_explained(state_of: StateOf) -> None:
    """Without owners the second release would silently steal the child's reference."""
    pool = ledger_pool()
    pool.advance(3.5)
    table = BlockTable(pool, sequence(1))
    table.append(2 * B)
    child = table.fork(sequence(2))
    blocks = table.snapshot()
    pool.advance(8.0)
    table.release()
    before = state_of(pool)
    with pytest.raises(RefCountError) as error:
        pool.release(blocks, table.account)
    assert (error.value.block_id, error.value.held) == (blocks[0], 0)
    message = str(error.value)
    assert "sequence 1, which holds nothing now, last call 'release' at 8.000" in message
    assert "held by sequence 2, since 3.500, last call 'share' at 3.500" in message
    with pytest.raises(RefCountError):
        pool.begin_copy(blocks[0], blocks[1], table.account)
    assert state_of(pool) == before
    child.release()
    pool.check([])


def test_check_names_the_owner_its_time_and_its_last_call() -> None:
    pool = ledger_pool()
    pool.advance(12.25)
    table = BlockTable(pool, sequence(42))
    table.append(B)
    pool._refs[table.block_ids[0]] += 1
    pool._num_references += 1
    pool._num_shared += 1
    with pytest.raises(InvariantBroken) as error:
        pool.check()
    assert str(error.value) == (
        f"block {table.block_ids[0]} has 2 references and the accounts list 1: block {table.block_ids[0]} is held by "
        "sequence 42, since 12.250, last call 'take' at 12.250"
    )


def test_a_lost_pin_is_explained_by_who_began_the_copy() -> None:
    pool = ledger_pool()
    table = BlockTable(pool, sequence(1))
    table.append(1)
    child = table.fork(sequence(2))
    ((_, dst),) = child.append(1).copies
    pool._pins[dst] += 1
    with pytest.raises(InvariantBroken, match=r"has 2 pins and 1 copies.*a copy into it, begun by sequence 2"):
        pool.check()


def test_a_block_nobody_admits_to_is_explained_by_its_last_holder() -> None:
    pool = ledger_pool()
    table = BlockTable(pool, sequence(5))
    table.append(1)
    (block,) = table.block_ids
    assert pool.ledger is not None
    table.account.entries.clear()  # type: ignore[union-attr]
    assert pool.ledger.explain(block) == (
        f"block {block} is held by no account; the last one was sequence 5, which holds nothing now, "
        "last call 'take' at 0.000"
    )
    assert pool.ledger.explain(9) == "block 9 was never held"


def test_a_lease_that_nobody_gave_back_is_found_by_its_age() -> None:
    pool = ledger_pool()
    pool.advance(10.0)
    table = BlockTable(pool, sequence(1))
    table.append(B)
    old = table.fork(Owner("lease", "session a"))
    pool.advance(20.0)
    young = table.fork(Owner("lease", "session b"))
    assert pool.ledger is not None
    assert [str(account.owner) for account in pool.ledger.overdue("lease", 15.0)] == ["lease session a"]
    old.release()
    assert pool.ledger.overdue("lease", 15.0) == []
    assert len(pool.ledger.overdue("lease", 21.0)) == 1
    young.release()
    table.release()
    pool.check([])


# ── Handles ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("has_ledger", [False, True])
def test_a_handle_is_stale_from_the_last_release_on_even_if_the_block_is_held_anew(has_ledger: bool) -> None:
    pool = BlockPool(2, B, ledger=has_ledger)
    (block,) = pool.take(1)
    handle = pool.handle(block)
    pool.share(block)
    pool.release([block])
    assert pool.resolve(handle) == block  # one holder is left
    pool.release([block])
    with pytest.raises(StaleBlock, match="given back"):
        pool.resolve(handle)
    assert pool.take(1) == [block]
    with pytest.raises(StaleBlock, match="generation 0, now 1"):
        pool.resolve(handle)
    assert pool.resolve(pool.handle(block)) == block


def test_a_cached_block_found_again_does_not_revive_an_old_handle() -> None:
    pool = BlockPool(3, B)
    (block,) = pool.take(1)
    pool.publish(block, b"k" * 32)
    handle = pool.handle(block)
    pool.release([block])
    pool.touch(block)
    with pytest.raises(StaleBlock):
        pool.resolve(handle)


@pytest.mark.parametrize("block", [0, -1, 99, 1])
def test_only_a_held_block_of_the_pool_has_a_handle(block: int) -> None:
    with pytest.raises(StaleBlock):
        BlockPool(9, B).handle(block)


# ── Debug modes ──────────────────────────────────────────────────────────────────────────────────


def test_poison_lists_each_block_whose_content_means_nothing_and_never_a_findable_one() -> None:
    pool = BlockPool(9, B, poison=True)
    table = BlockTable(pool)
    table.append(3 * B + 1)
    first, second, third, tail = table.block_ids
    for block in (first, second):
        pool.publish(block, bytes([block]) * 32)
    assert pool.take_dead() == []
    table.release()
    assert pool.take_dead() == [tail, third]
    assert pool.take_dead() == []
    pool.forget_all()
    assert sorted(pool.take_dead()) == sorted([first, second])


def test_an_evicted_block_is_dead_before_it_is_written_again() -> None:
    pool = BlockPool(2, B, poison=True)
    (block,) = pool.take(1)
    pool.publish(block, b"k" * 32)
    pool.release([block])
    assert pool.take_dead() == []
    assert pool.take(1) == [block]
    assert pool.take_dead() == [block]


def test_a_stale_read_meets_poison_and_a_live_one_never_does() -> None:
    """The whole contract on a simulated device: dead blocks are filled before the step's copies and writes."""
    random = Random(3)
    pool = BlockPool(12, B, poison=True)
    cache = PrefixCache(pool)
    device: dict[int, str] = {}
    tables: list[tuple[BlockTable, list[int]]] = []
    for _ in range(400):
        if tables and (random.random() < 0.45 or pool.num_free < 4):
            table, _tokens = tables.pop(random.randrange(len(tables)))
            handles = [pool.handle(block) for block in table.block_ids]
            table.release()
            for handle in handles:
                if pool.ref_count(handle.block) == 0 and pool.key_of(handle.block) is None:
                    assert handle.block in (pool._dead or [])
        tokens = [random.randint(0, 1) for _ in range(random.randint(1, 9))]
        hashes = cache.block_hashes(tokens)
        match = cache.match(hashes, len(tokens) - 1)
        table = BlockTable(pool)
        try:
            table.adopt(match, len(tokens) - match.num_tokens)
        except OutOfBlocks:
            continue
        for block in pool.take_dead():
            for offset in range(B):
                device[block * B + offset] = "poison"
        for position in range(match.num_tokens, len(tokens)):
            device[table.slot(position)] = repr(tokens[: position + 1])
        for block, key in zip(table.block_ids, hashes, strict=False):
            cache.publish(block, key)
        tables.append((table, tokens))
        for other, written in tables:
            assert [device[other.slot(p)] for p in range(len(written))] == [
                repr(written[: p + 1]) for p in range(len(written))
            ]


def test_guard_blocks_are_never_handed_out_and_never_counted() -> None:
    pool = BlockPool(17, B, guard_every=4)
    assert pool.guards == {4, 8, 12, 16}
    assert pool.num_usable == pool.num_free == 12
    taken = pool.take(12)
    assert pool.guards.isdisjoint(taken)
    pool.check([taken])
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    pool.release(taken)
    pool.check([])
    assert (pool.num_used, pool.num_free) == (0, 12)


# ── Injected faults under load ───────────────────────────────────────────────────────────────────


class Load:
    """Sequences that come, grow, fork and go, over prompts that begin alike."""

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool)
        self.random = Random(seed)
        self.tables: list[BlockTable] = []
        self.copies: list[tuple[int, int]] = []
        self.number = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        random, pool = self.random, self.pool
        self.number += 1
        pool.advance(float(self.number))
        pool.finish_copies(self.copies)
        self.copies = []
        if self.tables and (len(self.tables) > 5 or random.random() < 0.3):
            self.tables.pop(random.randrange(len(self.tables))).release()
        prompt = [0] * random.randint(0, 20) + [random.randint(0, 9) for _ in range(random.randint(1, 6))]
        hashes = self.cache.block_hashes(prompt)
        match = self.cache.match(hashes, len(prompt) - 1)
        table = BlockTable(pool, sequence(self.number))
        try:
            table.adopt(match, len(prompt) - match.num_tokens)
        except OutOfBlocks:
            if self.tables:
                self.tables.pop(0).release()
        else:
            for block, key in zip(table.block_ids, hashes, strict=False):
                self.cache.publish(block, key)
            self.tables.append(table)
            if random.random() < 0.3:
                self.tables.append(table.fork(Owner("lease", f"fork {self.number}")))
        for table in self.tables:
            try:
                self.copies += table.append(random.randint(0, 2)).copies
            except OutOfBlocks:
                continue

    def finish(self) -> None:
        self.pool.finish_copies(self.copies)
        self.copies = []
        for table in self.tables:
            table.release()
        self.tables = []


def pools() -> Iterator[tuple[str, Callable[[], BlockPool]]]:
    yield "ring", lambda: BlockPool(40, B, ledger=True)
    yield "cost", lambda: BlockPool(40, B, ledger=True, policy="cost")
    yield "quotas", lambda: BlockPool(40, B, quotas=Quotas({b"": Quota(floor=20), b"idle": Quota(floor=4)}))


each_pool = pytest.mark.parametrize("make_pool", [make for _, make in pools()], ids=[name for name, _ in pools()])


def busy(make_pool: Callable[[], BlockPool], seed: int) -> Load:
    load = Load(make_pool(), seed)
    load.run(60)
    load.pool.check()
    while not any(len(table.block_ids) > 2 for table in load.tables):
        load.step()
    return load


def serves_on_and_is_whole_but_for(load: Load, quarantined: set[int]) -> None:
    """What every fault must end in."""
    pool = load.pool
    pool.check()
    load.run(120)
    pool.check()
    load.finish()
    pool.check([])
    assert pool.quarantined == quarantined
    assert pool.num_usable == pool.num_blocks - 1 - len(quarantined)
    assert pool.num_free == pool.num_usable
    handed_out = pool.take(pool.num_available())
    assert quarantined.isdisjoint(handed_out)
    pool.release(handed_out)
    assert {incident.block for incident in pool.incidents} == quarantined
    assert pool.num_incidents == len(quarantined)


@each_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_double_free_under_load_is_refused_at_the_call_and_harms_nobody(
    make_pool: Callable[[], BlockPool], seed: int
) -> None:
    load = busy(make_pool, seed)
    table = load.tables.pop()
    blocks, account = table.snapshot(), table.account
    table.release()
    with pytest.raises(RefCountError, match="which holds nothing now, last call 'release'"):
        load.pool.release(blocks, account)
    serves_on_and_is_whole_but_for(load, set())


@each_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_lost_free_under_load_is_found_when_its_owner_ends_and_only_its_block_is_lost(
    make_pool: Callable[[], BlockPool], seed: int
) -> None:
    """The table forgot a block: nobody would ever give it back."""
    load = busy(make_pool, seed)
    table = next(t for t in load.tables if len(t.block_ids) > 2)
    lost = table.block_ids[-1]
    del table._block_ids[-1]
    load.tables.remove(table)
    table.release()
    (incident,) = load.pool.incidents
    assert incident.block == lost
    assert "ended with 0 references" in incident.reason
    assert str(table.account.owner) in incident.reason  # type: ignore[union-attr]
    serves_on_and_is_whole_but_for(load, {lost})


@each_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_block_given_back_behind_its_tables_back_is_quarantined_when_the_table_ends(
    make_pool: Callable[[], BlockPool], seed: int
) -> None:
    """The first of two frees of the same owner is the wrong one; it shows at the second."""
    load = busy(make_pool, seed)
    table = next(t for t in load.tables if len(t.block_ids) > 2)
    stolen = table.block_ids[-1]
    load.pool.release([stolen], table.account)
    load.tables.remove(table)
    table.release()
    (incident,) = load.pool.incidents
    assert incident.block == stolen
    assert "gave back 1 references" in incident.reason
    serves_on_and_is_whole_but_for(load, {stolen})


@each_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_late_completion_is_told_apart_and_changes_nothing(
    make_pool: Callable[[], BlockPool], seed: int, state_of: StateOf
) -> None:
    load = busy(make_pool, seed)
    while not load.copies:
        load.step()
    late = list(load.copies)
    load.pool.finish_copies(late)
    load.copies = []
    before = state_of(load.pool)
    with pytest.raises(StaleBlock, match="not the target of a copy in flight"):
        load.pool.finish_copies(late)
    assert state_of(load.pool) == before
    serves_on_and_is_whole_but_for(load, set())


@each_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_stale_handle_raises_at_the_call_site_and_says_who_holds_the_block_now(
    make_pool: Callable[[], BlockPool], seed: int
) -> None:
    load = busy(make_pool, seed)
    table = load.tables.pop()
    handles = [load.pool.handle(block) for block in table.block_ids]
    table.release()
    load.run(10)
    stale = [handle for handle in handles if load.pool._gens[handle.block] != handle.generation]
    assert stale
    for handle in stale:
        with pytest.raises(StaleBlock, match="given back since"):
            load.pool.resolve(handle)
    serves_on_and_is_whole_but_for(load, set())


def _gain_a_reference(pool: BlockPool, block: int) -> None:
    pool._refs[block] += 1


def _lose_a_reference(pool: BlockPool, block: int) -> None:
    pool._refs[block] -= 1


def _gain_a_pin(pool: BlockPool, block: int) -> None:
    pool._pins[block] += 1


def _lose_an_account_entry(pool: BlockPool, block: int) -> None:
    assert pool.ledger is not None
    del next(pool.ledger.holders(block)).entries[block]


def _link_a_held_block(pool: BlockPool, block: int) -> None:
    pool._next[block], pool._prev[block] = pool._next[0], 0
    pool._prev[pool._next[0]] = block
    pool._next[0] = block
    pool._num_free += 1


DAMAGE = [_gain_a_reference, _lose_a_reference, _gain_a_pin, _lose_an_account_entry, _link_a_held_block]


@each_pool
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("seed", range(3))
def test_damaged_books_are_audited_the_block_quarantined_and_service_goes_on(
    make_pool: Callable[[], BlockPool], damage: Callable[[BlockPool, int], None], seed: int
) -> None:
    load = busy(make_pool, seed)
    table = next(t for t in load.tables if len(t.block_ids) > 2)
    block = table.block_ids[-1]
    damage(load.pool, block)
    with pytest.raises(InvariantBroken):
        load.pool.check()
    findings = load.pool.audit()
    assert {finding.block for finding in findings} - {None} == {block}
    assert load.pool.audit() == []
    serves_on_and_is_whole_but_for(load, {block})


@each_pool
@pytest.mark.parametrize("seed", range(3))
def test_a_torn_free_ring_is_mended_without_losing_a_block(make_pool: Callable[[], BlockPool], seed: int) -> None:
    load = busy(make_pool, seed)
    load.finish()
    ring = [block for block in load.pool.free_blocks() if load.pool.key_of(block) is None]
    if len(ring) < 3:
        load.pool.forget_all()
        ring = load.pool.free_blocks()
    load.pool._next[ring[1]] = ring[0]  # a loop: what lies behind it cannot be reached
    with pytest.raises(InvariantBroken):
        load.pool.check()
    assert load.pool.audit()
    load.pool.check()
    quarantined = set(load.pool.quarantined)
    assert quarantined
    serves_on_and_is_whole_but_for(load, quarantined)


@each_pool
def test_a_table_whose_block_lost_its_count_ends_without_an_error(make_pool: Callable[[], BlockPool]) -> None:
    load = busy(make_pool, 0)
    table = next(t for t in load.tables if len(t.block_ids) > 2 and load.pool.ref_count(t.block_ids[-1]) == 1)
    block = table.block_ids[-1]
    load.pool._refs[block] = 0
    load.tables.remove(table)
    table.release()
    assert load.pool.quarantined == {block}
    serves_on_and_is_whole_but_for(load, {block})


def test_appending_to_a_shared_block_that_the_books_deny_changes_nothing(state_of: StateOf) -> None:
    pool = ledger_pool()
    table = BlockTable(pool, sequence(1))
    table.append(B + 1)
    child = table.fork(sequence(2))
    assert child.account is not None
    del child.account.entries[child.block_ids[-1]]
    before = state_of(pool), child.num_tokens, child.snapshot()
    with pytest.raises(RefCountError, match="sequence 2"):
        child.append(1)
    assert (state_of(pool), child.num_tokens, child.snapshot()) == before


def test_a_quarantined_block_is_used_and_given_back_by_its_holders_and_never_found_or_handed_out() -> None:
    pool = ledger_pool(6)
    cache = PrefixCache(pool)
    table = BlockTable(pool, sequence(1))
    table.append(2 * B)
    hashes = cache.block_hashes(range(2 * B))
    block = table.block_ids[0]
    cache.publish(block, hashes[0])
    pool.quarantine(block, "a device error")
    assert cache.match(hashes, 2 * B).block_ids == ()
    assert cache.publish(block, hashes[0]) is False
    assert table.slot(1) == block * B + 1
    assert (pool.num_usable, pool.num_used, pool.num_free) == (4, 1, 3)
    table.release()
    assert pool.take(4) != []
    assert pool.num_free == 0
    pool.check()
    assert [tuple(incident) for incident in pool.incidents] == [(block, "a device error", 0.0)]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_free_block_can_be_quarantined(is_published: bool) -> None:
    pool = BlockPool(6, B, policy="cost" if is_published else "lru")
    (block,) = pool.take(1)
    if is_published:
        pool.publish(block, b"k" * 32)
    pool.release([block])
    pool.quarantine(block, "operator")
    pool.quarantine(block, "again")
    assert (pool.num_usable, pool.num_free, pool.num_incidents) == (4, 4, 1)
    assert block not in pool.take(4)
    for use in (pool.share, pool.handle, pool.touch):  # its pin is nobody's reference
        with pytest.raises(StaleBlock):
            use(block)
    pool.check()


def test_a_held_block_that_is_quarantined_is_not_called_dead_while_its_holder_uses_it() -> None:
    pool = BlockPool(6, B, poison=True)
    (block,) = pool.take(1)
    pool.publish(block, b"k" * 32)
    pool.quarantine(block, "a test")
    assert pool.take_dead() == []
