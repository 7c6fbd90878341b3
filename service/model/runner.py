"""Executes steps: copies, packing, one forward pass, logits of the sampled rows, samples. Runs on the step thread alone.

Keeps nothing between steps but the model and the cache: every entry says all that its computation needs. Not a judge of requests; what is
out of bounds was refused at the edge. Invariant: a step writes only to the slots of its own tokens and to the destinations of its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor

from backends.interface import AttentionBackend, PlanT
from backends.kv_cache import KVCache
from backends.staging import Staging
from service.engine.batch import (
    EntryOutput,
    PromptLogprob,
    SequenceId,
    StepBatch,
    StepEntry,
    StepOutput,
)
from service.messages import SamplingParams
from service.model.graphs import StepGraphs, StepModel
from service.model.logprobs import prompt_logprobs
from service.model.packing import pack, shared_slot
from service.model.sampler import Sampler, Samples
from service.model.verification import fold, row_starts, unfold

NON_FINITE = "the model produced logits that are not finite (NaN or infinity)"
MAX_CAPTURED_TOKENS = 2048  # beyond, a step takes so long that nothing is gained, and the buffers would be large
WARM_UP_PREFILL = 64  # tokens
WARM_UP_CONTEXT = 2048  # tokens; enough for backends that split a long context to do so


class ModelRunner(Generic[PlanT]):
    """The `StepRunner` of a model in this process."""

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend[PlanT],
        cache: KVCache,
        *,
        num_valid_ids: int,
        max_model_len: int,
        max_captured_tokens: int = MAX_CAPTURED_TOKENS,
        checks_slots: bool = False,
    ) -> None:
        """Bind `model` to `cache`. Ids from `num_valid_ids` on are padding of the head and never sampled.

        `max_model_len` bounds the positions of a warm-up; requests were held to it at the edge.
        Steps of up to `max_captured_tokens` tokens may be replayed from a captured one; 0 for none.
        `checks_slots` looks at every step for two tokens in one slot, for tests and for hunting a fault: it costs a sort per step.
        """
        model.bind_cache(cache)
        self._block_size = cache.spec.block_size
        self._device = cache.layer(0).device
        max_tokens = min(max_captured_tokens, MAX_CAPTURED_TOKENS)
        table_width = -(-max_model_len // self._block_size)
        graphs = StepGraphs(model, backend, device=self._device, max_tokens=max_tokens, table_width=table_width)
        self._parts: tuple[StepModel, KVCache, StepGraphs[PlanT]] | None = (model, cache, graphs)
        self._num_valid_ids = num_valid_ids
        self._max_model_len = max_model_len
        self._checks_slots = checks_slots
        self._sampler = Sampler(num_valid_ids)
        self._staging = Staging(self._device)

    def execute(self, batch: StepBatch) -> StepOutput:
        """Compute one step; see `StepRunner`. Raises `ValueError` for a block table that is too short, whatever torch raises else."""
        model, cache, graphs = self._open_parts()
        begin = perf_counter()
        with torch.inference_mode():
            cache.copy_blocks(batch.copies)
            outputs = self._compute(model, graphs, batch.entries) if batch.entries else ()
        return StepOutput(step_id=batch.step_id, outputs=outputs, compute_s=perf_counter() - begin)

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Run one step of each kind, so that everything is compiled and packed before the first request; `report` gets each phase.

        All tokens go to the null block, which nothing reads for a result; it is zeroed afterwards. Blocks that sequences hold are not
        touched, so that a warm-up may also follow a backend swap.
        """
        _, cache, graphs = self._open_parts()
        checks, self._checks_slots = self._checks_slots, False  # every token of a warm-up shares the null block
        try:
            for phase, entries in warm_up_steps(self._block_size, self._max_model_len, graphs.sizes):
                report(phase)
                self.execute(StepBatch(step_id=0, entries=entries))
        finally:
            self._checks_slots = checks
            with torch.inference_mode():
                for index in range(cache.spec.num_layers):
                    cache.layer(index)[0].zero_()
                    scales = cache.scales(index)
                    if scales is not None:
                        scales[0].zero_()

    def close(self) -> None:
        """Let go of the model and the cache; a step after it raises `RuntimeError`."""
        self._parts = None

    def _open_parts(self) -> tuple[StepModel, KVCache, StepGraphs[PlanT]]:
        if self._parts is None:
            raise RuntimeError("the model runner has been closed")
        return self._parts

    def _compute(
        self, model: StepModel, graphs: StepGraphs[PlanT], entries: Sequence[StepEntry]
    ) -> tuple[EntryOutput, ...]:
        rows = unfold(entries)
        # Queries of one sequence read its keys once on a CPU; on a GPU decodes are what captured steps consist of.
        packed = pack(entries if self._device.type == "cpu" else rows, self._block_size)
        if self._checks_slots and (slot := shared_slot(packed.meta.slot_mapping)) is not None:
            raise RuntimeError(f"two tokens of one step would be written to slot {slot}")
        hidden = graphs.forward(packed)
        starts = packed.row_starts if len(packed.row_starts) == len(rows) + 1 else row_starts(rows)
        samples = self._sample(model, hidden, starts, rows)
        scores = self._score_prompts(model, hidden, starts, rows)
        outputs = [output_of(row, samples.get(index, ()), scores.get(index, ())) for index, row in enumerate(rows)]
        return fold(entries, outputs)

    def _sample(
        self, model: StepModel, hidden: Tensor, starts: Sequence[int], entries: Sequence[StepEntry]
    ) -> dict[int, Samples | None]:
        """Sample the last token of each entry that has seeds; by index of the entry."""
        sampled = [index for index, entry in enumerate(entries) if entry.seeds]
        if not sampled:
            return {}
        if len(sampled) < len(hidden):
            last_rows = [starts[index + 1] - 1 for index in sampled]
            [places] = self._staging.send([np.array(last_rows)])
            hidden = hidden.index_select(0, places)
        logits = model.logits(hidden)
        chosen = self._sampler.sample(logits, [entries[index] for index in sampled])
        return dict(zip(sampled, chosen, strict=True))

    def _score_prompts(
        self, model: StepModel, hidden: Tensor, starts: Sequence[int], entries: Sequence[StepEntry]
    ) -> dict[int, tuple[PromptLogprob, ...] | None]:
        """Score the prompt tokens that entries ask for; by index of the entry."""
        scores = {}
        for index, entry in enumerate(entries):
            if entry.prompt_logprob_targets:
                scores[index] = prompt_logprobs(
                    hidden[starts[index] : starts[index + 1]],
                    entry.prompt_logprob_targets,
                    entry.sampling.prompt_logprobs or 0,
                    lambda rows: model.logits(rows)[:, : self._num_valid_ids],
                )
        return scores


def output_of(entry: StepEntry, samples: Samples | None, scores: tuple[PromptLogprob, ...] | None) -> EntryOutput:
    """Build what an entry gets; None for either part means that its logits were not finite."""
    if samples is None or scores is None:
        return EntryOutput(sequence_id=entry.sequence_id, error=NON_FINITE)
    return EntryOutput(sequence_id=entry.sequence_id, samples=samples, prompt_logprobs=scores)


def warm_up_steps(
    block_size: int, max_model_len: int, sizes: Sequence[int] = ()
) -> list[tuple[str, tuple[StepEntry, ...]]]:
    """Return the phases of a warm-up and the entries of each; all of their blocks are the null block. `sizes`: decodes that are captured."""
    few, chunk = min(2, max_model_len), min(WARM_UP_PREFILL, max_model_len)
    context = min(WARM_UP_CONTEXT, max_model_len)
    greedy = SamplingParams(temperature=0.0)

    def entry(start: int, count: int, sampling: SamplingParams, **more: Any) -> StepEntry:
        blocks = (0,) * -(-(start + count) // block_size)
        return StepEntry(
            sequence_id=SequenceId(0),
            token_ids=(0,) * count,
            start=start,
            block_ids=blocks,
            sampling=sampling,
            seeds=(0,),
            **more,
        )

    captured = [(f"warming up: {size} decodes", (entry(0, 1, greedy),) * size) for size in sizes]
    return [
        *captured,
        ("warming up: a decode step", (entry(0, 1, greedy),)),
        ("warming up: a long context", (entry(context - 1, 1, greedy),)),
        ("warming up: prefill and decode together", (entry(chunk - 1, 1, greedy), entry(0, chunk, greedy))),
        (
            "warming up: the sampler",
            (
                entry(0, 1, SamplingParams(logprobs=5)),
                entry(0, 1, SamplingParams(top_k=40, top_p=0.9, min_p=0.05)),
                entry(
                    0,
                    1,
                    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0}),
                    prompt_token_ids=(0,),
                    output_token_ids=(0,),
                ),
                entry(0, few, SamplingParams(prompt_logprobs=1), prompt_logprob_targets=(0,) * few),
            ),
        ),
    ]
