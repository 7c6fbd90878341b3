"""Drafts through the runner: whatever was guessed, what comes out is what would have come out token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from backends.kv_cache import KVCache
from backends.reference import ReferenceBackend
from service.engine.batch import EntryOutput, SampledToken, StepBatch, StepEntry
from service.model.runner import NON_FINITE, ModelRunner
from service.model.verification import fold, unfold
from tests.model.steps import CPU, AttentionModel, make_entry

BLOCK = 8
PROMPT = tuple((7 * i * i + 3 * i + 1) % 61 for i in range(21))
BLOCKS = (9, 4, 17, 2, 11)

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3},
    "filtered": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 1.5, "frequency_penalty": 1.1},
    "penalised and drawn": {"temperature": 1.0, "frequency_penalty": 2.0},
    "biased": {"temperature": 0.8, "logit_bias": {3: 5.0, 7: -100.0}},
    "not to end yet": {"temperature": 2.0, "min_tokens": 4, "stop_token_ids": tuple(range(30))},
    "with logprobs": {"temperature": 0.7, "logprobs": 5},
}


class Bench:
    """A runner over a one-layer model, and one sequence in it."""

    def __init__(self, poisoned_id: int | None = None) -> None:
        model = AttentionModel(poisoned_id)
        cache = KVCache(model.kv_cache_spec(BLOCK), 40, CPU)
        self.runner = ModelRunner(
            model, ReferenceBackend(), cache, num_valid_ids=61, max_model_len=64, checks_slots=True
        )

    def step(self, *entries: StepEntry) -> tuple[EntryOutput, ...]:
        return self.runner.execute(StepBatch(step_id=1, entries=entries)).outputs

    def prefill(self) -> None:
        """Compute all of the prompt but its last token."""
        self.step(make_entry(PROMPT[:-1], block_ids=BLOCKS, seeds=()))

    def decode(self, output: Sequence[int], drafts: Sequence[int] = (), **sampling: Any) -> EntryOutput:
        return self.step(decode_entry(output, drafts, **sampling))[0]


def decode_entry(output: Sequence[int], drafts: Sequence[int] = (), **sampling: Any) -> StepEntry:
    """The decode of the last token of PROMPT and `output`, with `drafts` behind it."""
    tokens = (*PROMPT, *output)
    return make_entry(
        (tokens[-1], *drafts),
        start=len(tokens) - 1,
        block_ids=BLOCKS,
        num_drafts=len(drafts),
        num_output_tokens=len(output),
        prompt=PROMPT,
        output=output,
        **sampling,
    )


def assert_same(actual: Sequence[SampledToken], expected: Sequence[SampledToken]) -> None:
    """Compare ids exactly, and logprobs within the rounding of this model's products, which are torch's and depend on the shape."""
    assert [sample.token_id for sample in actual] == [sample.token_id for sample in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


def token_by_token(count: int, **sampling: Any) -> tuple[SampledToken, ...]:
    bench = Bench()
    bench.prefill()
    samples: tuple[SampledToken, ...] = ()
    for _ in range(count):
        samples += bench.decode([sample.token_id for sample in samples], **sampling).samples
    return samples


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_drafts_give_the_samples_of_single_steps_up_to_the_first_wrong_one(name: str, num_right: int) -> None:
    sampling = PARAMETERS[name]
    expected = token_by_token(12, **sampling)
    ids = [sample.token_id for sample in expected]
    bench = Bench()
    bench.prefill()
    wrong = (ids[num_right] + 1) % 61
    got = bench.decode([], [*ids[:num_right], wrong, ids[num_right + 1]], **sampling).samples
    assert_same(got, expected[: num_right + 1])
    # The next step writes over the slots of the guesses that failed, and finds the confirmed ones.
    later = len(got)
    assert_same(bench.decode(ids[:later], ids[later : later + 4], **sampling).samples, expected[later : later + 5])


def test_drafts_of_one_sequence_change_nothing_beside_it() -> None:
    expected = token_by_token(6, temperature=0.0)
    ids = [sample.token_id for sample in expected]
    bench = Bench()
    bench.prefill()
    other = make_entry(PROMPT[5:17], block_ids=(20, 21), sequence_id=2, temperature=1.0, logprobs=3)
    alone = bench.step(other)[0]
    outputs = bench.step(decode_entry([], ids[:3], temperature=0.0), other)
    assert_same(outputs[0].samples, expected[:4])
    assert_same(outputs[1].samples, alone.samples)


def test_a_fault_behind_a_wrong_draft_is_nobodys_and_one_behind_a_right_draft_is_left_to_the_next_step() -> None:
    bench = Bench(poisoned_id=60)
    bench.prefill()
    expected = token_by_token(2, temperature=0.0)
    ids = [sample.token_id for sample in expected]
    assert 60 not in ids
    assert bench.decode([], [60], temperature=0.0).samples == expected[:1]
    assert bench.decode([], [ids[0], 60], temperature=0.0).samples == expected
    forced = {"temperature": 0.0, "logit_bias": {60: 100.0}}
    assert [sample.token_id for sample in bench.decode([], [60, 5], **forced).samples] == [60]
    assert bench.decode([60], [5], **forced).error == NON_FINITE


def test_entries_without_drafts_are_passed_on_as_they_are() -> None:
    entries = (make_entry((1, 2, 3)), make_entry((4,), sequence_id=2))
    assert unfold(entries) is entries
    outputs = tuple(EntryOutput(sequence_id=entry.sequence_id) for entry in entries)
    assert fold(entries, outputs) == outputs
