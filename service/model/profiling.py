"""Measures what a device leaves for the block pool, by running the largest step before there is a pool.

All tokens of that step go to the null block of a cache of one block. What the step took stays with torch's allocator, which gives it to
later steps, so the difference of free memory before the weights were loaded and after the step is what everything but the pool needs:
weights, activations, workspaces, compiled kernels, the driver's context. Invariant: nothing here is used on a CPU, whose memory is shared
with everything else; see `pool_size` for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backends.interface import AttentionBackend
from backends.kv_cache import KVCache, KVCacheSpec
from service.config import SchedulerConfig
from service.engine.batch import SequenceId, StepBatch, StepEntry
from service.messages import SamplingParams
from service.model.graphs import StepModel
from service.model.pool_size import DeviceShare
from service.model.runner import ModelRunner

FreeBytes = Callable[[], int]  # free memory of the device, now


def cuda_free_bytes(index: int) -> int:
    """Return the memory of CUDA device `index` that no process has taken."""
    return int(torch.cuda.mem_get_info(index)[0])


def measure(
    model: StepModel,
    backend: AttentionBackend[Any],
    spec: KVCacheSpec,
    scheduler: SchedulerConfig,
    *,
    device: torch.device,
    num_valid_ids: int,
    max_model_len: int,
    free_at_start: int,
    free_bytes: FreeBytes,
) -> DeviceShare:
    """Run the largest step that `scheduler` allows and return what it leaves. Raises what torch raises where even that does not fit."""
    runner: ModelRunner[Any] = ModelRunner(
        model,
        backend,
        KVCache(spec, 1, device),
        num_valid_ids=num_valid_ids,
        max_model_len=max_model_len,
    )
    # No step's contexts can be longer together than a pool of all memory.
    longest = max(1, min(max_model_len, free_at_start // spec.bytes_per_token // scheduler.max_num_seqs))
    try:
        runner.execute(StepBatch(step_id=0, entries=largest_step(scheduler, spec.block_size, longest, max_model_len)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        runner.close()
    return DeviceShare(free_at_start, max(0, free_at_start - free_bytes()))


def largest_step(
    scheduler: SchedulerConfig, block_size: int, context: int, max_model_len: int
) -> tuple[StepEntry, ...]:
    """Return decodes of `context` tokens, sampled in the way that takes most memory, and prompts that fill the largest budget.

    One prompt runs beside the decodes, more where the budget is longer than a prompt can be. A step of `prefill_budget` tokens has no
    decodes, but as many prompts may end in it, so that it has as many rows to sample: one step bounds both kinds.
    """
    wants_most = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, logprobs=20)
    blocks = (0,) * -(-max_model_len // block_size)  # one tuple for all: there are many

    def entry(start: int, count: int) -> StepEntry:
        return StepEntry(
            sequence_id=SequenceId(0),
            token_ids=(0,) * count,
            start=start,
            block_ids=blocks,
            sampling=wants_most,
            seeds=(0,),
        )

    entries = [entry(context - 1, 1) for _ in range(min(scheduler.max_num_seqs, scheduler.token_budget) - 1)]
    left = max(scheduler.token_budget, scheduler.prefill_budget or 0) - len(entries)
    while left > 0:
        count = min(left, max_model_len)
        entries.append(entry(0, count))
        left -= count
    return tuple(entries)
