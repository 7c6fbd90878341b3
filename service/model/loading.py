"""Load a model from a Hugging Face folder or a GGUF file. Finds, checks and reads files; fetching them is `fetch.py`'s task.

Invariant: a model that is returned is complete. Anything missing, damaged or contradictory raises `ModelLoadError` in one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import torch

from backends.ops import Ops, open_ops
from service.errors import ModelLoadError
from service.model.checked_files import read_json
from service.model.config import DecoderConfig
from service.model.decoder import Decoder
from service.model.gguf_file import GgufFile
from service.model.quantisation import Quantisation
from service.model.safetensors_files import SafetensorsFolder
from service.model.weights import TensorSource, read_weights

log = structlog.get_logger()

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED_DTYPES: dict[str, str] = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
MAX_MODEL_LEN = 1 << 22  # bounds the rotary tables that an absurd max_position_embeddings would ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and what the service must know of its checkpoint.

    `tokenizer_source`: the folder with tokenizer.json, or a GGUF file's metadata. `eos_ids`: those the configuration files name; the
    tokenizer may know more.
    """

    name: str
    decoder: Decoder
    config: DecoderConfig
    dtype: torch.dtype
    max_model_len: int
    tokenizer_source: Path | dict[str, object]
    eos_ids: frozenset[int]


def load_model(
    path: Path,
    *,
    dtype: DtypeName = "auto",
    device: torch.device | None = None,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    quantise: Quantisation = "none",
) -> LoadedModel:
    """Load the folder or `.gguf` file at `path`.

    `dtype` "auto" is the checkpoint's own; float16 becomes bfloat16 on a CPU (same size, no overflow, and the faster one there), and
    quantised GGUF types, whose blocks carry 8 significant bits at most, become bfloat16. `max_model_len` defaults to the declared
    context; `ops` to the fastest for the device and dtype. `quantise` says how matrices are held (see `quantisation`); then activations
    are bfloat16 and the device is a CPU. Raises `ModelLoadError`.
    """
    device = device or torch.device("cpu")
    if quantise != "none":
        _check_quantisation(quantise, dtype, device)
        dtype = "bfloat16"
    if path.is_dir():
        config = _folder_config(path)
        with SafetensorsFolder(path, config.family) as folder:
            chosen = _choose_dtype(
                dtype, config.declared_dtype or STORED_DTYPES.get(folder.embedding_dtype, "float32"), device
            )
            return _build(path.name, config, folder, chosen, device, max_model_len, ops, path, quantise)
    if not path.exists():
        raise ModelLoadError(f"there is no model at {path}")
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path} is a file of tensors alone; name its folder, which has config.json too")
    file = GgufFile(path)
    stored = STORED_DTYPES.get(file.main_type.name, "bfloat16")
    return _build(
        path.stem,
        file.config,
        file,
        _choose_dtype(dtype, stored, device),
        device,
        max_model_len,
        ops,
        file.metadata,
        quantise,
    )


def _folder_config(folder: Path) -> DecoderConfig:
    generation = folder / "generation_config.json"
    config = read_json(folder / "config.json")
    try:
        return DecoderConfig.from_hf(config, read_json(generation) if generation.exists() else None)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error.message}") from error


def _check_quantisation(quantise: Quantisation, dtype: DtypeName, device: torch.device) -> None:
    """Raise `ModelLoadError` for what quantised weights cannot be combined with."""
    if device.type != "cpu":
        raise ModelLoadError(
            f"model.quantize is {quantise}: quantised weights run on the CPU only; set backend.device to cpu or model.quantize to none"
        )
    if dtype not in ("auto", "bfloat16"):
        raise ModelLoadError(
            f"model.quantize is {quantise} and model.dtype is {dtype}: quantised weights multiply bfloat16 activations; "
            "set model.dtype to auto or model.quantize to none"
        )


def _choose_dtype(asked: DtypeName, stored: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    if stored == "float16" and device.type == "cpu":
        return torch.bfloat16
    return DTYPES.get(stored, torch.bfloat16)


def _build(
    name: str,
    config: DecoderConfig,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    ops: Ops | None,
    tokenizer_source: Path | dict[str, object],
    quantise: Quantisation,
) -> LoadedModel:
    length = _model_len(config, max_model_len)
    weights = read_weights(config, source, dtype, device, quantise)
    decoder = Decoder(config, weights, ops or open_ops(device, dtype), length)
    return LoadedModel(
        name=name,
        decoder=decoder,
        config=config,
        dtype=dtype,
        max_model_len=length,
        tokenizer_source=tokenizer_source,
        eos_ids=config.eos_ids,
    )


def _model_len(config: DecoderConfig, asked: int | None) -> int:
    """Return the context length; above the declared one only where the rotation stretches it."""
    length = config.max_position if asked is None else asked
    limit = min(config.longest_context, MAX_MODEL_LEN)
    if not 1 <= length <= limit:
        raise ModelLoadError(f"max_model_len is {length}; this model takes 1 to {limit}")
    return length
