"""A GGUF file as a source of weights: names, and values in Hugging Face's row order. The header is parsed in `gguf_header.py`.

Invariant: what `read` gives equals the tensor that the converter was given, up to the file's quantisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from backends.quantised_weights import BLOCK, BLOCK_BYTES, QuantisedWeight
from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.dequantise import BLOCK_FORMATS, PLAIN_TYPES, dequantise
from service.model.gguf_header import read_gguf_header, release_pages
from service.model.registry import Family
from service.model.weights import TensorSpec

# A file's pages count as the process's memory as long as they are mapped in; after so many bytes they are let go, to be found in the
# system's cache if they are looked at again.
MAPPED_BYTES = 16 << 20
ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
TOP_NAMES: Mapping[str, str] = MappingProxyType(
    {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
)
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "qkv": "attn_qkv",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "post_attention_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "gate_up": "ffn_up",  # where gate and up are one tensor, it has up's name
        "down": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    }
)


class GgufNaming:
    """llama.cpp's names, e.g. `blk.3.attn_q.weight`."""

    def top(self, role: str) -> str:
        """Name a tensor outside the layers."""
        return f"{TOP_NAMES[role]}.weight"

    def layer(self, index: int, role: str, kind: str) -> str:
        """Name a layer's tensor."""
        return f"blk.{index}.{LAYER_NAMES[role]}.{kind}"


class GgufFile:
    """The file's configuration, metadata and tensors."""

    norm_offset = 0.0  # converters store norms whole

    def __init__(self, path: Path) -> None:
        """Parse and check the header; raises `ModelLoadError` naming the file or the key at fault."""
        header = read_gguf_header(path)
        self.description = str(path)
        self.naming = GgufNaming()
        self.metadata = header.metadata
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ModelLoadError(f"{path} is one of {parts} parts; join them with llama.cpp's gguf-split --merge first")
        self._tensors = header.tensors
        self._data = header.data
        self._mapped_bytes = 0
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in header.tensors.items()}
        factors = {name: self._floats(f"{name}.weight") for name in ROPE_FACTORS if f"{name}.weight" in self.shapes}
        try:
            self.config = DecoderConfig.from_gguf(self.metadata, self.shapes, factors)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error.message}") from error
        self._family: Family = self.config.family

    @property
    def main_type(self) -> GGMLQuantizationType:
        """The type that most weights (by elements) are stored in."""
        elements: Counter[GGMLQuantizationType] = Counter()
        for entry in self._tensors.values():
            if len(entry.shape) > 1:
                elements[entry.kind] += entry.shape[0] * entry.shape[1]
        return elements.most_common(1)[0][0] if elements else GGMLQuantizationType.F32

    def is_ignorable(self, name: str) -> bool:
        """Tell whether a tensor was used for the configuration already."""
        return name in {f"{factors}.weight" for factors in ROPE_FACTORS}

    def read(self, spec: TensorSpec, out: Tensor) -> None:
        """Dequantise a tensor into `out`; raises `ModelLoadError` for a type that the gguf library cannot decode."""
        entry = self._tensors[spec.name]
        try:
            dequantise(self._raw(spec), entry.kind, out)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.description}: tensor {spec.name} is of type {entry.kind.name}, which is not supported"
            ) from error

    def blocks(self, spec: TensorSpec) -> QuantisedWeight | None:
        """Return a matrix as the blocks that the file holds, without copying them where the order of rows allows."""
        found = BLOCK_FORMATS.get(self._tensors[spec.name].kind)
        if found is None:
            return None
        data = torch.from_numpy(self._raw(spec)).view(spec.shape[0], spec.shape[1] // BLOCK, BLOCK_BYTES[found])
        return QuantisedWeight(found, data)

    def exact_dtype(self, name: str) -> torch.dtype:
        """Return the float type that a tensor's numbers are read into without a loss, float32 at most."""
        dtype = PLAIN_TYPES.get(self._tensors[name].kind, torch.float32)
        return torch.float32 if dtype == torch.float64 else dtype

    def _raw(self, spec: TensorSpec) -> NDArray[np.uint8]:
        """Return a tensor's bytes with its rows in Hugging Face's order."""
        entry = self._tensors[spec.name]
        self._mapped_bytes += entry.num_bytes  # threads may miss a tensor: it is no exact account
        if self._mapped_bytes > MAPPED_BYTES:
            self._mapped_bytes = 0
            release_pages(self._data)
        raw = self._data[entry.start : entry.start + entry.num_bytes]
        if spec.rotary_heads is not None and self._family.gguf_permutes_qk:
            raw = _pairs_to_halves(raw, spec.rotary_heads, spec.shape[0])
        return raw

    def _floats(self, name: str) -> list[float]:
        entry = self._tensors[name]
        values = torch.empty(entry.shape, dtype=torch.float32)
        dequantise(self._data[entry.start : entry.start + entry.num_bytes], entry.kind, values)
        numbers: list[float] = values.flatten().tolist()
        return numbers


def _pairs_to_halves(raw: NDArray[np.uint8], num_heads: int, num_rows: int) -> NDArray[np.uint8]:
    """Reorder the rows of a packed q or k tensor (or its bias), which works on the packed bytes since no block spans two rows.

    In the file the two rows of a rotary pair lie side by side, (2 i, 2 i + 1) of each head; half-split rotation wants (i, i + D / 2).
    """
    pairs = raw.reshape(
        num_heads, num_rows // num_heads // 2, 2, -1
    )  # [heads, D / 2, which of the pair, bytes of a row]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
