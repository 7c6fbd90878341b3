"""The allocator against a plain model, with a simulated device.

The model is what a user would write down: for every live table the tokens it holds and its block ids,
for every hash the block it was published for. The device is a dict from slot to content, where the
content of a slot is the namespace and *all* tokens up to it, as real KV depends on all of them. So a
lost copy, a write into a shared block or a foreign hit shows as a wrong content when a table is read
back, whatever the counters say.

A step is built by admissions and appends and run by `run_step`: its copies first, then its writes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
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
    AllocatorError,
    BlockPool,
    BlockTable,
    Growth,
    OutOfBlocks,
    OutOfRange,
    PoolStats,
    PrefixCache,
    PublishConflict,
    RefCountError,
    StaleBlock,
    TableNotEmpty,
)

Content = tuple[bytes, tuple[int, ...]]  # namespace, all tokens up to and including this one

# Prompts begin alike and pools are tiny, so that hits, copies and full pools are common.
TOKENS = st.builds(
    lambda num_common, tail: [0] * num_common + tail,
    st.integers(0, 8),
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
)
NAMESPACES = st.sampled_from([b"", b"tenant"])


@dataclass(eq=False)
class Model:
    """One sequence as its user sees it."""

    table: BlockTable
    namespace: bytes
    tokens: list[int]
    blocks: list[int]  # what the table must hold, derived from the growths alone
    num_written: int = 0  # tokens whose KV a step has computed
    hashes: list[bytes] = field(default_factory=list)

    def content(self, position: int) -> Content:
        return self.namespace, tuple(self.tokens[: position + 1])


class AllocatorModel(RuleBasedStateMachine):
    models = Bundle("models")

    @initialize(target=models, num_blocks=st.integers(3, 12), block_size=st.integers(1, 4))
    def make_pool(self, num_blocks: int, block_size: int) -> Model | MultipleResults[Model]:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool)
        self.block_size = block_size
        self.live: list[Model] = []
        self.published: dict[Content, int] = {}  # content of a block's last slot → block
        self.device: dict[int, Content] = {}
        self.copies: list[tuple[int, int]] = []  # of the step being built
        self.writes: list[Model] = []
        self.seen: Counter[str] = Counter()  # what really happened, for the random walk to assert
        return self.admit(tokens=[0], namespace=b"")

    # ── Building steps ───────────────────────────────────────────────────────────────────────────

    @rule(target=models, tokens=TOKENS, namespace=NAMESPACES)
    def admit(self, tokens: list[int], namespace: bytes) -> Model | MultipleResults[Model]:
        model = Model(BlockTable(self.pool), namespace, [], [])
        hashes = self.cache.block_hashes(tokens, namespace)
        match = self.cache.match(hashes, len(tokens) - 1)

        hits: list[int] = []
        while (end := (len(hits) + 1) * self.block_size) < len(tokens):
            block = self.published.get((namespace, tuple(tokens[:end])))
            if block is None:
                break
            hits.append(block)
        held = self.holders()
        num_new = self.blocks_for(len(tokens)) - len(hits)
        needed = num_new + sum(block not in held for block in hits)

        assert list(match.block_ids) == hits
        assert match.num_tokens == len(hits) * self.block_size
        assert model.table.blocks_needed(len(tokens) - match.num_tokens, match) == needed
        growth = self.grow(needed, lambda: model.table.adopt(match, len(tokens) - match.num_tokens))
        if growth is None:
            return multiple()
        assert len(growth.new_blocks) == num_new
        assert growth.copies == ()
        self.seen["held hit"] += any(block in held for block in hits)
        self.seen["free hit"] += any(block not in held for block in hits)
        model.tokens, model.blocks = list(tokens), [*hits, *growth.new_blocks]
        model.num_written, model.hashes = match.num_tokens, hashes
        self.live.append(model)
        self.writes.append(model)
        return model

    @rule(model=models, tokens=st.lists(st.integers(0, 1), max_size=6))
    def append(self, model: Model, tokens: list[int]) -> None:
        last = model.blocks[-1] if model.blocks else 0
        is_partial = len(model.tokens) % self.block_size > 0
        entries = Counter(block for other in self.live for block in other.blocks)
        copy_needed = bool(tokens) and is_partial and (entries[last] > 1 or last in self.published.values())
        num_new = self.blocks_for(len(model.tokens) + len(tokens)) - len(model.blocks)
        assert model.table.blocks_needed(len(tokens)) == num_new + copy_needed
        growth = self.grow(num_new + copy_needed, lambda: model.table.append(len(tokens)))
        if growth is None:
            return
        assert (len(growth.new_blocks), len(growth.copies)) == (num_new, copy_needed)
        for src, dst in growth.copies:
            self.seen["copy of a shared tail"] += entries[src] > 1
            self.seen["copy of a published tail"] += entries[src] == 1
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
        for src, dst in self.copies:
            for offset in range(self.block_size):
                source = self.device.get(src * self.block_size + offset)
                if source is not None:
                    self.device[dst * self.block_size + offset] = source
        for model in self.writes:
            for position in range(model.num_written, len(model.tokens)):
                self.device[model.table.slot(position)] = model.content(position)
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

    # ── Calls that must fail ─────────────────────────────────────────────────────────────────────

    @rule(model=models)
    def refuse_wrong_calls(self, model: Model) -> None:
        pool, table = self.pool, model.table
        calls: list[tuple[type[AllocatorError], Callable[[], object]]] = [
            (OutOfBlocks, lambda: pool.take(pool.num_free + 1)),
            (OutOfRange, lambda: pool.take(-1)),
            (OutOfRange, lambda: table.append(-1)),
            (OutOfRange, lambda: table.truncate(table.num_tokens + 1)),
            (OutOfRange, lambda: table.slot(table.num_tokens)),
            (StaleBlock, lambda: pool.release([*model.blocks, 0])),
            (StaleBlock, lambda: pool.finish_copies([*self.copies, (1, 1)])),
            (OutOfBlocks, lambda: table.append((pool.num_free + 1) * self.block_size)),
        ]
        free = pool.free_blocks()
        if free:
            calls += [
                (RefCountError, lambda: pool.release([*model.blocks, free[-1]])),
                (StaleBlock, lambda: pool.share(free[0])),
                (StaleBlock, lambda: pool.publish(free[0], b"k" * 32)),
            ]
        if model.blocks:
            match = self.cache.match((), 0)
            too_often = model.blocks * (pool.ref_count(model.blocks[0]) + 1)
            calls += [
                (TableNotEmpty, lambda: table.adopt(match, 0)),
                (RefCountError, lambda: pool.release(too_often)),
            ]
            if pool.key_of(model.blocks[0]) is not None:
                calls.append((PublishConflict, lambda: pool.publish(model.blocks[0], b"k" * 32)))
        for error, call in calls:
            before = self.state()
            with pytest.raises(error):
                call()
            assert self.state() == before
            assert (table.num_tokens, list(table.block_ids)) == (len(model.tokens), model.blocks)

    # ── What holds at all times ──────────────────────────────────────────────────────────────────

    @invariant()
    def counts_balance(self) -> None:
        self.pool.check([model.blocks for model in self.live])
        held, entries = self.holders(), Counter(block for model in self.live for block in model.blocks)
        stats = PoolStats.of(self.pool, [model.table for model in self.live])
        cached = sum(block not in held for block in self.published.values())
        assert (stats.total, stats.used, stats.cached) == (self.pool.num_blocks - 1, len(held), cached)
        assert stats.used + stats.cached + stats.free == stats.total
        assert (stats.shared, stats.references) == (sum(n > 1 for n in entries.values()), entries.total())
        slots = sum(len(model.blocks) * self.block_size - len(model.tokens) for model in self.live)
        assert stats.tail_waste_slots == slots
        assert self.cache.num_cached == len(self.published)
        in_flight = Counter(block for copy in self.copies for block in copy)
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block) == entries[block] + in_flight[block]

    @invariant()
    def every_table_reads_back_its_own_tokens(self) -> None:
        for model in self.live:
            assert model.table.snapshot() == tuple(model.blocks)
            assert model.table.num_tokens == len(model.tokens)
            pending = {dst for _, dst in self.copies}
            for position in range(model.num_written):
                if model.blocks[position // self.block_size] not in pending:
                    assert self.device[model.table.slot(position)] == model.content(position)

    @invariant()
    def every_published_block_still_has_its_content(self) -> None:
        for (namespace, tokens), block in self.published.items():
            for offset in range(self.block_size):
                expected = namespace, tokens[: len(tokens) - self.block_size + offset + 1]
                assert self.device[block * self.block_size + offset] == expected

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for model in self.live:
                model.table.release()
            self.pool.finish_copies(self.copies)
            self.pool.check([])
            assert self.pool.num_free == self.pool.num_usable

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def publish_full_blocks(self, model: Model) -> None:
        model.hashes = self.cache.block_hashes(model.tokens, model.namespace, model.hashes)
        for index in range(model.num_written // self.block_size):
            content = model.content((index + 1) * self.block_size - 1)
            block = model.blocks[index]
            found = self.published.setdefault(content, block)
            self.seen["duplicate"] += found != block
            assert self.cache.publish(block, model.hashes[index]) == (found == block)

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def holders(self) -> set[int]:
        in_tables = {block for model in self.live for block in model.blocks}
        return in_tables | {block for copy in self.copies for block in copy}

    def grow(self, needed: int, call: Callable[[], Growth]) -> Growth | None:
        """Run a call that takes blocks; None if the model says it cannot fit, and then it must have failed."""
        free = self.pool.num_usable - len(self.holders())
        before, reused = self.state(), self.pool.free_blocks()
        if needed > free:
            with pytest.raises(OutOfBlocks) as error:
                call()
            assert (error.value.needed, error.value.free) == (needed, free)
            assert self.state() == before
            self.seen["out of blocks"] += 1
            return None
        growth = call()
        taken = {*growth.new_blocks, *(dst for _, dst in growth.copies)}
        assert taken <= {*reused}
        for content in [content for content, block in self.published.items() if block in taken]:
            del self.published[content]
            self.seen["eviction"] += 1
        return growth

    def state(self) -> object:
        pool = self.pool
        blocks = range(1, pool.num_blocks)
        return (
            pool.free_blocks(),
            [(pool.ref_count(block), pool.key_of(block)) for block in blocks],
            PoolStats.of(pool, [model.table for model in self.live]),
            [model.table.snapshot() for model in self.live],
            pool.num_copies_in_flight,
        )


AllocatorModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAllocatorModel = AllocatorModel.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_meets_every_situation_and_keeps_every_promise(seed: int) -> None:
    """Hypothesis finds small surprises; a long walk in a busy pool meets the crowded ones."""
    random = Random(seed)
    machine = AllocatorModel()
    machine.make_pool(num_blocks=14, block_size=2 + seed % 3)
    prompts = [[0] * 8 + [0, 1], [0, 1] * 6, [1] * 11]

    def act() -> None:
        choice = random.choice(
            ["admit"] * 4 + ["step"] * 3 + ["append"] * 4 + ["truncate"] * 2 + ["fork", "release", "refuse"]
        )
        if choice == "admit":
            prompt = random.choice(prompts)
            machine.admit(tokens=prompt[: random.randint(1, len(prompt))], namespace=b"")
        elif choice == "step":
            machine.run_step(publishes=random.random() < 0.8)
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
            else:
                machine.refuse_wrong_calls(model=model)

    for _ in range(1500):
        act()
        if machine.pool.num_free < 2 and random.random() < 0.5:
            machine.release(model=random.choice(machine.live))
        machine.counts_balance()
        machine.every_table_reads_back_its_own_tokens()
        machine.every_published_block_still_has_its_content()
    machine.teardown()
    expected = {
        "held hit",
        "free hit",
        "copy of a shared tail",
        "copy of a published tail",
        "release during a copy",
        "out of blocks",
        "eviction",
        "duplicate",
    }
    assert {name for name, count in machine.seen.items() if count} == expected
