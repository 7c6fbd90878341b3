"""The largest step, and what it leaves of a device's memory; the reader of that memory is a fake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.reference import ReferenceBackend
from service.config import CacheConfig, SchedulerConfig
from service.engine.batch import StepBatch, StepOutput
from service.errors import ConfigError
from service.model.pool_size import DeviceShare, PoolSize, size_pool
from service.model.profiling import largest_step, measure
from service.model.runner import ModelRunner
from tests.model.steps import CPU, AttentionModel

MODEL = AttentionModel()
SPEC = MODEL.kv_cache_spec(8)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    scheduler: SchedulerConfig,
    *,
    free_at_start: int,
    left: int,
    max_model_len: int = 64,
) -> tuple[DeviceShare, StepBatch]:
    """Measure with a device that has `left` bytes after the step; also returns the step."""
    batches: list[StepBatch] = []
    execute = ModelRunner.execute

    def spy(runner: ModelRunner[Any], batch: StepBatch) -> StepOutput:
        batches.append(batch)
        return execute(runner, batch)

    monkeypatch.setattr(ModelRunner, "execute", spy)
    share = measure(
        MODEL,
        ReferenceBackend(),
        SPEC,
        scheduler,
        device=CPU,
        num_valid_ids=61,
        max_model_len=max_model_len,
        free_at_start=free_at_start,
        free_bytes=lambda: left if batches else pytest.fail("read before the step"),
    )
    [batch] = batches
    return share, batch


def test_the_largest_step_fills_the_budget_and_the_batch_and_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SchedulerConfig(max_num_seqs=6, token_budget=50)
    share, batch = measured(monkeypatch, scheduler, free_at_start=10_000_000, left=7_000_000)
    assert share == DeviceShare(10_000_000, 3_000_000)
    assert batch.num_tokens == 50
    assert [len(entry.token_ids) for entry in batch.entries] == [1] * 5 + [45]
    assert {entry.seq_len for entry in batch.entries[:5]} == {64}
    assert {block for entry in batch.entries for block in entry.block_ids} == {0}


def test_contexts_of_the_step_are_no_longer_together_than_memory_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, token_budget=8)
    _, batch = measured(monkeypatch, scheduler, free_at_start=4 * 10 * SPEC.bytes_per_token, left=0)
    assert {entry.seq_len for entry in batch.entries[:3]} == {10}


def test_a_budget_longer_than_a_prompt_is_filled_with_several() -> None:
    entries = largest_step(SchedulerConfig(max_num_seqs=3, token_budget=100), 8, 16, 40)
    assert [len(entry.token_ids) for entry in entries] == [1, 1, 40, 40, 18]
    assert all(len(entry.block_ids) * 8 >= entry.seq_len for entry in entries)
    assert [
        len(entry.token_ids) for entry in largest_step(SchedulerConfig(max_num_seqs=9, token_budget=1), 8, 1, 40)
    ] == [1]


def test_the_largest_step_has_the_prompts_of_a_step_without_decodes() -> None:
    entries = largest_step(SchedulerConfig(max_num_seqs=3, token_budget=8, prefill_budget=100), 8, 16, 40)
    assert [len(entry.token_ids) for entry in entries] == [1, 1, 40, 40, 18]


def sized(cache: CacheConfig, device: DeviceShare | None, **more: Any) -> PoolSize:
    arguments: dict[str, Any] = {"declared_len": 64, "requested_len": None, "max_num_seqs": 2, **more}
    return size_pool(cache, SPEC, free_memory_bytes=10**9, device=device, **arguments)


def test_the_pool_gets_what_the_share_of_the_memory_leaves() -> None:
    """All of it, even if the running sequences could not fill it: cached prefixes can."""
    block = SPEC.bytes_per_block
    device = DeviceShare(free_bytes=1000 * block, used_bytes=300 * block)
    assert sized(CacheConfig(gpu_memory_utilization=0.9), device).num_blocks == 600
    assert sized(CacheConfig(gpu_memory_utilization=0.5), device).num_blocks == 200
    assert sized(CacheConfig(size=str(50 * block)), device).num_blocks == 50
    assert sized(CacheConfig(num_blocks=40), device).num_blocks == 40


def test_a_device_that_leaves_less_than_a_sequence_is_an_error_with_the_numbers() -> None:
    block = SPEC.bytes_per_block
    with pytest.raises(ConfigError, match=f"{10 * block} bytes that were free .* take {9 * block};") as caught:
        sized(CacheConfig(gpu_memory_utilization=1.0), DeviceShare(10 * block, 9 * block))
    assert caught.value.param == "cache.gpu_memory_utilization"
    with pytest.raises(ConfigError, match="leaves no memory"):
        sized(CacheConfig(gpu_memory_utilization=0.5), DeviceShare(10 * block, 9 * block))
    shrunk = sized(CacheConfig(gpu_memory_utilization=1.0), DeviceShare(10 * block, 7 * block))
    assert shrunk == PoolSize(3, 16)
    with pytest.raises(ConfigError, match="max_model_len 17 does not fit"):
        sized(CacheConfig(gpu_memory_utilization=1.0), DeviceShare(10 * block, 7 * block), requested_len=17)


def test_cuda_is_asked_for_the_free_memory_of_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.model.profiling import cuda_free_bytes

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((index + 1) * 1000, 5000))
    assert cuda_free_bytes(1) == 2000
