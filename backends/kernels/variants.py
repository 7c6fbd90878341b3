"""Which kernels are shipped: a `Variant` is one source with its -D macros, compiled into one module. Nothing else is ever compiled.

Neither compiles nor launches: the CuPy backend and the emulation in tests both start from here.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent

# The numbers that the sources know the types by (prim.cuh).
TYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
TYPE_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
QUANTISED = (torch.int8, torch.float8_e4m3fn)
BLOCK_SIZES = (8, 16, 32, 64, 128)
HEAD_SIZES = (64, 80, 96, 128, 256)
MMA_CAPABILITY = (8, 0)  # mma.sync with bfloat16 and cp.async
SIMT_CAPABILITY = (7, 5)  # the oldest that CUDA 13 compiles for


@dataclass(frozen=True, slots=True)
class Variant:
    """One module: a source file and its macros. `head_size` is None where a kernel takes it as an argument."""

    source: str
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int | None

    @property
    def name(self) -> str:
        """A name for reports, e.g. attention_mma-bf16-int8-d128."""
        size = "" if self.head_size is None else f"-d{self.head_size}"
        stem = self.source.removesuffix(".cu")
        return f"{stem}-{TYPE_NAMES[self.q_dtype]}-{TYPE_NAMES[self.kv_dtype]}{size}"

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are 8 bits with a scale per token and head."""
        return self.kv_dtype in QUANTISED

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether the module needs `MMA_CAPABILITY`."""
        return self.source == "attention_mma.cu"

    @property
    def minimum_capability(self) -> tuple[int, int]:
        """The oldest compute capability that this variant compiles for."""
        has_bfloat16 = torch.bfloat16 in (self.q_dtype, self.kv_dtype)
        return MMA_CAPABILITY if self.uses_tensor_cores or has_bfloat16 else SIMT_CAPABILITY

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's -D options."""
        defines = (f"-DQ_TYPE={TYPE_NUMBERS[self.q_dtype]}", f"-DKV_TYPE={TYPE_NUMBERS[self.kv_dtype]}")
        return defines if self.head_size is None else (*defines, f"-DHEAD_SIZE={self.head_size}")

    @property
    def options(self) -> tuple[str, ...]:
        """All options of NVRTC but the architecture. Of what a header declares each module uses a part: that is no warning (177)."""
        return ("--std=c++17", "-diag-suppress=177", *self.defines)

    @property
    def text(self) -> str:
        """The source with its own headers put in place: what a compiler without an include path gets."""
        return expand(self.source)

    @property
    def digest(self) -> str:
        """A hash of the text and the macros: with architecture and compiler version, the key of a cache of binaries."""
        return hashlib.sha256("\0".join((self.text, *self.options)).encode()).hexdigest()[:20]


def expand(source: str, folder: Path = SOURCES) -> str:
    """Return a source file with each `#include "…"` replaced by the file, once."""
    seen: set[str] = set()

    def load(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (folder / name).read_text()
        return re.sub(r'^#include "([^"]+)"$', lambda match: load(match[1]), text, flags=re.MULTILINE)

    return load(source)


def _attention(source: str, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_sizes: tuple[int, ...]) -> list[Variant]:
    return [Variant(source, q_dtype, kv_dtype, size) for size in head_sizes]


# float32 models, and float16 before Ampere, run the SIMT kernels; everything else the tensor cores.
SHIPPED: tuple[Variant, ...] = (
    *_attention("attention_mma.cu", torch.bfloat16, torch.bfloat16, HEAD_SIZES),
    *_attention("attention_mma.cu", torch.float16, torch.float16, HEAD_SIZES),
    *_attention("attention_mma.cu", torch.bfloat16, torch.int8, HEAD_SIZES),
    *_attention("attention_mma.cu", torch.bfloat16, torch.float8_e4m3fn, HEAD_SIZES),
    *_attention("attention_mma.cu", torch.float16, torch.int8, (64, 128)),
    *_attention("attention_mma.cu", torch.float16, torch.float8_e4m3fn, (64, 128)),
    *_attention("attention_simt.cu", torch.float32, torch.float32, (16, 32, *HEAD_SIZES)),
    *_attention("attention_simt.cu", torch.float32, torch.int8, (64, 128)),
    *_attention("attention_simt.cu", torch.float32, torch.float8_e4m3fn, (64, 128)),
    *_attention("attention_simt.cu", torch.float16, torch.float16, (64, 80, 96, 128)),
    *(
        Variant("cache.cu", q_dtype, kv_dtype, None)
        for q_dtype in (torch.float32, torch.float16, torch.bfloat16)
        for kv_dtype in (q_dtype, *QUANTISED)
    ),
)


def attention_variant(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, capability: tuple[int, int]
) -> Variant | None:
    """Return the shipped attention module for these types on that compute capability, or None: then nothing serves them."""
    for variant in SHIPPED:
        if (
            variant.head_size == head_size
            and (variant.q_dtype, variant.kv_dtype) == (q_dtype, kv_dtype)
            and capability >= variant.minimum_capability
        ):
            return variant
    return None


def cache_variant(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> Variant | None:
    """Return the shipped module that stores and copies keys and values of these types, or None."""
    wanted = Variant("cache.cu", q_dtype, kv_dtype, None)
    return wanted if wanted in SHIPPED else None
