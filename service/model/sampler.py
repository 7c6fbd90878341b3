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

from backends.torch_threads import calling_thread_only
from service.engine.batch import SampledToken, StepEntry
from service.messages import SamplingParams
from service.model.drawing import draw, row_kernels, select
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
        """Draw one token per seed of each entry from its row of logits [R, vocab], float32 or bfloat16, which may be overwritten.

        Entry r belongs to row r. None stands for a row with logits that are not finite. A row that is taken as it is costs one or two
        looks at it; what asks for more gets a float32 copy.
        """
        logits = logits[:, : self.num_valid_ids]
        best = likeliest(logits)
        rows = [row for row, token_id in enumerate(best) if token_id is not None]
        with_logprobs = [row for row in rows if entries[row].sampling.logprobs is not None]
        table = None
        if with_logprobs:
            counts = [entries[row].sampling.logprobs or 0 for row in with_logprobs]
            with calling_thread_only():
                table = LogprobTable(select(logits, with_logprobs), counts)
        adjusted = [row for row in rows if wants_adjusting(entries[row])]
        plain = rows if not adjusted else [row for row in rows if not wants_adjusting(entries[row])]

        chosen: list[list[int]] = [[] for _ in entries]
        for row in plain:
            token_id = best[row]
            if token_id is not None and is_greedy(entries[row].sampling):
                chosen[row] = [token_id] * len(entries[row].seeds)
        random = [row for row in plain if not is_greedy(entries[row].sampling)]
        if random:
            for row, token_ids in zip(random, draw(logits, random, entries), strict=True):
                chosen[row] = token_ids
        if adjusted:
            wide = select(logits, adjusted).float()
            for row, token_ids in zip(adjusted, choose_adjusted(wide, [entries[row] for row in adjusted]), strict=True):
                chosen[row] = token_ids

        samples: list[Samples | None] = [
            None if token_id is None else tuple(SampledToken(token_id=chosen_id) for chosen_id in chosen[row])
            for row, token_id in enumerate(best)
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


def likeliest(logits: Tensor) -> list[int | None]:
    """Return the likeliest id of each row of logits [R, V], the lowest of equals; None for a row that is not finite."""
    kernels = row_kernels(logits)
    if kernels is not None:
        found: list[int | None] = kernels.likeliest(logits)
        return found
    if logits.device.type != "cpu":
        return likeliest_on_device(logits)
    finite = finite_rows(logits)
    return [token_id if is_finite else None for token_id, is_finite in zip(argmax(logits), finite, strict=True)]


def likeliest_on_device(logits: Tensor) -> list[int | None]:
    """Return what `likeliest` does; both answers come over together, so that a greedy step waits for the device once."""
    ids, finite = torch.stack([logits.argmax(dim=1), torch.isfinite(logits).all(dim=1).long()]).tolist()
    return [token_id if is_finite else None for token_id, is_finite in zip(ids, finite, strict=True)]


def argmax(logits: Tensor) -> list[int]:
    """Return the likeliest id of each row of logits [R, V] without NaN, the lowest of equals."""
    if logits.device.type == "cpu":  # NumPy's is vectorised and some six times faster than torch's
        found: list[int] = logits.float().numpy().argmax(axis=1).tolist()
    else:
        found = logits.argmax(dim=1).tolist()
    return found


@calling_thread_only()
def choose_adjusted(logits: Tensor, entries: Sequence[StepEntry]) -> list[list[int]]:
    """Apply what each entry asks for to its row of logits [R, V] float32, in place, and choose."""
    for row, entry in zip(logits, entries, strict=True):
        adjust(row, entry)
    chosen = [[token_id] * len(entry.seeds) for token_id, entry in zip(argmax(logits), entries, strict=True)]
    random = [row for row, entry in enumerate(entries) if not is_greedy(entry.sampling)]
    if random:
        for row, token_ids in zip(random, draw(logits, random, entries), strict=True):
            chosen[row] = token_ids
    return chosen


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
