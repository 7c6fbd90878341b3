"""What crosses the seam between the event loop and the model-step thread: plain, immutable data, complete in itself.

No tensor, lock or user text. Because every entry carries all that its step needs, preemption, replay and a restarted executor need
nothing synchronised. The one exception is a step made while the one before it is computed: a token sampled there stands in it as
"to come", and `complete` fills it in on the step thread. A runner only ever sees complete steps.
"""

from __future__ import annotations

from typing import NewType, Protocol

from msgspec import Struct
from msgspec.structs import replace

from service.messages import SamplingParams

SequenceId = NewType("SequenceId", int)

UNKNOWN_TOKEN = 0  # stands where a token is to come


class StepEntry(Struct, frozen=True, kw_only=True):
    """The tokens of one sequence that a step computes.

    `token_ids` stand at positions `start … start + len - 1`; the KV of positions below `start` is already in `block_ids`, which cover
    all positions up to the last. When `seeds` is not empty the logits of the last token are sampled once per seed (several at the fork of
    a request with n > 1); sample i at position p is a function of (seeds[i], p) and the logits alone, never of neighbours.

    The last `num_drafts` of `token_ids` are guesses to verify, behind exactly one known token and with exactly one seed. The logits of that
    token and of every draft are sampled, each as it would be if the drafts before it were known tokens.

    `prompt_token_ids` and `output_token_ids` are the history that penalties act on, None where `sampling` has no penalties.
    `num_output_tokens` counts tokens generated before this step (for `min_tokens`). `eos_ids` are suppressed while it is below
    `sampling.min_tokens`. `wants_prompt_logprobs` asks for the logprobs of the tokens after each of `token_ids`, which are
    `prompt_logprob_targets` (the prompt's next tokens; may be one shorter than `token_ids` at the prompt's end).
    `awaits_token`: the last of `token_ids` is the one that the step before samples for this sequence; see `complete`.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...] = ()
    num_drafts: int = 0
    num_output_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None
    prompt_logprob_targets: tuple[int, ...] | None = None
    awaits_token: bool = False

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once this entry has been computed."""
        return self.start + len(self.token_ids)


class StepBatch(Struct, frozen=True, kw_only=True):
    """One step of the model: entries (decodes first, then prefill chunks) and the block copies that precede its writes."""

    step_id: int
    entries: tuple[StepEntry, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, drafts included."""
        return sum(len(entry.token_ids) for entry in self.entries)


class SampledToken(Struct, frozen=True, kw_only=True):
    """One sampled token; `logprob` and `top` (best first) only where the entry's `sampling.logprobs` asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """The logprob of one prompt token given those before it, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class EntryOutput(Struct, frozen=True, kw_only=True):
    """What a step gave one entry: a sample per seed, or `error` (say, non-finite logits) and none.

    An entry with drafts gets between one sample and one more than it has drafts: all but the last of them equal the drafts in their
    order, so the step has computed their KV, too. What was sampled behind a draft that was not confirmed means nothing and is left out.
    """

    sequence_id: SequenceId
    samples: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    error: str | None = None


class StepOutput(Struct, frozen=True, kw_only=True):
    """The outputs of one step in the order of its entries; `compute_s` is the time on the step thread in seconds."""

    step_id: int
    outputs: tuple[EntryOutput, ...]
    compute_s: float


def complete(batch: StepBatch, previous: StepOutput | None) -> StepBatch:
    """Fill in the tokens that were being sampled when `batch` was made; `previous` is the output of the step before it.

    A sequence that has no sample there has failed, so nobody will look at what its entry gives: it keeps `UNKNOWN_TOKEN`, which a model
    can compute. None stands for a step that failed as a whole.
    """
    if not any(entry.awaits_token for entry in batch.entries):
        return batch
    outputs = () if previous is None else previous.outputs
    sampled = {output.sequence_id: output.samples[-1].token_id for output in outputs if output.samples}

    def completed(entry: StepEntry) -> StepEntry:
        token_id = sampled.get(entry.sequence_id, UNKNOWN_TOKEN)
        history = entry.output_token_ids
        return replace(
            entry,
            token_ids=(*entry.token_ids[:-1], token_id),
            output_token_ids=None if history is None else (*history, token_id),
            awaits_token=False,
        )

    return replace(batch, entries=tuple(completed(entry) if entry.awaits_token else entry for entry in batch.entries))


class StepRunner(Protocol):
    """What executes steps: the model runner, or a fake in tests. Called from one thread only."""

    def execute(self, batch: StepBatch) -> StepOutput:
        """Run the copies, compute the tokens, sample; raises whatever went wrong, which fails this step's requests only."""
        ...

    def close(self) -> None:
        """Give the memory back; called once, from the thread that ran the steps."""
        ...
