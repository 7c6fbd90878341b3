"""The block pool: who holds each block, and in which order free blocks are reused.

It knows block ids and counts. It does not know tokens, tensors or sequences: `table.py` maps
positions to blocks, `prefix.py` computes the hashes under which blocks can be found again,
`audit.py` verifies the bookkeeping and repairs it.

Invariant: a block is free exactly when nobody holds it, and a free block can still be *found* by
its hash until `take` hands it out again. So there is no separate cache: every free block is cache.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from allocator.audit import Finding, find_faults, rebuild
from allocator.errors import (
    AllocatorError,
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    PublishConflict,
    QuotaExceeded,
    RefCountError,
    StaleBlock,
    UnknownPolicy,
)
from allocator.eviction import NORMAL, NUM_LEVELS, POLICIES, BlockFacts, Shelves
from allocator.ledger import Account, Ledger, Owner
from allocator.observer import Observer, Publication
from allocator.quota import PUBLIC, Quotas, Space

NULL_BLOCK = 0  # what padding points at; never handed out, never counted
MAX_INCIDENTS = 256  # the last ones are kept


class BlockHandle(NamedTuple):
    """A block as somebody knew it: stale as soon as its last holder has given it back."""

    block: int
    generation: int


class Incident(NamedTuple):
    """A block that was taken out of service because the books disagreed about it."""

    block: int
    reason: str
    at: float  # the caller's clock, in seconds


class BlockPool:
    """Hand out, share and take back the blocks `1 … num_blocks - 1`.

    Block 0 is the null block. All state is in lists of ints indexed by block id, so that a step
    creates no object per block:

        _refs   references held by tables, and by whoever called `take`, `share` or `touch`
        _pins   references held by copies in flight (see `begin_copy`), and for ever by guards and the quarantine
        _keys   the hash under which the block is published, or None
        _gens   how often the block has become free: what makes a `BlockHandle` stale
        _next   } the free blocks as a ring in eviction order, closed over block 0:
        _prev   }   0 ⇄ reused next ⇄ … ⇄ reused last ⇄ 0

    The ring is in LRU order. With another policy, quotas or priority levels the free *published* blocks are on
    `Shelves` instead and the ring holds the others. What is not switched on costs a test for None.

    Not thread-safe: one thread owns a pool and everything built on it.
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
        "_keys",
        "_levels",
        "_next",
        "_notes_dead",
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
        self._deadlines: list[tuple[float, int, bytes]] = []  # heap of (time, block, key): when a level ends
        self._deadline_of: dict[int, float] = {}  # the one that counts, by block
        self._dead: list[int] | None = [] if poison else None
        self._notes_dead = poison or quotas is not None
        self._quarantine: set[int] = set()
        self.incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.num_incidents = 0
        self._on_stored: tuple[Callable[[Publication], None], ...] = ()
        self._on_removed: tuple[Callable[[int, bytes], None], ...] = (self._note_evicted,) if poison else ()
        self._on_freed: tuple[Callable[[int], None], ...] = ()
        self._on_reused: tuple[Callable[[int], None], ...] = ()
        self._on_cleared: tuple[Callable[[], None], ...] = ()
        self._on_quarantined: tuple[Callable[[int, str], None], ...] = ()
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

    # ── Counts, all O(1) ─────────────────────────────────────────────────────────────────────────

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

    def require_available(self, num_blocks: int, account: Account | None = None) -> None:
        """Raise what `take` would raise for so many blocks."""
        if num_blocks > self._num_free:
            raise OutOfBlocks(num_blocks, self._num_free)
        if self.quotas is not None and num_blocks > (available := self.num_available(account)):
            raise QuotaExceeded(num_blocks, available, self._space_of(account).namespace)

    def num_obtainable(self, account: Account | None = None) -> int:
        """Count the blocks that this account could hold if nobody else held any: `num_usable`, or less under quotas."""
        if self.quotas is None:
            return self.num_usable
        return self.quotas.largest(self._space_of(account), self.num_usable)

    # ── Holding blocks ───────────────────────────────────────────────────────────────────────────

    def open(self, owner: Owner | None) -> Account | None:
        """Open an account for an owner, to be given to the calls below; None where nothing is booked.

        An account needs no closing: it is listed in the ledger while it holds something.
        """
        if self.ledger is None or owner is None:
            return None if self.ledger is None else self.ledger.anonymous
        space = None if self.quotas is None else self.quotas.space(owner.namespace)
        return Account(self.ledger, owner, space)

    def take(self, num_blocks: int, account: Account | None = None) -> list[int]:
        """Take blocks from the head of the eviction order, each with one reference.

        All or nothing. A taken block that could still be found is forgotten by the index first:
        that is the only way a hash is evicted. Raises `OutOfBlocks`, as `QuotaExceeded` where blocks
        are free and the account's namespace may not have them.
        """
        if num_blocks < 0:
            raise OutOfRange("num_blocks", num_blocks, 0)
        if num_blocks > self._num_free or self.quotas is not None:
            self.require_available(num_blocks, account)
        refs, keys, index, following = self._refs, self._keys, self._index, self._next
        on_removed = self._on_removed
        taken: list[int] = []
        evicted = self._evict_for(num_blocks, account) if self._shelves is not None else ()
        num_from_ring = num_blocks - len(evicted)
        block = following[NULL_BLOCK]
        for _ in range(num_from_ring):
            if (key := keys[block]) is not None:
                del index[key]
                keys[block] = None
                self._num_free_findable -= 1
                self._num_evictions += 1
                for told in on_removed:
                    told(block, key)
            refs[block] = 1
            taken.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        for block in evicted:
            refs[block] = 1
            taken.append(block)
        self._num_free -= num_blocks
        self._num_references += num_blocks
        if self.ledger is not None:
            account = account or self.ledger.anonymous
            account.gained(taken, "take")
            if self.quotas is not None and account.space is not None:
                self.quotas.holds(account.space, num_blocks)
                account.space.resident += num_blocks
                for block in taken:
                    self._spaces[block] = account.space
        return taken

    def share(self, block: int, account: Account | None = None) -> None:
        """Add a reference to a block that somebody holds. Raises `StaleBlock` for a free one."""
        if not self._is_held(block):
            raise StaleBlock(block, "cannot be shared because nobody holds it")
        self._add_reference(block)
        if self.ledger is not None:
            (account or self.ledger.anonymous).gained((block,), "share")

    def touch(self, block: int, account: Account | None = None) -> None:
        """Use a published block again: add a reference, taking it out of the free ring if it was free.

        Raises `StaleBlock` when the block is not published: its content is anybody's.
        """
        self.hold(block, account)
        for told in self._on_reused:
            told(block)

    def hold(self, block: int, account: Account | None = None) -> None:
        """Add a reference like `touch`, for bookkeeping: no observer takes it for a use."""
        self._require_in_pool(block)
        if self._keys[block] is None:
            raise StaleBlock(block, "cannot be touched because it is not published (evicted or never filled)")
        if self._refs[block] == 0 and self._pins[block] == 0:
            self._num_free_findable -= 1
            if self._shelves is None:
                self._unlink(block)
            else:
                self._unshelve(block)
        self._add_reference(block)
        if self.ledger is not None:
            (account or self.ledger.anonymous).gained((block,), "touch")

    def release(self, blocks: Sequence[int], account: Account | None = None) -> None:
        """Give back one reference for each entry; the entries go from first to last of a sequence.

        Blocks left without a holder become free: findable ones at the end of the eviction order,
        last block first so that a tail is evicted before its prefix; the others, which can never be
        hit again, at its head. A block may occur twice if both references are the caller's.
        Raises `RefCountError` (double free: the pool, or with a ledger this account, has no such
        reference) or `StaleBlock` (not a block of this pool), and then no entry of the batch has been
        released.
        """
        if self.ledger is not None:
            account = account or self.ledger.anonymous
            account.require(blocks)
        self._require_references(blocks)
        if account is not None:
            account.lost(blocks, "release")
        refs, pins = self._refs, self._pins
        for block in reversed(blocks):
            count = refs[block] = refs[block] - 1
            if count == 1:
                self._num_shared -= 1
            elif count == 0 and pins[block] == 0:
                self._link_free(block)
        self._num_references -= len(blocks)

    def settle(self, blocks: Sequence[int], account: Account | None) -> None:
        """Give back all that an owner holds as it ends; `blocks` is what it believes to hold.

        Where the ledger agrees this is `release`. Where it does not, nothing is raised, since nobody could
        mend it: the blocks in dispute go into quarantine and the rest is released.
        """
        if account is None or self.ledger is None:
            self.release(blocks)
            return
        believed = Counter(blocks)
        if dict(believed) == account.entries:
            try:
                self.release(blocks, account)
            except RefCountError:
                pass  # the pool's own counts are damaged
            else:
                return
        for block, count in believed.items():
            if (held := account.entries.get(block, 0)) < count and 0 < block < self.num_blocks:
                self.quarantine(block, f"{account} gave back {count} references to block {block} and held {held}")
        for block, held in account.entries.items():
            if (count := believed[block]) < held:
                self.quarantine(block, f"{account} ended with {count} references to block {block} and held {held}")
        self.audit()
        self.release([*Counter(account.entries).elements()], account)

    def handle(self, block: int) -> BlockHandle:
        """Name a held block so that a use after its last release is noticed. Raises `StaleBlock` for a free one."""
        if not self._is_held(block):
            raise StaleBlock(block, "has no handle because nobody holds it")
        return BlockHandle(block, self._gens[block])

    def resolve(self, handle: BlockHandle) -> int:
        """Return the block of a handle. Raises `StaleBlock` when it has been given back since, even if it is held anew."""
        block = handle.block
        if not self._is_held(block) or self._gens[block] != handle.generation:
            reason = (
                f"was given back since the handle was made (generation {handle.generation}, now {self._gens[block]})"
            )
            raise StaleBlock(block, reason if self.ledger is None else f"{reason}; {self.ledger.explain(block)}")
        return block

    # ── Copies in flight ─────────────────────────────────────────────────────────────────────────

    def begin_copy(self, src: int, dst: int, account: Account | None = None) -> None:
        """Turn one reference to `src` into a pin and pin `dst`: the device is going to copy one to the other.

        The caller gives its reference to `src` away and keeps the one to `dst`. Both blocks stay
        held, whatever their tables do, until `finish_copies`. A pin does not make a block shared:
        copies run before the writes of their step, so the last table left on `src` may go on
        writing to it, and the owner of `dst` may append to it.
        """
        if self.ledger is not None:
            account = account or self.ledger.anonymous
            account.require((src,))
            account.require((dst,))
        self._require_references((src,))
        self._require_references((dst,))
        if src == dst or dst in self._copies:
            raise StaleBlock(dst, "cannot be copied to: it is the source, or another copy to it is in flight")
        if self.ledger is not None and account is not None:
            account.lost((src,), "begin_copy")
            self.ledger.copiers[dst] = account
        self._copies[dst] = src
        self._pins[src] += 1
        self._pins[dst] += 1
        self._refs[src] -= 1
        if self._refs[src] == 1:
            self._num_shared -= 1
        self._num_references -= 1

    def finish_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """Drop the pins of copies whose step was applied, or will never run.

        Raises `StaleBlock` when a `(src, dst)` is not in flight, before any pin was dropped.
        """
        finished = tuple(copies)
        seen = set()
        for src, dst in finished:
            if self._copies.get(dst) != src or dst in seen:
                raise StaleBlock(dst, f"is not the target of a copy in flight from block {src}")
            seen.add(dst)
        refs, pins = self._refs, self._pins
        for src, dst in finished:
            del self._copies[dst]
            if self.ledger is not None:
                self.ledger.copiers.pop(dst, None)
            for block in (src, dst):
                pins[block] -= 1
                if pins[block] == 0 and refs[block] == 0:
                    self._link_free(block)

    # ── Finding blocks ───────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        block: int,
        key: bytes,
        parent: bytes | None = None,
        depth: int = 0,
        is_public: bool = False,
        num_tokens: int | None = None,
    ) -> bool:
        """Make a held block findable under `key`; from now on its content must not change.

        Returns whether the block is the one found under `key`: the first publisher wins, a
        duplicate stays private and no table is pointed elsewhere. `parent` is the key of the block before
        it, `depth` how many precede it and `num_tokens` how many tokens it has, None if it is full: for
        observers and policies. A public block is charged to the
        namespace `PUBLIC` from now on. Raises `StaleBlock` when nobody holds the block and
        `PublishConflict` when it has another key.
        """
        if not self._is_held(block):
            raise StaleBlock(block, "cannot be published because nobody holds it")
        current = self._keys[block]
        if current is not None:
            if current != key:
                raise PublishConflict(block)
            return True
        if self._quarantine and block in self._quarantine:
            return False
        if self._index.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        if is_public and self.quotas is not None:
            self._charge_public(block, self.quotas)
        for told in self._on_stored:
            told(Publication(block, key, parent, depth, num_tokens or self.block_size))
        return True

    def find(self, key: bytes) -> int | None:
        """Return the block published under `key`, held or free; changes nothing."""
        return self._index.get(key)

    def published(self) -> list[tuple[bytes, int]]:
        """List the keys that can be found, with their blocks."""
        return list(self._index.items())

    def key_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is published, None if it is not."""
        self._require_in_pool(block)
        return self._keys[block]

    def forget_all(self) -> None:
        """Unpublish every block; those held stay held, those free keep their place in the order."""
        if self._shelves is not None:
            for block in self._shelves.clear():  # they go to the end of the ring, in their order
                self._discharge(block)
                last = self._prev[NULL_BLOCK]
                self._next[last] = self._prev[NULL_BLOCK] = block
                self._prev[block], self._next[block] = last, NULL_BLOCK
        for block in self._index.values():
            self._keys[block] = None
            if self._dead is not None and self._refs[block] == 0 and self._pins[block] == 0:
                self._dead.append(block)
        self._index.clear()
        self._levels.clear()
        self._deadline_of.clear()
        self._deadlines.clear()
        self._num_free_findable = 0
        for told in self._on_cleared:
            told()

    def retain(self, blocks: Iterable[int], level: int, until: float) -> None:
        """Set the priority level of published blocks until the clock (`advance`) reaches `until`; then it is NORMAL again.

        All blocks of a lower level are evicted before any of a higher one (of the same namespace). No level
        makes a block unavailable to `take`. Raises `StaleBlock` for an unpublished block, and `OutOfRange`.
        """
        if not 0 <= level < NUM_LEVELS:
            raise OutOfRange("level", level, 0, NUM_LEVELS - 1)
        chosen = tuple(blocks)
        for block in chosen:
            if self.key_of(block) is None:
                raise StaleBlock(block, "cannot be retained because it is not published")
        if self._shelves is None:
            self._open_shelves()
        for block in chosen:
            self._set_level(block, level)
            key = self._keys[block]
            if level != NORMAL and key is not None:
                self._deadline_of[block] = until
                heapq.heappush(self._deadlines, (until, block, key))

    def level_of(self, block: int) -> int:
        """Return the priority level of a block, `NORMAL` unless `retain` has set another."""
        self._require_in_pool(block)
        return self._levels.get(block, NORMAL)

    def advance(self, now: float) -> None:
        """Set the clock, in seconds, and end the priority levels whose time has come. Costs nothing when there is none."""
        self.now = now
        if self.ledger is not None:
            self.ledger.now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            until, block, key = heapq.heappop(self._deadlines)
            # A later `retain`, or the block's eviction, has made an earlier deadline meaningless.
            if self._keys[block] == key and self._deadline_of.get(block) == until:
                self._set_level(block, NORMAL)

    def record_lookup(self, lookup_tokens: int, hit_tokens: int) -> None:
        """Count the tokens an admitted sequence looked up and found, for the hit rate."""
        self.lookup_tokens += lookup_tokens
        self.hit_tokens += hit_tokens

    # ── Questions about one block ────────────────────────────────────────────────────────────────

    def ref_count(self, block: int) -> int:
        """Count the holders of a block: references and copies in flight."""
        self._require_in_pool(block)
        return self._refs[block] + self._pins[block]

    def is_writable(self, block: int) -> bool:
        """Say whether the one table that holds the block may write into it: unshared and unpublished.

        The caller vouches for the id (it comes from a table).
        """
        return self._refs[block] == 1 and self._keys[block] is None

    def count_free(self, blocks: Iterable[int]) -> int:
        """Count how many different blocks of these are free; touching them uses up that many."""
        refs, pins = self._refs, self._pins
        return len({block for block in blocks if refs[block] == 0 and pins[block] == 0})

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

    def namespace_of(self, block: int) -> bytes | None:
        """Return the namespace that is charged for a block, None when none is."""
        self._require_in_pool(block)
        space = self._spaces[block] if self._spaces else None
        return None if space is None else space.namespace

    def take_dead(self) -> list[int]:
        """List the blocks that became meaningless since the last call, for their owner to poison. Needs `poison`.

        Call it before each step: all of them are overwritten before they are read, or never read.
        """
        if self._dead is None:
            return []
        dead, self._dead = self._dead, []
        return list(dict.fromkeys(dead))

    # ── Self-check ───────────────────────────────────────────────────────────────────────────────

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify the whole bookkeeping in O(blocks + references); raise `InvariantBroken` saying what is wrong.

        `tables`: the block ids of every holder there is; then the references must be exactly theirs.
        """
        for finding in find_faults(self, tables):
            raise InvariantBroken(str(finding))

    def audit(self) -> list[Finding]:
        """Verify the bookkeeping as `check` does, but take the blocks concerned out of service and go on.

        Each becomes an incident; whoever holds such a block may use it and give it back as before. Free ring,
        index and counters are rebuilt from what is left. Returns what was wrong.
        """
        findings = list(find_faults(self, None))
        if findings:
            for finding in findings:
                if finding.block is not None:
                    self._seclude(finding.block, finding.problem)
            rebuild(self)
        return findings

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

    def observe(self, observer: Observer) -> None:
        """Tell `observer` about publications, evictions and reuse from now on."""
        kind = type(observer)
        for name in ("stored", "removed", "freed", "reused", "cleared", "quarantined"):
            if getattr(kind, name) is not getattr(Observer, name):
                slot = f"_on_{name}"
                setattr(self, slot, (*getattr(self, slot), getattr(observer, name)))

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _require_in_pool(self, block: int) -> None:
        # Negative ids would silently index from the end of the lists.
        if not 0 < block < self.num_blocks:
            raise StaleBlock(block, f"is not one of the blocks 1 to {self.num_blocks - 1} of this pool")

    def _is_held(self, block: int) -> bool:
        self._require_in_pool(block)
        if self._refs[block] > 0:
            return True
        return self._pins[block] > (block in self._quarantine or block in self._guards)

    def _require_references(self, blocks: Sequence[int]) -> None:
        """Raise unless every entry of the batch has a reference of its own to give back."""
        refs, num_blocks = self._refs, self.num_blocks
        for block in blocks:
            if not 0 < block < num_blocks:
                self._require_in_pool(block)
            if refs[block] == 0:
                raise RefCountError(block, held=0, released=1)
        if len(set(blocks)) != len(blocks):
            for block, released in Counter(blocks).items():
                if released > refs[block]:
                    raise RefCountError(block, held=refs[block], released=released)

    def _add_reference(self, block: int) -> None:
        count = self._refs[block] = self._refs[block] + 1
        if count == 2:
            self._num_shared += 1
        self._num_references += 1

    def _space_of(self, account: Account | None) -> Space:
        account = account or (self.ledger.anonymous if self.ledger is not None else None)
        if account is None or account.space is None:
            raise AllocatorError("an account of another pool was given")
        return account.space

    def _note_evicted(self, block: int, _key: bytes) -> None:
        if self._dead is not None and self._refs[block] == 0 and self._pins[block] == 0:
            self._dead.append(block)

    def _note_dead(self, block: int) -> None:
        """Let go of an unpublished block that has become free: nobody is charged, and its content means nothing."""
        if self._dead is not None:
            self._dead.append(block)
        self._discharge(block, is_held=True)

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
        for told in self._on_removed:
            told(block, key)

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

    # ── Shelves: what quotas, levels and policies other than LRU need ────────────────────────────

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

    def _shelve(self, block: int) -> None:
        """Put a published block that has become free on its shelf."""
        assert self._shelves is not None
        space = self._spaces[block] if self._spaces else None
        if self.quotas is not None and space is not None:
            self.quotas.holds(space, -1)
        self._shelves.add(block, space, self._levels.get(block, NORMAL))
        self._num_free += 1

    def _unshelve(self, block: int) -> None:
        """Take a free published block off its shelf."""
        assert self._shelves is not None
        space = self._spaces[block] if self._spaces else None
        self._shelves.remove(block, space, self._levels.get(block, NORMAL))
        self._num_free -= 1
        if self.quotas is not None and space is not None:
            self.quotas.holds(space, 1)

    def _evict_for(self, num_blocks: int, account: Account | None) -> list[int]:
        """Choose and unpublish the shelved blocks that `take` needs; none while the ring has enough."""
        shelves = self._shelves
        assert shelves is not None
        space, num_own = None, 0
        if self.quotas is not None:
            space = self._space_of(account)
            if space.quota.cap is not None:  # at its cap a namespace recycles its own cache
                num_own = max(0, space.resident + num_blocks - space.quota.cap)
        num_plain = self._num_free - self._num_free_findable
        num_victims = max(num_own, num_blocks - num_plain)
        victims = []
        for index in range(num_victims):  # one by one: each changes who is furthest above its share
            block = shelves.pop(space, num_blocks, own_only=index < num_own)
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

    # ── The free ring ────────────────────────────────────────────────────────────────────────────

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link_free(self, block: int) -> None:
        """Make a block nobody holds any more free: published ones last in the order, others first."""
        self._gens[block] += 1
        following, preceding = self._next, self._prev
        if self._keys[block] is not None:
            self._num_free_findable += 1
            for told in self._on_freed:
                told(block)
            if self._shelves is not None:
                self._shelve(block)
                return
            before, after = preceding[NULL_BLOCK], NULL_BLOCK
        else:
            before, after = NULL_BLOCK, following[NULL_BLOCK]
            if self._notes_dead:
                self._note_dead(block)
        following[before] = block
        preceding[block] = before
        following[block] = after
        preceding[after] = block
        self._num_free += 1
