"""The block table: which block holds each position of one sequence.

It grows, forks and shrinks by whole blocks and says which block copies the device must make. It
never touches KV: the engine runs the copies before the step's writes.

Invariant: a table has exactly the blocks its tokens need, and every slot it reserves lies in a
block that it alone holds and that is not published.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from allocator.errors import OutOfRange, StaleBlock, TableNotEmpty
from allocator.ledger import Account, Owner
from allocator.pool import BlockPool
from allocator.prefix import Match


class Growth(NamedTuple):
    """What a table gained: blocks appended at its end, and copies to run before the step's writes.

    Both ends of every copy stay held until `pool.finish_copies(growth.copies)`.
    """

    new_blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]  # (src, dst); dst has replaced src in the table


NO_GROWTH = Growth((), ())
TABLE = Owner("sequence", "without a name")


class BlockTable:
    """Map the positions `0 … num_tokens - 1` of a sequence to slots of the pool.

    A table that is empty, be it new or released, holds nothing and may be used (again).
    """

    __slots__ = ("_account", "_block_ids", "_block_size", "_num_tokens", "_pool")

    def __init__(self, pool: BlockPool, owner: Owner | None = None) -> None:
        """`owner`: in whose name a pool with a ledger books the blocks, and whose namespace is charged."""
        self._pool = pool
        self._account = pool.open(owner or TABLE)
        self._block_size = pool.block_size
        self._block_ids: list[int] = []
        self._num_tokens = 0

    @property
    def block_ids(self) -> Sequence[int]:
        """The live list of blocks, to read now; `snapshot` gives one to keep."""
        return self._block_ids

    @property
    def num_tokens(self) -> int:
        """Count the slots reserved, written or not."""
        return self._num_tokens

    @property
    def account(self) -> Account | None:
        """The account its references are booked under, None in a pool without a ledger."""
        return self._account

    @property
    def num_tail_slots(self) -> int:
        """Count the slots of the last block that no token uses."""
        return -self._num_tokens % self._block_size

    @property
    def num_reclaimable(self) -> int:
        """Count the blocks that `release` would free; O(blocks). What preempting the sequence gains."""
        entries = Counter(self._block_ids)
        return sum(self._pool.ref_count(block) == count for block, count in entries.items())

    def append(self, num_tokens: int) -> Growth:
        """Reserve slots for `num_tokens` more tokens.

        If the partly filled last block is shared or published, it is replaced by a copy. Raises
        `OutOfBlocks` (nothing changed), `OutOfRange` for a negative count, and `RefCountError` where the books
        deny it that block.
        """
        filled = self._num_tokens % self._block_size  # slots used in the last block, 0 = it is full
        if 0 < num_tokens <= self._block_size - filled and filled and self._pool.is_writable(self._block_ids[-1]):
            self._num_tokens += num_tokens  # the usual decode step: no new block
            return NO_GROWTH
        needed = self.blocks_needed(num_tokens)
        copies = self._needs_copy(num_tokens)
        if copies:
            self._pool.require_held(self._block_ids[-1:], self._account)
        taken = self._pool.take(needed, self._account)
        self._num_tokens += num_tokens
        if not copies:
            self._block_ids += taken
            return Growth(tuple(taken), ())
        src, dst = self._block_ids[-1], taken[0]
        self._pool.begin_copy(src, dst, self._account)
        self._block_ids[-1:] = taken
        return Growth(tuple(taken[1:]), ((src, dst),))

    def blocks_needed(self, num_tokens: int, match: Match | None = None) -> int:
        """Count the free blocks that appending would use up, the copy of a shared last block included.

        With `match`: what `adopt(match, num_tokens)` would use up, hits that sit among the free
        blocks included.
        """
        if num_tokens < 0:
            raise OutOfRange("num_tokens", num_tokens, 0)
        if match is not None:
            end = match.num_tokens + num_tokens
            hits = match.block_ids if match.partial is None else (*match.block_ids, match.partial.block_id)
            return -(-end // self._block_size) - len(match.block_ids) + self._pool.count_free(hits)
        end = self._num_tokens + num_tokens
        return -(-end // self._block_size) - len(self._block_ids) + self._needs_copy(num_tokens)

    def adopt(self, match: Match, num_tokens: int) -> Growth:
        """Start an empty table with the blocks of `match` and reserve `num_tokens` slots after them.

        One atomic step: the hits are held first, so taking the new blocks cannot evict them. A partial hit
        is copied to the first new block, and held until `pool.finish_copies(growth.copies)`. Also
        counts the lookup for the hit rate, so sequences without a hit should come through here too.
        Raises `TableNotEmpty`, `OutOfBlocks`, and `StaleBlock` when a matched block was reused since
        the match (match again).
        """
        if self._block_ids:
            raise TableNotEmpty(self._num_tokens)
        pool = self._pool
        for block, key in zip(match.block_ids, match.hashes, strict=True):
            if pool.key_of(block) != key:
                raise StaleBlock(block, "was reused after it was matched")
        partial = match.partial
        if partial is not None and pool.key_of(partial.block_id) != partial.block_hash:
            raise StaleBlock(partial.block_id, "was reused after it was matched")
        needed = self.blocks_needed(num_tokens, match)
        pool.require_available(needed, self._account)
        for block in match.block_ids:
            pool.touch(block, self._account)
        if partial is not None:
            pool.touch(partial.block_id, self._account)
        num_hits = len(match.block_ids)
        end = match.num_tokens + num_tokens
        taken = pool.take(-(-end // self._block_size) - num_hits, self._account)
        self._block_ids = [*match.block_ids, *taken]
        self._num_tokens = end
        pool.record_lookup(match.num_lookup_tokens, match.num_tokens)
        if partial is None:
            return Growth(tuple(taken), ())
        pool.begin_copy(partial.block_id, taken[0], self._account)
        return Growth(tuple(taken[1:]), ((partial.block_id, taken[0]),))

    def fork(self, owner: Owner | None = None) -> "BlockTable":
        """Return a table over the same blocks; whoever first appends to a shared tail gets a copy.

        `owner`: who holds the child's references, by default the same as this table's.

        Fork between steps: the child's copy of the tail runs before the next writes, so every slot
        of the parent must have been written by a step that was launched earlier.
        """
        if owner is None and self._account is not None:
            owner = self._account.owner
        child = BlockTable(self._pool, owner)
        self._pool.share_all(self._block_ids, child._account)
        child._block_ids = self._block_ids.copy()
        child._num_tokens = self._num_tokens
        return child

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and release the blocks past them.

        A block cut in half stays published if it was, so the next append copies it. Raises
        `OutOfRange`.
        """
        if not 0 <= num_tokens <= self._num_tokens:
            raise OutOfRange("num_tokens", num_tokens, 0, self._num_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        self._pool.release(self._block_ids[num_blocks:], self._account)
        del self._block_ids[num_blocks:]
        self._num_tokens = num_tokens

    def release(self) -> None:
        """Give back every block; a second call finds nothing to give back and does nothing.

        With a ledger a disagreement about what it holds is quarantined, not raised (`BlockPool.settle`).
        """
        self._pool.settle(self._block_ids, self._account)
        self._block_ids = []
        self._num_tokens = 0

    def slot(self, position: int) -> int:
        """Return where a token's KV lives: `block_ids[position // B] * B + position % B`."""
        if not 0 <= position < self._num_tokens:
            raise OutOfRange("position", position, 0, self._num_tokens - 1)
        block_size = self._block_size
        return self._block_ids[position // block_size] * block_size + position % block_size

    def snapshot(self) -> tuple[int, ...]:
        """Copy the block ids, for a step that must not see later changes."""
        return tuple(self._block_ids)

    def _needs_copy(self, num_tokens: int) -> bool:
        """Say whether the first of `num_tokens` new slots lies in a block this table must not write."""
        partly_filled = self._num_tokens % self._block_size > 0
        return num_tokens > 0 and partly_filled and not self._pool.is_writable(self._block_ids[-1])
