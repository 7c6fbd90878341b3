"""The block pool: who holds each block, and in which order free blocks are reused.

It knows block ids and counts. It does not know tokens, tensors or sequences: `table.py` maps
positions to blocks, `prefix.py` computes the hashes under which blocks can be found again.

Invariant: a block is free exactly when nobody holds it, and a free block can still be *found* by
its hash until `take` hands it out again. So there is no separate cache: every free block is cache.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from allocator.errors import (
    InvariantBroken,
    OutOfBlocks,
    OutOfRange,
    PublishConflict,
    RefCountError,
    StaleBlock,
)

NULL_BLOCK = 0  # what padding points at; never handed out, never counted


class BlockPool:
    """Hand out, share and take back the blocks `1 … num_blocks - 1`.

    Block 0 is the null block. All state is in lists of ints indexed by block id, so that a step
    creates no object per block:

        _refs   references held by tables, and by whoever called `take`, `share` or `touch`
        _pins   references held by copies in flight (see `begin_copy`)
        _keys   the hash under which the block is published, or None
        _next   } the free blocks as a ring in eviction order, closed over block 0:
        _prev   }   0 ⇄ reused next ⇄ … ⇄ reused last ⇄ 0

    Not thread-safe: one thread owns a pool and everything built on it.
    """

    __slots__ = (
        "_copies",
        "_index",
        "_keys",
        "_next",
        "_num_evictions",
        "_num_free",
        "_num_free_findable",
        "_num_references",
        "_num_shared",
        "_pins",
        "_prev",
        "_refs",
        "block_size",
        "hit_tokens",
        "lookup_tokens",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make a pool of free blocks of `block_size` slots each; block 0 counts in `num_blocks`."""
        if num_blocks < 2:
            raise OutOfRange("num_blocks", num_blocks, 2)
        if block_size < 1:
            raise OutOfRange("block_size", block_size, 1)
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

    # ── Counts, all O(1) ─────────────────────────────────────────────────────────────────────────

    @property
    def num_usable(self) -> int:
        """Count the blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Count the blocks nobody holds, findable ones included: what `take` can hand out."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Count the blocks that somebody holds."""
        return self.num_blocks - 1 - self._num_free

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

    # ── Holding blocks ───────────────────────────────────────────────────────────────────────────

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the eviction order, each with one reference.

        All or nothing. A taken block that could still be found is forgotten by the index first:
        that is the only way a hash is evicted. Raises `OutOfBlocks`.
        """
        if num_blocks < 0:
            raise OutOfRange("num_blocks", num_blocks, 0)
        if num_blocks > self._num_free:
            raise OutOfBlocks(needed=num_blocks, free=self._num_free)
        refs, keys, following = self._refs, self._keys, self._next
        taken = []
        block = following[NULL_BLOCK]
        for _ in range(num_blocks):
            key = keys[block]
            if key is not None:
                del self._index[key]
                keys[block] = None
                self._num_free_findable -= 1
                self._num_evictions += 1
            refs[block] = 1
            taken.append(block)
            block = following[block]
        following[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self._num_free -= num_blocks
        self._num_references += num_blocks
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block that somebody holds. Raises `StaleBlock` for a free one."""
        if not self._is_held(block):
            raise StaleBlock(block, "cannot be shared because nobody holds it")
        self._add_reference(block)

    def touch(self, block: int) -> None:
        """Add a reference to a published block, taking it out of the free ring if it was free.

        Raises `StaleBlock` when the block is not published: its content is anybody's.
        """
        self._require_in_pool(block)
        if self._keys[block] is None:
            raise StaleBlock(block, "cannot be touched because it is not published (evicted or never filled)")
        if self._refs[block] == 0 and self._pins[block] == 0:
            self._unlink(block)
            self._num_free_findable -= 1
        self._add_reference(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference for each entry; the entries go from first to last of a sequence.

        Blocks left without a holder become free: findable ones at the end of the eviction order,
        last block first so that a tail is evicted before its prefix; the others, which can never be
        hit again, at its head. A block may occur twice if both references are the caller's.
        Raises `RefCountError` (double free) or `StaleBlock` (not a block of this pool), and then
        no entry of the batch has been released.
        """
        self._require_references(blocks)
        refs, pins = self._refs, self._pins
        for block in reversed(blocks):
            count = refs[block] = refs[block] - 1
            if count == 1:
                self._num_shared -= 1
            elif count == 0 and pins[block] == 0:
                self._link_free(block)
        self._num_references -= len(blocks)

    # ── Copies in flight ─────────────────────────────────────────────────────────────────────────

    def begin_copy(self, src: int, dst: int) -> None:
        """Turn one reference to `src` into a pin and pin `dst`: the device is going to copy one to the other.

        The caller gives its reference to `src` away and keeps the one to `dst`. Both blocks stay
        held, whatever their tables do, until `finish_copies`. A pin does not make a block shared:
        copies run before the writes of their step, so the last table left on `src` may go on
        writing to it, and the owner of `dst` may append to it.
        """
        self._require_references((src,))
        self._require_references((dst,))
        if src == dst or dst in self._copies:
            raise StaleBlock(dst, "cannot be copied to: it is the source, or another copy to it is in flight")
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
            for block in (src, dst):
                pins[block] -= 1
                if pins[block] == 0 and refs[block] == 0:
                    self._link_free(block)

    # ── Finding blocks ───────────────────────────────────────────────────────────────────────────

    def publish(self, block: int, key: bytes) -> bool:
        """Make a held block findable under `key`; from now on its content must not change.

        Returns whether the block is the one found under `key`: the first publisher wins, a
        duplicate stays private and no table is pointed elsewhere. Raises `StaleBlock` when nobody
        holds the block and `PublishConflict` when it has another key.
        """
        if not self._is_held(block):
            raise StaleBlock(block, "cannot be published because nobody holds it")
        current = self._keys[block]
        if current is not None:
            if current != key:
                raise PublishConflict(block)
            return True
        if self._index.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        return True

    def find(self, key: bytes) -> int | None:
        """Return the block published under `key`, held or free; changes nothing."""
        return self._index.get(key)

    def key_of(self, block: int) -> bytes | None:
        """Return the hash under which a block is published, None if it is not."""
        self._require_in_pool(block)
        return self._keys[block]

    def forget_all(self) -> None:
        """Unpublish every block; those held stay held, those free keep their place in the order."""
        for block in self._index.values():
            self._keys[block] = None
        self._index.clear()
        self._num_free_findable = 0

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
        """List the free blocks in the order in which they will be reused (for tests and debugging)."""
        free = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            free.append(block)
            block = self._next[block]
        return free

    # ── Self-check ───────────────────────────────────────────────────────────────────────────────

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify the whole bookkeeping in O(num_blocks); raise `InvariantBroken` saying what is wrong.

        `tables`: the block ids of every holder there is; then the references must be exactly theirs.
        """
        free = self._check_ring()
        self._check_counts(free)
        self._check_index()
        pins = Counter(self._copies.values()) + Counter(self._copies.keys())
        for block, count in enumerate(self._pins):
            if count != pins[block]:
                raise InvariantBroken(f"block {block} has {count} pins and {pins[block]} copies in flight touch it")
        if tables is not None:
            held = Counter(block for block_ids in tables for block in block_ids)
            for block, count in enumerate(self._refs):
                if count != held[block]:
                    raise InvariantBroken(f"block {block} has {count} references and the tables hold {held[block]}")

    def _check_ring(self) -> set[int]:
        free: set[int] = set()
        previous, block = NULL_BLOCK, self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if block in free:
                raise InvariantBroken(f"block {block} is in the free ring twice")
            if self._prev[block] != previous:
                raise InvariantBroken(
                    f"block {block} follows {previous} in the free ring but points back to {self._prev[block]}"
                )
            free.add(block)
            previous, block = block, self._next[block]
        if self._prev[NULL_BLOCK] != previous:
            raise InvariantBroken(f"the free ring ends at {previous}, not at {self._prev[NULL_BLOCK]}")
        return free

    def _check_counts(self, free: set[int]) -> None:
        if self._refs[NULL_BLOCK] or self._pins[NULL_BLOCK] or self._keys[NULL_BLOCK] is not None:
            raise InvariantBroken("the null block is held, pinned or published")
        for block in range(1, self.num_blocks):
            count = self._refs[block] + self._pins[block]
            if min(self._refs[block], self._pins[block]) < 0:
                raise InvariantBroken(f"block {block} has a negative count")
            if (count == 0) != (block in free):
                raise InvariantBroken(
                    f"block {block} has {count} holders and is {'' if block in free else 'not '}in the free ring"
                )
        expected = {
            "num_free": (self._num_free, len(free)),
            "num_free_findable": (
                self._num_free_findable,
                sum(self._keys[block] is not None for block in free),
            ),
            "num_references": (self._num_references, sum(self._refs)),
            "num_shared": (self._num_shared, sum(count > 1 for count in self._refs)),
        }
        for name, (counter, counted) in expected.items():
            if counter != counted:
                raise InvariantBroken(f"{name} says {counter} and counting gives {counted}")

    def _check_index(self) -> None:
        for key, block in self._index.items():
            if self._keys[block] != key:
                raise InvariantBroken(f"the index finds block {block} under a hash that is not the block's")
        published = sum(key is not None for key in self._keys)
        if published != len(self._index):
            raise InvariantBroken(f"{published} blocks have a hash and the index knows {len(self._index)}")

    # ── Helpers ──────────────────────────────────────────────────────────────────────────────────

    def _require_in_pool(self, block: int) -> None:
        # Negative ids would silently index from the end of the lists.
        if not 0 < block < self.num_blocks:
            raise StaleBlock(block, f"is not one of the blocks 1 to {self.num_blocks - 1} of this pool")

    def _is_held(self, block: int) -> bool:
        self._require_in_pool(block)
        return self._refs[block] > 0 or self._pins[block] > 0

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

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link_free(self, block: int) -> None:
        """Put a block nobody holds any more into the free ring: at its end if findable, else at its head."""
        following, preceding = self._next, self._prev
        if self._keys[block] is not None:
            before, after = preceding[NULL_BLOCK], NULL_BLOCK
            self._num_free_findable += 1
        else:
            before, after = NULL_BLOCK, following[NULL_BLOCK]
        following[before] = block
        preceding[block] = before
        following[block] = after
        preceding[after] = block
        self._num_free += 1
