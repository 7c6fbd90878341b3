"""Natural-log probabilities as they are reported: over the raw logits of the valid ids, before penalties, bias and temperature.

Invariant: every number is finite; what is impossible is `LOGPROB_FLOOR`, so that no wire format ever meets an infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from service.engine.batch import PromptLogprob
from service.model.ranking import leading

LOGPROB_FLOOR = -9999.0
# Rows of a prompt taken at once: 64 rows of a 49 152-id vocabulary are 12 MiB of logits and as much of logprobs.
PROMPT_SLICE = 64

Alternatives = tuple[tuple[int, float], ...]


class LogprobTable:
    """The logprobs of some rows of logits [R, V], in float32; computed once, read per row."""

    def __init__(self, logits: Tensor, counts: Sequence[int]) -> None:
        """Keep `counts[r]` alternatives of row r. `logits` may be overwritten afterwards."""
        self._all = torch.log_softmax(logits, dim=1, dtype=torch.float32).clamp_(min=LOGPROB_FLOOR)
        # Ordered by logits, since rounding makes different logits equal in the logarithm.
        _, ids = leading(logits, max(counts, default=0))
        self._counts = counts
        self._top_ids: list[list[int]] = ids.tolist()
        self._top_values: list[list[float]] = self._all.gather(1, ids).tolist()

    def alternatives(self, row: int) -> Alternatives:
        """Return the likeliest (id, logprob) of a row, best first."""
        count = self._counts[row]
        return tuple(zip(self._top_ids[row][:count], self._top_values[row][:count], strict=True))

    def of(self, rows: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return the logprob of each (row, id) pair; an id outside the valid ones is impossible."""
        width = self._all.shape[1]
        index = torch.tensor([rows, [min(token_id, width - 1) for token_id in ids]], device=self._all.device)
        values: list[float] = self._all[index[0], index[1]].tolist()
        return [value if token_id < width else LOGPROB_FLOOR for value, token_id in zip(values, ids, strict=True)]


def prompt_logprobs(
    hidden: Tensor,
    targets: Sequence[int],
    count: int,
    logits_of: Callable[[Tensor], Tensor],
) -> tuple[PromptLogprob, ...] | None:
    """Score `targets[i]` by the logits of hidden [len(targets), H] row i, with `count` alternatives each.

    `logits_of` gives logits of the valid ids only. Works in slices, so that memory does not grow with the prompt. Returns None if
    any logit is not finite.
    """
    found: list[PromptLogprob] = []
    for first in range(0, len(targets), PROMPT_SLICE):
        part = targets[first : first + PROMPT_SLICE]
        logits = logits_of(hidden[first : first + len(part)])
        if not all(finite_rows(logits)):
            return None
        table = LogprobTable(logits, [count] * len(part))
        values = table.of(range(len(part)), part)
        found.extend(
            PromptLogprob(token_id=token_id, logprob=value, top=table.alternatives(row))
            for row, (token_id, value) in enumerate(zip(part, values, strict=True))
        )
    return tuple(found)


def finite_rows(logits: Tensor) -> list[bool]:
    """Say for each row of logits [R, V] whether all of it is finite."""
    # A sum meets every NaN and infinity and costs a tenth of looking at each; only a row whose sum is not finite is looked at.
    finite: list[bool] = torch.isfinite(logits.sum(dim=1, dtype=torch.float32)).tolist()
    return [is_finite or bool(torch.isfinite(logits[row]).all()) for row, is_finite in enumerate(finite)]
