"""Chooses tokens from logits for all rows of a step at once. Knows ids and numbers, not text, stop strings or when a choice ends.

The order of what happens to a row is part of the contract: padding ids are cut off; logprobs are taken of what is left; repetition
penalty, presence and frequency penalty, logit bias; end ids suppressed while `min_tokens` is not reached; temperature; top-k; top-p; min-p;
one draw by the inverse of the cumulative distribution.

Invariant: a sample is a function of its row, its parameters, its seed and its position, bit for bit. Every operation works along one row,
and no generator is shared, so neither the neighbours nor the shape of the batch can show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from service.engine.batch import SampledToken, StepEntry
from service.messages import SamplingParams
from service.model.drawing import draw, select
from service.model.logprobs import LogprobTable, finite_rows

# At and below this temperature the likeliest token is taken: dividing by less says nothing new and loses all precision.
GREEDY_TEMPERATURE = 1e-5
Samples = tuple[SampledToken, ...]


class Sampler:
    """The batched sampler. Stateless; used from the thread that runs the steps."""

    def __init__(self, num_valid_ids: int) -> None:
        """Only ids below `num_valid_ids` exist for the tokenizer; a head that is wider has padding rows, which are never chosen."""
        self.num_valid_ids = num_valid_ids

    def sample(self, logits: Tensor, entries: Sequence[StepEntry]) -> list[Samples | None]:
        """Draw one token per seed of each entry from its row of logits [R, vocab] float32, which is overwritten.

        Entry r belongs to row r. None stands for a row with logits that are not finite.
        """
        logits = logits[:, : self.num_valid_ids]
        finite = finite_rows(logits)
        rows = [row for row, is_finite in enumerate(finite) if is_finite]
        with_logprobs = [row for row in rows if entries[row].sampling.logprobs is not None]
        table = None
        if with_logprobs:
            counts = [entries[row].sampling.logprobs or 0 for row in with_logprobs]
            table = LogprobTable(select(logits, with_logprobs), counts)
        for row in rows:
            if wants_adjusting(entries[row]):
                adjust(logits[row], entries[row])

        chosen: list[list[int]] = [[] for _ in entries]
        greedy = [row for row in rows if is_greedy(entries[row].sampling)]
        if greedy:
            for row, token_id in zip(greedy, argmax(logits, greedy), strict=True):
                chosen[row] = [token_id] * len(entries[row].seeds)
        random = [row for row in rows if not is_greedy(entries[row].sampling)]
        if random:
            for row, token_ids in zip(random, draw(logits, random, entries), strict=True):
                chosen[row] = token_ids

        samples: list[Samples | None] = [
            tuple(SampledToken(token_id=token_id) for token_id in chosen[row]) if is_finite else None
            for row, is_finite in enumerate(finite)
        ]
        if table is not None:
            for index, row in enumerate(with_logprobs):
                values = table.of([index] * len(chosen[row]), chosen[row])
                top = table.alternatives(index)
                samples[row] = tuple(
                    SampledToken(token_id=token_id, logprob=value, top=top)
                    for token_id, value in zip(chosen[row], values, strict=True)
                )
        return samples


def is_greedy(sampling: SamplingParams) -> bool:
    """Say whether the likeliest token is taken whatever the seed."""
    return sampling.is_greedy or sampling.temperature <= GREEDY_TEMPERATURE


def argmax(logits: Tensor, rows: Sequence[int]) -> list[int]:
    """Return the likeliest id of each of `rows`, the lowest of equals."""
    chosen = select(logits, rows)
    if chosen.device.type == "cpu":  # NumPy's is vectorised and some six times faster than torch's
        found: list[int] = chosen.numpy().argmax(axis=1).tolist()
    else:
        found = chosen.argmax(dim=1).tolist()
    return found


def wants_adjusting(entry: StepEntry) -> bool:
    """Say whether anything changes the logits of this row before a token is chosen; most rows want nothing."""
    sampling = entry.sampling
    is_short = entry.num_output_tokens < sampling.min_tokens
    return sampling.wants_penalties or bool(sampling.logit_bias) or is_short


def adjust(row: Tensor, entry: StepEntry) -> None:
    """Apply penalties, bias and `min_tokens` to one row [V] in place. The end ids come last, so that no bias brings them back."""
    sampling = entry.sampling
    if sampling.wants_penalties:
        penalise(row, entry)
    if sampling.logit_bias:
        # An id that does not exist was refused at the edge; here it must not harm the other rows of the step.
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if 0 <= token_id < len(row)}
        row[torch.tensor(list(bias), dtype=torch.int64, device=row.device)] += torch.tensor(
            list(bias.values()), dtype=torch.float32, device=row.device
        )
    if entry.num_output_tokens < sampling.min_tokens:
        end_ids = np.unique(valid_ids((*entry.eos_ids, *sampling.stop_token_ids), len(row)))
        if len(end_ids) < len(row):  # never forbid everything
            row[torch.from_numpy(end_ids).to(row.device)] = -torch.inf


def penalise(row: Tensor, entry: StepEntry) -> None:
    """Apply the penalties to one row [V] in place.

    Repetition (Keskar et al., CTRL, 2019) divides the positive and multiplies the negative logits of ids in the prompt or the output;
    presence and frequency look at the output alone.
    """
    sampling = entry.sampling
    output = valid_ids(entry.output_token_ids or (), len(row))
    if sampling.repetition_penalty != 1.0:
        prompt = valid_ids(entry.prompt_token_ids or (), len(row))
        seen = torch.from_numpy(np.concatenate([prompt, output])).to(row.device)
        values = row[seen]  # an id that occurs twice is read twice before it is written twice, with the same value
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        ids, counts = np.unique(output, return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(penalty).float().to(row.device)


def valid_ids(ids: Sequence[int], num_valid_ids: int) -> npt.NDArray[np.int64]:
    """Return `ids` without those that the row does not have: a prompt given as ids may name padding ones."""
    found = np.fromiter(ids, np.int64, len(ids))
    return found[(found >= 0) & (found < num_valid_ids)]
