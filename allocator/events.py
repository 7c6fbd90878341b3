"""Events: what became findable and what ceased to be, numbered, for routers, indexers and audits.

A consumer reads `since(seq)`. A number is given to an event before anybody sees it, so a consumer that missed some
notices, and one that is further behind than the buffer reaches is told so and starts again from `snapshot`.

Invariant: replaying a snapshot and the events after it gives exactly the keys that can be found now.
"""

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from allocator.errors import EventsLost, OutOfRange
from allocator.observer import Observer, Publication

if TYPE_CHECKING:
    from allocator.pool import BlockPool

DEVICE = "device"  # the tier that the pool itself is


class Stored(NamedTuple):
    """A block of `num_tokens` tokens can be found under `key` in `tier`; `parent` is the key before it in the prefix."""

    seq: int
    key: bytes
    parent: bytes | None
    num_tokens: int
    namespace: bytes | None  # who is charged; None in a pool without quotas
    tier: str = DEVICE


class Removed(NamedTuple):
    """Nothing is found under `key` in `tier` any more."""

    seq: int
    key: bytes
    namespace: bytes | None
    tier: str = DEVICE


class Cleared(NamedTuple):
    """Nothing at all is found in `tier` any more."""

    seq: int
    tier: str = DEVICE


class Quarantined(NamedTuple):
    """A block was taken out of service; if it was findable, a `Removed` came before."""

    seq: int
    block: int
    reason: str


Event = Stored | Removed | Cleared | Quarantined


class EventLog(Observer):
    """The last `capacity` events of one pool and its tiers. It observes the pool from its making on."""

    def __init__(self, pool: "BlockPool", capacity: int = 4096) -> None:
        if capacity < 1:
            raise OutOfRange("capacity", capacity, 1)
        self._pool = pool
        self._events: deque[Event] = deque(maxlen=capacity)
        self._labels: dict[bytes, tuple[bytes | None, int]] = {}  # key → parent and tokens, of what can be found
        self.next_seq = 0
        pool.observe(self)

    def since(self, seq: int) -> list[Event]:
        """List the events numbered `seq` and above. Raises `EventsLost` when some of them have left the buffer."""
        first = self.next_seq - len(self._events)
        if not 0 <= seq <= self.next_seq:
            raise OutOfRange("seq", seq, 0, self.next_seq)
        if seq < first:
            raise EventsLost(seq, first)
        return list(islice(self._events, seq - first, None))

    def snapshot(self) -> tuple[int, list[Stored]]:
        """Describe what can be found in the pool now, and the number of the event to read on from."""
        seq, pool = self.next_seq, self._pool
        stored = []
        for key, block in pool.published():
            parent, num_tokens = self._labels.get(key, (None, pool.block_size))
            stored.append(Stored(seq, key, parent, num_tokens, pool.namespace_of(block)))
        return seq, stored

    def tier_stored(self, tier: str, key: bytes, parent: bytes | None, num_tokens: int) -> None:
        """Record that a lower tier has a block."""
        self._events.append(Stored(self._number(), key, parent, num_tokens, None, tier))

    def tier_removed(self, tier: str, key: bytes) -> None:
        """Record that a lower tier has lost a block."""
        self._events.append(Removed(self._number(), key, None, tier))

    # ── What the pool tells ──────────────────────────────────────────────────────────────────────

    def stored(self, publication: Publication) -> None:
        """Record a publication."""
        block, key, parent, num_tokens = publication.block, publication.key, publication.parent, publication.num_tokens
        self._labels[key] = (parent, num_tokens)
        namespace = self._pool.namespace_of(block)
        self._events.append(Stored(self._number(), key, parent, num_tokens, namespace))

    def removed(self, block: int, key: bytes) -> None:
        """Record an eviction."""
        self._labels.pop(key, None)
        self._events.append(Removed(self._number(), key, self._pool.namespace_of(block)))

    def cleared(self) -> None:
        """Record that the cache was cleared."""
        self._labels.clear()
        self._events.append(Cleared(self._number()))

    def quarantined(self, block: int, reason: str) -> None:
        """Record an incident."""
        self._events.append(Quarantined(self._number(), block, reason))

    def _number(self) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return seq
