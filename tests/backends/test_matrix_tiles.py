"""Products on matrix tiles against float64 and integer arithmetic; skipped where the processor or the system has none."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from backends.numba_kernels.matrix_tiles import (
    CONFIGURATION_BYTES,
    MAX_TILE_ROWS,
    STEP_BYTES,
    configure_tiles,
    has_matrix_tiles,
    multiply_tiles,
    release_tiles,
)
from tests.backends.test_numba_kernels import run_python

needs_tiles = pytest.mark.skipif(not has_matrix_tiles(), reason="no matrix tiles")
ROWS = [1, 2, 15, 16, 17, 31, 32]


@lru_cache
def compiled() -> Any:
    @njit(nogil=True)
    def multiply(
        tag: Any,
        buffer: int,
        rows: int,
        columns: int,
        a: int,
        a_stride: int,
        b: int,
        c: int,
        steps: int,
        adds: bool,
        following: int,
        lines: int,
    ) -> None:
        configure_tiles(buffer, rows)
        multiply_tiles(tag, rows, columns, a, a_stride, b, 64 * columns, c, 64 * columns, steps, adds, following, lines)
        release_tiles()

    return multiply


def words_of(weight: Tensor) -> Tensor:
    """Lay weight [N, K] out as rows of words: neighbouring values of k in a word, outputs side by side."""
    per_word = 4 // weight.element_size()
    return weight.view(weight.shape[0], -1, per_word).transpose(0, 1).contiguous()


def multiply(
    x: Tensor, weight: Tensor, start: Tensor | None = None, x_address: int | None = None, lines: int = 0
) -> Tensor:
    """x @ weight.T through the tiles, added to `start`; checks that nothing is written past the last row."""
    rows, K = x.shape
    N = weight.shape[0]
    is_int8 = x.dtype == torch.int8
    c = torch.full((MAX_TILE_ROWS + 1, N), 77, dtype=torch.int32 if is_int8 else torch.float32)
    if start is not None:
        c[:rows] = start
    buffer = np.zeros(CONFIGURATION_BYTES, np.uint8)
    packed = words_of(weight)
    compiled()(
        np.int8(0) if is_int8 else np.uint16(0), buffer.ctypes.data, rows, N // 16, x_address or x.data_ptr(), x.stride(0) * x.element_size(),
        packed.data_ptr(), c.data_ptr(), K * x.element_size() // STEP_BYTES, start is not None, packed.data_ptr(), lines,
    )  # fmt: skip
    assert (c[rows:] == 77).all()
    return c[:rows]


def random_numbers(rows: int, K: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, K), dtype=dtype)
    return torch.randn(rows, K).to(dtype)


@needs_tiles
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_integer_products_are_exact(rows: int, columns: int) -> None:
    x, weight = random_numbers(rows, 192, torch.int8), random_numbers(16 * columns, 192, torch.int8)
    product = (x.long() @ weight.long().T).int()
    assert torch.equal(multiply(x, weight), product)
    assert torch.equal(multiply(x, weight, start=product, lines=3), 2 * product)


@needs_tiles
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_products_are_those_of_float64_within_float32_sums(rows: int, columns: int) -> None:
    x = random_numbers(rows, 200, torch.bfloat16)[:, :160]  # rows further apart than their width
    weight = random_numbers(16 * columns, 160, torch.bfloat16)
    product = x.double() @ weight.double().T
    torch.testing.assert_close(multiply(x, weight), product.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        multiply(x, weight, start=product.float(), lines=3), 2 * product.float(), atol=2e-4, rtol=1e-4
    )


@needs_tiles
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_columns() -> None:
    x, weight = random_numbers(32, 576, torch.bfloat16), random_numbers(32, 576, torch.bfloat16)
    together = multiply(x, weight)
    for row in (0, 15, 16, 31):
        for count in (1, 5, 17):
            for begin in (max(0, row - count + 1), min(row, 32 - count)):
                assert torch.equal(multiply(x[begin : begin + count], weight)[row - begin], together[row])
        assert torch.equal(multiply(x[row:], weight[16:])[0], together[row, 16:])


@needs_tiles
def test_nothing_past_the_last_row_is_read() -> None:
    """The rows end where a page begins that may not be touched."""
    area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(base + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    for rows in (3, 18):
        x, weight = random_numbers(rows, 64, torch.int8), random_numbers(32, 64, torch.int8)
        at = base + mmap.PAGESIZE - x.numel()
        ctypes.memmove(at, x.data_ptr(), x.numel())
        assert torch.equal(multiply(x, weight, x_address=at), (x.long() @ weight.long().T).int())


@needs_tiles
def test_a_nan_stays_in_its_row() -> None:
    x, weight = random_numbers(17, 64, torch.bfloat16), random_numbers(32, 64, torch.bfloat16)
    x[16, 3] = float("nan")
    result = multiply(x, weight)
    assert result[16].isnan().all()
    assert not result[:16].isnan().any()


def test_hidden_feature_flags_hide_the_tiles(tmp_path: Path) -> None:
    code = "from backends.numba_kernels.matrix_tiles import has_matrix_tiles; print(has_matrix_tiles())"
    flags = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": "+avx512f,+avx512bf16,+amx-tile"}
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path), **flags) == "False"
