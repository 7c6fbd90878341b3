"""Keys and values of 8 bits laid out for matrix tiles, bit for bit; skipped where the processor has no products of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from backends.numba_kernels import tile_layout
from backends.numba_kernels.tile_layout import HAS_BYTE_TABLES, widen_group
from backends.numba_kernels.vectors import HAS_BF16_DOT

pytestmark = pytest.mark.skipif(not HAS_BF16_DOT, reason="no AVX512_BF16")

KINDS: dict[torch.dtype, Any] = {torch.int8: np.int8(0), torch.float8_e4m3fn: np.uint8(0)}


def compiled(kind: Any) -> Callable[..., None]:
    @njit(nogil=True)
    def widen(
        keys: int, values: int, stride: int, written: int, wide_keys: int, words: int, count: int, following: int
    ) -> None:
        widen_group(kind, keys, values, stride, written, wide_keys, words, count, following)

    return widen


def every_code(kind: torch.dtype, rows: int, count: int) -> Tensor:
    """Rows that hold each code but those of NaN, and the -128 that no row is quantised to."""
    codes = torch.arange(rows * count).view(rows, count).mul(7).remainder(256).to(torch.uint8)
    left_out = [0x80] if kind == torch.int8 else [0x7F, 0xFF]
    for code in left_out:
        codes[codes == code] = 1
    return codes.view(kind)


@pytest.mark.parametrize("has_tables", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_widened_group_is_exact_whatever_its_width_and_fill(
    kind: torch.dtype, has_tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_tables and not HAS_BYTE_TABLES:
        pytest.skip("no AVX512_VBMI")
    monkeypatch.setattr(tile_layout, "HAS_BYTE_TABLES", has_tables)
    widen = compiled(KINDS[kind])
    for count in (32, 64, 96, 128, 160):
        for written in (16, 1, 11):
            # Rows stand further apart than they are long; what was not written follows at once and is NaN in float8.
            keys = torch.full((16, count + 16), 0x7F, dtype=torch.uint8).view(kind)
            values = keys.clone()
            keys.view(torch.uint8)[:written, :count] = every_code(kind, written, count).view(torch.uint8)
            values.view(torch.uint8)[:written, :count] = every_code(kind, written, count).flip(0).view(torch.uint8)
            wide_keys = torch.full((16, count), torch.nan, dtype=torch.bfloat16)
            words = torch.full((8, count, 2), torch.nan, dtype=torch.bfloat16)
            areas = (x.data_ptr() for x in (keys, values, wide_keys, words))
            key_at, value_at, wide_at, words_at = areas
            widen(key_at, value_at, count + 16, written, wide_at, words_at, count, key_at)
            places = torch.arange(16).clamp(max=written - 1)
            wanted_keys, wanted_values = (x.float()[places, :count].bfloat16() for x in (keys, values))
            assert torch.equal(wide_keys, wanted_keys)
            assert torch.equal(words, wanted_values.view(8, 2, count).transpose(1, 2))
