"""The block pool: who holds each block, and under which hash it can be found.

It knows block ids and counts. It does not know tokens, tensors or sequences: `table.py` maps
positions to blocks, `prefix.py` computes the hashes under which blocks can be found again,
`free_order.py` keeps the free ones in order, `audit.py` verifies the bookkeeping and repairs it.

Invariant: a block is free exactly when nobody holds it, and a free block can still be *found* by
its hash until `take` hands it out again. So there is no separate cache: every free block is cache.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from allocator.audit import Finding, find_faults, rebuild
from allocator.errors import InvariantBroken, OutOfBlocks, OutOfRange, PublishConflict, RefCountError, StaleBlock
from allocator.free_order import NULL_BLOCK, FreeOrder
from allocator.ledger import Account, Owner
from allocator.observer import Publication


class BlockHandle(NamedTuple):
    """A block as somebody knew it: stale as soon as its last holder has given it back."""

    block: int
    generation: int


class BlockPool(FreeOrder):
    """Hand out, share and take back the blocks `1 … num_blocks - 1`; block 0 is the null block.

    Not thread-safe: one thread owns a pool and everything built on it.
    """

    __slots__ = ()

    # ── Holding blocks ────────────────────────────────────────────────────────────────────────────────

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
        if num_blocks > self._num_free:
            raise OutOfBlocks(needed=num_blocks, free=self._num_free)
        is_plain, num_from_ring = self._is_plain, num_blocks
        if not is_plain:
            evicted = self._evict_for(num_blocks, account)
            num_from_ring -= len(evicted)
        refs, keys, index, following = self._refs, self._keys, self._index, self._next
        taken: list[int] = []
        block = following[NULL_BLOCK]
        for _ in range(num_from_ring):
            if (key := keys[block]) is not None:
                del index[key]
                keys[block] = None
                self._num_free_findable -= 1
                self._num_evictions += 1
                if not is_plain:
                    self._tell_removed(block, key)
            refs[block] = 1
            taken.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self._num_free -= num_blocks
        self._num_references += num_blocks
        if not is_plain:
            for block in evicted:
                refs[block] = 1
                taken.append(block)
            self._book_taken(taken, account)
        return taken

    def share(self, block: int, account: Account | None = None) -> None:
        """Add a reference to a block that somebody holds. Raises `StaleBlock` for a free one."""
        self.share_all((block,), account)

    def share_all(self, blocks: Sequence[int], account: Account | None = None) -> None:
        """Add a reference for each entry, all of them held; a block may occur twice. Raises `StaleBlock`."""
        refs, num_blocks = self._refs, self.num_blocks
        for block in blocks:
            if not (0 < block < num_blocks and refs[block]) and not self._is_held(block):
                raise StaleBlock(block, "cannot be shared because nobody holds it")
        for block in blocks:
            count = refs[block] = refs[block] + 1
            if count == 2:
                self._num_shared += 1
        self._num_references += len(blocks)
        if self.ledger is not None:
            (account or self.ledger.anonymous).gained(blocks, "share")

    def touch(self, block: int, account: Account | None = None, *, is_use: bool = True) -> None:
        """Add a reference to a published block, taking it out of the free ring if it was free.

        `is_use` False: held for bookkeeping, and no observer takes it for a hit. Raises `StaleBlock` when the
        block is not published: its content is anybody's.
        """
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
        if self._is_plain:
            return
        if is_use:
            for told in self._on_reused:
                told(block)
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
        if self.ledger is None:
            self._require_references(blocks)
        else:
            self.require_held(blocks, account)
            (account or self.ledger.anonymous).lost(blocks, "release")
        refs, pins = self._refs, self._pins
        freed = []
        for block in reversed(blocks):
            count = refs[block] = refs[block] - 1
            if count == 1:
                self._num_shared -= 1
            elif count == 0 and pins[block] == 0:
                freed.append(block)
        if freed:
            self._link_free(freed)
        self._num_references -= len(blocks)

    def require_held(self, blocks: Sequence[int], account: Account | None = None) -> None:
        """Raise what `release` would raise for these blocks."""
        if self.ledger is not None:
            (account or self.ledger.anonymous).require(blocks)
        self._require_references(blocks)

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

    # ── Copies in flight ──────────────────────────────────────────────────────────────────────────────

    def begin_copy(self, src: int, dst: int, account: Account | None = None) -> None:
        """Turn one reference to `src` into a pin and pin `dst`: the device is going to copy one to the other.

        The caller gives its reference to `src` away and keeps the one to `dst`. Both blocks stay
        held, whatever their tables do, until `finish_copies`. A pin does not make a block shared:
        copies run before the writes of their step, so the last table left on `src` may go on
        writing to it, and the owner of `dst` may append to it.
        """
        self.require_held((src,), account)
        self.require_held((dst,), account)
        if src == dst or dst in self._copies:
            raise StaleBlock(dst, "cannot be copied to: it is the source, or another copy to it is in flight")
        if self.ledger is not None:
            account = account or self.ledger.anonymous
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
                    self._link_free((block,))

    # ── Finding blocks ────────────────────────────────────────────────────────────────────────────────

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

    def record_lookup(self, lookup_tokens: int, hit_tokens: int) -> None:
        """Count the tokens an admitted sequence looked up and found, for the hit rate."""
        self.lookup_tokens += lookup_tokens
        self.hit_tokens += hit_tokens

    # ── Questions about one block ─────────────────────────────────────────────────────────────────────

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

    # ── Self-check ────────────────────────────────────────────────────────────────────────────────────

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

    # ── Helpers ───────────────────────────────────────────────────────────────────────────────────────

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
        if len(blocks) > 1 and len(set(blocks)) != len(blocks):
            for block, released in Counter(blocks).items():
                if released > refs[block]:
                    raise RefCountError(block, held=refs[block], released=released)

    def _add_reference(self, block: int) -> None:
        count = self._refs[block] = self._refs[block] + 1
        if count == 2:
            self._num_shared += 1
        self._num_references += 1

    def _book_taken(self, taken: list[int], account: Account | None) -> None:
        """Book fresh blocks under their owner and charge its namespace."""
        if self.ledger is None:
            return
        account = account or self.ledger.anonymous
        account.gained(taken, "take")
        if self.quotas is not None and account.space is not None:
            self.quotas.holds(account.space, len(taken))
            account.space.resident += len(taken)
            for block in taken:
                self._spaces[block] = account.space
