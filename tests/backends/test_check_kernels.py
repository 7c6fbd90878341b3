"""The check of compiled kernels: what it refuses, and, where NVRTC is installed, that it sees what a compiler did."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from backends.kernels.variants import SHIPPED, Variant

SCRIPT = Path(__file__).parents[2] / "ops" / "gpu" / "check_kernels.py"


@pytest.fixture(scope="module")
def check_kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_a_kernel_over_its_budget_or_without_its_instructions_is_refused(check_kernels: ModuleType) -> None:
    """Registers, stack, accesses to local memory, blocks that do not fit, and a design that the compiler undid."""
    mix = {"16-byte loads": 2, "cp.async": 24, "ldmatrix": 32, "mma": 64, "local memory": 0}
    good = check_kernels.Usage(
        "attention_mma-bf16-bf16-d64", "attention_mma_decode", "sm_90", 128, 0, 55296, 4, 1.0, mix
    )
    assert check_kernels.judge(good) == []
    assert "256 registers, 255 allowed" in check_kernels.judge(replace(good, registers=256))
    assert any("stack" in fault for fault in check_kernels.judge(replace(good, stack_bytes=8)))
    assert any("local memory" in fault for fault in check_kernels.judge(replace(good, mix={**mix, "local memory": 4})))
    assert any("no block fits" in fault for fault in check_kernels.judge(replace(good, blocks_per_multiprocessor=0)))
    assert "no mma in the machine code" in check_kernels.judge(replace(good, mix={**mix, "mma": 0}))
    simt = replace(good, variant="attention_simt-f32-int8-d64", kernel="attention_simt_4", registers=239)
    assert check_kernels.judge(simt) == []
    assert check_kernels.judge(replace(simt, variant="attention_simt-f32-f32-d64"))


def test_the_table_replaces_what_stands_between_the_marks(check_kernels: ModuleType, tmp_path: Path) -> None:
    """And nothing else of the file; a file without marks is an error, not a file lost."""
    mix = {"16-byte loads": 2, "cp.async": 24, "ldmatrix": 32, "mma": 64, "local memory": 0}
    usage = check_kernels.Usage(
        "attention_mma-bf16-bf16-d64", "attention_mma_decode", "sm_90", 128, 0, 55296, 4, 1.0, mix
    )
    file = tmp_path / "kernels.md"
    file.write_text("before\n<!-- kernels: begin -->\nold\n<!-- kernels: end -->\nafter\n")
    check_kernels.write_table(file, [usage])
    lines = file.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "old" not in lines
    assert (
        "| attention_mma-bf16-bf16-d64 | attention_mma_decode | sm_90 | 128 | 55296 | 4 | 16 | 2 | 24 | 32 | 64 |"
        in lines
    )
    file.write_text("no marks\n")
    with pytest.raises(ValueError, match="substring"):
        check_kernels.write_table(file, [usage])
    assert file.read_text() == "no marks\n"


def test_every_variant_is_compiled_for_every_architecture_that_it_claims(check_kernels: ModuleType) -> None:
    """Tensor-core modules from 8.0 on, the others from 7.5 unless bfloat16 is in them."""
    assert check_kernels.capability("sm_100") == (10, 0)
    for variant in SHIPPED:
        claimed = [
            name for name in check_kernels.ARCHITECTURES if check_kernels.capability(name) >= variant.minimum_capability
        ]
        has_bfloat16 = torch.bfloat16 in (variant.q_dtype, variant.kv_dtype)
        assert ("sm_75" in claimed) == (not variant.uses_tensor_cores and not has_bfloat16), variant.name
        assert {"sm_80", "sm_90", "sm_100"} <= set(claimed)


def test_a_module_compiles_to_machine_code_with_its_instructions(check_kernels: ModuleType) -> None:
    """One of the smallest; `make check-kernels` does them all."""
    if not check_kernels._is_installed("cuda.bindings") or check_kernels._tools() is None:
        pytest.skip(f"not all of {', '.join(check_kernels.PACKAGES)} are installed")
    variant = Variant("attention_mma.cu", torch.bfloat16, torch.bfloat16, 64)
    usages = check_kernels._examine(variant, "sm_90")
    assert isinstance(usages, list), usages
    assert {usage.kernel for usage in usages} == {"attention_mma_decode", "attention_mma_prefill", "merge_parts"}
    assert [fault for usage in usages for fault in check_kernels.judge(usage)] == []
    broken = Variant("attention_mma.cu", torch.float32, torch.float32, 64)
    assert "16-bit queries" in check_kernels._examine(broken, "sm_90")
