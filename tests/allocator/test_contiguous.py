"""The contiguous baseline: spans never overlap, nothing is lost, and holes merge again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.contiguous import Arena, BestFitArena, BuddyArena, Reservation, Span
from allocator.errors import OutOfRange, OutOfSlots, StaleSpan

ARENAS: list[Callable[[int], Arena]] = [BestFitArena, BuddyArena]
both = pytest.mark.parametrize("make", ARENAS, ids=["best-fit", "buddy"])


@both
@given(
    num_slots=st.integers(1, 300),
    commands=st.lists(st.tuples(st.booleans(), st.integers(1, 80)), max_size=60),
)
def test_spans_never_overlap_and_every_slot_is_free_or_held(
    make: Callable[[int], Arena], num_slots: int, commands: list[tuple[bool, int]]
) -> None:
    arena = make(num_slots)
    held: list[Span] = []
    for is_release, number in commands:
        if is_release and held:
            arena.release(held.pop(number % len(held)))
        else:
            largest = arena.largest_free
            if number > largest:
                with pytest.raises(OutOfSlots) as caught:
                    arena.reserve(number)
                assert (caught.value.needed, caught.value.largest, caught.value.free) == (
                    number,
                    largest,
                    arena.num_free,
                )
            else:
                span = arena.reserve(number)
                assert number <= span.num_slots <= largest
                held.append(span)
        slots = [slot for span in held for slot in range(span.start, span.start + span.num_slots)]
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < num_slots for slot in slots)
        assert arena.num_free == num_slots - len(slots)
    for span in held:
        arena.release(span)
    whole = num_slots if make is BestFitArena else 1 << (num_slots.bit_length() - 1)
    assert arena.largest_free == whole, "released holes have not merged"


def test_best_fit_uses_the_shortest_hole_that_is_long_enough() -> None:
    arena = BestFitArena(100)
    spans = [arena.reserve(size) for size in (30, 10, 12, 10, 38)]
    arena.release(spans[0])
    arena.release(spans[2])
    assert arena.reserve(11) == Span(40, 11)
    assert arena.reserve(20) == Span(0, 20)


def test_free_slots_in_two_pieces_hold_no_span_of_their_sum() -> None:
    arena = BestFitArena(30)
    spans = [arena.reserve(10) for _ in range(3)]
    arena.release(spans[0])
    arena.release(spans[2])
    with pytest.raises(OutOfSlots, match="20 slots in one piece are needed; the longest hole has 10, all together 20"):
        arena.reserve(20)


def test_a_buddy_span_is_rounded_up_to_a_power_of_two() -> None:
    arena = BuddyArena(1024)
    assert [arena.reserve(size).num_slots for size in (1, 2, 3, 100, 128)] == [1, 2, 4, 128, 128]


def test_a_buddy_arena_that_is_no_power_of_two_can_be_used_up() -> None:
    arena = BuddyArena(100)
    spans = [arena.reserve(4) for _ in range(25)]
    assert arena.num_free == 0
    for span in spans:
        arena.release(span)
    assert [arena.reserve(size).num_slots for size in (64, 32, 4)] == [64, 32, 4]


@both
def test_a_span_released_twice_or_made_up_is_refused_and_changes_nothing(make: Callable[[int], Arena]) -> None:
    arena = make(64)
    span = arena.reserve(16)
    arena.reserve(16)
    for stale in (Span(span.start, 8), Span(span.start + 1, 16), Span(63, 1)):
        with pytest.raises(StaleSpan, match="is held"):
            arena.release(stale)
    assert arena.num_free == 32
    arena.release(span)
    with pytest.raises(StaleSpan):
        arena.release(span)
    assert arena.num_free == 48


@both
@pytest.mark.parametrize("num_slots", [0, -1])
def test_sizes_below_one_are_refused(make: Callable[[int], Arena], num_slots: int) -> None:
    with pytest.raises(OutOfRange, match="num_slots must be at least 1"):
        make(num_slots)
    with pytest.raises(OutOfRange, match="num_slots must be at least 1"):
        make(8).reserve(num_slots)


@both
def test_a_reservation_holds_its_maximum_from_the_first_token_on(make: Callable[[int], Arena]) -> None:
    arena = make(1024)
    sequence = Reservation(arena, 256)
    sequence.append(3)
    assert (sequence.num_tokens, sequence.num_slots, arena.num_free) == (3, 256, 768)
    first = sequence.slot(0)
    assert [sequence.slot(position) for position in range(3)] == [first, first + 1, first + 2]
    with pytest.raises(OutOfRange, match="num_tokens must be between 0 and 253"):
        sequence.append(254)
    with pytest.raises(OutOfRange, match="position"):
        sequence.slot(3)
    sequence.append(253)
    sequence.release()
    sequence.release()
    assert (arena.num_free, sequence.num_slots) == (1024, 0)
    with pytest.raises(OutOfRange):
        sequence.append(1)


def test_a_reservation_that_does_not_fit_leaves_the_arena_as_it_was() -> None:
    arena = BestFitArena(100)
    Reservation(arena, 60)
    with pytest.raises(OutOfSlots):
        Reservation(arena, 41)
    assert arena.num_free == 40
