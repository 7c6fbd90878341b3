"""A block allocator as a textbook would write it, on dicts and lists: what `allocator/` is compared with.

It does the same job, no more and no less fast than plain Python allows: a stack of free blocks, a dict of reference counts, a list of
blocks for each sequence, cached blocks in an `OrderedDict`, content found by hash. Checks that the caller could make are left out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict


class TextbookAllocator:
    """Blocks of `block_size` slots, handed out to sequences by name."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks - 1, -1, -1))
        self.refs: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.cached: OrderedDict[int, bytes] = OrderedDict()  # free blocks with content, least recently used first
        self.by_hash: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def append(self, sequence: int, num_tokens: int) -> tuple[int, int] | None:
        """Give a sequence slots for more tokens; returns a copy (src, dst) if its last block had to be replaced."""
        table = self.tables.setdefault(sequence, [])
        length = self.lengths.get(sequence, 0)
        copy = None
        if length % self.block_size:
            last = table[-1]
            if self.refs[last] > 1 or last in self.hash_of:
                copy = (last, self.take())
                self.refs[last] -= 1
                table[-1] = copy[1]
        length += num_tokens
        for _ in range(-(-length // self.block_size) - len(table)):
            table.append(self.take())
        self.lengths[sequence] = length
        return copy

    def take(self) -> int:
        """Take a free block, of the cached ones the oldest when there is no other."""
        if self.free:
            block = self.free.pop()
        else:
            block, key = self.cached.popitem(last=False)
            del self.by_hash[key]
            del self.hash_of[block]
        self.refs[block] = 1
        return block

    def release(self, sequence: int) -> None:
        """Give back every block of a sequence, last first."""
        refs = self.refs
        for block in reversed(self.tables.pop(sequence)):
            refs[block] -= 1
            if not refs[block]:
                del refs[block]
                key = self.hash_of.get(block)
                if key is None:
                    self.free.append(block)
                else:
                    self.cached[block] = key
        del self.lengths[sequence]

    def fork(self, parent: int, child: int) -> None:
        """Let a new sequence share the blocks of another."""
        refs = self.refs
        table = self.tables[parent]
        for block in table:
            refs[block] += 1
        self.tables[child] = table.copy()
        self.lengths[child] = self.lengths[parent]

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block findable."""
        if self.by_hash.setdefault(key, block) == block:
            self.hash_of[block] = key

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Hash the full blocks of a prompt, each with all before it."""
        parent = b""
        found = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            parent = hashlib.sha256(parent + array("I", tokens[end - self.block_size : end]).tobytes()).digest()
            found.append(parent)
        return found

    def match(self, hashes: list[bytes]) -> list[int]:
        """Find the cached blocks of a prompt's beginning."""
        blocks = []
        for key in hashes:
            block = self.by_hash.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
