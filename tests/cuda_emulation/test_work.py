"""The division of a step among thread blocks: every visible pair of a row and a key in exactly one item."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.kernels.work import KEY_ALIGNMENT, divide

sequences = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 1500)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=5
)


@given(sequences, st.integers(1, 9), st.sampled_from([1, 4, 16, 64]), st.none() | st.integers(1, 700))
def test_every_row_and_visible_key_lies_in_exactly_one_item(
    steps: list[tuple[int, int]], group: int, tile_rows: int, window: int | None
) -> None:
    """NUM-03: splits, tiles and windows cover what is visible, once; ranges begin where scales are aligned."""
    work = divide(np.array([n for n, _ in steps]), np.array([m for _, m in steps]), group, tile_rows, window)
    seen = [np.zeros((n * group, m), np.int32) for n, m in steps]
    for sequence, first, count, begin, end, *_ in work.items.tolist():
        assert 1 <= count <= tile_rows
        assert begin % KEY_ALIGNMENT == 0
        seen[sequence][first : first + count, begin:end] += 1
    for (n, m), count_of in zip(steps, seen, strict=True):
        position = m - n + np.arange(n * group)[:, None] // group
        key = np.arange(m)[None]
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        assert (count_of[visible] == 1).all()
        assert (count_of <= 1).all()


@given(sequences, st.integers(1, 9), st.sampled_from([1, 4, 16, 64]))
def test_every_row_is_written_once_and_every_part_is_merged_once(
    steps: list[tuple[int, int]], group: int, tile_rows: int
) -> None:
    """A row belongs to one whole item, or to one merge whose parts are its partial items' and lie inside the workspace."""
    work = divide(np.array([n for n, _ in steps]), np.array([m for _, m in steps]), group, tile_rows)
    written = [np.zeros(n * group, np.int32) for n, _ in steps]
    parts = {}
    for sequence, first, count, begin, _end, is_partial, part, _ in work.items.tolist():
        if not is_partial:
            written[sequence][first : first + count] += 1
        for row in range(count if is_partial else 0):
            assert part + row not in parts
            assert part + row < work.num_parts
            parts[part + row] = (sequence, first + row, begin)
    for sequence, first, count, part, num_parts, step, *_ in work.merges.tolist():
        written[sequence][first : first + count] += 1
        for row in range(count):
            begins = []
            for split in range(num_parts):
                owner, own_row, begin = parts.pop(part + split * step + row)
                assert (owner, own_row) == (sequence, first + row)
                begins.append(begin)
            assert begins == sorted(set(begins))
            assert num_parts > 1
    assert not parts
    assert all((rows == 1).all() for rows in written)


@given(sequences, st.integers(1, 4))
def test_a_sequence_is_cut_the_same_way_whoever_stands_beside_it(steps: list[tuple[int, int]], group: int) -> None:
    """NUM-09: only the numbering of sequences and parts differs."""
    together = divide(np.array([n for n, _ in steps]), np.array([m for _, m in steps]), group, 16).items
    for index, (n, m) in enumerate(steps):
        alone = divide(np.array([n]), np.array([m]), group, 16).items
        assert np.array_equal(together[together[:, 0] == index][:, 1:6], alone[:, 1:6])
