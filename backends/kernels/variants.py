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
STAGES = 3  # keys on their way hide the latency of memory; see attention_mma.cu


@dataclass(frozen=True, slots=True)
class Variant:
    """One module: a source file and its macros. The modules of the cache and of rows have kernels for all types and no macros."""

    source: str
    q_dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    head_size: int | None = None
    stages: int | None = None  # of the ring of keys and values in shared memory, of the tensor-core modules

    @property
    def name(self) -> str:
        """A name for reports, e.g. attention_mma-bf16-int8-d128."""
        stem = self.source.removesuffix(".cu")
        if self.q_dtype is None or self.kv_dtype is None:
            return stem
        stages = "" if self.stages in (None, STAGES) else f"-{self.stages}stages"
        return f"{stem}-{TYPE_NAMES[self.q_dtype]}-{TYPE_NAMES[self.kv_dtype]}-d{self.head_size}{stages}"

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
        return SIMT_CAPABILITY if self.source in ("attention_simt.cu", "cache.cu") else MMA_CAPABILITY

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's -D options."""
        if self.q_dtype is None or self.kv_dtype is None:
            return ()
        types = (f"-DQ_TYPE={TYPE_NUMBERS[self.q_dtype]}", f"-DKV_TYPE={TYPE_NUMBERS[self.kv_dtype]}")
        stages = () if self.stages is None else (f"-DSTAGES={self.stages}",)
        return (*types, f"-DHEAD_SIZE={self.head_size}", *stages)

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


def _mma(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, head_sizes: tuple[int, ...] = HEAD_SIZES, stages: int = STAGES
) -> list[Variant]:
    return [Variant("attention_mma.cu", q_dtype, kv_dtype, size, stages) for size in head_sizes]


def _simt(dtype: torch.dtype, head_sizes: tuple[int, ...]) -> list[Variant]:
    return [Variant("attention_simt.cu", dtype, dtype, size) for size in head_sizes]


CACHE = Variant("cache.cu")
ROWS = Variant("rows.cu")

# Which of these serves a device is decided in dispatch.py. What is not here is refused: a float32 model over 8 bits, say, is better run in
# bfloat16; tiny heads (16, 32) are those of the test checkpoints.
SHIPPED: tuple[Variant, ...] = (
    *_mma(torch.bfloat16, torch.bfloat16),
    *_mma(torch.float16, torch.float16),
    *_mma(torch.bfloat16, torch.int8),
    *_mma(torch.bfloat16, torch.float8_e4m3fn),
    *_mma(torch.float16, torch.int8, (64, 128)),
    *_mma(torch.float16, torch.float8_e4m3fn, (64, 128)),
    # Where a block may have 99 KB of shared memory (compute capability 8.6, 8.9, 12.0), three stages of long 16-bit keys do not fit.
    *_mma(torch.bfloat16, torch.bfloat16, (128, 256), stages=2),
    *_mma(torch.float16, torch.float16, (128, 256), stages=2),
    *_simt(torch.float32, (16, 32, *HEAD_SIZES)),
    *_simt(torch.float16, (64, 96, 128)),  # before tensor cores had what attention_mma.cu needs
    CACHE,
    ROWS,
)


def store_kernel(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Return the kernel of `CACHE` that writes rows of one type into a pool of another, or None: then nothing serves them."""
    is_stored = q_dtype == kv_dtype or (kv_dtype in QUANTISED and q_dtype != torch.float32)
    if not is_stored or q_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return f"store_{TYPE_NAMES[q_dtype]}_{TYPE_NAMES[kv_dtype]}"
