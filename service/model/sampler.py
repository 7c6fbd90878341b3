"""Chooses tokens from logits for all rows of a step at once. Knows ids and numbers, not text, stop strings or when a choice ends.

The order of what happens to a row is part of the contract: padding ids are cut off; logprobs are taken of what is left; repetition
penalty, presence and frequency penalty, logit bias; end ids suppressed while `min_tokens` is not reached; temperature; top-k; top-p; min-p;
one draw by the inverse of the cumulative distribution.

Invariant: a sample is a function of its row, its parameters, its seed and its position, bit for bit. Every operation works along one row,
and no generator is shared, so neither the neighbours nor the shape of the batch can show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from service.engine.batch import SampledToken, StepEntry
from service.messages import SamplingParams
from service.model.logprobs import LogprobTable, finite_rows
from service.model.philox import uniforms
from service.model.ranking import ranked_prefix

# At and below this temperature the likeliest token is taken: dividing by less says nothing new and loses all precision.
GREEDY_TEMPERATURE = 1e-5
# How many of a row's likeliest ids are looked at for top-k and top-p before the next, larger try; the last try is the whole row.
CANDIDATES = (128, 2048)

Samples = tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-k, top-p and min-p of some rows, each [R, 1]."""

    top_k: Tensor  # int64; the number of ids where it is off
    top_p: Tensor  # float64
    min_p: Tensor  # float64

    def of_rows(self, rows: Tensor) -> Filters:
        """Return the filters of `rows` [N] int64."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


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
            table = LogprobTable(logits[with_logprobs], counts)
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
    chosen = logits if len(rows) == logits.shape[0] else logits[list(rows)]
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
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if 0 <= token_id < len(row)}
        ids = torch.tensor(list(bias), dtype=torch.int64, device=row.device)
        row[ids] += torch.tensor(list(bias.values()), dtype=torch.float32, device=row.device)
    if entry.num_output_tokens < sampling.min_tokens:
        ids = valid_ids({*entry.eos_ids, *sampling.stop_token_ids}, row)
        if len(ids) < len(row):  # never forbid everything
            row[ids] = -torch.inf


def penalise(row: Tensor, entry: StepEntry) -> None:
    """Apply the penalties to one row [V] in place.

    Repetition (Keskar et al., CTRL, 2019) divides the positive and multiplies the negative logits of ids in the prompt or the output;
    presence and frequency look at the output alone.
    """
    sampling = entry.sampling
    prompt, output = entry.prompt_token_ids or (), entry.output_token_ids or ()
    if sampling.repetition_penalty != 1.0:
        ids = valid_ids({*prompt, *output}, row)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if output and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
        counts = Counter(output)
        ids = valid_ids(counts, row)
        times = torch.tensor([counts[token_id] for token_id in ids.tolist()], device=row.device)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def valid_ids(ids: Iterable[int], row: Tensor) -> Tensor:
    """Return the ids that the row [V] has: a prompt given as ids may name padding ones."""
    kept = [token_id for token_id in ids if 0 <= token_id < len(row)]
    return torch.tensor(kept, dtype=torch.int64, device=row.device)


def draw(logits: Tensor, rows: Sequence[int], entries: Sequence[StepEntry]) -> list[list[int]]:
    """Draw one id per seed for each of `rows` of logits [R, V]."""
    device, width = logits.device, logits.shape[1]
    params = [entries[row].sampling for row in rows]
    numbers = torch.from_numpy(numbers_of([entries[row] for row in rows])).to(device)  # [N, most seeds]
    chosen = logits[list(rows)]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # The largest becomes 0 before the division, so that nothing can overflow upwards.
    scaled = (chosen - chosen.amax(dim=1, keepdim=True)).div_(temperature.unsqueeze(1))
    probabilities = torch.softmax(scaled, dim=1)
    filters = Filters(
        torch.tensor([[p.top_k if 0 < p.top_k < width else width] for p in params], device=device),
        torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device),
        torch.tensor([[p.min_p] for p in params], dtype=torch.float64, device=device),
    )
    needs_order = [0 < p.top_k < width or p.top_p < 1.0 for p in params]
    found = torch.zeros_like(numbers, dtype=torch.int64)

    unordered = positions_of(needs_order, False, device)
    if len(unordered) > 0:
        kept = probabilities[unordered].double()
        if any(p.min_p > 0.0 for p in params):
            floor = filters.min_p[unordered] * kept.amax(dim=1, keepdim=True)
            kept.masked_fill_(kept < floor, 0.0)
        found[unordered] = invert(kept, numbers[unordered])

    pending = positions_of(needs_order, True, device)
    for count in (*CANDIDATES, width):
        if len(pending) == 0:
            break
        count = min(count, width)
        values, ids = ranked_prefix(scaled[pending], count)
        kept, is_settled = keep(values, probabilities[pending].gather(1, ids).double(), filters.of_rows(pending), width)
        settled = pending[is_settled]
        ranks = invert(kept[is_settled], numbers[settled])
        found[settled] = ids[is_settled].gather(1, ranks)
        pending = pending[~is_settled]
    picked: list[list[int]] = found.tolist()
    return [ids_of_row[: len(entries[row].seeds)] for ids_of_row, row in zip(picked, rows, strict=True)]


def keep(values: Tensor, probabilities: Tensor, filters: Filters, width: int) -> tuple[Tensor, Tensor]:
    """Apply the filters to ranked candidates [N, K]: probabilities with 0 where filtered out, and [N] whether K were enough.

    They are not enough while an id outside of them could belong to the kept ones, be it only by a tie with the last candidate.
    """
    count = values.shape[1]
    rank = torch.arange(count, device=values.device)
    kept = probabilities.masked_fill(rank >= filters.top_k, 0.0)
    mass_until = kept.cumsum(dim=1)
    # Top-p is a share of what top-k left, or of everything, where the candidates may be only a part of it.
    mass = torch.where(filters.top_k < width, mass_until[:, -1:], 1.0)
    is_kept = (rank < filters.top_k) & ((mass_until - kept < filters.top_p * mass) | (filters.top_p >= 1.0))
    num_kept = is_kept.sum(dim=1, keepdim=True)  # at least 1: nothing stands before the first
    if count < width:
        has_mass = (filters.top_k == width) | (filters.top_k <= count)
        is_settled = (has_mass & (values.gather(1, num_kept - 1) > values[:, -1:]))[:, 0]
    else:
        is_settled = torch.ones(len(values), dtype=torch.bool, device=values.device)
    is_kept &= probabilities >= filters.min_p * probabilities[:, :1]
    return probabilities.masked_fill(~is_kept, 0.0), is_settled


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return for each number u of [N, S] the first column of weights [N, K] float64 whose running sum exceeds u times the total."""
    running = weights.cumsum(dim=1)
    found = torch.searchsorted(running, numbers * running[:, -1:], right=True)
    return found.clamp_(max=weights.shape[1] - 1)


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


def positions_of(flags: Sequence[bool], wanted: bool, device: torch.device) -> Tensor:
    """Return where `flags` equals `wanted`, [N] int64."""
    return torch.tensor([i for i, flag in enumerate(flags) if flag is wanted], dtype=torch.int64, device=device)
