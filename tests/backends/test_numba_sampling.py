"""The kernels that choose ids, against NumPy in float64: every width, ties, numbers that are not finite, neighbours and threads."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from backends import numba_sampling

WIDTHS = [1, 15, 16, 61, 64, 320, 511, 512, 513, 1500, 49152]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return cast("torch.dtype", request.param)


def random_logits(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return rows of a wider head, whose padding is larger than any logit and must not be looked at."""
    generator = torch.Generator().manual_seed(seed + width)
    wide = torch.full((rows, width + 7), 1e9)
    wide[:, :width] = torch.randn(rows, width, generator=generator) * 4
    return wide.to(dtype)[:, :width]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_likeliest_id_is_the_lowest_of_equals(dtype: torch.dtype, width: int) -> None:
    """In bfloat16 random rows have many ties of their own."""
    logits = random_logits(9, width, dtype)
    logits[3] = 0
    logits[4, width // 2 :] = 77
    logits[5] = -1e30
    logits[6, -1] = 99
    assert numba_sampling.likeliest(logits) == logits.float().numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_is_told_wherever_it_stands(
    dtype: torch.dtype, width: int, bad: float
) -> None:
    places = sorted({0, width - 1, width // 2, width // 512 * 512 % width})
    logits = random_logits(len(places) + 1, width, dtype)
    for row, place in enumerate(places):
        logits[row, place] = bad
    best = numba_sampling.likeliest(logits)
    assert best[:-1] == [None] * len(places)
    assert best[-1] == int(logits[-1].float().argmax())


def reference(row: Tensor, temperature: float, min_p: float) -> npt.NDArray[np.float64]:
    """Return the shares of a row in float64."""
    x = row.double().numpy()
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0
    return cast("npt.NDArray[np.float64]", weights / weights.sum())


@pytest.mark.parametrize("width", WIDTHS)
def test_an_id_is_drawn_by_the_share_that_a_number_falls_into(dtype: torch.dtype, width: int) -> None:
    logits = random_logits(5, width, dtype)
    rows = np.array([0, 2, 3, 4])
    temperatures = np.array([1.0, 0.3, 2.5, 0.8], np.float32)
    min_ps = np.array([0.0, 0.0, 0.0, 0.1], np.float32)
    shares = [reference(logits[row], float(t), float(p)) for row, t, p in zip(rows, temperatures, min_ps, strict=True)]
    # The middle of the share of each of the likeliest ids, where rounding cannot show.
    numbers = np.zeros((4, 6))
    wanted = np.zeros((4, 6), np.int64)
    for i, share in enumerate(shares):
        likely = np.argsort(-share, kind="stable")[:6]
        likely = np.resize(likely[share[likely] > 1e-5], 6)
        numbers[i] = (np.cumsum(share) - share / 2)[likely]
        wanted[i] = likely
    assert numba_sampling.draw(logits, rows, temperatures, min_ps, numbers).tolist() == wanted.tolist()


def kept_ids(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64]:
    """Return what may be drawn, likeliest first: the definition, in float64, by a full sort."""
    share = reference(row, temperature, 0.0)
    order = np.argsort(-share, kind="stable")
    order = order[share[order] > 0][:top_k]
    mass = share[order].sum() if top_k < len(share) else 1.0
    before = np.cumsum(share[order]) - share[order]
    is_kept = (before < top_p * mass) | (top_p >= 1)
    is_kept &= share[order] >= min_p * share.max()
    is_kept[0] = True
    return order[is_kept]


FILTERS = [
    (1, 1.0, 0.0), (5, 1.0, 0.0), (700, 1.0, 0.0), (30_000, 1.0, 0.0), (49152, 0.5, 0.0), (49152, 0.95, 0.0), (49152, 1e-9, 0.0),
    (40, 0.7, 0.0), (5000, 0.6, 0.0), (49152, 0.9, 0.05), (100, 0.95, 0.3), (49152, 0.9999, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("width", [1, 61, 513, 49152])
@pytest.mark.parametrize("spread", [4.0, 0.3])
def test_the_first_and_the_last_that_ranks_allow_are_drawn_and_none_beyond(
    dtype: torch.dtype, width: int, spread: float, filters: tuple[int, float, float]
) -> None:
    """`spread` 0.3 leaves tens of thousands of ids of about the same weight; bfloat16 makes whole flocks of them equal."""
    logits = random_logits(3, width, dtype) / 4 * spread
    top_k, top_p, min_p = min(filters[0], width), filters[1], filters[2]
    temperatures = np.array([1.0, 0.7, 1.5], np.float32)
    numbers, wanted = np.zeros((3, 4)), np.zeros((3, 4), np.int64)
    for row in range(3):
        share = reference(logits[row], float(temperatures[row]), 0.0)
        kept = kept_ids(logits[row], float(temperatures[row]), top_k, top_p, min_p)
        shares = share[kept] / share[kept].sum()
        middles = np.zeros(width)
        by_id = np.argsort(kept)
        middles[by_id] = np.cumsum(shares[by_id]) - shares[by_id] / 2
        num_clear = int((shares > 1e-5).sum())  # of others the share is within the rounding of the sums
        for place, rank in enumerate((0, num_clear // 3, num_clear // 2, num_clear - 1)):
            numbers[row, place], wanted[row, place] = middles[rank], kept[rank]
    found = numba_sampling.draw_ranked(
        logits, np.arange(3), temperatures, np.full(3, min_p, np.float32), numbers, np.full(3, top_k), np.full(3, top_p)
    )
    for row in range(3):
        kept = np.sort(kept_ids(logits[row], float(temperatures[row]), top_k, top_p, min_p))
        # A share of a twenty-thousandth is a few roundings wide: there a neighbour is right too.
        distances = np.abs(np.searchsorted(kept, found[row]) - np.searchsorted(kept, wanted[row]))
        assert distances.max() <= (0 if len(kept) < 2000 else 2)


def test_of_equal_weights_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(1, 6000)
    logits[0, 4000:] = 1.0
    ends = np.array([[0.0, 1 - 2**-53]])
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    for top_k, last in ((1, 4000), (300, 4299), (2000, 5999), (2001, 0), (2500, 499)):
        found = numba_sampling.draw_ranked(logits, np.arange(1), one, zero, ends, np.array([top_k]), np.ones(1))[0]
        assert found.tolist() == [0 if top_k > 2000 else 4000, 5999 if top_k > 2000 else last]
    top_p = 1000 * np.e / (2000 * np.e + 4000)
    found = numba_sampling.draw_ranked(logits, np.arange(1), one, zero, ends, np.array([6000]), np.array([top_p]))[0]
    assert found[0] == 4000
    assert abs(found[1] - 4999) <= 1


def test_an_id_without_weight_is_never_drawn(dtype: torch.dtype) -> None:
    """The smallest and the largest number there is, on rows that begin and end with impossible ids."""
    logits = torch.full((2, 700), -np.inf, dtype=dtype)
    logits[0, 200:300] = 1.0
    logits[1, 650:660] = -3.0
    numbers = np.array([[0.0, 1 - 2**-53, 0.5]] * 2)
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    found = numba_sampling.draw(logits, np.arange(2), ones, zeros, numbers)
    assert found.tolist() == [[200, 299, 250], [650, 659, 655]]


def test_a_row_gives_the_same_alone_and_beside_others_on_any_number_of_threads(dtype: torch.dtype) -> None:
    logits = random_logits(40, 5000, dtype)
    numbers = np.random.default_rng(1).random((40, 3))
    temperatures, min_ps = np.linspace(0.2, 3, 40).astype(np.float32), np.zeros(40, np.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(numba_sampling.draw(logits, np.arange(40), temperatures, min_ps, numbers).tolist())
            assert numba_sampling.likeliest(logits) == logits.float().numpy().argmax(axis=1).tolist()
        assert results[0] == results[1] == results[2]
        for row in (0, 17, 39):
            one = slice(row, row + 1)
            alone = numba_sampling.draw(logits, np.array([row]), temperatures[one], min_ps[one], numbers[one])
            assert alone.tolist() == [results[0][row]]
    finally:
        torch.set_num_threads(before)


def test_what_has_no_kernel_is_said() -> None:
    assert numba_sampling.takes(torch.zeros(2, 3))
    assert numba_sampling.takes(torch.zeros(2, 3, dtype=torch.bfloat16)[:, :2])
    assert not numba_sampling.takes(torch.zeros(2, 3, dtype=torch.float16))
    assert not numba_sampling.takes(torch.zeros(3, 2).T)
