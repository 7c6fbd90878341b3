"""Tiers: bytes first, then the key; caps before allocation; files that survive a restart, or are a miss."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from allocator import (
    HIGH,
    LOW,
    BlockPool,
    BlockTable,
    EventLog,
    FileTier,
    HostTier,
    Load,
    OffloadQueue,
    OutOfBlocks,
    OutOfRange,
    Owner,
    PrefixCache,
    Quota,
    QuotaExceeded,
    Quotas,
    Removed,
    StaleBlock,
    Store,
    Stored,
    Tier,
    TierLink,
    load_secret,
    make_stamp,
)

StateOf = Callable[[BlockPool], object]
B = 4
BLOCK_BYTES = 64
FACTS = {"layout": "1", "dtype": "float16", "model": "tiny@1", "rope": "10000"}
LOADER = Owner("tier", "load")


class Machine:
    """A pool with a device of fake bytes above one tier."""

    def __init__(self, tier: Tier, num_blocks: int = 9, secret: bytes = b"s" * 32) -> None:
        self.pool = BlockPool(num_blocks, B, ledger=True)
        self.cache = PrefixCache(self.pool, secret=secret)
        self.log = EventLog(self.pool)
        self.tier = tier
        self.link = TierLink(self.pool, self.cache, tier, BLOCK_BYTES, self.log)
        self.device: dict[int, bytes] = {}

    def content(self, tokens: list[int], depth: int) -> bytes:
        return repr(tokens[: (depth + 1) * B]).encode().ljust(BLOCK_BYTES, b" ")[-BLOCK_BYTES:]

    def serve(self, tokens: list[int]) -> int:
        """Match, adopt, compute, publish, release; returns the cached tokens and checks that they are the right ones."""
        hashes = self.cache.block_hashes(tokens)
        match = self.cache.match(hashes, len(tokens) - 1)
        for depth, block in enumerate(match.block_ids):
            assert self.device[block] == self.content(tokens, depth)
        table = BlockTable(self.pool, Owner("sequence", "1"))
        table.adopt(match, len(tokens) - match.num_tokens)
        for depth, key in enumerate(hashes):
            if depth >= len(match.block_ids):
                self.device[table.block_ids[depth]] = self.content(tokens, depth)
            self.cache.publish(table.block_ids[depth], key, hashes[depth - 1] if depth else None, depth)
        table.release()
        return match.num_tokens

    def store(self, tokens: list[int]) -> int:
        store = self.link.begin_store(self.cache.block_hashes(tokens))
        if store is None:
            return 0
        return self.link.finish_store(store, [self.device[block] for block in store.block_ids])

    def begin_load(self, tokens: list[int]) -> Load | None:
        hashes = self.cache.block_hashes(tokens)
        match = self.cache.match(hashes, len(tokens) - 1)
        num_blocks = self.link.lookup(hashes, match, len(tokens) - 1)
        return self.link.begin_load(hashes, match, num_blocks, LOADER) if num_blocks else None

    def load(self, tokens: list[int]) -> int:
        load = self.begin_load(tokens)
        if load is None:
            return 0
        num_loaded = 0
        for block, key in zip(load.block_ids, load.keys, strict=True):
            payload = self.tier.read(key)
            if payload is None:
                break
            self.device[block] = payload
            num_loaded += 1
        return self.link.finish_load(load, num_loaded)

    def evict_everything(self) -> None:
        self.pool.release(self.pool.take(self.pool.num_free))


@pytest.fixture(params=["host", "file"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return HostTier(100_000) if request.param == "host" else FileTier(tmp_path, FACTS, 100_000)


def test_what_the_pool_evicted_comes_back_from_the_tier(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(3 * B + 1))
    machine.serve(tokens)
    assert machine.store(tokens) == 3
    machine.evict_everything()
    assert machine.load(tokens) == 3
    assert machine.serve(tokens) == 3 * B
    machine.pool.check([])
    assert machine.link.num_open == 0


def test_a_block_is_not_found_before_its_bytes_are_there(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(3 * B + 1))
    hashes = machine.cache.block_hashes(tokens)
    machine.serve(tokens)
    machine.store(tokens)
    machine.evict_everything()
    load = machine.begin_load(tokens)
    assert load is not None
    assert machine.cache.match(hashes, 3 * B).num_tokens == 0
    assert (machine.pool.num_used, machine.link.num_open) == (3, 1)
    machine.pool.check()
    assert machine.link.finish_load(load, 2) == 2  # the third could not be read
    assert machine.cache.match(hashes, 3 * B).num_tokens == 2 * B
    assert hashes[2] not in tier
    assert machine.link.finish_load(load, 2) == 0
    assert (machine.pool.num_used, machine.link.num_open) == (0, 0)
    machine.pool.check([])


def test_a_lookup_stops_at_a_block_that_the_pool_still_has() -> None:
    machine = Machine(HostTier(100_000), num_blocks=5)
    tokens = list(range(3 * B + 1))
    hashes = machine.cache.block_hashes(tokens)
    machine.serve(tokens)
    machine.store(tokens)
    second = machine.pool.find(hashes[1])
    assert second is not None
    machine.pool.retain([second], HIGH, until=9.0)
    machine.pool.release(machine.pool.take(3))
    match = machine.cache.match(hashes, 3 * B)
    assert (match.num_tokens, machine.link.lookup(hashes, match, 3 * B)) == (0, 1)
    assert machine.load(tokens) == 1
    assert machine.cache.match(hashes, 3 * B).num_tokens == 2 * B


def test_a_load_holds_the_prefix_it_continues(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(4 * B + 1))
    machine.serve(tokens)
    machine.store(tokens)
    machine.evict_everything()
    machine.serve(tokens[: 2 * B + 1])
    load = machine.begin_load(tokens)
    assert load is not None
    assert (len(load.held), len(load.keys)) == (2, 2)
    rest = machine.pool.take(machine.pool.num_free)
    machine.pool.release(rest)
    assert machine.cache.match(machine.cache.block_hashes(tokens), 4 * B).block_ids == load.held
    machine.link.finish_load(load, 0)
    machine.pool.check([])


def test_a_load_that_does_not_fit_changes_nothing(tier: Tier, state_of: StateOf) -> None:
    machine = Machine(tier)
    tokens = list(range(4 * B + 1))
    machine.serve(tokens)
    machine.store(tokens)
    machine.evict_everything()
    hashes = machine.cache.block_hashes(tokens)
    match = machine.cache.match(hashes, 4 * B)
    machine.pool.take(6)
    before = state_of(machine.pool)
    with pytest.raises(OutOfBlocks) as error:
        machine.link.begin_load(hashes, match, 4, LOADER)
    assert (error.value.needed, error.value.free) == (4, 2)
    for wrong in (0, 5):
        with pytest.raises(OutOfRange, match="num_blocks"):
            machine.link.begin_load(hashes, match, wrong, LOADER)
    assert (state_of(machine.pool), machine.link.num_open) == (before, 0)


def test_a_load_after_an_outdated_match_is_refused(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(3 * B + 1))
    machine.serve(tokens)
    machine.store(tokens)
    hashes = machine.cache.block_hashes(tokens)
    match = machine.cache.match(hashes, B)
    machine.evict_everything()
    with pytest.raises(StaleBlock, match="reused"):
        machine.link.begin_load(hashes, match, 2, LOADER)
    machine.pool.check([])


def test_a_load_is_charged_to_its_tenant(tier: Tier) -> None:
    machine = Machine(tier)
    machine.pool = BlockPool(9, B, quotas=Quotas({b"a": Quota(cap=1)}))
    machine.cache = PrefixCache(machine.pool, secret=b"s" * 32)
    link = TierLink(machine.pool, machine.cache, tier, BLOCK_BYTES)
    hashes = machine.cache.block_hashes(range(2 * B), b"a")
    match = machine.cache.match(hashes, 2 * B)
    with pytest.raises(QuotaExceeded):
        link.begin_load(hashes, match, 2, Owner("tier", "load", b"a"))
    load = link.begin_load(hashes, match, 1, Owner("tier", "load", b"a"))
    assert link.finish_load(load, 1) == 1
    machine.pool.check()


def test_blocks_published_by_another_meanwhile_are_not_published_twice(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(2 * B + 1))
    machine.serve(tokens)
    machine.store(tokens)
    machine.evict_everything()
    load = machine.begin_load(tokens)
    assert load is not None
    machine.serve(tokens)  # somebody did not want to wait
    assert machine.link.finish_load(load, 2) == 0
    assert machine.serve(tokens) == 2 * B
    machine.pool.check([])


def test_the_source_of_a_store_is_not_evicted_before_the_copy_ends(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(3 * B + 1))
    machine.serve(tokens)
    store = machine.link.begin_store(machine.cache.block_hashes(tokens))
    assert store is not None
    taken = machine.pool.take(machine.pool.num_free)
    assert not {*taken} & {*store.block_ids}
    with pytest.raises(OutOfBlocks):
        machine.pool.take(1)
    payloads = [machine.device[store.block_ids[0]], None, b"too short"]
    with pytest.raises(OutOfRange, match="payloads"):
        machine.link.finish_store(store, payloads[:2])
    assert machine.link.finish_store(store, payloads) == 1  # a failed copy and one of another size are not kept
    assert machine.link.finish_store(store, payloads) == 0
    assert [key in machine.tier for key in store.keys] == [True, False, False]
    machine.pool.release(taken)
    machine.pool.check([])


def test_a_store_offers_only_what_is_published_and_not_there(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(2 * B + 1))
    assert machine.link.begin_store(machine.cache.block_hashes(tokens)) is None
    machine.serve(tokens)
    hashes = machine.cache.block_hashes(tokens)
    store = machine.link.begin_store([hashes[0], hashes[0], b"?" * 32, hashes[1]])
    assert store is not None
    assert store.keys == tuple(hashes)
    machine.link.finish_store(store, [machine.device[block] for block in store.block_ids])
    assert machine.link.begin_store(hashes) is None


def test_storing_is_no_use_of_a_block() -> None:
    pool = BlockPool(9, B, policy="cost")
    cache = PrefixCache(pool)
    link = TierLink(pool, cache, HostTier(10_000), BLOCK_BYTES)
    table = BlockTable(pool)
    table.append(B)
    (key,) = cache.block_hashes([1] * B)
    cache.publish(table.block_ids[0], key)
    store = link.begin_store([key])
    assert isinstance(store, Store)
    assert pool._facts is not None
    assert pool._facts.uses[table.block_ids[0]] == 0
    link.finish_store(store, [b"x" * BLOCK_BYTES])
    table.release()


@pytest.mark.parametrize("kind", ["host", "file"])
def test_the_cap_holds_at_every_moment_and_the_least_recently_used_goes(kind: str, tmp_path: Path) -> None:
    header = 0 if kind == "host" else 100
    cap = 3 * (BLOCK_BYTES + header)
    tier: Tier = HostTier(cap) if kind == "host" else FileTier(tmp_path, FACTS, cap)
    machine = Machine(tier, num_blocks=40)
    prompts = [[number] * (B + 1) for number in range(5)]
    for prompt in prompts[:3]:
        machine.serve(prompt)
        assert machine.store(prompt) == 1
    keys = [machine.cache.block_hashes(prompt)[0] for prompt in prompts]
    assert tier.read(keys[0]) is not None
    machine.serve(prompts[3])
    assert machine.store(prompts[3]) == 1
    assert [key in tier for key in keys] == [True, False, True, True, False]
    assert tier.used_bytes == cap
    long = [9] * (5 * B + 1)
    machine.serve(long)
    store = machine.link.begin_store(machine.cache.block_hashes(long))
    assert store is not None
    assert len(store.keys) == 3  # never more than could be kept
    assert tier.used_bytes == 0  # the room is there before a byte is copied
    machine.link.finish_store(store, [machine.device[block] for block in store.block_ids])
    assert tier.used_bytes == cap
    assert tier.write(b"k" * 32, bytes(BLOCK_BYTES)) is False
    assert tier.write(store.keys[0], bytes(BLOCK_BYTES)) is True  # it is there already
    tier.discard(b"k" * 32)
    removed = [event for event in machine.log.since(0) if isinstance(event, Removed) and event.tier == tier.name]
    assert len(removed) == 4
    with pytest.raises(OutOfRange):
        HostTier(0)


def test_tier_events_name_the_tier(tier: Tier) -> None:
    machine = Machine(tier)
    tokens = list(range(B + 1))
    machine.serve(tokens)
    machine.store(tokens)
    machine.evict_everything()
    load = machine.begin_load(tokens)
    assert load is not None
    machine.link.finish_load(load, 0)
    (key,) = machine.cache.block_hashes(tokens)
    events = [event for event in machine.log.since(0) if isinstance(event, Stored | Removed)]
    assert [(type(event).__name__, event.key, event.tier) for event in events] == [
        ("Stored", key, "device"),
        ("Stored", key, tier.name),
        ("Removed", key, "device"),
        ("Removed", key, tier.name),
    ]


def test_the_offload_queue_gives_what_was_published_and_is_worth_keeping() -> None:
    pool = BlockPool(9, B)
    cache, queue = PrefixCache(pool, sub_blocks=True), OffloadQueue(pool, max_keys=5)
    table = BlockTable(pool)
    table.append(4 * B + 1)
    hashes = cache.block_hashes(range(4 * B))
    for block, key in zip(table.block_ids, hashes, strict=False):
        cache.publish(block, key)
    cache.publish_tail(table.block_ids[4], hashes[-1], 4, [1])  # no full block
    pool.retain(table.block_ids[:1], LOW, until=9.0)
    pool.retain(table.block_ids[1:2], HIGH, until=9.0)
    assert queue.take(2) == hashes[1:3]
    assert queue.take(2) == hashes[3:]
    assert queue.take(2) == []


# ── Files ────────────────────────────────────────────────────────────────────────────────────────


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*/*.kv")
    return path


def test_files_survive_a_restart_with_their_order_of_use(tmp_path: Path) -> None:
    secret = load_secret(tmp_path)
    tokens = list(range(3 * B + 1))
    first = Machine(FileTier(tmp_path, FACTS, 100_000), secret=secret)
    first.serve(tokens)
    first.store(tokens)
    assert load_secret(tmp_path) == secret
    second = Machine(FileTier(tmp_path, FACTS, 100_000), secret=load_secret(tmp_path))
    assert (len(second.tier), second.tier.used_bytes) == (3, first.tier.used_bytes)
    assert second.load(tokens) == 3
    second.device.update({})  # what was loaded is checked by `serve`
    assert second.serve(tokens) == 3 * B


def test_the_secret_is_readable_by_its_owner_only_and_without_it_nothing_is_found(tmp_path: Path) -> None:
    load_secret(tmp_path)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    tokens = list(range(B + 1))
    first = Machine(FileTier(tmp_path, FACTS, 100_000), secret=load_secret(tmp_path))
    first.serve(tokens)
    first.store(tokens)
    stranger = Machine(FileTier(tmp_path, FACTS, 100_000), secret=b"another")
    assert stranger.load(tokens) == 0
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("fact", FACTS)
def test_a_file_of_another_layout_dtype_model_or_rope_is_a_miss(fact: str, tmp_path: Path) -> None:
    FileTier(tmp_path, FACTS, 10_000).write(key_of(1), b"payload")
    other = FileTier(tmp_path, {**FACTS, fact: "other"}, 10_000)
    assert key_of(1) not in other
    assert other.read(key_of(1)) is None
    # Even a file that was moved to the other's place is not believed.
    source = only_file(tmp_path)
    target = other._path(key_of(1))
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())
    again = FileTier(tmp_path, {**FACTS, fact: "other"}, 10_000)
    assert key_of(1) in again
    assert again.read(key_of(1)) is None
    assert (again.num_refused, len(again), again.used_bytes, target.exists()) == (1, 0, 0, False)


def test_a_stamp_does_not_depend_on_order_and_tells_names_from_values() -> None:
    assert make_stamp(FACTS) == make_stamp(dict(reversed(FACTS.items())))
    assert make_stamp({"a": "bc"}) != make_stamp({"ab": "c"})


@pytest.mark.parametrize("length", [0, 1, 11, 40, 99, 100, 101, 163])
def test_a_torn_file_is_a_miss_at_every_length(length: int, tmp_path: Path) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)
    payload = bytes(range(64))
    assert tier.write(key_of(1), payload)
    path = only_file(tmp_path)
    assert path.stat().st_size == 164
    path.write_bytes(path.read_bytes()[:length])
    for each in (tier, FileTier(tmp_path, FACTS, 10_000)):
        assert each.read(key_of(1)) is None
        assert key_of(1) not in each
        each.write(key_of(2), b"")
        each.discard(key_of(2))


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)
    payload = b"the keys and values"
    for position in range(100 + len(payload)):
        assert tier.write(key_of(1), payload)
        path = only_file(tmp_path)
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)
        assert tier.read(key_of(1)) is None
    assert tier.num_refused == 100 + len(payload)
    assert tier.write(key_of(1), payload)
    assert tier.read(key_of(1)) == payload


def test_foreign_names_and_unfinished_files_do_no_harm(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)
    tier.write(key_of(1), b"payload")
    folder = only_file(tmp_path).parent
    (folder / "readme.txt").write_text("hello")
    (folder / "zz.kv").write_text("no key")
    (folder / "abcd.kv").write_text("a short key")
    (folder / "1-2.part").write_text("cut off")
    (folder / "folder.kv").mkdir()
    again = FileTier(tmp_path, FACTS, 10_000)
    assert len(again) == 1
    assert again.read(key_of(1)) == b"payload"
    assert not (folder / "1-2.part").exists()
    assert (folder / "readme.txt").exists()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)
    tier.write(key_of(1), b"payload")
    only_file(tmp_path).unlink()
    assert tier.read(key_of(1)) is None
    assert tier.used_bytes == 0


def test_a_disk_that_takes_nothing_keeps_nothing_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert tier.write(key_of(1), b"payload") is False
    monkeypatch.undo()
    assert (len(tier), tier.used_bytes, tier.num_refused) == (0, 0, 1)
    assert not list(tmp_path.glob("*/*/*"))
    assert tier.write(key_of(1), b"payload") is True


def test_a_smaller_cap_after_a_restart_drops_the_oldest(tmp_path: Path) -> None:
    import os

    tier = FileTier(tmp_path, FACTS, 10_000)
    for number in range(4):
        tier.write(key_of(number), bytes(64))
        os.utime(tier._path(key_of(number)), (number, number))
    assert tier.read(key_of(0)) is not None
    smaller = FileTier(tmp_path, FACTS, 2 * 164)
    assert [key_of(number) in smaller for number in range(4)] == [True, False, False, True]
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 2


def test_keys_of_another_length_and_senseless_limits_are_refused(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, FACTS, 10_000)
    with pytest.raises(OutOfRange, match="key"):
        tier.write(b"short", b"")
    with pytest.raises(OutOfRange, match="max_bytes"):
        FileTier(tmp_path, FACTS, 0)
    with pytest.raises(OutOfRange, match="block_bytes"):
        TierLink(BlockPool(3, B), PrefixCache(BlockPool(3, B)), tier, 0)


@pytest.mark.parametrize("seed", range(4))
def test_under_load_with_failures_everything_found_is_right_and_nothing_leaks(tier: Tier, seed: int) -> None:
    """Prompts, stores, loads that end late, partly or not at all; the device checks every hit's bytes."""
    random = Random(seed)
    machine = Machine(tier, num_blocks=10)
    prompts = [[number // 2] * B + [number] * random.randint(1, 4 * B) for number in range(10)]
    loads: list[Load] = []
    seen = {"load": 0, "hit": 0, "full": 0}
    for _ in range(1000):
        prompt = random.choice(prompts)
        action = random.choice(["serve", "serve", "store", "load", "load", "load", "finish", "evict"])
        try:
            if action == "serve":
                seen["hit"] += machine.serve(prompt) > 0
            elif action == "store":
                machine.store(prompt)
            elif action == "load" and (load := machine.begin_load(prompt)) is not None:
                loads.append(load)
            elif action == "finish" and loads:
                load = loads.pop(random.randrange(len(loads)))
                num_loaded = random.randint(0, len(load.keys))
                for index in range(num_loaded):
                    payload = machine.tier.read(load.keys[index])
                    if payload is None:
                        num_loaded = index
                        break
                    machine.device[load.block_ids[index]] = payload
                seen["load"] += machine.link.finish_load(load, num_loaded)
            elif action == "evict" and random.random() < 0.3:
                machine.evict_everything()
        except OutOfBlocks:
            seen["full"] += 1
        machine.pool.check()
    for load in loads:
        machine.link.finish_load(load, 0)
    machine.pool.check([])
    assert machine.pool.num_free == machine.pool.num_usable
    assert seen["load"] > 10, seen
    assert seen["hit"] > 10, seen
    assert seen["full"] > 0, seen
