"""The whole CUDA backend, its planning and its launches, through the emulation: the parity matrix and the golden checkpoints.

Functions of the matrix are called as they stand, with the emulation as one more line in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch

from backends import registry
from backends.interface import DeviceInfo
from backends.kv_cache import KVCacheSpec
from tests.backends import test_parity as parity
from tests.backends import test_quantised as quantised
from tests.backends.steps import Shape
from tests.cuda_emulation.backend import LINE, NAME
from tests.cuda_emulation.module import missing
from tests.model import test_golden_checkpoints as golden

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", MappingProxyType({NAME: LINE, **registry.BACKENDS}))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
MATRIX: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (parity.test_every_row_equals_the_dense_float64_computation, (Shape(9, 3, 64, 16), F32)),
    (parity.test_every_row_equals_the_dense_float64_computation, (Shape(9, 3, 64, 16), BF16)),
    (parity.test_every_row_equals_the_dense_float64_computation, (Shape(4, 4, 80, 8), BF16)),
    (parity.test_every_row_equals_the_dense_float64_computation, (Shape(8, 1, 128, 32), BF16)),
    (parity.test_every_row_equals_the_dense_float64_computation, (Shape(4, 2, 16, 16), F32)),
    (parity.test_a_prompt_in_chunks_equals_the_prompt_as_a_whole, (None,)),
    (parity.test_a_prompt_in_chunks_equals_the_prompt_as_a_whole, (17,)),
    (parity.test_slices_of_a_fused_projection_are_read_and_written_in_place, (F32,)),
    (parity.test_slices_of_a_fused_projection_are_read_and_written_in_place, (BF16,)),
    (parity.test_a_cache_of_any_supported_dtype_serves_queries_of_another, (F32,)),
    (parity.test_a_cache_of_any_supported_dtype_serves_queries_of_another, (BF16,)),
    (parity.test_an_empty_step_writes_nothing_and_fails_nothing, ()),
    (parity.test_rows_without_keys_and_rows_of_padding_become_zeros, ()),
    (parity.test_a_table_that_is_exactly_wide_enough_serves_as_a_wider_one, (64,)),
    (parity.test_a_table_that_is_exactly_wide_enough_serves_as_a_wider_one, (65,)),
    (parity.test_products_of_1e5_stay_finite_and_right, (2000, F16)),
    (parity.test_storing_changes_the_slots_of_the_step_and_nothing_else, (F32,)),
    (parity.test_storing_changes_the_slots_of_the_step_and_nothing_else, (BF16,)),
    (parity.test_plans_of_two_steps_may_be_used_in_turn, ()),
    (parity.test_one_plan_serves_local_and_global_layers, ()),
    *(
        (test, (*arguments, kind))
        for kind in quantised.KINDS
        for test, arguments in (
            (quantised.test_every_row_equals_the_dense_computation_over_what_was_kept, (Shape(9, 3, 64, 16), BF16)),
            (quantised.test_every_row_equals_the_dense_computation_over_what_was_kept, (Shape(8, 1, 128, 32), BF16)),
            (quantised.test_stored_rows_are_the_definitions_bits_and_nothing_else_changes, (BF16,)),
            (quantised.test_a_prompt_in_chunks_and_decodes_equals_the_prompt_as_a_whole, (None, BF16)),
            (quantised.test_a_copied_block_reads_as_its_source, ()),
        )
    ),
]


def label(row: tuple[Callable[..., None], tuple[Any, ...]]) -> str:
    test, arguments = row
    return "-".join([test.__name__.removeprefix("test_"), *map(str, arguments)])


@pytest.mark.parametrize("row", MATRIX, ids=label)
def test_the_parity_matrix_holds(row: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    test, arguments = row
    test(NAME, *arguments)


@pytest.mark.parametrize("name", golden.CHECKPOINTS)
def test_a_batch_of_a_tiny_checkpoint_has_the_golden_tokens(name: str) -> None:
    golden.test_a_batch_of_all_prompts_follows_the_reference_token_by_token(name, NAME)


def test_what_no_kernel_serves_is_refused_with_the_numbers() -> None:
    device = DeviceInfo("cpu")
    for spec, words in (
        (KVCacheSpec(1, 4, 2, 48, 16, BF16), ("bf16", "head_size 48", "8.0")),
        (KVCacheSpec(1, 4, 2, 64, 20, BF16), ("block_size is 20", "8, 16, 32, 64, 128")),
        (KVCacheSpec(1, 4, 2, 80, 16, F32, torch.int8), ("f32 queries", "int8 pool", "in bfloat16")),
        (KVCacheSpec(1, 4, 2, 80, 16, F16, torch.int8), ("f16 queries", "int8 pool", "64, 128")),
        (KVCacheSpec(1, 3, 2, 64, 16, F32), ("num_heads 3",)),
    ):
        reasons = "; ".join(registry.probe(spec, device)[NAME])
        assert all(word in reasons for word in words), reasons
