"""A Hugging Face folder's weights: one safetensors file, or shards under an index. Knows tensors by name, not what they are for.

Headers are read and checked here, before the library maps the file. Invariant: each tensor comes from exactly one file; where there is an
index it alone decides which, and files it does not name are not opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.errors import ModelLoadError
from service.model.checked_files import file_size, impostor, read_json
from service.model.registry import Family
from service.model.weights import TensorSpec

log = structlog.get_logger()

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
# What a folder's tensors are prefixed by: plain models, the two spellings of a multimodal model's text part, a bare backbone.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")

TOP_NAMES: Mapping[str, str] = MappingProxyType({"embedding": "embed_tokens", "final_norm": "norm"})
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "qkv": "self_attn.qkv_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    }
)
SANDWICH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LAYER_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
)


class HfNaming:
    """Hugging Face's names, e.g. `model.layers.3.self_attn.q_proj.weight`."""

    def __init__(self, prefix: str, head: str, family: Family) -> None:
        self._prefix = prefix
        self._head = head
        self._parts = SANDWICH_NAMES if family.has_sandwich_norms else LAYER_NAMES

    def top(self, role: str) -> str:
        """Name a tensor outside the layers."""
        return self._head if role == "head" else f"{self._prefix}{TOP_NAMES[role]}.weight"

    def layer(self, index: int, role: str, kind: str) -> str:
        """Name a layer's tensor."""
        return f"{self._prefix}layers.{index}.{self._parts[role]}.{kind}"


class SafetensorsFolder:
    """The folder's tensors. Use as a context manager: the maps close at its end."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Find and check the files; raises `ModelLoadError` naming the file, with expected and actual sizes."""
        self.description = str(folder)
        self.norm_offset = family.norm_offset
        self._family = family
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}
        self._file_of = self._assign()
        shapes: dict[str, tuple[int, ...]] = {}
        headers = {name: read_header(folder / name) for name in dict.fromkeys(self._file_of.values())}
        absent = []
        for tensor, file in self._file_of.items():
            entry = headers[file].get(tensor)
            if entry is None:
                absent.append(f"{tensor} (in {file})")
                continue
            self._dtypes[tensor], shapes[tensor] = entry
        if absent:
            raise ModelLoadError(
                f"{folder / INDEX} names {len(absent)} tensors that their shards lack: {', '.join(absent[:8])}"
            )
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in shapes), PREFIXES[0])
        heads = ("lm_head.weight", "language_model.lm_head.weight")
        self.naming = HfNaming(prefix, next((h for h in heads if h in shapes), heads[0]), family)

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    @property
    def embedding_dtype(self) -> str:
        """The stored type of the embedding, say "BF16"; "F32" if there is none (the check of all tensors reports that)."""
        return self._dtypes.get(self.naming.top("embedding"), "F32")

    def is_ignorable(self, name: str) -> bool:
        """Tell whether a tensor is a recomputable buffer or of a part that is not served."""
        return name.endswith(IGNORABLE_SUFFIXES) or name.startswith(self._family.ignored_prefixes)

    def read(self, spec: TensorSpec, out: Tensor) -> None:
        """Copy a tensor out of the map, converted to `out`'s dtype; rows stand in Hugging Face's order already."""
        dtype = self._dtypes[spec.name]
        if dtype not in ITEM_BYTES:
            raise ModelLoadError(
                f"{self.description}: tensor {spec.name} is of type {dtype}; known are {', '.join(ITEM_BYTES)}"
            )
        file = self._file_of[spec.name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            out.copy_(self._open[file].get_tensor(spec.name))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{self._folder / file}: cannot read {spec.name}: {error}") from error

    def blocks(self, spec: TensorSpec) -> None:  # noqa: ARG002  # part of the protocol
        """Return nothing: these files hold plain numbers."""
        return

    def exact_dtype(self, name: str) -> torch.dtype:
        """Return the float type that a tensor's numbers are read into without a loss, float32 at most."""
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(self._dtypes[name], torch.float32)

    def _assign(self) -> dict[str, str]:
        """Return the file of every tensor."""
        present = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if (self._folder / INDEX).exists():
            assigned = self._read_index()
            missing = sorted({name for name in assigned.values() if not (self._folder / name).is_file()})
            if missing:
                raise ModelLoadError(
                    f"{self._folder / INDEX} names {len(missing)} files that are not there: {', '.join(missing[:8])}"
                )
            self._log_ignored(present, set(assigned.values()))
            return assigned
        chosen = SINGLE if SINGLE in present else present[0] if len(present) == 1 else None
        if chosen is None:
            raise ModelLoadError(self._nothing_to_load(present))
        self._log_ignored(present, {chosen})
        return dict.fromkeys(read_header(self._folder / chosen), chosen)

    def _read_index(self) -> dict[str, str]:
        path = self._folder / INDEX
        assigned = read_json(path).get("weight_map")
        if not isinstance(assigned, dict) or not assigned:
            raise ModelLoadError(f"{path} has no weight_map")
        for tensor, file in assigned.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelLoadError(
                    f"{path}: the file of {tensor} is {file!r}, expected the name of a file beside the index"
                )
        return assigned

    def _log_ignored(self, present: list[str], used: set[str]) -> None:
        ignored = [name for name in present if name not in used]
        if ignored:
            log.info("model.files_ignored", folder=str(self._folder), files=ignored[:8], count=len(ignored))

    def _nothing_to_load(self, present: list[str]) -> str:
        if present:
            return f"{self._folder} has {len(present)} safetensors files, but neither {INDEX} nor {SINGLE}: {', '.join(present[:8])}"
        others = sorted(path.name for pattern in OTHER_FORMATS for path in self._folder.glob(pattern))
        hint = f"; {others[0]} is of a format that is not supported, convert it to safetensors" if others else ""
        return f"{self._folder} has no safetensors file{hint}"


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (type, shape) of every tensor, after checking that the header is whole and that the data behind it is all there."""
    size = file_size(path)
    with path.open("rb") as file:
        start = file.read(256)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            reason = impostor(start) or f"its header would have {length} bytes; it is cut off or no safetensors file"
            raise ModelLoadError(f"{path} has {size} bytes: {reason}")
        file.seek(8)
        raw = file.read(length)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} ({size} bytes) has a broken header: {impostor(start) or error}") from error
    if not isinstance(entries, dict):
        raise ModelLoadError(f"{path} ({size} bytes) has a broken header: it is no JSON object")
    entries.pop("__metadata__", None)
    found = {name: _entry(path, name, entry) for name, entry in entries.items()}
    expected = 8 + length + max((end for _, _, end in found.values()), default=0)
    if expected != size:
        raise ModelLoadError(
            f"{path} has {size} bytes, its header describes {expected}; it is cut off or damaged, fetch it again"
        )
    return {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int]:
    """Return (type, shape, end of the data) of one header entry."""
    fault = ModelLoadError(f"{path}: the header's entry of tensor {name[:120]} is broken")
    if not isinstance(entry, dict):
        raise fault
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise fault
    elements = 1
    for extent in shape:
        elements *= extent
    if offsets[0] > offsets[1] or (dtype in ITEM_BYTES and offsets[1] - offsets[0] != elements * ITEM_BYTES[dtype]):
        raise fault
    return dtype, tuple(shape), offsets[1]


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
