"""Eviction: which free cached block is forgotten first.

An `EvictionOrder` ranks blocks; `Shelves` keeps one for each namespace and priority level and picks the
namespace, then the level, then the block. A pool that uses neither quotas, levels nor another policy than LRU
does without this file: its free ring is in LRU order already.

Invariant: a block is on the shelves exactly while it is free and published.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from allocator.observer import Observer, Publication
from allocator.quota import Quotas, Space

LOW, NORMAL, HIGH = 0, 1, 2  # priority levels: all blocks of a lower one are evicted before any of a higher one
NUM_LEVELS = 3

MAX_USES = 3  # hits beyond these say nothing more about the next one
ATTENTION_TOKENS = 98_304  # a token after so many costs about twice what the first one does (both measured on traces)


class BlockFacts(Observer):
    """What a policy may weigh about published blocks, by block id."""

    __slots__ = ("block_size", "depths", "uses")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.depths = [0] * num_blocks  # blocks that precede it in its prefix
        self.uses = [0] * num_blocks  # times it was found since it was published

    def stored(self, publication: Publication) -> None:
        """Observe a publication."""
        self.depths[publication.block] = publication.depth
        self.uses[publication.block] = 0

    def reused(self, block: int) -> None:
        """Observe a hit."""
        self.uses[block] += 1


class EvictionOrder(Protocol):
    """An order of free cached blocks; every call is O(log blocks) or better, iteration excepted."""

    def add(self, block: int) -> None:
        """Take in a block that has just become free (never one that is in it)."""

    def remove(self, block: int) -> None:
        """Let go of a block, which is in it."""

    def pop(self) -> int:
        """Choose the next block to evict and let go of it; it is not empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """List the blocks, the next victim first (for tests and debugging)."""


class LruOrder:
    """Least recently released first. A sequence releases its last block first, so prefixes outlive their tails."""

    __slots__ = ("_blocks",)

    def __init__(self, _facts: BlockFacts) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        """Put it last."""
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """Let go of it."""
        del self._blocks[block]

    def pop(self) -> int:
        """Take the first."""
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class CostAwareOrder:
    """Greedy-dual: evict the block with the least value, where value = age floor + frequency × recompute cost.

    The age floor is the value of the last victim (Cao and Irani 1997; with frequency: Cherkasova 1998), so
    whatever is not used again is overtaken by all that came later. Frequency is 1 and the hits so far, at most
    `MAX_USES`. Recomputing a token costs the same everywhere, and more by its attention over those before it:
    twice as much after `ATTENTION_TOKENS`. A block is worth at least as much as its successor in the prefix,
    which is useless without it, so prefixes still shrink from their end.
    """

    __slots__ = ("_depth", "_entries", "_facts", "_floor", "_heap", "_turn", "_worth")

    def __init__(self, facts: BlockFacts) -> None:
        self._facts = facts
        self._depth, self._worth = 0, 0.0  # of the block added last: a sequence releases its last block first
        self._floor = 0.0
        self._turn = 0  # equal values: least recently released first
        self._entries: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []  # (value, turn, block), outdated ones included

    def add(self, block: int) -> None:
        """Value it as it is now."""
        self._turn += 1
        facts = self._facts
        depth = facts.depths[block]
        worth = (1 + min(facts.uses[block], MAX_USES)) * (1.0 + depth * facts.block_size / ATTENTION_TOKENS)
        if depth + 1 == self._depth:
            worth = max(worth, self._worth)
        self._depth, self._worth = depth, worth
        entry = (self._floor + worth, self._turn, block)
        self._entries[block] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:  # keep what `remove` left behind in bounds
            self._heap = sorted(self._entries.values())

    def remove(self, block: int) -> None:
        """Let go of it; its place in the heap is passed over later."""
        del self._entries[block]

    def pop(self) -> int:
        """Take the block of least value and raise the age floor to it."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) == entry:
                self._floor = entry[0]
                del self._entries[entry[2]]
                return entry[2]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return (block for _, _, block in sorted(self._entries.values()))


Policy = Callable[[BlockFacts], EvictionOrder]

POLICIES: dict[str, Policy] = {"lru": LruOrder, "cost": CostAwareOrder}


class Shelves:
    """The free cached blocks of a pool, by namespace and priority level."""

    __slots__ = ("_levels", "_policy", "facts", "quotas")

    def __init__(self, policy: Policy, facts: BlockFacts, quotas: Quotas | None) -> None:
        self._policy = policy
        self.facts = facts
        self.quotas = quotas
        self._levels: dict[Space | None, list[EvictionOrder]] = {}

    def add(self, block: int, space: Space | None, level: int) -> None:
        """Shelve a block that has become free."""
        levels = self._levels.get(space)
        if levels is None:
            levels = self._levels[space] = [self._policy(self.facts) for _ in range(NUM_LEVELS)]
        levels[level].add(block)

    def remove(self, block: int, space: Space | None, level: int) -> None:
        """Take a block off its shelf."""
        levels = self._levels[space]
        levels[level].remove(block)
        if space is not None and not any(map(len, levels)):
            del self._levels[space]

    def victims(self, taker: Space | None, num_blocks: int, num_own: int, num_victims: int) -> Iterator[int]:
        """Choose blocks to evict for `taker`, which takes `num_blocks`: `num_own` of its own, the others from whoever
        is furthest above its share at that moment.

        What the taker is about to have counts as its own; a namespace at its floor or below gives nothing to others.
        The caller books each victim before it asks for the next. O(namespaces) once, then O(log) a block.
        """
        if self.quotas is None or taker is None:
            for _ in range(num_victims):
                yield self._pop(None)
            return
        for _ in range(num_own):
            yield self._pop(taker)
        if num_own == num_victims:
            return
        candidates = [
            (-space.excess(num_blocks if space is taker else 0), turn, space)
            for turn, space in enumerate(self._levels)
            if space is not None and (space is taker or not space.is_protected)
        ]
        heapq.heapify(candidates)
        for _ in range(num_victims - num_own):
            _, turn, space = candidates[0]
            yield self._pop(space)
            if space in self._levels and (space is taker or not space.is_protected):
                excess = space.excess(num_blocks if space is taker else 0)
                heapq.heapreplace(candidates, (-excess, turn, space))
            else:
                heapq.heappop(candidates)

    def _pop(self, space: Space | None) -> int:
        levels = self._levels[space]
        block = next(level.pop() for level in levels if len(level))
        if space is not None and not any(map(len, levels)):
            del self._levels[space]
        return block

    def clear(self) -> list[int]:
        """Empty every shelf and list what was on them, first victims first."""
        blocks = list(self)
        self._levels.clear()
        return blocks

    def __iter__(self) -> Iterator[int]:
        """List the blocks by namespace and level: the order of reuse where there is one namespace."""
        for levels in self._levels.values():
            for level in levels:
                yield from level
