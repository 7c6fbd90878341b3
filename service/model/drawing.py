"""Draws ids from rows of logits: temperature, top-k, top-p, min-p, then one number through the inverse of the running sum.

The ids that are left are summed up in the order of their ids. Knows nothing of penalties, text or what is reported.

Invariant: what a row gives is a function of that row, its parameters, its seeds and its position, bit for bit: every operation works along
one row, and which way a row takes is decided by that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from backends.torch_threads import calling_thread_only
from service.engine.batch import StepEntry
from service.model.philox import uniforms
from service.model.ranking import ranked_prefix

# Top-k and top-p look at so many of a row's likeliest ids first; only rows where these do not settle the matter are sorted as a whole.
CANDIDATES = 256
ROWS_SORTED_AT_ONCE = 4  # more would not fit a processor's cache
# The running sum of a row is taken over blocks first: adding up one by one cannot be vectorised.
SUM_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of some rows, each [N, 1]."""

    top_k: Tensor  # int64; the number of ids where it is off
    top_p: Tensor  # float64
    min_p: Tensor  # float32

    def of_rows(self, rows: Tensor) -> Filters:
        """Return the filters of `rows` [N] int64."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def row_kernels(logits: Tensor) -> Any:
    """Return the module of compiled kernels for `logits` [R, V]; None where there are none for such."""
    try:
        from backends import numba_sampling
    except ImportError:  # a machine without Numba
        return None
    return numba_sampling if numba_sampling.takes(logits) else None


def draw(logits: Tensor, rows: Sequence[int], entries: Sequence[StepEntry]) -> list[list[int]]:
    """Draw one id per seed for each of `rows` of logits [R, V], in any float dtype."""
    kernels = row_kernels(logits)
    if kernels is None:
        return draw_with_torch(logits, rows, entries)
    width = logits.shape[1]
    found: dict[int, list[int]] = {}
    for ranks in (False, True):
        kind = [row for row in rows if wants_ranking(entries[row], width) == ranks]
        if not kind:
            continue
        drawing = [entries[row] for row in kind]
        params = [entry.sampling for entry in drawing]
        arguments = (
            logits,
            np.array(kind, np.int64),
            np.array([p.temperature for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            numbers_of(drawing),
        )
        if ranks:
            top_ks = np.array([p.top_k if 0 < p.top_k < width else width for p in params], np.int64)
            chosen = kernels.draw_ranked(*arguments, top_ks, np.array([p.top_p for p in params]))
        else:
            chosen = kernels.draw(*arguments)
        found |= dict(zip(kind, chosen.tolist(), strict=True))
    return [found[row][: len(entries[row].seeds)] for row in rows]


def wants_ranking(entry: StepEntry, width: int) -> bool:
    """Say whether which ids may be drawn of `width` depends on their ranks."""
    return 0 < entry.sampling.top_k < width or entry.sampling.top_p < 1.0


@calling_thread_only()
def draw_with_torch(logits: Tensor, rows: Sequence[int], entries: Sequence[StepEntry]) -> list[list[int]]:
    """Do what `draw` does, on any device."""
    device, width = logits.device, logits.shape[1]
    drawing = [entries[row] for row in rows]
    params = [entry.sampling for entry in drawing]
    numbers = torch.from_numpy(numbers_of(drawing)).to(device)  # [N, most seeds]
    temperatures = torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device)
    scaled = select(logits, rows).float()
    # The largest becomes 0 before the division, so that nothing can overflow upwards.
    scaled.sub_(scaled.amax(dim=1, keepdim=True)).div_(temperatures)
    probabilities = torch.softmax(scaled, dim=1)

    ranks = [wants_ranking(entry, width) for entry in drawing]
    filters = Filters(
        torch.tensor([[p.top_k if 0 < p.top_k < width else width] for p in params], device=device),
        torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device),
        torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=device),
    )
    found = torch.zeros_like(numbers, dtype=torch.int64)
    whole = torch.tensor([i for i, does_rank in enumerate(ranks) if not does_rank], dtype=torch.int64, device=device)
    ranked = torch.tensor([i for i, does_rank in enumerate(ranks) if does_rank], dtype=torch.int64, device=device)
    if len(ranked) > 0:
        settled, chosen, unsettled = draw_from_likeliest(probabilities, ranked, filters, numbers)
        found[settled] = chosen
        if len(unsettled) > 0:
            for part in torch.split(unsettled, ROWS_SORTED_AT_ONCE):
                kept = keep_of_all(select(probabilities, part), filters.of_rows(part))
                probabilities.index_copy_(0, part, kept)
            whole = torch.cat([whole, unsettled])
    if len(whole) > 0:
        whole = whole.sort().values
        kept = select(probabilities, whole)
        if any(p.min_p > 0.0 for p in params):
            kept = apply_min_p(kept, filters.min_p[whole])
        found[whole] = invert(kept, numbers[whole])
    picked: list[list[int]] = found.tolist()
    return [ids[: len(entry.seeds)] for ids, entry in zip(picked, drawing, strict=True)]


def draw_from_likeliest(
    probabilities: Tensor, rows: Tensor, filters: Filters, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Filter and draw `rows` [N] of probabilities [R, V] by looking at their likeliest ids only.

    Returns the rows for which that was enough, the ids drawn for them, and the other rows. It is not enough while an id further down
    could belong to the kept ones, be it only by a tie with the last candidate.
    """
    width = probabilities.shape[1]
    of_rows = filters.of_rows(rows)
    values, ids = ranked_prefix(select(probabilities, rows), CANDIDATES)
    count = values.shape[1]
    num_kept = count_kept(values, of_rows, width)
    has_mass = (of_rows.top_k == width) | (of_rows.top_k <= count)
    is_settled = (has_mass & (values.gather(1, num_kept - 1) > values[:, -1:]))[:, 0] | (count == width)
    kept = values.masked_fill(torch.arange(count, device=values.device) >= num_kept, 0.0)
    kept = apply_min_p(kept, of_rows.min_p)[is_settled]
    # By id, as in a row that is looked at as a whole.
    by_id = ids[is_settled].sort(dim=1)
    settled = rows[is_settled]
    chosen = by_id.values.gather(1, invert(kept.gather(1, by_id.indices), numbers[settled]))
    return settled, chosen, rows[~is_settled]


def keep_of_all(probabilities: Tensor, filters: Filters) -> Tensor:
    """Return probabilities [N, V] with 0 for the ids that top-k and top-p leave out.

    Sorts values without their ids, which NumPy does ten times faster than torch sorts both.
    """
    if probabilities.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(probabilities.numpy(), axis=1)).flip(1)
    else:
        ordered = probabilities.sort(dim=1, descending=True).values
    num_kept = count_kept(ordered, filters, probabilities.shape[1])
    last = ordered.gather(1, num_kept - 1)
    above = probabilities > last
    tied = probabilities == last
    num_tied_kept = num_kept - above.sum(dim=1, keepdim=True)
    return probabilities.masked_fill(~(above | (tied & (tied.cumsum(dim=1) <= num_tied_kept))), 0.0)


def count_kept(ranked: Tensor, filters: Filters, width: int) -> Tensor:
    """Return how many of the ranked probabilities [N, K] of V = `width` ids pass top-k and top-p, [N, 1] and at least 1."""
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    passed = ranked.double().masked_fill_(rank >= filters.top_k, 0.0)
    until = passed.cumsum(dim=1)
    # Top-p is a share of what top-k left, or of everything, where the candidates may be only a part of it.
    mass = torch.where(filters.top_k < width, until[:, -1:], 1.0)
    is_kept = (passed > 0.0) & ((until - passed < filters.top_p * mass) | (filters.top_p >= 1.0))
    # The product above may underflow to 0; the first id passes whatever top-p is.
    return is_kept.sum(dim=1, keepdim=True).clamp_(min=1)


def apply_min_p(probabilities: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities [N, K] with 0 where less than min_p [N, 1] of the row's largest."""
    floor = min_p * probabilities.amax(dim=1, keepdim=True)
    return probabilities.masked_fill(probabilities < floor, 0.0)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return for each number u of [N, S] the first column of weights [N, K] float32 whose running sum exceeds u times the total."""
    if weights.shape[1] % SUM_BLOCK:
        weights = pad(weights, (0, -weights.shape[1] % SUM_BLOCK))
    blocks = weights.view(len(weights), weights.shape[1] // SUM_BLOCK, SUM_BLOCK)
    until = blocks.sum(dim=2).double().cumsum(dim=1)  # [N, blocks]
    target = numbers * until[:, -1:]
    block = torch.searchsorted(until, target, right=True).clamp_(max=until.shape[1] - 1)
    rest = target - pad(until, (1, 0)).gather(1, block)
    inside = (
        blocks[torch.arange(len(blocks), device=blocks.device)[:, None], block].double().cumsum(dim=2)
    )  # [N, S, 64]
    column = torch.searchsorted(inside, rest[:, :, None], right=True)
    # The two sums differ in rounding: past the end means the last column that has weight.
    last = torch.searchsorted(inside, inside[:, :, -1:].contiguous())
    return block * SUM_BLOCK + torch.minimum(column, last)[:, :, 0]


def numbers_of(entries: Sequence[StepEntry]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) per entry and seed, [N, most seeds]; unused places are 0.

    The position that counts is the one the sampled token will take.
    """
    seeds = [seed for entry in entries for seed in entry.seeds]
    positions = [entry.seq_len for entry in entries for _ in entry.seeds]
    counts = np.array([len(entry.seeds) for entry in entries])
    numbers = np.zeros((len(entries), int(counts.max())))
    numbers[np.arange(numbers.shape[1]) < counts[:, None]] = uniforms(seeds, positions)
    return numbers


def select(table: Tensor, rows: Sequence[int] | Tensor) -> Tensor:
    """Return `rows` (ascending) of table [R, V]: itself if they are all of them, else a copy. Indexing would copy id by id."""
    if len(rows) == len(table):
        return table
    return table.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=table.device))
