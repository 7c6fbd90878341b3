"""The check of compiled kernels: what it refuses, and, where NVRTC is installed, that it sees what a compiler did."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from backends.kernels.dispatch import attention_variant
from backends.kernels.variants import CACHE, SHIPPED, Variant

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
        "attention_mma-bf16-bf16-d64", "attention_mma_decode", "sm_90", 128, 0, 128, 55296, 4, 1.0, mix
    )
    assert check_kernels.judge(good) == []
    assert "256 registers, 255 allowed" in check_kernels.judge(replace(good, registers=256))
    assert any("stack" in fault for fault in check_kernels.judge(replace(good, stack_bytes=8)))
    assert any("local memory" in fault for fault in check_kernels.judge(replace(good, mix={**mix, "local memory": 4})))
    assert any("no block fits" in fault for fault in check_kernels.judge(replace(good, blocks_per_multiprocessor=0)))
    assert "no mma in the machine code" in check_kernels.judge(replace(good, mix={**mix, "mma": 0}))


def test_the_table_replaces_what_stands_between_the_marks(check_kernels: ModuleType, tmp_path: Path) -> None:
    """And nothing else of the file; a file without marks is an error, not a file lost."""
    mix = {"16-byte loads": 2, "cp.async": 24, "ldmatrix": 32, "mma": 64, "local memory": 0}
    usage = check_kernels.Usage(
        "attention_mma-bf16-bf16-d64", "attention_mma_decode", "sm_90", 128, 0, 128, 55296, 4, 1.0, mix
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


def test_each_architecture_is_compiled_for_with_what_it_is_served_with(check_kernels: ModuleType) -> None:
    """Tensor-core modules from 8.0 on, the others from 7.5; a short ring only where memory is short; nothing is left out."""
    assert check_kernels.capability("sm_100") == (10, 0)
    compiled = {
        name: check_kernels.chosen(name, whole=name not in check_kernels.SHORT_RINGS_ONLY)
        for name in check_kernels.ARCHITECTURES
    }
    assert not any(variant.uses_tensor_cores for variant in compiled["sm_75"])
    assert compiled["sm_80"] == compiled["sm_90"] == compiled["sm_100"]
    assert {variant.stages for variant in compiled["sm_86"]} == {2}
    assert {variant for variants in compiled.values() for variant in variants} == set(SHIPPED)
    assert check_kernels.chosen("sm_120") == check_kernels.chosen("sm_89")


HANDFUL = [
    (torch.bfloat16, torch.bfloat16, 128, ("sm_80", "sm_86", "sm_90", "sm_100")),
    (torch.bfloat16, torch.int8, 256, ("sm_80", "sm_90", "sm_100")),  # the most registers of all
    (torch.float16, torch.float8_e4m3fn, 64, ("sm_90",)),
    (torch.float32, torch.float32, 256, ("sm_75", "sm_90")),
    (torch.float16, torch.float16, 96, ("sm_75",)),
]


@pytest.mark.parametrize(
    ("types", "architecture"),
    [(row[:3], architecture) for row in HANDFUL for architecture in row[3]],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)).replace("torch.", ""),
)
def test_a_handful_of_modules_compiles_within_its_budget(
    check_kernels: ModuleType,
    types: tuple[torch.dtype, torch.dtype, int],
    architecture: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hardest of each kind; `make check-kernels` does them all."""
    needs_compiler(check_kernels)
    monkeypatch.setattr(check_kernels, "KEPT", tmp_path)
    variant = attention_variant(*types, check_kernels.capability(architecture))
    assert variant is not None
    for module in (variant, CACHE) if types[2] == 64 else (variant,):
        usages = check_kernels.examine(module, architecture)
        assert isinstance(usages, list), usages
        assert [fault for usage in usages for fault in check_kernels.judge(usage)] == []
        if module is not CACHE:
            assert "merge_parts" in {usage.kernel for usage in usages}


def test_what_was_found_is_kept_until_the_source_changes(
    check_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler(check_kernels)
    monkeypatch.setattr(check_kernels, "KEPT", tmp_path)
    first = check_kernels.examine(CACHE, "sm_90")
    assert isinstance(first, list), first
    [kept] = tmp_path.iterdir()
    kept.write_text(json.dumps([asdict(replace(usage, registers=7)) for usage in first]))
    assert {usage.registers for usage in check_kernels.examine(CACHE, "sm_90")} == {7}
    monkeypatch.setattr(Variant, "digest", property(lambda variant: "another source"))
    assert check_kernels.examine(CACHE, "sm_90")[0].registers == first[0].registers


def test_what_does_not_compile_is_reported_in_the_compilers_words(
    check_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler(check_kernels)
    monkeypatch.setattr(check_kernels, "KEPT", tmp_path)
    broken = Variant("attention_mma.cu", torch.float32, torch.float32, 64, 3)
    assert "16-bit queries" in check_kernels.examine(broken, "sm_90")
    assert list(tmp_path.iterdir()) == []


def needs_compiler(check_kernels: ModuleType) -> None:
    if not check_kernels._is_installed("cuda.bindings") or check_kernels._tools() is None:
        pytest.skip(f"not all of {', '.join(check_kernels.PACKAGES)} are installed")


def test_what_a_compiler_writes_into_a_buffer_reaches_nobody_elses_bytes(check_kernels: ModuleType) -> None:
    """An empty log is one zero byte, and Python has one object for every bytes object of length one."""

    def write_zero(program: object, buffer: bytes) -> None:
        ctypes.memset(buffer, 0, 1)

    assert check_kernels.filled(write_zero, None, 1) == b"\0"
    assert bytes([32])[0] == 32
    assert ord(bytes([32]).decode()) == 32
