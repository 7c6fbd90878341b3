"""Weights held as integers: what their formats mean, that packing loses nothing, and products against float64."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from backends.numba_kernels.group_kinds import KINDS
from backends.numba_kernels.matrix_tiles import has_matrix_tiles
from backends.numba_linear import PackedLinear
from backends.numba_ops import NumbaOps
from backends.numba_quantised import QuantisedGatedLinear, QuantisedLinear
from backends.ops import Activation, Linear, TorchOps
from backends.quantised_weights import Format, QuantisedWeight, quantise, stack

FORMATS: list[Format] = ["q4_0", "q4_1", "q8_0", "int8"]
BLOCK_FORMATS = {name: GGMLQuantizationType[name.upper()] for name in FORMATS if name != "int8"}
BF16_STEP = 2.0**-8  # half a unit in the last place of bfloat16 is at most this share of a number, twice
SHAPES = [(96, 576), (32, 64), (50, 128), (1, 64), (576, 1536)]


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_weight(form: Format, N: int, K: int) -> QuantisedWeight:
    """Blocks as the gguf library makes them, rows as ours does."""
    numbers = random_numbers(N, K, seed=5)
    if form == "int8":
        return quantise(numbers, "int8")
    raw = gguf.quants.quantize(numbers.numpy(), BLOCK_FORMATS[form])
    return QuantisedWeight(form, torch.from_numpy(raw).view(N, K // 32, -1))


def on_vectors(weight: QuantisedWeight, bias: Tensor | None = None) -> QuantisedLinear:
    return QuantisedLinear(weight, bias, has_tiles=False)


def on_tiles(weight: QuantisedWeight, bias: Tensor | None = None) -> QuantisedLinear:
    return QuantisedLinear(weight, bias)


needs_tiles = pytest.mark.skipif(not has_matrix_tiles(), reason="no matrix tiles")
BODIES = [pytest.param(on_vectors, id="vectors"), pytest.param(on_tiles, id="tiles", marks=needs_tiles)]
LinearMaker = Callable[..., QuantisedLinear]


# --- formats ---


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_blocks_stand_for_the_numbers_of_the_gguf_library(form: Format) -> None:
    """Bit for bit in float32, more blocks than are decoded at a time."""
    weight = random_weight(form, 70, 1024)
    raw = weight.data.reshape(70, -1).numpy()
    assert weight.shape == (70, 1024)
    assert torch.equal(weight.dequantise(), torch.from_numpy(gguf.quants.dequantize(raw, BLOCK_FORMATS[form])))


@pytest.mark.parametrize("form", ["int8", "q8_0"])
def test_eight_bit_codes_are_the_nearest(form: Format) -> None:
    """No number is off by more than half a step, of the row or the block (whose float16 scale adds its rounding)."""
    numbers = random_numbers(40, 96) * torch.logspace(-3, 3, 40).unsqueeze(1)
    numbers[3] = 0
    weight = quantise(numbers, form)
    groups = numbers if form == "int8" else numbers.view(40, 3, 32)
    step = groups.abs().amax(-1, keepdim=True) / 127
    slack = 1e-6 if form == "int8" else 127 * 2.0**-11  # a scale that was rounded down clips the largest number
    error = (weight.dequantise() - numbers).view(groups.shape).abs()
    assert (error <= step * (0.5 + slack)).all()
    assert (weight.dequantise()[3] == 0).all()


def test_four_bit_blocks_lose_less_than_plain_ranges_do() -> None:
    """The gguf library's Q4_1 takes minimum and maximum as they are."""
    numbers = random_numbers(64, 576)
    plain = QuantisedWeight(
        "q4_1", torch.from_numpy(gguf.quants.quantize(numbers.numpy(), BLOCK_FORMATS["q4_1"])).view(64, 18, 20)
    )
    ours = (quantise(numbers, "q4_1").dequantise() - numbers).view(-1, 32).square().sum(1)
    theirs = (plain.dequantise() - numbers).view(-1, 32).square().sum(1)
    assert ours.sum() < 0.95 * theirs.sum()
    constant = torch.cat([torch.full((1, 32), 3.5), torch.zeros(1, 32)])
    assert torch.equal(quantise(constant, "q4_1").dequantise(), constant)


def test_integers_are_quantised_again_without_a_copy_in_floats() -> None:
    """Rows are taken a few at a time, with the result of taking them all."""
    weight = random_weight("q4_1", 200, 512)
    for form in ("int8", "q8_0"):
        again, whole = quantise(weight, form), quantise(weight.dequantise(), form)  # type: ignore[arg-type]
        assert torch.equal(again.data, whole.data)
    with pytest.raises(ValueError, match="q4_0 is only read"):
        quantise(weight, "q4_0")


def test_only_weights_of_one_format_are_stacked() -> None:
    upper, lower = random_weight("int8", 32, 64), random_weight("int8", 16, 64)
    whole = stack([upper, lower])
    assert whole is not None
    assert torch.equal(whole.dequantise(), torch.cat([upper.dequantise(), lower.dequantise()]))
    assert stack([upper, random_weight("q8_0", 32, 64)]) is None


# --- packing ---


@pytest.mark.parametrize("make", BODIES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_packing_keeps_every_byte(form: Format, N: int, K: int, make: LinearMaker) -> None:
    weight = random_weight(form, N, K)
    back = make(weight).weight()
    assert torch.equal(back.data, weight.data)
    if weight.scales is not None:
        assert back.scales is not None
        assert torch.equal(back.scales, weight.scales)


@pytest.mark.parametrize("make", BODIES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("N", "K"), [(96, 576), (50, 128)])
def test_rows_are_looked_up_in_the_packed_weight(form: Format, N: int, K: int, make: LinearMaker) -> None:
    weight = random_weight(form, N, K)
    linear = make(weight)
    ids = torch.tensor([0, N - 1, 17, 5, 17])
    assert torch.equal(linear.rows(ids), weight.dequantise()[ids].to(torch.bfloat16))
    assert linear.rows(ids[:0]).shape == (0, K)
    missing = linear.rows(torch.tensor([N, 3, -1]))
    assert missing[[0, 2]].isnan().all()
    assert torch.equal(missing[1], linear.rows(torch.tensor([3]))[0])


# --- products on vectors: inputs rounded to 8 bits by groups ---


@pytest.mark.parametrize("num_rows", [0, 1, 2, 9, 17, 130])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_products_are_those_of_float64_for_inputs_that_codes_can_hold(
    form: Format, N: int, K: int, num_rows: int
) -> None:
    """Integers up to 127 times a power of two for each group lose nothing when they are quantised; x is a slice of wider rows."""
    group = KINDS[form].group
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (num_rows, K // group, group), generator=generator).float()
    codes[..., 0] = 127
    scales = torch.randint(-6, 6, (num_rows, K // group, 1), generator=generator).float().exp2()
    x = torch.cat([(codes * scales).view(num_rows, K), torch.ones(num_rows, 6)], 1).to(torch.bfloat16)[:, :K]
    weight, bias = random_weight(form, N, K), random_numbers(N)
    product = x.double() @ weight.dequantise().double().T
    # A float32 sum of as many terms as there are groups, then one rounding.
    room = 1e-6 * (x.double().abs() @ weight.dequantise().double().abs().T) + BF16_STEP * product.abs()
    assert ((on_vectors(weight)(x).double() - product).abs() <= room).all()
    with_bias = on_vectors(weight, bias)(x).double()
    assert ((with_bias - product - bias).abs() <= room + BF16_STEP * (product + bias).abs() + 1e-6).all()


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_are_off_by_at_most_half_a_step_of_their_group(form: Format) -> None:
    """The bound of the rounding: half a step of each x times the magnitude of its weight."""
    N, K, group = 96, 576, KINDS[form].group
    x = (random_numbers(40, K) * torch.logspace(-2, 2, K)).to(torch.bfloat16)
    weight = random_weight(form, N, K)
    steps = x.double().view(40, -1, group).abs().amax(-1, keepdim=True).expand(-1, -1, group).reshape(40, K) / 127
    product, magnitude = x.double() @ weight.dequantise().double().T, weight.dequantise().double().abs()
    room = 0.501 * (steps @ magnitude.T) + BF16_STEP * product.abs()
    error = (on_vectors(weight)(x).double() - product).abs()
    assert (error <= room).all()
    # Roundings that know nothing of each other add in squares; a uniform error has a variance of a twelfth of its squared width.
    expected = ((steps.square() @ magnitude.square().T) / 12 + (BF16_STEP * product).square() / 3).sqrt()
    assert error.square().mean().sqrt() < 1.3 * expected.square().mean().sqrt()


# --- products on matrix tiles: the weight becomes bfloat16, inputs stay as they are ---

# Groups of 32 rows, one more, one less; several blocks of them.
ROWS = [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 130, 300, 700]


@needs_tiles
@pytest.mark.parametrize("form", BLOCK_FORMATS)
@pytest.mark.parametrize(("N", "K"), [*SHAPES, (16, 32), (720, 32), (720, 576), (144, 4096)])
def test_tiles_give_the_bits_of_the_weight_in_bfloat16(form: Format, N: int, K: int) -> None:
    """For any rows and threads: the ring of few rows, panels ahead, several blocks of the inner dimension, halves of panels at the end."""
    weight, bias = random_weight(form, N, K), random_numbers(N)
    width = -(-N // 16) * 16
    numbers, shift = torch.zeros(width, K, dtype=torch.bfloat16), torch.zeros(width)
    numbers[:N], shift[:N] = weight.dequantise(), bias
    linears = [(on_tiles(weight), PackedLinear(numbers)), (on_tiles(weight, bias), PackedLinear(numbers, shift))]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for T in ROWS:
                x = random_numbers(T, K + 6).to(torch.bfloat16)[:, :K]
                for quantised, plain in linears:
                    assert torch.equal(quantised(x), plain(x)[:, :N]), (threads, T)
    finally:
        torch.set_num_threads(before)


@needs_tiles
@pytest.mark.parametrize(("N", "K"), [(96, 576), (50, 128), (16, 64), (144, 4096)])
def test_rows_of_codes_lose_nothing_on_tiles(N: int, K: int) -> None:
    """Codes and inputs are exact in bfloat16, the scale comes last: what remains is float32 sums and one rounding."""
    weight, bias = random_weight("int8", N, K), random_numbers(N)
    linear = on_tiles(weight, bias)
    for T in ROWS:
        x = random_numbers(T, K).to(torch.bfloat16)
        product = x.double() @ weight.dequantise().double().T
        room = 1e-6 * (x.double().abs() @ weight.dequantise().double().abs().T) + BF16_STEP * (product + bias).abs()
        assert ((linear(x).double() - product - bias).abs() <= room + 1e-6).all()


@needs_tiles
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_has_the_bits_of_a_product_and_an_activation(
    form: Format, activation: Activation, has_bias: bool
) -> None:
    weight, bias = random_weight(form, 2 * 112, 192), random_numbers(2 * 112) if has_bias else None
    ops = NumbaOps(torch.bfloat16)
    gated = ops.pack_gated_linear(weight, bias, activation)
    assert isinstance(gated, QuantisedGatedLinear)
    linear = ops.pack_linear(weight, bias)
    for T in ROWS:
        x = random_numbers(T, 192).to(torch.bfloat16)
        assert torch.equal(gated(x), ops.act_mul(linear(x), activation))


# --- both ---


@pytest.mark.parametrize("make", BODIES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_is_the_same_alone_and_among_others(form: Format, make: LinearMaker) -> None:
    """Also across the rows that a thread holds at once, and on two threads."""
    linear, x = make(random_weight(form, 200, 576)), random_numbers(261, 576).to(torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = linear(x)
        for row in (0, 7, 8, 15, 16, 127, 128, 255, 260):
            assert torch.equal(linear(x[row : row + 1])[0], together[row])
            assert torch.equal(linear(x[row:])[0], together[row])
        for count in range(1, 20):
            assert torch.equal(linear(x[:count]), together[:count])
        torch.set_num_threads(2)
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", BODIES)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_finite_shows_in_its_row_and_nowhere_else(form: Format, make: LinearMaker) -> None:
    x = random_numbers(4, 128).to(torch.bfloat16)
    x[1, 70] = torch.nan
    x[2, 3] = torch.inf
    y = make(random_weight(form, 48, 128))(x)
    assert y[[0, 3]].isfinite().all()
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()


@pytest.mark.parametrize("make", BODIES)
@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_the_smallest_numbers_give_the_bias(form: Format, make: LinearMaker) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1] = 1e-38
    bias = random_numbers(32)
    assert torch.equal(make(random_weight(form, 32, 64), bias)(x), bias.to(torch.bfloat16).expand(2, 32))


def test_the_definition_computes_in_float32_with_what_the_integers_stand_for() -> None:
    weight, bias, x = random_weight("q4_1", 32, 64), random_numbers(32), random_numbers(5, 64)
    linear: Any = TorchOps().pack_linear(weight, bias)
    assert torch.allclose(linear(x), x @ weight.dequantise().T + bias, atol=1e-5)
    assert torch.equal(linear.rows(torch.tensor([3])), weight.dequantise()[3:4].to(torch.bfloat16))


def test_shapes_without_kernels_use_the_definition() -> None:
    """int8 needs whole groups of 64."""
    weight, x = quantise(random_numbers(16, 96), "int8"), random_numbers(3, 96).to(torch.bfloat16)
    linear: Linear = NumbaOps(torch.bfloat16).pack_linear(weight)
    assert not isinstance(linear, QuantisedLinear)
    assert torch.allclose(linear(x).float(), x.float() @ weight.dequantise().T, atol=0.1)


# --- other processors ---

PRODUCTS = """
from tests.backends.test_quantised_weights import FORMATS, digest
print(*(digest(form) for form in FORMATS))
"""


def digest(form: Format) -> str:
    """A number for all bits of some products."""
    x = random_numbers(19, 192).to(torch.bfloat16)
    y = on_vectors(random_weight(form, 80, 192), random_numbers(80))(x)
    return hashlib.sha256(y.view(torch.int16).numpy().tobytes()).hexdigest()


AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
NO_HALVES = {**AVX2, "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
HERE = sorted(name for name, has in llvm.get_host_cpu_features().items() if has and not name.startswith("amx"))
NO_TILES = {"NUMBA_CPU_NAME": llvm.get_host_cpu_name(), "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in HERE)}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [AVX2, NO_HALVES, NO_TILES], ids=["avx2", "no-f16c", "no-tiles"])
def test_a_processor_without_the_instructions_gives_the_same_bits(flags: dict[str, str], tmp_path: Path) -> None:
    """On vectors integer sums are exact, and the float ones run in one order: plain loops and VNNI agree to the last bit."""
    result = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [digest(form) for form in FORMATS]


def test_halves_of_every_kind_are_read() -> None:
    """Subnormal and extreme scales of blocks: as numpy reads them."""
    halves = np.array([0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001, 0xFBFF, 0x3C00, 0x0000], np.uint16)
    data = torch.zeros(len(halves), 2, 34, dtype=torch.uint8)
    data[:, :, :2] = torch.from_numpy(halves.view(np.uint8)).view(-1, 1, 2)
    data[:, :, 2:] = 1
    rows = on_vectors(QuantisedWeight("q8_0", data)).rows(torch.arange(len(halves)))
    wanted = torch.from_numpy(halves.view(np.float16).astype(np.float32)).to(torch.bfloat16)
    assert torch.equal(rows, wanted.unsqueeze(1).expand(-1, 64))
