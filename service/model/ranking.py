"""The order of a row's ids: likeliest first, equal values by the lower id. Knows values, not what they mean.

`torch.topk` leaves the order of equal values open, and which of them make the cut may change with k. Here that is never visible: a caller
either gets a prefix that the rule alone decides, or is told that the prefix is too short to say. Invariant: results of a row do not depend
on the other rows nor on how many candidates were asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Asked for beyond k, so that a tie across the cut (which costs a full sort) is rare.
MARGIN = 8


def ranked_prefix(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of values [R, V] and their ids, [R, count], in order.

    Ids whose value equals the last one of a row may be missing from it; everything above that value is complete, unless count is V.
    """
    if count >= values.shape[1]:
        ordered = torch.sort(values, dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    top, ids = torch.topk(values, count, dim=1)
    if bool((top[:, 1:] == top[:, :-1]).any()):
        ids, order = torch.sort(ids, dim=1)
        again = torch.sort(top.gather(1, order), dim=1, descending=True, stable=True)
        return again.values, ids.gather(1, again.indices)
    return top, ids


def leading(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return exactly the first min(count, V) of each row of values [R, V] and their ids, in order."""
    count = min(count, values.shape[1])
    if count == 0:
        empty = values[:, :0]
        return empty, empty.long()
    top, ids = ranked_prefix(values, count + MARGIN)
    tied = top[:, count - 1] == top[:, -1]
    if top.shape[1] < values.shape[1] and bool(tied.any()):
        all_top, all_ids = ranked_prefix(values[tied], values.shape[1])
        top[tied], ids[tied] = all_top[:, : top.shape[1]], all_ids[:, : top.shape[1]]
    return top[:, :count], ids[:, :count]
