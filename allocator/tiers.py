"""Lower tiers: host memory or disk that keeps the bytes of blocks the pool has evicted, or will.

The allocator moves no bytes: it says which block and under which key, and in which order. A tier keeps opaque
payloads; the owner of the tensors fills and reads them, on whatever thread or stream it likes.

    load    look up → take blocks → (bytes arrive) → publish. Before that nobody can find the blocks.
    store   make room → hold the source → (bytes leave) → release. Before that nobody can evict the source.

Invariant: a key leads to a block only after the block's bytes are there; a cap holds before a byte is allocated.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from allocator.errors import OutOfRange, StaleBlock
from allocator.events import EventLog
from allocator.eviction import NORMAL
from allocator.ledger import Account, Owner
from allocator.observer import Observer, Publication
from allocator.pool import BlockPool
from allocator.prefix import Match, PrefixCache


class Tier(Protocol):
    """Payloads by key, within `max_bytes`. Whatever goes wrong with one is a miss, never an exception."""

    @property
    def name(self) -> str:
        """What events call it."""

    @property
    def used_bytes(self) -> int:
        """What its payloads take up; never above `max_bytes`."""

    def __contains__(self, key: bytes) -> bool:
        """Say whether `read` is likely to find the payload."""

    def __len__(self) -> int: ...

    def read(self, key: bytes) -> bytes | None:
        """Return a payload as it was written, or None."""

    def capacity(self, payload_bytes: int) -> int:
        """Count the payloads of this size that it could hold if it were empty."""

    def make_room(self, num_payloads: int, payload_bytes: int) -> list[bytes]:
        """Drop least recently used payloads until so many fit (at most `capacity`); returns the dropped keys."""

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a payload if it fits into the room there is; says whether it did."""

    def discard(self, key: bytes) -> None:
        """Drop a payload, if it is there."""


class HostTier:
    """Payloads in this process's memory."""

    def __init__(self, max_bytes: int, name: str = "host") -> None:
        if max_bytes < 1:
            raise OutOfRange("max_bytes", max_bytes, 1)
        self.max_bytes = max_bytes
        self._name = name
        self._payloads: OrderedDict[bytes, bytes] = OrderedDict()
        self._used_bytes = 0

    @property
    def name(self) -> str:
        """What events call it."""
        return self._name

    @property
    def used_bytes(self) -> int:
        """What its payloads take up."""
        return self._used_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._payloads

    def __len__(self) -> int:
        return len(self._payloads)

    def read(self, key: bytes) -> bytes | None:
        """Return a payload and count it as used."""
        payload = self._payloads.get(key)
        if payload is not None:
            self._payloads.move_to_end(key)
        return payload

    def capacity(self, payload_bytes: int) -> int:
        """Count the payloads of this size that it could hold if it were empty."""
        return self.max_bytes // payload_bytes

    def make_room(self, num_payloads: int, payload_bytes: int) -> list[bytes]:
        """Drop least recently used payloads until so many fit."""
        dropped = []
        while self._payloads and self._used_bytes + num_payloads * payload_bytes > self.max_bytes:
            key, payload = self._payloads.popitem(last=False)
            self._used_bytes -= len(payload)
            dropped.append(key)
        return dropped

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a payload if there is room."""
        if key in self._payloads:
            self._payloads.move_to_end(key)
            return True
        if self._used_bytes + len(payload) > self.max_bytes:
            return False
        self._payloads[key] = payload
        self._used_bytes += len(payload)
        return True

    def discard(self, key: bytes) -> None:
        """Drop a payload, if it is there."""
        payload = self._payloads.pop(key, None)
        if payload is not None:
            self._used_bytes -= len(payload)


@dataclass(eq=False, slots=True)
class Load:
    """Blocks that wait for their bytes: read `keys[i]` of the tier into `block_ids[i]`, then `TierLink.finish_load`."""

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parents: tuple[bytes | None, ...]
    depth: int  # blocks of the prefix before them
    held: tuple[int, ...]  # that prefix, kept while they load
    account: Account | None
    is_open: bool = True


@dataclass(eq=False, slots=True)
class Store:
    """Blocks whose bytes are on their way down: write `block_ids[i]` under `keys[i]`, then `TierLink.finish_store`."""

    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    account: Account | None
    is_open: bool = True


class TierLink:
    """Connect one tier to one pool. Like the pool it belongs to one thread; only payloads may travel on others."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, tier: Tier, block_bytes: int, log: EventLog | None = None
    ) -> None:
        """`block_bytes`: the size of every payload. `log`: where the tier's events go."""
        if block_bytes < 1:
            raise OutOfRange("block_bytes", block_bytes, 1)
        self._pool = pool
        self._cache = cache
        self._tier = tier
        self._block_bytes = block_bytes
        self._log = log
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Count the loads and stores begun and not finished."""
        return self._num_open

    # ── Up ───────────────────────────────────────────────────────────────────────────────────────

    def lookup(self, hashes: Sequence[bytes], match: Match, max_tokens: int) -> int:
        """Count the blocks that follow a match and are in the tier, within `max_tokens`. Changes nothing."""
        num_blocks = 0
        for key in hashes[len(match.block_ids) : max_tokens // self._pool.block_size]:
            if key not in self._tier or self._pool.find(key) is not None:
                break
            num_blocks += 1
        return num_blocks

    def begin_load(self, hashes: Sequence[bytes], match: Match, num_blocks: int, owner: Owner) -> Load:
        """Take blocks for the `num_blocks` hashes after a match, and hold the match meanwhile.

        Nothing can be found under these hashes before `finish_load`. Raises `OutOfBlocks` and, when the match is
        outdated, `StaleBlock`, and then has changed nothing.
        """
        pool, first = self._pool, len(match.block_ids)
        if not 0 < num_blocks <= len(hashes) - first:
            raise OutOfRange("num_blocks", num_blocks, 1, len(hashes) - first)
        for block, key in zip(match.block_ids, match.hashes, strict=True):
            if pool.key_of(block) != key:
                raise StaleBlock(block, "was reused after it was matched")
        account = pool.open(owner)
        pool.require_available(num_blocks + pool.count_free(match.block_ids), account)
        for block in match.block_ids:
            pool.touch(block, account)
        self._num_open += 1
        return Load(
            keys=tuple(hashes[first : first + num_blocks]),
            block_ids=tuple(pool.take(num_blocks, account)),
            parents=tuple(hashes[i - 1] if i else None for i in range(first, first + num_blocks)),
            depth=first,
            held=match.block_ids,
            account=account,
        )

    def finish_load(self, load: Load, num_loaded: int) -> int:
        """Publish the first `num_loaded` blocks, whose bytes are there, and let go of all of them.

        What was loaded can be matched and adopted like any cached prefix; the rest is computed as if it had never
        been found. 0 gives up. A second call does nothing. Returns how many blocks can now be found.
        """
        if not 0 <= num_loaded <= len(load.keys):
            raise OutOfRange("num_loaded", num_loaded, 0, len(load.keys))
        if not load.is_open:
            return 0
        load.is_open = False
        self._num_open -= 1
        num_found = 0
        for index in range(num_loaded):
            key, parent = load.keys[index], load.parents[index]
            num_found += self._cache.publish(load.block_ids[index], key, parent, load.depth + index)
        for key in load.keys[num_loaded:]:  # what could not be read is not offered again
            self._tier.discard(key)
            if self._log is not None:
                self._log.tier_removed(self._tier.name, key)
        self._pool.settle([*load.held, *load.block_ids], load.account)
        return num_found

    # ── Down ─────────────────────────────────────────────────────────────────────────────────────

    def begin_store(self, keys: Sequence[bytes]) -> Store | None:
        """Hold the blocks published under `keys` that the tier lacks, at most as many as it can have room for.

        None when there is nothing to do. The room is made first, so the tier never exceeds its cap.
        """
        pool, wanted = self._pool, []
        for key in dict.fromkeys(keys):
            block = pool.find(key)
            if block is not None and key not in self._tier:
                wanted.append((key, block))
        wanted = wanted[: self._tier.capacity(self._block_bytes)]
        if not wanted:
            return None
        for key in self._tier.make_room(len(wanted), self._block_bytes):
            if self._log is not None:
                self._log.tier_removed(self._tier.name, key)
        account = pool.open(Owner("tier", self._tier.name))
        for _, block in wanted:
            pool.touch(block, account, is_use=False)
        self._num_open += 1
        return Store(tuple(key for key, _ in wanted), tuple(block for _, block in wanted), account)

    def finish_store(self, store: Store, payloads: Sequence[bytes | None]) -> int:
        """Write the payloads (None: the copy failed) and let go of the blocks. A second call does nothing.

        Returns how many the tier kept.
        """
        if len(payloads) != len(store.keys):
            raise OutOfRange("len(payloads)", len(payloads), len(store.keys), len(store.keys))
        if not store.is_open:
            return 0
        store.is_open = False
        self._num_open -= 1
        num_kept = 0
        for key, payload in zip(store.keys, payloads, strict=True):
            if payload is not None and len(payload) == self._block_bytes and self._tier.write(key, payload):
                num_kept += 1
                if self._log is not None:
                    self._log.tier_stored(self._tier.name, key, None, self._pool.block_size)
        self._pool.settle(store.block_ids, store.account)
        return num_kept


class OffloadQueue(Observer):
    """The keys published since they were last asked for, newest kept when there are too many; feeds `begin_store`."""

    def __init__(self, pool: BlockPool, max_keys: int = 4096, min_level: int = NORMAL) -> None:
        """`min_level`: the priority level below which a block is not worth keeping."""
        self._pool = pool
        self._min_level = min_level
        self._keys: deque[bytes] = deque(maxlen=max_keys)
        pool.observe(self)

    def stored(self, publication: Publication) -> None:
        """Queue a full block."""
        if publication.num_tokens == self._pool.block_size:
            self._keys.append(publication.key)

    def cleared(self) -> None:
        """Forget everything."""
        self._keys.clear()

    def take(self, num_keys: int) -> list[bytes]:
        """Return at most so many keys, oldest first, that can still be found and have the level."""
        keys: list[bytes] = []
        while self._keys and len(keys) < num_keys:
            key = self._keys.popleft()
            block = self._pool.find(key)
            if block is not None and self._pool.level_of(block) >= self._min_level:
                keys.append(key)
        return keys
