"""The runner over a one-layer model: whatever way a sequence's tokens are split into steps, blocks and batches, the result is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from backends.kv_cache import KVCache
from backends.reference import ReferenceBackend
from service.engine.batch import EntryOutput, StepBatch, StepEntry, StepOutput
from service.model.runner import NON_FINITE, ModelRunner
from tests.model.steps import CPU, AttentionModel, make_entry

BLOCK = 8
PROMPT = tuple((7 * i * i + 3 * i + 1) % 61 for i in range(27))


class Bench:
    """A runner with its model and cache at hand."""

    def __init__(self, model: AttentionModel | None = None, num_valid_ids: int = 61, max_model_len: int = 64) -> None:
        self.model = model or AttentionModel()
        self.cache = KVCache(self.model.kv_cache_spec(BLOCK), 40, CPU)
        self.runner = ModelRunner(
            self.model,
            ReferenceBackend(),
            self.cache,
            num_valid_ids=num_valid_ids,
            max_model_len=max_model_len,
            checks_slots=True,
        )

    def step(self, *entries: StepEntry, copies: Sequence[tuple[int, int]] = ()) -> StepOutput:
        return self.runner.execute(StepBatch(step_id=3, entries=entries, copies=tuple(copies)))

    def whole(self, tokens: Sequence[int] = PROMPT, **more: Any) -> EntryOutput:
        """Compute all tokens in one step, in blocks of their own."""
        return self.step(make_entry(tokens, block_ids=(30, 31, 32, 33, 34), **more)).outputs[0]


def test_a_prompt_in_chunks_and_scattered_blocks_gives_what_it_gives_whole() -> None:
    bench = Bench()
    expected = bench.whole(logprobs=10)
    blocks = (9, 4, 17, 2)
    first = bench.step(make_entry(PROMPT[:11], block_ids=blocks, seeds=()))
    bench.step(make_entry(PROMPT[11:16], start=11, block_ids=blocks, seeds=()))
    last = bench.step(make_entry(PROMPT[16:], start=16, block_ids=blocks, logprobs=10))
    assert first.outputs[0] == EntryOutput(sequence_id=first.outputs[0].sequence_id)
    assert_same(last.outputs[0], expected)


def test_decodes_and_a_prefill_chunk_in_one_step_give_what_they_give_alone() -> None:
    bench = Bench()
    tables = [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
    others = [PROMPT[:20], PROMPT[3:9], PROMPT[5:]]
    for tokens, blocks in zip(others[:2], tables, strict=False):
        bench.step(make_entry(tokens[:-1], block_ids=blocks, seeds=()))
    output = bench.step(
        make_entry(others[0][-1:], start=19, block_ids=tables[0], sequence_id=1, logprobs=5),
        make_entry(others[1][-1:], start=5, block_ids=tables[1], sequence_id=2, logprobs=5),
        make_entry(others[2], block_ids=tables[2], sequence_id=3, logprobs=5),
    )
    assert output.step_id == 3
    assert output.compute_s > 0
    assert [entry.sequence_id for entry in output.outputs] == [1, 2, 3]
    for entry, tokens in zip(output.outputs, others, strict=True):
        assert_same(entry, bench.whole(tokens, logprobs=5))


def test_a_forked_tail_is_copied_before_either_branch_writes() -> None:
    """Copies precede writes: the source's next token goes to the slot that has just been copied."""
    bench = Bench()
    shared = PROMPT[:11]  # one full block and three slots of a second one
    bench.step(make_entry(shared, block_ids=(1, 2), seeds=()))
    output = bench.step(
        make_entry((40,), start=11, block_ids=(1, 2), logprobs=5, sequence_id=1),
        make_entry((50,), start=11, block_ids=(1, 3), logprobs=5, sequence_id=2),
        copies=[(2, 3)],
    )
    assert_same(output.outputs[0], bench.whole((*shared, 40), logprobs=5))
    assert_same(output.outputs[1], bench.whole((*shared, 50), logprobs=5))


def test_a_step_touches_no_slot_but_its_own() -> None:
    bench = Bench()
    bench.cache.layer(0).fill_(123.0)
    bench.step(make_entry(PROMPT[:10], block_ids=(5, 3), seeds=()))
    written = (bench.cache.layer(0) != 123.0).any(dim=1).any(dim=1).any(dim=-1)  # [block, slot]
    assert written.nonzero().tolist() == [[3, 0], [3, 1], *([5, slot] for slot in range(8))]


def test_only_the_sampled_rows_go_through_the_head() -> None:
    bench = Bench()
    bench.step(
        make_entry((1,), block_ids=(1,)),
        make_entry(PROMPT, block_ids=(2, 3, 4, 5)),
        make_entry(PROMPT[:20], block_ids=(6, 7, 8), seeds=()),
    )
    assert bench.model.rows_of_logits == [2]
    bench.model.rows_of_logits.clear()
    bench.step(make_entry(PROMPT[:20], block_ids=(6, 7, 8), seeds=()))
    assert bench.model.rows_of_logits == []


def test_prompt_logprobs_score_each_next_token_whole_and_in_chunks_alike() -> None:
    bench = Bench(AttentionModel())
    asked = {"prompt_logprobs": 3, "logprobs": 3}
    whole = bench.whole(targets=PROMPT[1:], **asked)
    assert [score.token_id for score in whole.prompt_logprobs] == list(PROMPT[1:])
    for position in (0, 13, 25):  # each is what sampling after that prefix reports
        (sample,) = bench.whole(PROMPT[: position + 1], logprobs=3).samples
        score = whole.prompt_logprobs[position]
        assert [i for i, _ in score.top] == [i for i, _ in sample.top]
        assert [v for _, v in score.top] == pytest.approx([v for _, v in sample.top], abs=1e-5)
        exact = dict(bench.whole(PROMPT[: position + 1], logprobs=20).samples[0].top)
        if score.token_id in exact:
            assert score.logprob == pytest.approx(exact[score.token_id], abs=1e-5)
    blocks = (1, 2, 3, 4)
    first = bench.step(make_entry(PROMPT[:10], block_ids=blocks, seeds=(), targets=PROMPT[1:11], **asked)).outputs[0]
    last = bench.step(make_entry(PROMPT[10:], start=10, block_ids=blocks, targets=PROMPT[11:], **asked)).outputs[0]
    scores = first.prompt_logprobs + last.prompt_logprobs
    assert [score.logprob for score in scores] == pytest.approx([s.logprob for s in whole.prompt_logprobs], abs=1e-5)
    assert_same(last, whole)


def test_the_logits_of_a_long_prompt_are_scored_in_slices() -> None:
    bench = Bench()
    tokens = PROMPT * 8
    bench.step(
        make_entry(tokens, block_ids=range(1, 29), seeds=(), prompt_logprobs=0, targets=(*tokens[1:], 5)),
    )
    assert sum(bench.model.rows_of_logits) == len(tokens)
    assert max(bench.model.rows_of_logits) <= 64


def test_a_sequence_with_non_finite_logits_fails_and_its_neighbours_do_not() -> None:
    """NUM-06: the request gets an error, no token; the same for the logits of its prompt."""
    bench = Bench(AttentionModel(poisoned_id=60))
    expected = bench.whole(PROMPT[:9])
    output = bench.step(
        make_entry(PROMPT[:9], block_ids=(1, 2), sequence_id=1),
        make_entry((5, 60), block_ids=(3,), sequence_id=2),
        make_entry((60, 5), block_ids=(4,), sequence_id=3, seeds=(), prompt_logprobs=1, targets=(5, 9)),
        make_entry(PROMPT[:9], block_ids=(5, 6), sequence_id=4),
    ).outputs
    assert [entry.error for entry in output] == [None, NON_FINITE, NON_FINITE, None]
    assert output[1].samples == ()
    assert output[2].prompt_logprobs == ()
    assert output[0].samples == output[3].samples == expected.samples


def test_padding_ids_of_the_head_are_never_sampled_nor_reported() -> None:
    """MDL-07."""
    bench = Bench(num_valid_ids=20)
    bench.model.head[:, 20:] *= 100.0
    output = bench.whole(seeds=range(100), temperature=2.0, logprobs=20, prompt_logprobs=20, targets=(*PROMPT[1:], 5))
    assert all(sample.token_id < 20 for sample in output.samples)
    assert all(token_id < 20 for sample in output.samples for token_id, _ in sample.top)
    assert all(token_id < 20 for score in output.prompt_logprobs for token_id, _ in score.top)
    assert len(output.samples[0].top) == 20


@pytest.mark.parametrize("max_model_len", [23, 24, 25])
def test_a_sequence_that_fills_the_context_is_the_same_alone_and_beside_short_ones(max_model_len: int) -> None:
    """BLK-11: the last token lies in the first, the last or a middle slot of its block."""
    bench = Bench(max_model_len=max_model_len)
    tokens = PROMPT[:max_model_len]
    blocks = tuple(range(1, 2 + (max_model_len - 1) // BLOCK))
    bench.step(make_entry(tokens[:-1], block_ids=blocks, seeds=()))
    last = make_entry(tokens[-1:], start=max_model_len - 1, block_ids=blocks, logprobs=5)
    alone = bench.step(last).outputs[0]
    mixed = bench.step(make_entry((3,), block_ids=(20,), sequence_id=2), last).outputs[1]
    assert_same(alone, bench.whole(tokens, logprobs=5))
    assert_same(mixed, alone)


def test_two_tokens_for_one_slot_are_a_fault_where_steps_are_checked() -> None:
    bench = Bench()
    with pytest.raises(RuntimeError, match="slot 17"):
        bench.step(make_entry((1, 2), block_ids=(2,)), make_entry((1,), start=1, block_ids=(2,), sequence_id=2))


def test_a_warm_up_reports_each_phase_and_leaves_the_blocks_of_sequences_alone() -> None:
    bench = Bench()
    prompt = make_entry(PROMPT[:-1], block_ids=(1, 2, 3, 4), seeds=())
    bench.step(prompt)
    before = bench.cache.layer(0).clone()
    phases: list[str] = []
    bench.runner.warm_up(phases.append)
    assert len(phases) >= 4
    assert len(set(phases)) == len(phases)
    assert torch.equal(bench.cache.layer(0)[1:], before[1:])
    assert not bench.cache.layer(0)[0].any()
    with pytest.raises(RuntimeError, match="slot"):  # the check of slots is on again
        bench.step(make_entry((1, 2), block_ids=(2,)), make_entry((1,), start=1, block_ids=(2,), sequence_id=2))


@pytest.mark.parametrize("max_model_len", [1, 2, 7, 4000])
def test_a_warm_up_stays_within_the_context(max_model_len: int) -> None:
    bench = Bench(max_model_len=max_model_len)
    seen: list[int] = []
    forward = bench.model.forward

    def watched(token_ids: Any, positions: torch.Tensor, plan: Any, backend: Any) -> torch.Tensor:
        seen.append(int(positions.max()))
        return forward(token_ids, positions, plan, backend)

    bench.model.forward = watched  # type: ignore[method-assign]
    bench.runner.warm_up(lambda phase: None)
    assert max(seen) <= max_model_len - 1


def test_a_step_without_entries_does_its_copies() -> None:
    bench = Bench()
    bench.cache.layer(0)[1] = 5.0
    assert bench.step(copies=[(1, 2)]).outputs == ()
    assert torch.equal(bench.cache.layer(0)[2], bench.cache.layer(0)[1])


def test_a_closed_runner_refuses_steps_and_lets_the_cache_go() -> None:
    bench = Bench()
    bench.runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        bench.step(make_entry())


def assert_same(actual: EntryOutput, expected: EntryOutput) -> None:
    """Compare samples exactly and logprobs within the rounding of differently shaped products."""
    assert [sample.token_id for sample in actual.samples] == [sample.token_id for sample in expected.samples]
    for ours, theirs in zip(actual.samples, expected.samples, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)
