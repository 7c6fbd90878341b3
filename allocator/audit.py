"""Verify a pool's bookkeeping from first principles, and rebuild what is derived from it.

The truth is held twice: references per block in the pool, and per owner in the ledger. Everything else (the free
ring, the index, the counters, what namespaces are charged) follows from them. `find_faults` compares,
`rebuild` derives again. `BlockPool.check` raises the first finding, `BlockPool.audit` quarantines all of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from allocator.eviction import NORMAL

if TYPE_CHECKING:
    from allocator.pool import BlockPool


class Finding(NamedTuple):
    """One contradiction in the books; `block` is None where it concerns a total."""

    block: int | None
    problem: str

    def __str__(self) -> str:
        return self.problem


def find_faults(pool: "BlockPool", tables: Iterable[Sequence[int]] | None) -> Iterator[Finding]:
    """Find every contradiction in O(blocks + references). `tables`: the block ids of every holder there is."""
    free: set[int] = set()
    yield from _ring_faults(pool, free)
    yield from _shelf_faults(pool, free)
    yield from _count_faults(pool, free)
    yield from _index_faults(pool)
    yield from _ledger_faults(pool)
    if tables is not None:
        held = Counter(block for block_ids in tables for block in block_ids)
        for block, count in enumerate(pool._refs):
            if count != held[block] and block not in pool._quarantine:  # there the books are known to disagree
                yield Finding(block, f"block {block} has {count} references and the tables hold {held[block]}")
    yield from _quota_faults(pool)


def _ring_faults(pool: "BlockPool", free: set[int]) -> Iterator[Finding]:
    """Walk the free ring as far as it is one; collects its blocks in `free`."""
    previous, block = 0, pool._next[0]
    while block != 0:
        if block in free:
            yield Finding(block, f"block {block} is in the free ring twice")
            return
        if pool._prev[block] != previous:
            back = pool._prev[block]
            yield Finding(block, f"block {block} follows {previous} in the free ring but points back to {back}")
        free.add(block)
        previous, block = block, pool._next[block]
    if pool._prev[0] != previous:
        yield Finding(None, f"the free ring ends at {previous}, not at {pool._prev[0]}")


def _shelf_faults(pool: "BlockPool", free: set[int]) -> Iterator[Finding]:
    """Compare the shelves with the ring; adds their blocks to `free`."""
    if pool._shelves is None:
        return
    for block in free:
        if pool._keys[block] is not None:
            yield Finding(block, f"block {block} is published and free, and not on a shelf")
    for block in pool._shelves:
        if block in free:
            yield Finding(block, f"block {block} is on a shelf and in the free ring, or on two shelves")
        if pool._keys[block] is None:
            yield Finding(block, f"block {block} is on a shelf and not published")
        free.add(block)


def _count_faults(pool: "BlockPool", free: set[int]) -> Iterator[Finding]:
    if pool._refs[0] or pool._pins[0] or pool._keys[0] is not None:
        yield Finding(None, "the null block is held, pinned or published")
    pins = Counter(pool._copies.values()) + Counter(pool._copies.keys())
    pins.update(pool._guards)
    pins.update(pool._quarantine)
    for block in range(1, pool.num_blocks):
        refs, pinned = pool._refs[block], pool._pins[block]
        if refs < 0 or pinned < 0:
            yield Finding(block, f"block {block} has a negative count")
        if pinned != pins[block]:
            explanation = "" if pool.ledger is None else f": {pool.ledger.explain(block)}"
            problem = f"block {block} has {pinned} pins and {pins[block]} copies in flight touch it"
            yield Finding(block, problem + explanation)
        if (refs + pinned == 0) != (block in free):
            place = "" if block in free else "not "
            yield Finding(block, f"block {block} has {refs + pinned} holders and is {place}in the free ring")
    findable = sum(pool._keys[block] is not None for block in free)
    for name, counter, counted in (
        ("num_free", pool._num_free, len(free)),
        ("num_free_findable", pool._num_free_findable, findable),
        ("num_references", pool._num_references, sum(pool._refs)),
        ("num_shared", pool._num_shared, sum(count > 1 for count in pool._refs)),
    ):
        if counter != counted:
            yield Finding(None, f"{name} says {counter} and counting gives {counted}")


def _index_faults(pool: "BlockPool") -> Iterator[Finding]:
    for key, block in pool._index.items():
        if pool._keys[block] != key:
            yield Finding(block, f"the index finds block {block} under a hash that is not the block's")
    for block, key_of_block in enumerate(pool._keys):
        if key_of_block is not None and pool._index.get(key_of_block) != block:
            yield Finding(block, f"block {block} has a hash under which the index does not find it")
    for block in pool._levels:
        if pool._keys[block] is None:
            yield Finding(block, f"block {block} has a priority level and is not published")


def _ledger_faults(pool: "BlockPool") -> Iterator[Finding]:
    """Balance the double entry: references in the pool against references in all accounts."""
    if pool.ledger is None:
        return
    booked = pool.ledger.totals(pool.num_blocks)
    for block, count in enumerate(pool._refs):
        if count != booked[block]:
            yield Finding(
                block,
                f"block {block} has {count} references and the accounts list {booked[block]}: "
                f"{pool.ledger.explain(block)}",
            )


def _quota_faults(pool: "BlockPool") -> Iterator[Finding]:
    if pool.quotas is None:
        return
    resident, held = _charges(pool)
    for space in pool.quotas.spaces():
        counted = resident[space.namespace], held[space.namespace]
        if (space.resident, space.held) != counted:
            yield Finding(
                None,
                f"namespace {space.namespace.hex()[:12]} is charged for {space.resident} blocks, {space.held} held, "
                f"and counting gives {counted[0]}, {counted[1]}",
            )
    if pool.quotas.unmet != sum(space.unmet_floor for space in pool.quotas.spaces()):
        yield Finding(None, f"the unmet floors say {pool.quotas.unmet} and do not add up to it")


def _charges(pool: "BlockPool") -> tuple[Counter[bytes], Counter[bytes]]:
    resident: Counter[bytes] = Counter()
    held: Counter[bytes] = Counter()
    for block, space in enumerate(pool._spaces):
        if space is not None:
            resident[space.namespace] += 1
            held[space.namespace] += pool._refs[block] + pool._pins[block] > 0
    return resident, held


def rebuild(pool: "BlockPool") -> None:
    """Derive everything from the references, the accounts, the copies in flight and the keys, keeping the order of reuse.

    The blocks at fault are in quarantine already. Where pool and accounts disagree about one, the larger count is
    booked, the difference under its last known holder, so that every owner can give back what it believes to hold.
    """
    _clear_null_block(pool)
    order = _walk(pool)
    pool._refs[:] = [max(0, count) for count in pool._refs]
    if pool.ledger is not None:
        for block, booked in enumerate(pool.ledger.totals(pool.num_blocks)):
            if pool._refs[block] > booked:
                account = pool.ledger.last[block] or pool.ledger.anonymous
                account.gained([block] * (pool._refs[block] - booked), "audit")
            pool._refs[block] = max(booked, pool._refs[block])
    pins = Counter(pool._copies.values()) + Counter(pool._copies.keys())
    pins.update(pool._guards)
    pins.update(pool._quarantine)
    pool._pins[:] = [pins[block] for block in range(pool.num_blocks)]
    pool._index = {}
    for block, key in enumerate(pool._keys):
        if key is not None and pool._index.setdefault(key, block) != block:
            pool._keys[block] = None
    free = [block for block in range(1, pool.num_blocks) if pool._refs[block] + pool._pins[block] == 0]
    known = set(order)
    order = [block for block in free if block not in known] + [
        block for block in order if pool._refs[block] + pool._pins[block] == 0
    ]
    pool._num_references = sum(pool._refs)
    pool._num_shared = sum(count > 1 for count in pool._refs)
    pool._num_free = len(order)
    pool._num_free_findable = sum(pool._keys[block] is not None for block in order)
    _relink(pool, order)
    if pool.quotas is not None:
        for block in range(1, pool.num_blocks):
            if pool._keys[block] is None and pool._refs[block] + pool._pins[block] == 0:
                pool._spaces[block] = None
        pool.quotas.recount(*_charges(pool))


def _clear_null_block(pool: "BlockPool") -> None:
    pool._refs[0] = pool._pins[0] = 0
    pool._keys[0] = None


def _walk(pool: "BlockPool") -> list[int]:
    """List the free blocks in the order of reuse, as far as it can be followed."""
    order: dict[int, None] = {}
    block = pool._next[0]
    while block != 0 and block not in order:
        order[block] = None
        block = pool._next[block]
    if pool._shelves is not None:
        order.update(dict.fromkeys(pool._shelves.clear()))
    return list(order)


def _relink(pool: "BlockPool", order: list[int]) -> None:
    previous = 0
    for block in order:
        if pool._shelves is not None and pool._keys[block] is not None:
            space = pool._spaces[block] if pool._spaces else None
            pool._shelves.add(block, space, pool._levels.get(block, NORMAL))
            continue
        pool._next[previous], pool._prev[block] = block, previous
        previous = block
    pool._next[previous], pool._prev[0] = 0, previous
