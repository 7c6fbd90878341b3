"""The blocks of a pool, and the order in which free ones are reused.

What `BlockPool` stands on: the arrays, the counters, the free ring and, where something asks for them, the shelves
(`eviction.py`), priority levels, charges (`quota.py`) and the quarantine. It hands nothing out.

Invariant: every block but the null block, the guards and the quarantine is held, or in the ring, or on a shelf.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from allocator.errors import AllocatorError, OutOfBlocks, OutOfRange, QuotaExceeded, StaleBlock, UnknownPolicy
from allocator.eviction import NORMAL, NUM_LEVELS, POLICIES, BlockFacts, Shelves
from allocator.ledger import Account, Ledger
from allocator.observer import Observer, Publication
from allocator.quota import PUBLIC, Quotas, Space

NULL_BLOCK = 0  # what padding points at; never handed out, never counted
MAX_INCIDENTS = 256  # the last ones are kept


class Incident(NamedTuple):
    """A block that was taken out of service because the books disagreed about it."""

    block: int
    reason: str
    at: float  # the caller's clock, in seconds


class FreeOrder:
    """The state of the blocks `1 … num_blocks - 1`, and which of the free ones is reused next.

    All state is in lists of ints indexed by block id, so that a step
    creates no object per block:

        _refs   references held by tables, and by whoever called `take`, `share` or `touch`
        _pins   references held by copies in flight (see `begin_copy`), and for ever by guards and the quarantine
        _keys   the hash under which the block is published, or None
        _gens   how often the block has become free: what makes a `BlockHandle` stale
        _next   } the free blocks as a ring in eviction order, closed over block 0:
        _prev   }   0 ⇄ reused next ⇄ … ⇄ reused last ⇄ 0

    The ring is in LRU order. With another policy, quotas or priority levels the free *published* blocks are on
    `Shelves` instead and the ring holds the others. What is not switched on costs a test for None.
    """

    __slots__ = (
        "_copies",
        "_dead",
        "_deadline_of",
        "_deadlines",
        "_facts",
        "_gens",
        "_guards",
        "_index",
        "_is_plain",
        "_keys",
        "_levels",
        "_next",
        "_num_evictions",
        "_num_free",
        "_num_free_findable",
        "_num_references",
        "_num_shared",
        "_on_cleared",
        "_on_freed",
        "_on_quarantined",
        "_on_removed",
        "_on_reused",
        "_on_stored",
        "_pins",
        "_policy",
        "_prev",
        "_quarantine",
        "_refs",
        "_shelves",
        "_spaces",
        "block_size",
        "hit_tokens",
        "incidents",
        "ledger",
        "lookup_tokens",
        "now",
        "num_blocks",
        "num_incidents",
        "quotas",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        ledger: bool = False,
        policy: str = "lru",
        quotas: Quotas | None = None,
        poison: bool = False,
        guard_every: int | None = None,
    ) -> None:
        """Make a pool of free blocks of `block_size` slots each; block 0 counts in `num_blocks`.

        `ledger`: book every reference under an owner (implied by `quotas`). `policy`: a name of `POLICIES`.
        Debugging: with `poison`, `take_dead` lists the blocks whose content means nothing any more; with
        `guard_every` each so many blocks one is never handed out, for its owner to fill and to verify.
        """
        if num_blocks < 2:
            raise OutOfRange("num_blocks", num_blocks, 2)
        if block_size < 1:
            raise OutOfRange("block_size", block_size, 1)
        if policy not in POLICIES:
            raise UnknownPolicy(policy, POLICIES)
        if guard_every is not None and guard_every < 2:
            raise OutOfRange("guard_every", guard_every, 2)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lookup_tokens = 0  # tokens looked up by admitted sequences (`record_lookup`)
        self.hit_tokens = 0  # and how many of them were found
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}  # hash → block
        self._copies: dict[int, int] = {}  # copies in flight, dst → src; a dst has one copy at a time
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_free = num_blocks - 1
        self._num_free_findable = 0
        self._num_references = 0
        self._num_shared = 0
        self._num_evictions = 0
        self._gens = [0] * num_blocks
        self.now = 0.0  # the caller's clock, in seconds (`advance`)
        self.ledger = Ledger(num_blocks) if ledger or quotas is not None else None
        self.quotas = quotas
        self._spaces: list[Space | None] = [None] * (num_blocks if quotas is not None else 0)  # who is charged
        self._policy = policy
        self._levels: dict[int, int] = {}  # published blocks with another priority level than NORMAL
        self._deadlines: list[tuple[float, int]] = []  # heap of (time, block): when a level ends
        self._deadline_of: dict[int, float] = {}  # the one that counts, by block
        self._dead: list[int] | None = [] if poison else None
        self._quarantine: set[int] = set()
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.num_incidents = 0
        self._on_stored: tuple[Callable[[Publication], None], ...] = ()
        self._on_removed: tuple[Callable[[int, bytes], None], ...] = (self._note_evicted,) if poison else ()
        self._on_freed: tuple[Callable[[int], None], ...] = ()
        self._on_reused: tuple[Callable[[int], None], ...] = ()
        self._on_cleared: tuple[Callable[[], None], ...] = ()
        self._on_quarantined: tuple[Callable[[int, str], None], ...] = ()
        self._is_plain = not (ledger or poison or quotas is not None)
        self._facts: BlockFacts | None = None
        self._shelves: Shelves | None = None
        if quotas is not None or policy != "lru":
            self._open_shelves()
        self._guards = frozenset(range(guard_every, num_blocks, guard_every) if guard_every else ())
        for block in self._guards:
            self._unlink(block)
            self._pins[block] = 1
        if self.num_usable < 1:
            raise OutOfRange("num_blocks", num_blocks, 2 + len(self._guards))
        if quotas is not None and quotas.sum_of_floors > self.num_usable:
            raise OutOfRange("the sum of floors", quotas.sum_of_floors, 0, self.num_usable)
        if self.ledger is not None and quotas is not None:
            self.ledger.anonymous.space = quotas.space(b"")

    # ── Counts, all O(1) ──────────────────────────────────────────────────────────────────────────────

    @property
    def num_usable(self) -> int:
        """Count the blocks that can be handed out: all but the null block, guards and the quarantine."""
        return self.num_blocks - 1 - len(self._guards) - len(self._quarantine)

    @property
    def num_free(self) -> int:
        """Count the blocks nobody holds, findable ones included: what `take` can hand out."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Count the blocks that somebody holds, those in quarantine aside."""
        return self.num_usable - self._num_free

    @property
    def num_findable(self) -> int:
        """Count the published blocks, held or free."""
        return len(self._index)

    @property
    def num_free_findable(self) -> int:
        """Count the free blocks that can still be found by their hash."""
        return self._num_free_findable

    @property
    def num_shared(self) -> int:
        """Count the blocks with more than one reference, copies in flight aside."""
        return self._num_shared

    @property
    def num_references(self) -> int:
        """Count the references to all blocks, copies in flight aside."""
        return self._num_references

    @property
    def num_copies_in_flight(self) -> int:
        """Count the copies begun and not finished."""
        return len(self._copies)

    @property
    def num_evictions(self) -> int:
        """Count the findable blocks that were reused since the pool was made."""
        return self._num_evictions

    @property
    def quarantined(self) -> frozenset[int]:
        """The blocks taken out of service because the books disagreed about them."""
        return frozenset(self._quarantine)

    @property
    def guards(self) -> frozenset[int]:
        """The blocks that are never handed out, so that a write past the end of a neighbour shows in them."""
        return self._guards

    def num_available(self, account: Account | None = None) -> int:
        """Count the blocks that `take` would hand out to this account now: `num_free`, or less under quotas."""
        if self.quotas is None:
            return self._num_free
        return self.quotas.available(self._space_of(account), self._num_free)

    def num_obtainable(self, account: Account | None = None) -> int:
        """Count the blocks that this account could hold if nobody else held any: `num_usable`, or less under quotas."""
        if self.quotas is None:
            return self.num_usable
        return self.quotas.largest(self._space_of(account), self.num_usable)

    def require_available(self, num_blocks: int, account: Account | None = None) -> None:
        """Raise what `take` would raise for so many blocks."""
        if num_blocks > self._num_free:
            raise OutOfBlocks(num_blocks, self._num_free)
        if self.quotas is not None and num_blocks > (available := self.num_available(account)):
            raise QuotaExceeded(num_blocks, available, self._space_of(account).namespace)

    # ── The order of reuse ────────────────────────────────────────────────────────────────────────────

    def free_blocks(self) -> list[int]:
        """List the free blocks in the order in which they will be reused (for tests and debugging).

        With several namespaces the cached ones are listed by namespace: who takes decides whose goes first.
        """
        free = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            free.append(block)
            block = self._next[block]
        return free if self._shelves is None else [*free, *self._shelves]

    def level_of(self, block: int) -> int:
        """Return the priority level of a block, `NORMAL` unless `retain` has set another."""
        self._require_in_pool(block)
        return self._levels.get(block, NORMAL)

    def retain(self, blocks: Iterable[int], level: int, until: float) -> None:
        """Set the priority level of published blocks until the clock (`advance`) reaches `until`; then it is NORMAL again.

        All blocks of a lower level are evicted before any of a higher one (of the same namespace). No level
        makes a block unavailable to `take`. Raises `StaleBlock` for an unpublished block, and `OutOfRange`.
        """
        if not 0 <= level < NUM_LEVELS:
            raise OutOfRange("level", level, 0, NUM_LEVELS - 1)
        chosen = tuple(blocks)
        for block in chosen:
            self._require_in_pool(block)
            if self._keys[block] is None:
                raise StaleBlock(block, "cannot be retained because it is not published")
        if self._shelves is None:
            self._open_shelves()
        for block in chosen:
            self._set_level(block, level)
            if level != NORMAL:
                self._deadline_of[block] = until
                heapq.heappush(self._deadlines, (until, block))
        if len(self._deadlines) > 2 * len(self._deadline_of) + 64:  # most are of pins that were renewed or evicted
            self._deadlines = sorted((until, block) for block, until in self._deadline_of.items())

    def advance(self, now: float) -> None:
        """Set the clock, in seconds, and end the priority levels whose time has come. Costs nothing when there is none."""
        self.now = now
        if self.ledger is not None:
            self.ledger.now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            until, block = heapq.heappop(self._deadlines)
            # A later `retain`, or the block's eviction, has made an earlier deadline meaningless.
            if self._deadline_of.get(block) == until:
                self._set_level(block, NORMAL)

    # ── Out of service ────────────────────────────────────────────────────────────────────────────────

    def quarantine(self, block: int, reason: str) -> None:
        """Take one block out of service for good: it is not found, and not handed out when its holders are gone."""
        self._require_in_pool(block)
        if block not in self._quarantine and self._refs[block] == 0 and self._pins[block] == 0:
            if self._keys[block] is not None and self._shelves is not None:
                self._unshelve(block)
            else:
                self._unlink(block)
            self._num_free_findable -= self._keys[block] is not None
        self._seclude(block, reason)

    def take_dead(self) -> list[int]:
        """List the blocks that became meaningless since the last call, for their owner to poison. Needs `poison`.

        Call it before each step: all of them are overwritten before they are read, or never read.
        """
        if self._dead is None:
            return []
        dead, self._dead = self._dead, []
        return list(dict.fromkeys(dead))

    def _seclude(self, block: int, reason: str) -> None:
        """Pin a block for good, unpublish it and report it; the caller has taken it out of the free ones."""
        if block in self._quarantine or block in self._guards or block == NULL_BLOCK:
            return
        self._quarantine.add(block)
        self._pins[block] += 1
        if self._keys[block] is not None and self._index.get(self._keys[block] or b"") == block:
            self._forget(block)
        self._keys[block] = None
        self._discharge(block, is_held=True)
        self.incidents.append(Incident(block, reason, self.now))
        self.num_incidents += 1
        for told in self._on_quarantined:
            told(block, reason)

    # ── Watching ──────────────────────────────────────────────────────────────────────────────────────

    def observe(self, observer: Observer) -> None:
        """Tell `observer` about publications, evictions and reuse from now on."""
        self._is_plain = False
        kind = type(observer)
        for name in ("stored", "removed", "freed", "reused", "cleared", "quarantined"):
            if getattr(kind, name) is not getattr(Observer, name):
                slot = f"_on_{name}"
                setattr(self, slot, (*getattr(self, slot), getattr(observer, name)))

    def _tell_removed(self, block: int, key: bytes) -> None:
        for told in self._on_removed:
            told(block, key)

    def _forget(self, block: int) -> None:
        """Unpublish a block; the caller keeps the count of free findable ones."""
        key = self._keys[block]
        if key is None:
            return
        del self._index[key]
        self._keys[block] = None
        if self._levels:
            self._levels.pop(block, None)
            self._deadline_of.pop(block, None)
        self._tell_removed(block, key)

    def _note_evicted(self, block: int, _key: bytes) -> None:
        if self._dead is not None and self._refs[block] == 0 and self._pins[block] == 0:
            self._dead.append(block)

    def _note_cached(self, block: int) -> bool:
        """Tell observers of a published block that has become free; returns whether it went to a shelf."""
        for told in self._on_freed:
            told(block)
        if self._shelves is None:
            return False
        space = self._spaces[block] if self._spaces else None
        if self.quotas is not None and space is not None:
            self.quotas.holds(space, -1)
        self._shelves.add(block, space, self._levels.get(block, NORMAL))
        return True

    def _note_dead(self, block: int) -> None:
        """Let go of an unpublished block that has become free: nobody is charged, and its content means nothing."""
        if self._dead is not None:
            self._dead.append(block)
        self._discharge(block, is_held=True)

    # ── Shelves: what quotas, levels and policies other than LRU need ─────────────────────────────────

    def _open_shelves(self) -> None:
        """Move the free published blocks, in order, from the ring to shelves."""
        self._facts = BlockFacts(self.num_blocks, self.block_size)
        self.observe(self._facts)
        self._shelves = Shelves(POLICIES[self._policy], self._facts, self.quotas)
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            after = self._next[block]
            if self._keys[block] is not None:
                self._unlink(block)
                self._num_free += 1
                self._shelves.add(block, None, NORMAL)
            block = after

    def _unshelve(self, block: int) -> None:
        """Take a free published block off its shelf."""
        assert self._shelves is not None
        space = self._spaces[block] if self._spaces else None
        self._shelves.remove(block, space, self._levels.get(block, NORMAL))
        self._num_free -= 1
        if self.quotas is not None and space is not None:
            self.quotas.holds(space, 1)

    def _evict_for(self, num_blocks: int, account: Account | None) -> list[int]:
        """Choose and unpublish the shelved blocks that `take` needs; none while the ring has enough. Raises `QuotaExceeded`."""
        shelves = self._shelves
        if shelves is None:
            return []
        space, num_own = None, 0
        if self.quotas is not None:
            self.require_available(num_blocks, account)
            space = self._space_of(account)
            if space.quota.cap is not None:  # at its cap a namespace recycles its own cache
                num_own = max(0, space.resident + num_blocks - space.quota.cap)
        num_plain = self._num_free - self._num_free_findable
        num_victims = max(num_own, num_blocks - num_plain)
        victims = []
        for block in shelves.victims(space, num_blocks, num_own, num_victims):
            self._forget(block)
            self._discharge(block)
            victims.append(block)
        self._num_free_findable -= num_victims
        self._num_evictions += num_victims
        return victims

    def _set_level(self, block: int, level: int) -> None:
        before = self._levels.get(block, NORMAL)
        if before == level:
            return
        space = self._spaces[block] if self._spaces else None
        is_free = self._refs[block] == 0 and self._pins[block] == 0
        if is_free and self._shelves is not None:
            self._shelves.remove(block, space, before)
            self._shelves.add(block, space, level)
        if level == NORMAL:
            del self._levels[block]
            self._deadline_of.pop(block, None)
        else:
            self._levels[block] = level

    # ── Charges ───────────────────────────────────────────────────────────────────────────────────────

    def namespace_of(self, block: int) -> bytes | None:
        """Return the namespace that is charged for a block, None when none is."""
        self._require_in_pool(block)
        space = self._spaces[block] if self._spaces else None
        return None if space is None else space.namespace

    def _space_of(self, account: Account | None) -> Space:
        account = account or (self.ledger.anonymous if self.ledger is not None else None)
        if account is None or account.space is None:
            raise AllocatorError("an account of another pool was given")
        return account.space

    def _charge_public(self, block: int, quotas: Quotas) -> None:
        """Charge a held block to the public namespace, unless its tenant's floor could then not be filled at once."""
        space, public = self._spaces[block], quotas.space(PUBLIC)
        if space is None or space is public:
            return
        quotas.holds(space, -1)
        quotas.holds(public, 1)
        if quotas.unmet > self._num_free:
            quotas.holds(public, -1)
            quotas.holds(space, 1)
            return
        space.resident -= 1
        public.resident += 1
        self._spaces[block] = public

    def _discharge(self, block: int, is_held: bool = False) -> None:
        """Let a block weigh on no namespace."""
        space = self._spaces[block] if self._spaces else None
        if self.quotas is None or space is None:
            return
        space.resident -= 1
        if is_held:
            self.quotas.holds(space, -1)
        self._spaces[block] = None

    # ── The free ring ─────────────────────────────────────────────────────────────────────────────────

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link_free(self, blocks: Sequence[int]) -> None:
        """Make blocks nobody holds any more free, one after the other: published ones last in the order, others first."""
        keys, gens, following, preceding = self._keys, self._gens, self._next, self._prev
        is_plain = self._is_plain
        self._num_free += len(blocks)
        for block in blocks:
            gens[block] += 1
            if keys[block] is not None:
                self._num_free_findable += 1
                if not is_plain and self._note_cached(block):
                    continue
                before, after = preceding[NULL_BLOCK], NULL_BLOCK
            else:
                if not is_plain:
                    self._note_dead(block)
                before, after = NULL_BLOCK, following[NULL_BLOCK]
            following[before] = block
            preceding[block] = before
            following[block] = after
            preceding[after] = block

    def _require_in_pool(self, block: int) -> None:
        # Negative ids would silently index from the end of the lists.
        if not 0 < block < self.num_blocks:
            raise StaleBlock(block, f"is not one of the blocks 1 to {self.num_blocks - 1} of this pool")
