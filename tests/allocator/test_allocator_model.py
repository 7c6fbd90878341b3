"""The whole allocator against a plain model, with a simulated device.

The model is what a user would write down: for every live table the tokens it holds and its block ids, for every
content the block it was published for, whom each block is charged to, its priority level. The device is a dict from
slot to content, where the content of a slot is *all* tokens up to it, as real KV depends on all of them. So a lost
copy, a write into a shared block or a wrong hit shows as a wrong content when a table is read back, whatever the
counters say; a foreign tenant's hit shows because every hit is predicted.

A step is built by admissions and appends and run by `run_step`: its copies first, then its writes.
`make test-allocator-long` runs `LONG_RUNS` examples of many more steps each.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from allocator import (
    HIGH,
    LOW,
    NORMAL,
    PUBLIC,
    AllocatorError,
    BlockHandle,
    BlockPool,
    BlockTable,
    Cleared,
    EventLog,
    Growth,
    HostTier,
    Load,
    Match,
    OutOfBlocks,
    OutOfRange,
    Owner,
    PoolStats,
    PrefixCache,
    PublishConflict,
    Quarantined,
    Quota,
    QuotaExceeded,
    Quotas,
    RefCountError,
    Removed,
    StaleBlock,
    Store,
    Stored,
    TableNotEmpty,
    TierLink,
)

Content = tuple[bytes, tuple[int, ...]]  # who may find it, all tokens up to and including this one

# Prompts begin alike and pools are tiny, so that hits, copies and full pools are common.
TOKENS = st.builds(
    lambda num_common, tail: [0] * num_common + tail,
    st.integers(0, 8),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
TENANTS = (b"", b"tenant")
NAMESPACES = st.sampled_from(TENANTS)
BLOCK_BYTES = 200


@dataclass(eq=False)
class Model:
    """One sequence as its user sees it."""

    table: BlockTable
    namespace: bytes
    tokens: list[int]
    blocks: list[int]  # what the table must hold, derived from the growths alone
    num_written: int = 0  # tokens whose KV a step has computed
    hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """What is switched on in a pool."""

    policy: str = "lru"
    has_ledger: bool = True
    quotas: tuple[tuple[bytes, Quota], ...] | None = None
    sub_blocks: bool = False
    num_public: int = 0  # blocks of the declared public segment, all of token 0
    poison: bool = False


QUOTA = st.builds(
    lambda floor, more, weight: Quota(cap=None if more is None else floor + more, floor=floor, weight=weight),
    st.integers(0, 1),
    st.none() | st.integers(2, 6),
    st.sampled_from([0.5, 1.0, 3.0]),
)
KINDS = st.builds(
    Kind,
    policy=st.sampled_from(["lru", "cost"]),
    has_ledger=st.booleans(),
    quotas=st.none() | st.tuples(st.tuples(st.just(b""), QUOTA), st.tuples(st.just(b"tenant"), QUOTA)),
    sub_blocks=st.booleans(),
    num_public=st.integers(0, 2),
    poison=st.booleans(),
)


class AllocatorModel(RuleBasedStateMachine):
    models = Bundle("models")

    @initialize(target=models, num_blocks=st.integers(4, 13), block_size=st.integers(1, 4), kind=KINDS)
    def make_pool(self, num_blocks: int, block_size: int, kind: Kind = Kind()) -> Model | MultipleResults[Model]:
        self.kind = kind
        self.quotas = dict(kind.quotas or ())
        self.pool = BlockPool(
            num_blocks,
            block_size,
            ledger=kind.has_ledger,
            policy=kind.policy,
            quotas=None if kind.quotas is None else Quotas(self.quotas),
            poison=kind.poison,
        )
        self.log = EventLog(self.pool, capacity=100_000)
        self.cache = PrefixCache(self.pool, sub_blocks=kind.sub_blocks)
        self.tier = HostTier(4 * BLOCK_BYTES)
        self.link = TierLink(self.pool, self.cache, self.tier, BLOCK_BYTES, self.log)
        self.segment = (0,) * (kind.num_public * block_size)
        self.cache.declare_public(self.segment)
        self.block_size = block_size
        self.now = 0.0
        self.live: list[Model] = []
        self.published: dict[Content, int] = {}  # all tokens to the end of a block → block
        self.siblings: dict[Content, bytes] = {}  # those the sub-block index knows → who published them
        self.charged: dict[int, bytes] = {}  # block → namespace that pays for it
        self.levels: dict[int, tuple[int, float]] = {}
        self.quarantine: set[int] = set()
        self.device: dict[int, tuple[int, ...]] = {}
        self.dead: set[int] = set()  # blocks poisoned and not written since
        self.copies: list[tuple[int, int]] = []  # of the step being built
        self.writes: list[Model] = []
        self.loads: list[tuple[Load, list[Content]]] = []
        self.stores: list[tuple[Store, list[Content]]] = []
        self.below: dict[bytes, Content] = {}  # key → content, of everything the tier was ever given
        self.handles: list[tuple[BlockHandle, int]] = []
        self.epochs: Counter[int] = Counter()  # block → times it has become free
        self.were_held: set[int] = set()
        self.found_by_events: set[bytes] = set()
        self.next_event = 0
        self.seen: Counter[str] = Counter()  # what really happened, for the random walk to assert
        return self.admit(tokens=[0], namespace=b"")

    # ── Building steps ───────────────────────────────────────────────────────────────────────────

    @rule(target=models, tokens=TOKENS, namespace=NAMESPACES)
    def admit(self, tokens: list[int], namespace: bytes) -> Model | MultipleResults[Model]:
        model = Model(BlockTable(self.pool, Owner("sequence", str(len(tokens)), namespace)), namespace, [], [])
        hashes = self.cache.block_hashes(tokens, namespace)
        match = self.cache.match(hashes, len(tokens) - 1, tokens, namespace)
        hits = self.predicted_hits(tokens, namespace)
        run = self.predicted_run(tokens, namespace, len(hits))
        assert list(match.block_ids) == hits
        assert match.num_tokens == len(hits) * self.block_size + run
        assert (match.partial is None) == (run == 0)
        sources = hits if match.partial is None else [*hits, match.partial.block_id]
        held = self.holders()
        num_new = self.blocks_for(len(tokens)) - len(hits)
        needed = num_new + len({block for block in sources if block not in held})
        assert model.table.blocks_needed(len(tokens) - match.num_tokens, match) == needed
        growth = self.grow(needed, namespace, lambda: model.table.adopt(match, len(tokens) - match.num_tokens), sources)
        if growth is None:
            return multiple()
        self.seen["held hit"] += any(block in held for block in hits)
        self.seen["free hit"] += any(block not in held for block in hits)
        self.seen["partial hit"] += run > 0
        self.seen["public hit"] += any(self.charged.get(block) == PUBLIC for block in hits)
        assert len(growth.copies) == (run > 0)
        model.blocks = [*hits, *(dst for _, dst in growth.copies), *growth.new_blocks]
        assert len(model.blocks) == len(hits) + num_new
        self.copies += growth.copies
        model.tokens, model.num_written, model.hashes = list(tokens), match.num_tokens, hashes
        self.live.append(model)
        self.writes.append(model)
        return model

    @rule(model=models, tokens=st.lists(st.integers(0, 1), max_size=6))
    def append(self, model: Model, tokens: list[int]) -> None:
        last = model.blocks[-1] if model.blocks else 0
        is_partial = len(model.tokens) % self.block_size > 0
        copy_needed = bool(tokens) and is_partial and (self.entries()[last] > 1 or last in self.published.values())
        num_new = self.blocks_for(len(model.tokens) + len(tokens)) - len(model.blocks)
        assert model.table.blocks_needed(len(tokens)) == num_new + copy_needed
        growth = self.grow(num_new + copy_needed, model.namespace, lambda: model.table.append(len(tokens)), [])
        if growth is None:
            return
        assert (len(growth.new_blocks), len(growth.copies)) == (num_new, copy_needed)
        for src, dst in growth.copies:
            self.seen["copy of a shared tail"] += src not in self.published.values()
            self.seen["copy of a published tail"] += src in self.published.values()
            assert src == model.blocks[-1]
            model.blocks[-1] = dst
        self.copies += growth.copies
        model.blocks += growth.new_blocks
        model.tokens += tokens
        if tokens:
            if model not in self.live:
                self.live.append(model)
            self.writes.append(model)

    @rule(publishes=st.booleans())
    def run_step(self, publishes: bool) -> None:
        self.poison()
        for src, dst in self.copies:
            for offset in range(self.block_size):
                source = self.device.get(src * self.block_size + offset)
                if source is not None:
                    self.device[dst * self.block_size + offset] = source
        for model in self.writes:
            for position in range(model.num_written, len(model.tokens)):
                self.device[model.table.slot(position)] = tuple(model.tokens[: position + 1])
            model.num_written = len(model.tokens)
        self.pool.finish_copies(self.copies)
        written, self.copies, self.writes = self.writes, [], []
        if publishes:
            for model in written:
                self.publish_full_blocks(model)

    # ── Between steps ────────────────────────────────────────────────────────────────────────────

    @rule(target=models, model=models)
    def fork(self, model: Model) -> Model:
        if model.num_written < len(model.tokens):
            self.run_step(publishes=False)
        child = Model(model.table.fork(), model.namespace, list(model.tokens), list(model.blocks), model.num_written)
        if child.tokens:
            self.live.append(child)
        return child

    @rule(model=models, keep=st.integers(0, 30))
    def truncate(self, model: Model, keep: int) -> None:
        if model.num_written < len(model.tokens):
            self.run_step(publishes=False)
        num_tokens = keep % (len(model.tokens) + 1)
        model.table.truncate(num_tokens)
        del model.tokens[num_tokens:]
        del model.blocks[self.blocks_for(num_tokens) :]
        del model.hashes[num_tokens // self.block_size :]
        model.num_written = num_tokens
        if not model.tokens and model in self.live:
            self.live.remove(model)

    @rule(model=models)
    def publish(self, model: Model) -> None:
        self.publish_full_blocks(model)

    @rule(model=models)
    def publish_tail(self, model: Model) -> None:
        depth = model.num_written // self.block_size
        tokens = model.tokens[depth * self.block_size : model.num_written]
        in_flight = {dst for _, dst in self.copies}  # their bytes are not there yet
        if not tokens or model.blocks[depth] in in_flight or model.blocks[depth] in self.published.values():
            return
        if depth >= len(model.hashes) + 1:
            model.hashes = self.cache.block_hashes(model.tokens, model.namespace, model.hashes)
        content = model.namespace, tuple(model.tokens[: model.num_written])
        block = model.blocks[depth]
        parent = model.hashes[depth - 1] if depth else None
        is_new = self.kind.sub_blocks and content not in self.published and block not in self.quarantine
        assert self.cache.publish_tail(block, parent, depth, tokens, model.namespace) == is_new
        if is_new:
            self.published[content] = block
            self.siblings[content] = model.namespace
            self.seen["tail"] += 1

    @rule(model=consumes(models))
    def release(self, model: Model) -> None:
        # Also in the middle of building a step: its copies still run, its writes do not.
        in_flight = {block for copy in self.copies for block in copy}
        self.seen["release during a copy"] += not in_flight.isdisjoint(model.blocks)
        model.table.release()
        self.writes = [other for other in self.writes if other is not model]
        if model in self.live:
            self.live.remove(model)
        model.table.release()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.published.clear()
        self.siblings.clear()
        self.levels.clear()

    @rule(model=models, level=st.sampled_from([LOW, NORMAL, HIGH]), duration_s=st.integers(1, 5))
    def retain(self, model: Model, level: int, duration_s: int) -> None:
        blocks = {block for block in model.blocks if block in self.published.values()}
        self.pool.retain(blocks, level, self.now + duration_s)
        for block in blocks:
            self.levels.pop(block, None)
            if level != NORMAL:
                self.levels[block] = level, self.now + duration_s

    @rule(seconds=st.integers(0, 3))
    def advance(self, seconds: int) -> None:
        self.now += seconds
        self.pool.advance(self.now)
        ended = [block for block, (_, until) in self.levels.items() if until <= self.now]
        self.seen["a level ended"] += len(ended)
        for block in ended:
            del self.levels[block]

    @rule(model=models)
    def keep_a_handle(self, model: Model) -> None:
        for block in model.blocks[:1]:
            self.handles = [*self.handles[-20:], (self.pool.handle(block), self.epochs[block])]

    @rule(number=st.integers(0, 100))
    def quarantine_a_block(self, number: int) -> None:
        block = 1 + number % (self.pool.num_blocks - 1)
        floors = sum(quota.floor for quota in self.quotas.values())
        if number < 90 or self.pool.num_usable - 2 < max(floors, 2):
            return
        self.pool.quarantine(block, "a test")
        self.quarantine.add(block)
        self.seen["quarantine"] += 1
        self.levels.pop(block, None)
        for content in [content for content, published in self.published.items() if published == block]:
            del self.published[content]
            self.siblings.pop(content, None)

    # ── Tiers ────────────────────────────────────────────────────────────────────────────────────

    @rule(model=models)
    def begin_store(self, model: Model) -> None:
        if model.num_written < len(model.tokens):
            return
        keys = self.cache.block_hashes(model.tokens, model.namespace)
        contents = dict(zip(keys, self.contents(model.tokens, model.namespace), strict=True))
        store = self.link.begin_store(keys)
        if store is None:
            return
        assert all(key not in self.tier for key in store.keys)
        assert list(store.block_ids) == [self.published[contents[key]] for key in store.keys]
        self.stores.append((store, [contents[key] for key in store.keys]))

    @rule(number=st.integers(0, 9), is_kept=st.lists(st.booleans(), min_size=6, max_size=6))
    def finish_store(self, number: int, is_kept: list[bool]) -> None:
        if not self.stores:
            return
        store, contents = self.stores.pop(number % len(self.stores))
        payloads: list[bytes | None] = []
        for key, block, content, kept in zip(store.keys, store.block_ids, contents, is_kept, strict=False):
            slots = range(block * self.block_size, (block + 1) * self.block_size)
            assert [self.device[slot] for slot in slots] == [
                content[1][: len(content[1]) - self.block_size + offset + 1] for offset in range(self.block_size)
            ]
            payloads.append(repr(content[1]).encode().ljust(BLOCK_BYTES) if kept else None)
            self.below[key] = content
        payloads += [None] * (len(store.keys) - len(payloads))
        num_kept = self.link.finish_store(store, payloads)
        assert num_kept <= sum(payload is not None for payload in payloads)
        assert self.tier.used_bytes == len(self.tier) * BLOCK_BYTES <= self.tier.max_bytes
        self.seen["stored below"] += num_kept

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def begin_load(self, tokens: list[int], namespace: bytes) -> None:
        hashes = self.cache.block_hashes(tokens, namespace)
        match = self.cache.match(hashes, len(tokens), (), namespace)
        num_blocks = self.link.lookup(hashes, match, len(tokens))
        if not num_blocks:
            return
        held = self.holders()
        needed = num_blocks + len({block for block in match.block_ids if block not in held})
        owner = Owner("tier", "load", namespace)
        loads: list[Load] = []

        def begin() -> Growth:
            loads.append(self.link.begin_load(hashes, match, num_blocks, owner))
            return Growth(loads[0].block_ids, ())

        if self.grow(needed, namespace, begin, list(match.block_ids)) is None:
            return
        first = len(match.block_ids)
        self.loads.append((loads[0], self.contents(tokens, namespace)[first : first + num_blocks]))

    @rule(number=st.integers(0, 9), num_loaded=st.integers(0, 6))
    def finish_load(self, number: int, num_loaded: int) -> None:
        if not self.loads:
            return
        load, contents = self.loads.pop(number % len(self.loads))
        self.poison()
        num_loaded = min(num_loaded, len(load.keys))
        for index in range(num_loaded):
            payload = self.tier.read(load.keys[index])
            if payload is None:
                num_loaded = index
                break
            tokens = contents[index][1]
            assert payload == repr(tokens).encode().ljust(BLOCK_BYTES)
            for offset in range(self.block_size):
                slot = load.block_ids[index] * self.block_size + offset
                self.device[slot] = tokens[: len(tokens) - self.block_size + offset + 1]
        num_found = 0
        for block, content in zip(load.block_ids, contents[:num_loaded], strict=False):
            if content not in self.published and block not in self.quarantine:
                self.published[content] = block
                num_found += 1
                if content[0] == PUBLIC:
                    self.loads.append((load, contents))  # it holds its blocks until it is finished
                    self.charge_public(block)
                    self.loads.pop()
        assert self.link.finish_load(load, num_loaded) == num_found
        assert self.link.finish_load(load, num_loaded) == 0
        self.seen["loaded"] += num_found
        self.seen["load failed"] += num_loaded < len(load.keys)

    # ── Calls that must fail ─────────────────────────────────────────────────────────────────────

    @rule(model=models)
    def refuse_wrong_calls(self, model: Model) -> None:
        pool, table = self.pool, model.table
        account = table.account
        calls: list[tuple[type[AllocatorError], Callable[[], object]]] = [
            (OutOfBlocks, lambda: pool.take(pool.num_free + 1, account)),
            (OutOfBlocks, lambda: pool.take(pool.num_available(account) + 1, account)),
            (OutOfRange, lambda: pool.take(-1)),
            (OutOfRange, lambda: table.append(-1)),
            (OutOfRange, lambda: table.truncate(table.num_tokens + 1)),
            (OutOfRange, lambda: table.slot(table.num_tokens)),
            (AllocatorError, lambda: pool.release([*model.blocks, 0], account)),
            (StaleBlock, lambda: pool.finish_copies([*self.copies, (1, 1)])),
            (OutOfBlocks, lambda: table.append((pool.num_free + 1) * self.block_size)),
            (OutOfRange, lambda: pool.retain([], 7, 0.0)),
        ]
        free = pool.free_blocks()
        if free:
            calls += [
                (RefCountError, lambda: pool.release([*model.blocks, free[-1]], account)),
                (StaleBlock, lambda: pool.share(free[0])),
                (StaleBlock, lambda: pool.publish(free[0], b"k" * 32)),
                (StaleBlock, lambda: pool.handle(free[0])),
                (AllocatorError, lambda: pool.begin_copy(free[0], free[-1], account)),
            ]
        if model.blocks:
            too_often = model.blocks * (pool.ref_count(model.blocks[0]) + 1)
            calls += [
                (TableNotEmpty, lambda: table.adopt(Match((), 0, 0), 0)),
                (RefCountError, lambda: pool.release(too_often, account)),
                (OutOfRange, lambda: self.cache.publish_tail(model.blocks[0], None, 0, [])),
            ]
            if pool.key_of(model.blocks[0]) is not None:
                calls.append((PublishConflict, lambda: pool.publish(model.blocks[0], b"k" * 32)))
            elif pool.key_of(model.blocks[0]) is None:
                calls.append((StaleBlock, lambda: pool.retain(model.blocks[:1], HIGH, 9.0)))
            strangers = [other for other in self.live if not {*other.blocks} & {*model.blocks}]
            if strangers and pool.ledger is not None:  # only the ledger can tell whose reference it is
                calls.append((RefCountError, lambda: pool.release(model.blocks, strangers[0].table.account)))
        for error, call in calls:
            before = self.state()
            with pytest.raises(error):
                call()
            assert self.state() == before
            assert (table.num_tokens, list(table.block_ids)) == (len(model.tokens), model.blocks)

    # ── What holds at all times ──────────────────────────────────────────────────────────────────

    @invariant()
    def counts_balance(self) -> None:
        held, entries = self.holders(), self.entries()
        for block in self.were_held - held:
            self.epochs[block] += 1
        self.were_held = held
        self.pool.check(list(self.lists()))
        stats = PoolStats.of(self.pool, [model.table for model in self.live])
        cached = sum(block not in held for block in self.published.values())
        out = self.quarantine
        assert (stats.total, stats.used) == (self.pool.num_blocks - 1 - len(out), len(held - out))
        assert (stats.cached, stats.quarantined) == (cached, len(out))
        assert stats.used + stats.cached + stats.free == stats.total
        assert (stats.shared, stats.references) == (sum(n > 1 for n in entries.values()), entries.total())
        slots = sum(len(model.blocks) * self.block_size - len(model.tokens) for model in self.live)
        assert stats.tail_waste_slots == slots
        assert self.cache.num_cached == len(self.published)
        in_flight = Counter(block for copy in self.copies for block in copy)
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block) == entries[block] + in_flight[block] + (block in out)
            assert self.pool.level_of(block) == self.levels.get(block, (NORMAL, 0.0))[0]
        assert self.pool.num_incidents == len(out)

    @invariant()
    def charges_and_rights_are_kept(self) -> None:
        if self.pool.quotas is None:
            return
        held = self.holders() - self.quarantine
        alive = (held | {*self.published.values()}) - self.quarantine
        self.charged = {block: namespace for block, namespace in self.charged.items() if block in alive}
        for block in range(1, self.pool.num_blocks):
            assert self.pool.namespace_of(block) == self.charged.get(block)
        resident = Counter(self.charged.values())
        holding = Counter(self.charged[block] for block in held)
        for namespace, quota in self.quotas.items():
            space = self.pool.quotas.space(namespace)
            assert (space.resident, space.held) == (resident[namespace], holding[namespace])
            assert quota.cap is None or resident[namespace] <= quota.cap
            if not self.quarantine:  # it may have taken what was promised
                assert self.pool.num_free >= sum(max(0, q.floor - holding[n]) for n, q in self.quotas.items())

    @invariant()
    def every_table_reads_back_its_own_tokens(self) -> None:
        pending = {dst for _, dst in self.copies}
        for model in self.live:
            assert model.table.snapshot() == tuple(model.blocks)
            assert model.table.num_tokens == len(model.tokens)
            for position in range(model.num_written):
                if model.blocks[position // self.block_size] not in pending:
                    assert self.device[model.table.slot(position)] == tuple(model.tokens[: position + 1])

    @invariant()
    def every_published_block_still_has_its_content(self) -> None:
        for (_, tokens), block in self.published.items():
            num_before = (len(tokens) - 1) // self.block_size * self.block_size
            for offset in range(len(tokens) - num_before):
                assert self.device[block * self.block_size + offset] == tokens[: num_before + offset + 1]

    @invariant()
    def handles_are_stale_exactly_when_their_block_was_given_back(self) -> None:
        for handle, epoch in self.handles:
            if handle.block in self.were_held and self.epochs[handle.block] == epoch:
                assert self.pool.resolve(handle) == handle.block
            else:
                with pytest.raises(StaleBlock):
                    self.pool.resolve(handle)

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        for event in self.log.since(self.next_event):
            assert event.seq == self.next_event
            self.next_event += 1
            if isinstance(event, Quarantined):
                assert event.block in self.quarantine
            elif event.tier == "device":
                if isinstance(event, Stored):
                    self.found_by_events.add(event.key)
                elif isinstance(event, Removed):
                    self.found_by_events.remove(event.key)
                elif isinstance(event, Cleared):
                    self.found_by_events.clear()
        assert self.found_by_events == {key for key, _ in self.pool.published()}

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for model in self.live:
                model.table.release()
            for load, _ in self.loads:
                self.link.finish_load(load, 0)
            for store, _ in self.stores:
                self.link.finish_store(store, [None] * len(store.keys))
            self.pool.finish_copies(self.copies)
            self.pool.check([])
            assert self.link.num_open == 0
            assert self.pool.num_free == self.pool.num_usable == self.pool.num_blocks - 1 - len(self.quarantine)
            assert self.pool.audit() == []

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def contents(self, tokens: list[int], namespace: bytes) -> list[Content]:
        """What the full blocks of a prompt are found under."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [
            (PUBLIC if tuple(tokens[:end]) == self.segment[:end] else namespace, tuple(tokens[:end])) for end in ends
        ]

    def predicted_hits(self, tokens: list[int], namespace: bytes) -> list[int]:
        hits: list[int] = []
        for content in self.contents(tokens[:-1], namespace):
            block = self.published.get(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def predicted_run(self, tokens: list[int], namespace: bytes, num_hits: int) -> int:
        """The longest beginning of a block after the hits that somebody of this namespace has published."""
        start = num_hits * self.block_size
        ahead = tokens[start : min(start + self.block_size, len(tokens) - 1)]
        best = 0
        for (_, other), publisher in self.siblings.items():
            num_before = (len(other) - 1) // self.block_size * self.block_size
            if publisher == namespace and other[:num_before] == tuple(tokens[:start]) and num_before == start:
                run = 0
                for mine, theirs in zip(ahead, other[start:], strict=False):
                    if mine != theirs:
                        break
                    run += 1
                best = max(best, run)
        return best

    def publish_full_blocks(self, model: Model) -> None:
        model.hashes = self.cache.block_hashes(model.tokens, model.namespace, model.hashes)
        contents = self.contents(model.tokens, model.namespace)
        for index in range(model.num_written // self.block_size):
            content, block = contents[index], model.blocks[index]
            is_published = block in self.published.values()
            if is_published and self.published.get(content) != block:
                continue  # a published tail that was filled up by nobody: the table copies it before it writes
            if block not in self.quarantine:
                found = self.published.setdefault(content, block)
            else:
                found = None
            self.seen["duplicate"] += found not in (block, None)
            own = model.tokens[index * self.block_size : (index + 1) * self.block_size]
            parent = model.hashes[index - 1] if index else None
            is_found = self.cache.publish(block, model.hashes[index], parent, index, own, model.namespace)
            assert is_found == (found == block)
            if is_found:
                if self.kind.sub_blocks:
                    self.siblings.setdefault(content, model.namespace)
                if content[0] == PUBLIC:
                    self.charge_public(block)

    def charge_public(self, block: int) -> None:
        """A published public block weighs on no tenant, unless that would break the promise of a floor."""
        held = self.holders() - self.quarantine
        charged = {**self.charged, block: PUBLIC}
        holding = Counter(charged[b] for b in held if b in charged)
        unmet = sum(max(0, quota.floor - holding[n]) for n, quota in self.quotas.items())
        if self.pool.num_blocks - 1 - len(held | self.quarantine) >= unmet:
            self.charged = charged

    def poison(self) -> None:
        """Overwrite what the pool calls dead, as the owner of the tensors would before a step."""
        for block in self.pool.take_dead():
            for offset in range(self.block_size):
                self.device[block * self.block_size + offset] = (-1,)

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def lists(self) -> Iterator[list[int]]:
        for model in self.live:
            yield model.blocks
        for load, _ in self.loads:
            yield [*load.held, *load.block_ids]
        for store, _ in self.stores:
            yield list(store.block_ids)

    def entries(self) -> Counter[int]:
        return Counter(block for blocks in self.lists() for block in blocks)

    def holders(self) -> set[int]:
        return {*self.entries()} | {block for copy in self.copies for block in copy}

    def available(self, namespace: bytes) -> int:
        held = self.holders() - self.quarantine
        free = self.pool.num_blocks - 1 - len(held | self.quarantine)
        if self.pool.quotas is None:
            return free
        holding = Counter(self.charged[block] for block in held)
        unmet = sum(max(0, quota.floor - holding[n]) for n, quota in self.quotas.items() if n != namespace)
        available = max(0, free - unmet)
        quota = self.quotas[namespace]
        return available if quota.cap is None else min(available, max(0, quota.cap - holding[namespace]))

    def grow(self, needed: int, namespace: bytes, call: Callable[[], Growth], sources: list[int]) -> Growth | None:
        """Run a call that takes blocks; None if the model says it cannot fit, and then it must have failed."""
        free = self.pool.num_blocks - 1 - len(self.holders() | self.quarantine)
        available = self.available(namespace)
        before, reused = self.state(), self.pool.free_blocks()
        if needed > available:
            with pytest.raises(QuotaExceeded if needed <= free else OutOfBlocks) as error:
                call()
            assert (error.value.needed, error.value.free) == (needed, available if needed <= free else free)
            assert self.state() == before
            self.seen["out of blocks"] += needed > free
            self.seen["quota exceeded"] += needed <= free
            return None
        held = self.holders()
        resident = Counter(self.charged.values())
        evictable = {block for block in self.published.values() if block not in held and block not in sources}
        growth = call()
        taken = {*growth.new_blocks, *(dst for _, dst in growth.copies)}
        assert taken <= {*reused}
        evicted = evictable & taken
        self.require_right_victims(namespace, evicted, evictable - taken, resident)
        for content in [content for content, block in self.published.items() if block in taken]:
            del self.published[content]
            self.siblings.pop(content, None)
            self.seen["eviction"] += 1
        for block in taken:
            self.levels.pop(block, None)
            self.charged[block] = namespace
        return growth

    def require_right_victims(self, taker: bytes, evicted: set[int], kept: set[int], resident: Counter[bytes]) -> None:
        """Lower levels go first within a namespace, and nobody else's cache goes below its floor."""
        payers = {self.charged[block] for block in evicted | kept} if self.pool.quotas is not None else {b""}
        for payer in payers:

            def levels(blocks: set[int], payer: bytes = payer) -> list[int]:
                mine = [b for b in blocks if self.pool.quotas is None or self.charged[b] == payer]
                return [self.levels.get(block, (NORMAL, 0.0))[0] for block in mine]

            self.seen["eviction by level"] += len({*levels(evicted), *levels(kept)}) > 1 and bool(levels(evicted))
            assert max(levels(evicted), default=LOW) <= min(levels(kept), default=HIGH)
            if payer != taker and payer in self.quotas:
                left = resident[payer] - len(levels(evicted))
                assert left >= min(resident[payer], self.quotas[payer].floor)

    def state(self) -> object:
        pool = self.pool
        blocks = range(1, pool.num_blocks)
        spaces = [] if pool.quotas is None else [(s.namespace, s.resident, s.held) for s in pool.quotas.spaces()]
        return (
            pool.free_blocks(),
            [(pool.ref_count(block), pool.key_of(block), pool.level_of(block)) for block in blocks],
            PoolStats.of(pool, [model.table for model in self.live]),
            [model.table.snapshot() for model in self.live],
            pool.num_copies_in_flight,
            sorted(space for space in spaces if space[1:] != (0, 0)),
            self.log.next_seq,
            self.link.num_open,
        )


LONG_RUNS = int(os.environ.get("LOOSELEAF_ALLOCATOR_RUNS", "0"))
AllocatorModel.TestCase.settings = settings(
    max_examples=LONG_RUNS or 300,
    stateful_step_count=200 if LONG_RUNS else 40,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink] if LONG_RUNS else list(Phase),
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestAllocatorModel = AllocatorModel.TestCase

WALKS = {
    "plain": Kind(has_ledger=False),
    "ledger": Kind(),
    "cost": Kind(policy="cost", sub_blocks=True, poison=True),
    "public": Kind(num_public=2, sub_blocks=True),
    "quotas": Kind(quotas=((b"", Quota(floor=2, cap=9)), (b"tenant", Quota(floor=3, weight=2.0))), num_public=1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WALKS)
def test_a_random_walk_meets_every_situation_and_keeps_every_promise(name: str, seed: int) -> None:
    """Hypothesis finds small surprises; a long walk in a busy pool meets the crowded ones."""
    random, kind = Random(seed), WALKS[name]
    machine = AllocatorModel()
    machine.make_pool(num_blocks=14, block_size=2 + seed % 3, kind=kind)
    prompts = [[0] * 8 + [0, 1], [0, 1] * 6, [1] * 11]

    def act() -> None:
        choice = random.choice(
            ["admit"] * 6
            + ["step"] * 4
            + ["append"] * 5
            + ["truncate"] * 2
            + ["fork", "release", "refuse", "tail", "retain", "advance", "handle", "quarantine"]
            + ["store", "finish store", "load", "load", "load", "finish load"]
        )
        tenant = random.choice(TENANTS) if name in ("quotas", "public") else b""
        if choice in ("admit", "load"):
            prompt = random.choice(prompts)
            tokens = prompt[: random.randint(1, len(prompt))]
            if choice == "load" and machine.below:
                owner, stored = random.choice(list(machine.below.values()))
                machine.begin_load(tokens=list(stored), namespace=tenant if owner == PUBLIC else owner)
            else:
                machine.admit(tokens=tokens, namespace=tenant)
        elif choice == "step":
            machine.run_step(publishes=random.random() < 0.8)
        elif choice == "advance":
            machine.advance(seconds=random.randint(0, 3))
        elif choice == "quarantine" and len(machine.quarantine) < 3 and random.random() < 0.15:
            machine.quarantine_a_block(number=random.randint(90, 110))
        elif choice == "finish store":
            machine.finish_store(number=random.randint(0, 9), is_kept=[random.random() < 0.8 for _ in range(6)])
        elif choice == "finish load":
            machine.finish_load(number=random.randint(0, 9), num_loaded=random.randint(0, 6))
        elif machine.live:
            model = random.choice(machine.live)
            if choice == "append":
                machine.append(model=model, tokens=[random.randint(0, 1) for _ in range(random.randint(1, 3))])
            elif choice == "fork":
                machine.fork(model=model)
            elif choice == "truncate":
                machine.truncate(model=model, keep=max(0, len(model.tokens) - random.randint(1, 3)))
            elif choice == "release":
                machine.release(model=model)
            elif choice == "tail":
                machine.publish_tail(model=model)
            elif choice == "retain":
                level = random.choice([LOW, NORMAL, HIGH])
                machine.retain(model=model, level=level, duration_s=random.randint(1, 5))
            elif choice == "handle":
                machine.keep_a_handle(model=model)
            elif choice == "store":
                machine.begin_store(model=model)
            else:
                machine.refuse_wrong_calls(model=model)

    for _ in range(1500):
        act()
        if machine.pool.num_free < 3 and random.random() < 0.6 and machine.live:
            machine.release(model=random.choice(machine.live))
        machine.counts_balance()
        machine.charges_and_rights_are_kept()
        machine.every_table_reads_back_its_own_tokens()
        machine.every_published_block_still_has_its_content()
        machine.handles_are_stale_exactly_when_their_block_was_given_back()
        machine.events_tell_what_can_be_found()
    machine.teardown()
    expected = {
        "held hit",
        "free hit",
        "copy of a shared tail",
        "copy of a published tail",
        "release during a copy",
        "out of blocks",
        "eviction",
        "eviction by level",
        "duplicate",
        "a level ended",
        "stored below",
        "loaded",
        "load failed",
        "quarantine",
    }
    expected |= {"partial hit", "tail"} if kind.sub_blocks else set()
    expected |= {"public hit"} if kind.num_public else set()
    expected |= {"quota exceeded"} if kind.quotas else set()
    assert {event for event, count in machine.seen.items() if count} == expected
