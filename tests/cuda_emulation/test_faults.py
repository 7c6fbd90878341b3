"""Faults planted in the kernels, one at a time: the tests of the kernels would be worth nothing if they let one pass."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.kernels import work
from backends.kernels.variants import SOURCES
from tests.backends.steps import Shape, make_step
from tests.cuda_emulation.module import EmulationError, missing
from tests.cuda_emulation.step import check, load, make_quantised_step

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
SHAPE = Shape(6, 2, 64, 16)
# Decodes of more tiles than pipeline stages, one of them split; a chunk of a prompt; a partial last block everywhere.
STEPS = [(1, 37), (1, 215), (1, 300), (70, 330)]


@dataclass(frozen=True, slots=True)
class Fault:
    """What to replace in which source, the types under which it shows, and part of the report if it must be one of the emulation's."""

    title: str
    source: str
    old: str
    new: str
    q_dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    report: str | None = None


MMA, SIMT = "attention_mma.cu", "attention_simt.cu"
FAULTS = [
    Fault(
        "no barrier after a stage has arrived",
        MMA,
        "__syncthreads();  // this tile has arrived",
        "// this tile has arrived",
    ),
    Fault("no barrier before the ring is written over", MMA, "__syncthreads();  // the ring is read no more", ""),
    Fault(
        "no barrier before warps meet",
        MMA,
        "__syncthreads();\n    if (key_warp != 0) return;",
        "if (key_warp != 0) return;",
    ),
    Fault(
        "a barrier that some warps never reach",
        MMA,
        "__syncthreads();\n    if (key_warp != 0) return;",
        "if (key_warp != 0) return;\n    __syncthreads();",
        report="__syncthreads after some threads ended",
    ),
    Fault("a wait for cp.async one group too lax", MMA, "copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),
    Fault(
        "a stage filled while it is read",
        MMA,
        "if (tile + STAGES - 1 < num_tiles) fetch(tile + STAGES - 1);\n    look_up(tile + STAGES);",
        "look_up(tile + STAGES);\n    if (tile + STAGES < num_tiles) fetch(tile + STAGES);",
    ),
    Fault(
        "the block table off by one slot",
        MMA,
        "(min(key, item.end - 1) >> a.block_shift)",
        "(min(key, item.end - 1) + 1 >> a.block_shift)",
    ),
    Fault(
        "the block table read past its end",
        MMA,
        "(min(key, item.end - 1) >> a.block_shift)",
        "(key >> a.block_shift)",
        report="outside every tensor",
    ),
    Fault("a window one key too wide", MMA, "key <= at - a.window)", "key < at - a.window)"),
    Fault("a window that masks no edge tile", MMA, "tile_begin <= last_position - a.window)", "tile_begin < 0)"),
    Fault("a diagonal one key short", MMA, "key > at ||", "key >= at ||"),
    Fault("a diagonal one key too far", MMA, "key > at ||", "key > at + 1 ||"),
    Fault("keys past the end not masked", MMA, "if (key >= item.end || key > at", "if (key > at"),
    Fault("the soft cap's factor lost", "attention.cuh", "x = a.cap * (1.0f", "x = (1.0f"),
    Fault("the key's scale on the value", MMA, "weight * k_scale[KEYS + n", "weight * k_scale[n", kv_dtype=INT8),
    Fault("the neighbour's scale", MMA, "x *= k_scale[n * 8 + (e & 1)]", "x *= k_scale[n * 8]", kv_dtype=INT8),
    Fault(
        "the scales of another head",
        MMA,
        "(side * num_kv_heads + kv_head) * block_size",
        "(side * num_kv_heads) * block_size",
        kv_dtype=INT8,
    ),
    Fault("a value read without its transposition", MMA, "ldmatrix_4_transposed(b, v", "ldmatrix_4(b, v"),
    Fault(
        "a misaligned row",
        MMA,
        "keys + target, source",
        "reinterpret_cast<char*>(keys + target) + 8, source",
        report="misaligned",
    ),
    Fault(
        "the merge of one part too few", "attention.cuh", "part < num_parts; part++)", "part < num_parts - 1; part++)"
    ),
    Fault("the merge without weights", "attention.cuh", "exp2_fast(part_sum - largest)", "1.0f"),
    Fault("no barrier before warps meet (SIMT)", SIMT, "__syncthreads();\n", "", F32, F32),
    Fault(
        "a shuffle that half the warp does not reach",
        SIMT,
        "for (int bits = LANES / 2; bits > 0;",
        "for (int bits = lane < 16 ? LANES / 2 : LANES / 4; bits > 0;",
        F32,
        F32,
        report="warp collective",
    ),
    Fault(
        "the block table off by one slot (SIMT)", SIMT, "(key >> a.block_shift)", "(key + 1 >> a.block_shift)", F32, F32
    ),
    Fault(
        "a window one key too wide (SIMT)",
        SIMT,
        "key > position[r] - a.window)",
        "key >= position[r] - a.window)",
        F32,
        F32,
    ),
    Fault(
        "too little shared memory asked for",
        SIMT,
        "shared_values + WARPS * ROWS * D",
        "shared_values + WARPS * ROWS * D + 64",
        F32,
        F32,
        "past the end",
    ),
    Fault("a key stored a slot further", "cache.cu", "(slot & (block_size - 1));", "(slot + 1 & (block_size - 1));"),
    Fault("keys stored as values", "cache.cu", "side ? a.v +", "side == 0 ? a.v +"),
    Fault("a scale of the wrong range", "cache.cu", "127.0f : 448.0f)", "128.0f : 448.0f)", kv_dtype=INT8),
]


def run(sources: Path, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kernels = load(q_dtype, kv_dtype, SHAPE.head_size, sources=sources)
    if kv_dtype == INT8:
        step, scales = make_quantised_step(SHAPE, STEPS, q_dtype, kv_dtype)
    else:
        step, scales = make_step(SHAPE, STEPS, q_dtype), None
    check(kernels, step, step.layer(), scales)
    check(kernels, step, step.layer(window=101, soft_cap=5.0), scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "split_keys", lambda num_keys: np.full_like(num_keys, 40))  # ends inside a tile
        check(kernels, step, step.layer(), scales, seeds=[0])


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(BF16, BF16), (BF16, INT8), (F32, F32)], ids=str)
def test_the_kernels_as_shipped_pass_where_the_faults_fail(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Without this, a step that always fails would catch everything."""
    run(SOURCES, q_dtype, kv_dtype)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    """By a wrong row, by bits that depend on the schedule, or by a report; every fault of the list by itself."""
    sources = tmp_path / "kernels"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (sources / fault.source).read_text()
    assert text.count(fault.old) == 1, f"the source has no single place for this fault: {fault.old!r}"
    (sources / fault.source).write_text(text.replace(fault.old, fault.new))
    with pytest.raises((AssertionError, EmulationError)) as caught:
        run(sources, fault.q_dtype, fault.kv_dtype)
    assert "g++" not in str(caught.value), f"the faulty source does not compile: {caught.value}"
    if fault.report is not None:
        assert isinstance(caught.value, EmulationError)
        assert fault.report in str(caught.value)
