"""GGUF blocks to numbers, and numbers to rows of 8-bit codes, on the CPU with compiled kernels. `quantised_weights` is the definition.

Both functions run on the calling thread alone and hold the interpreter only to begin: they are for threads that read several tensors at the
same time. Invariant: what they give is the definition's, bit for bit; what they do not take they leave alone and say so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.numba_kernels.blocks import BFLOAT16, FLOAT32, FORMS, decode_kernel, quantise_kernel
from backends.numba_kernels.vectors import LANES
from backends.quantised_weights import BLOCK_BYTES, Format, QuantisedWeight

_FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def decode_blocks(blocks: Tensor, form: Format, out: Tensor) -> bool:
    """Fill contiguous `out` with the numbers of contiguous uint8 `blocks` of a file; says whether it did, which it does not for other tensors.

    It takes float32 and bfloat16 on the CPU; rounded once.
    """
    if form not in FORMS or out.device.type != "cpu" or out.dtype not in _FLOATS:
        return False
    if not (blocks.is_contiguous() and out.is_contiguous()):
        return False
    size = BLOCK_BYTES[form]
    kernel = decode_kernel(out.dtype == torch.bfloat16)
    kernel.launch(1, FORMS[form], blocks.data_ptr(), size, blocks.numel() // size, out.data_ptr())
    return True


def quantise_rows(weight: Tensor | QuantisedWeight) -> QuantisedWeight | None:
    """Quantise weight [N, K] of float32, bfloat16 or blocks to "int8"; None for other types and for a K that is no multiple of 16.

    A row with a number that is not finite gets a scale that is not finite either; its codes then mean nothing.
    """
    N, K = weight.shape
    source = weight if isinstance(weight, Tensor) else weight.data
    form = _FLOATS.get(weight.dtype) if isinstance(weight, Tensor) else FORMS.get(weight.format)
    if form is None or K % LANES or source.device.type != "cpu" or not source.is_contiguous():
        return None
    codes, scales = torch.empty((N, K), dtype=torch.int8), torch.empty(N)
    row_bytes = source[0].numel() * source.element_size() if N else 0
    quantise_kernel().launch(1, form, source.data_ptr(), row_bytes, N, K, codes.data_ptr(), scales.data_ptr())
    return QuantisedWeight("int8", codes, scales)
