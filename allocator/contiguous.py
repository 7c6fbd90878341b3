"""Contiguous reservation: what serving looked like before paging, kept to measure against. The engine does not use it.

A sequence gets one unbroken run of slots, as long as it may ever become, before its first token: the
most straightforward KV cache there is. Two ways to place the runs: best fit, and buddies.

Invariant: spans never overlap, and a span keeps its place until it is released.
"""

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol

from allocator.errors import OutOfRange, OutOfSlots, StaleSpan


class Span(NamedTuple):
    """Slots `start … start + num_slots - 1`; a place may take more than was asked for (`BuddyArena`)."""

    start: int
    num_slots: int


class Arena(Protocol):
    """A fixed number of slots out of which spans are cut."""

    num_slots: int

    @property
    def num_free(self) -> int:
        """Count the slots in no span, in one piece or in many."""
        ...

    @property
    def largest_free(self) -> int:
        """Count the slots of the longest span that could be reserved now."""
        ...

    def reserve(self, num_slots: int) -> Span:
        """Cut out a span of at least `num_slots`; raises `OutOfSlots` (nothing changed) or `OutOfRange`."""
        ...

    def release(self, span: Span) -> None:
        """Give a span back; raises `StaleSpan` when it is not one that `reserve` returned and nobody released."""
        ...


class BestFitArena:
    """Use the shortest hole that is long enough, the first of equals; neighbouring holes merge at once.

    `reserve` and `release` are O(log holes) comparisons and one move within a sorted list.
    """

    __slots__ = ("_by_size", "_ends", "_held", "_num_free", "_starts", "num_slots")

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise OutOfRange("num_slots", num_slots, 1)
        self.num_slots = num_slots
        self._num_free = 0
        self._by_size: list[tuple[int, int]] = []  # holes as (slots, start), sorted
        self._starts: dict[int, int] = {}  # first slot of a hole → its slots
        self._ends: dict[int, int] = {}  # slot after a hole → its first slot
        self._held: dict[int, int] = {}  # first slot of a span → its slots
        self._add_hole(0, num_slots)

    @property
    def num_free(self) -> int:
        """Count the slots in no span, in one piece or in many."""
        return self._num_free

    @property
    def largest_free(self) -> int:
        """Count the slots of the longest span that could be reserved now."""
        return self._by_size[-1][0] if self._by_size else 0

    def reserve(self, num_slots: int) -> Span:
        """Cut a span of exactly `num_slots` off the front of the best hole."""
        if num_slots < 1:
            raise OutOfRange("num_slots", num_slots, 1)
        place = bisect_left(self._by_size, (num_slots, 0))
        if place == len(self._by_size):
            raise OutOfSlots(num_slots, self.largest_free, self._num_free)
        size, start = self._by_size[place]
        self._remove_hole(start, size)
        if size > num_slots:
            self._add_hole(start + num_slots, size - num_slots)
        self._held[start] = num_slots
        return Span(start, num_slots)

    def release(self, span: Span) -> None:
        """Turn a span back into a hole, merged with the holes on both sides."""
        if self._held.get(span.start) != span.num_slots:
            raise StaleSpan(span.start, span.num_slots)
        del self._held[span.start]
        start, end = span.start, span.start + span.num_slots
        before = self._ends.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            start = before
        after = self._starts.get(end)
        if after is not None:
            self._remove_hole(end, after)
            end += after
        self._add_hole(start, end - start)

    def _add_hole(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start
        self._num_free += size

    def _remove_hole(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._starts[start]
        del self._ends[start + size]
        self._num_free -= size


class BuddyArena:
    """Round every span up to a power of two and split or merge halves (Knuth, *TAOCP* 1, 2.5).

    An arena that is no power of two is cut into several, largest first, so all its slots can be used.
    """

    __slots__ = ("_free", "_held", "_num_free", "_roots", "num_slots")

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise OutOfRange("num_slots", num_slots, 1)
        self.num_slots = num_slots
        self._num_free = num_slots
        self._free: list[dict[int, None]] = [{} for _ in range(num_slots.bit_length())]  # order → starts
        self._held: dict[int, int] = {}  # first slot of a span → its order
        self._roots: dict[int, int] = {}  # first slot of a power of two without a buddy → its order
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order][start] = None
                self._roots[start] = order
                start += 1 << order

    @property
    def num_free(self) -> int:
        """Count the slots in no span, in one piece or in many."""
        return self._num_free

    @property
    def largest_free(self) -> int:
        """Count the slots of the longest span that could be reserved now."""
        return next((1 << order for order in reversed(range(len(self._free))) if self._free[order]), 0)

    def reserve(self, num_slots: int) -> Span:
        """Take the smallest free power of two that is large enough, split down to the smallest that still is."""
        if num_slots < 1:
            raise OutOfRange("num_slots", num_slots, 1)
        wanted = (num_slots - 1).bit_length()
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            raise OutOfSlots(num_slots, self.largest_free, self._num_free)
        start, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][start + (1 << order)] = None
        self._held[start] = wanted
        self._num_free -= 1 << wanted
        return Span(start, 1 << wanted)

    def release(self, span: Span) -> None:
        """Give a span back and merge it with its buddy, and the pair with theirs, as far as they are free."""
        start = span.start
        order = self._held.get(start)
        if order is None or span.num_slots != 1 << order:
            raise StaleSpan(span.start, span.num_slots)
        del self._held[start]
        self._num_free += 1 << order
        while self._roots.get(start) != order:
            buddy = start ^ (1 << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            start = min(start, buddy)
            order += 1
        self._free[order][start] = None


class Reservation:
    """One sequence in a span of its own, the counterpart of `BlockTable`: all slots from the start, no copies, no sharing."""

    __slots__ = ("_arena", "_span", "max_tokens", "num_tokens")

    def __init__(self, arena: Arena, max_tokens: int) -> None:
        """Reserve for `max_tokens` tokens; raises `OutOfSlots`."""
        self._span: Span | None = arena.reserve(max_tokens)
        self._arena = arena
        self.max_tokens = max_tokens
        self.num_tokens = 0

    @property
    def num_slots(self) -> int:
        """Count the slots held, used or not."""
        return 0 if self._span is None else self._span.num_slots

    def append(self, num_tokens: int) -> None:
        """Use `num_tokens` more of the reserved slots; raises `OutOfRange` past the reservation."""
        room = self.max_tokens - self.num_tokens
        if not 0 <= num_tokens <= room:
            raise OutOfRange("num_tokens", num_tokens, 0, room)
        self.num_tokens += num_tokens

    def slot(self, position: int) -> int:
        """Return where a token's KV lives: `start + position`."""
        if self._span is None or not 0 <= position < self.num_tokens:
            raise OutOfRange("position", position, 0, self.num_tokens - 1)
        return self._span.start + position

    def release(self) -> None:
        """Give the span back; a second call does nothing. The reservation is not used again."""
        if self._span is not None:
            self._arena.release(self._span)
            self._span = None
            self.num_tokens = self.max_tokens = 0
