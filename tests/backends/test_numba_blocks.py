"""Compiled decoding and quantising give the bits of the definition in `backends.quantised_weights`, and refuse what they cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.numba_blocks import decode_blocks, quantise_rows
from backends.numba_kernels.blocks import FORMS, ROWS, RUN
from backends.quantised_weights import BLOCK, BLOCK_BYTES, DECODERS, Format, QuantisedWeight, quantise

BLOCK_FORMS: list[Format] = ["q4_0", "q4_1", "q8_0"]
DTYPES = [torch.float32, torch.bfloat16]
# Infinity and NaN are in `every_scale` too; these are the edges of what is finite.
EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF]


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def every_scale(form: Format) -> Tensor:
    """Blocks with each of the 65536 float16 as their scale, the rest of them random."""
    blocks = random_bytes(1 << 16, BLOCK_BYTES[form])
    blocks[:, :2] = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8).view(-1, 2)
    return blocks


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor with every NaN made the same one."""
    same = torch.where(x.isnan(), torch.tensor(torch.nan, dtype=x.dtype), x)
    return same.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def defined(blocks: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    out = torch.empty((len(blocks), BLOCK), dtype=dtype)
    DECODERS[form](blocks, out)
    return out


def assert_same(ours: QuantisedWeight | None, theirs: QuantisedWeight) -> None:
    assert ours is not None
    assert ours.format == theirs.format
    assert torch.equal(ours.data, theirs.data)
    assert ours.scales is not None
    assert theirs.scales is not None
    assert torch.equal(bits(ours.scales), bits(theirs.scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_blocks_become_the_numbers_of_the_definition(form: Format, dtype: torch.dtype) -> None:
    """With every float16 there is for a scale: zeros, denormals, infinities and NaN of both signs."""
    blocks = every_scale(form)
    out = torch.full((len(blocks), BLOCK), 7.0, dtype=dtype)
    assert decode_blocks(blocks, form, out)
    assert torch.equal(bits(out), bits(defined(blocks, form, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_and_minima_on_the_edge_give_the_numbers_of_the_definition(dtype: torch.dtype) -> None:
    pairs = torch.cartesian_prod(*[torch.tensor([*EDGES, 0x7C00, 0xFC00, 0x7E00])] * 2).to(torch.uint16)
    blocks = random_bytes(len(pairs), BLOCK_BYTES["q4_1"])
    blocks[:, :4] = pairs.contiguous().view(torch.uint8)
    out = torch.empty((len(blocks), BLOCK), dtype=dtype)
    assert decode_blocks(blocks, "q4_1", out)
    assert torch.equal(bits(out), bits(defined(blocks, "q4_1", dtype)))


@pytest.mark.parametrize("count", [0, 1, RUN - 1, RUN, RUN + 1])
def test_no_number_is_written_behind_the_last_block(count: int) -> None:
    for dtype in DTYPES:
        blocks, memory = random_bytes(count, 34), torch.full((count + 1, BLOCK), 7.0, dtype=dtype)
        assert decode_blocks(blocks, "q8_0", memory[:count])
        assert torch.equal(bits(memory[:count]), bits(defined(blocks, "q8_0", dtype)))
        assert (memory[count] == 7).all()


def test_other_tensors_are_not_decoded() -> None:
    blocks = random_bytes(4, 18)
    assert not decode_blocks(blocks, "q4_0", torch.empty((4, BLOCK), dtype=torch.float16))
    assert not decode_blocks(blocks, "q4_0", torch.empty((4, BLOCK), dtype=torch.float64))
    assert not decode_blocks(blocks, "q4_0", torch.empty((4, 2 * BLOCK))[:, :BLOCK])
    assert not decode_blocks(random_bytes(4, 36)[:, :18], "q4_0", torch.empty((4, BLOCK)))
    assert not decode_blocks(blocks, "q4_0", torch.empty((4, BLOCK), device="meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (ROWS + 1, 48), (50, 576), (3, 1536)])
def test_rows_become_the_codes_and_scales_of_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_same(quantise_rows(numbers), quantise(numbers, "int8"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_of_denormals_are_quantised_as_defined(dtype: torch.dtype) -> None:
    """A scale that is a denormal is coarse: numbers over it may pass 127 and are held there."""
    numbers = torch.randn((40, 64), generator=torch.Generator().manual_seed(2))
    numbers *= torch.logspace(-45, -36, 40).unsqueeze(1)
    numbers[3], numbers[4, ::2], numbers[5] = 0, 0, -0.0
    numbers[6], numbers[7] = 2.0**-149, 254 * 2.0**-149  # the smallest there is, and a scale of two of them
    numbers = numbers.to(dtype)
    assert_same(quantise_rows(numbers), quantise(numbers, "int8"))


def test_halves_between_two_codes_go_to_the_even_one() -> None:
    numbers = torch.arange(-127, 127.5, 0.5).repeat(2)[:1008].view(2, -1)[:, :496].contiguous()
    numbers[:, 0] = 127
    found = quantise_rows(numbers)
    assert_same(found, quantise(numbers, "int8"))
    assert found is not None
    assert found.data[0, 2:6].tolist() == [-126, -126, -125, -124]


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_blocks_are_quantised_as_the_numbers_that_they_stand_for(form: Format) -> None:
    blocks = random_bytes(37, 18, BLOCK_BYTES[form])
    blocks[..., 1] &= 0x3B  # finite scales
    if form == "q4_1":
        blocks[..., 3] &= 0x3B
    blocks[5] = 0
    weight = QuantisedWeight(form, blocks)
    assert_same(quantise_rows(weight), quantise(weight, "int8"))


def test_a_row_that_is_not_finite_has_a_scale_that_is_not() -> None:
    numbers = torch.ones(3, 32)
    numbers[0, 5], numbers[2, 31] = torch.nan, -torch.inf
    found = quantise_rows(numbers)
    assert found is not None
    assert found.scales is not None
    assert found.scales.isfinite().tolist() == [False, True, False]


def test_other_rows_are_left_to_the_definition() -> None:
    assert quantise_rows(torch.ones(2, 40)) is None
    assert quantise_rows(torch.ones(2, 32, dtype=torch.float16)) is None
    assert quantise_rows(torch.ones(2, 64)[:, :32]) is None
    assert quantise_rows(quantise(torch.ones(2, 32), "int8")) is None


def test_every_format_of_blocks_has_a_form() -> None:
    assert set(FORMS) == set(BLOCK_BYTES) == set(DECODERS)


@pytest.mark.slow
def test_the_numbers_are_the_same_without_wide_vectors_and_conversions(tmp_path: Path) -> None:
    """On what every x86-64 or ARM processor has: the instructions for float16 and bfloat16 are replaced by arithmetic."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    tests = "blocks_become or on_the_edge or rows_become or of_denormals or blocks_are_quantised"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
