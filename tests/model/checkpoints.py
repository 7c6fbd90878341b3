"""Tiny checkpoints made on the spot: seeded random weights as Hugging Face folders, and the same tensors as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.ops import Ops
from service.model.loading import LoadedModel, load_model
from service.model.quantisation import Quantisation

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Return a config.json of two small layers; a change to None removes the key, `...` writes null."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    config.update(changes)
    return {key: None if value is ... else value for key, value in config.items() if value is not None}


def random_state(
    config: Mapping[str, Any], seed: int = 0, *, has_bias: bool = False, has_qk_norm: bool = False
) -> dict[str, Tensor]:
    """Return weights under Hugging Face's names, scaled so that every part moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or hidden // heads

    def matrix(rows: int, columns: int, scale: float = 1.6) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    state = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 3.0), "model.norm.weight": norm(hidden)}
    if not config.get("tie_word_embeddings"):
        state["lm_head.weight"] = matrix(config["vocab_size"], hidden, 3.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        state[at + "input_layernorm.weight"] = norm(hidden)
        state[at + "post_attention_layernorm.weight"] = norm(hidden)
        for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            state[f"{at}self_attn.{name}_proj.weight"] = matrix(width * head_size, hidden)
            if has_bias:
                state[f"{at}self_attn.{name}_proj.bias"] = 0.5 * torch.randn(width * head_size, generator=generator)
        if has_qk_norm:
            state[at + "self_attn.q_norm.weight"] = norm(head_size)
            state[at + "self_attn.k_norm.weight"] = norm(head_size)
        state[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_size)
        state[at + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        state[at + "mlp.up_proj.weight"] = matrix(inner, hidden)
        state[at + "mlp.down_proj.weight"] = matrix(hidden, inner)
    return state


def write_folder(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Path:
    """Write config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def load(
    path: Path,
    *,
    dtype: Any = "float32",
    max_model_len: int | None = None,
    ops: Ops | None = None,
    quantise: Quantisation = "none",
) -> LoadedModel:
    """Load in float32 unless told otherwise."""
    return load_model(path, ops=ops, dtype=dtype, max_model_len=max_model_len, quantise=quantise)


def folder_state(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder with one safetensors file."""
    return load_file(folder / "model.safetensors")


def interleave_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Put row i + D / 2 of each head behind row i: how llama.cpp's converter stores q and k of Llama."""
    stored = torch.empty_like(rows)
    size = rows.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(size // 2):
            stored[head * size + 2 * i] = rows[head * size + i]
            stored[head * size + 2 * i + 1] = rows[head * size + i + size // 2]
    return stored


def write_gguf(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the tensors as llama.cpp's converter lays them out; matrices in `kind`, vectors in float32. Does not write a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(config["vocab_size"])])
    writer.add_array("tokenizer.ggml.scores", [-float(i) for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    names = GEMMA_NAMES if architecture == "gemma3" else GGUF_NAMES
    for name, tensor in state.items():
        module, suffix = name.rpartition(".")[::2]
        if architecture == "llama" and module.endswith((".q_proj", ".k_proj")):
            tensor = interleave_pairs(tensor, heads if module.endswith(".q_proj") else kv_heads)
        if architecture == "gemma3" and module.endswith("norm"):
            tensor = tensor + 1
        parts = module.split(".", 3)
        stored = f"blk.{parts[2]}.{names[parts[3]]}" if module.startswith("model.layers.") else names[module]
        _add(writer, f"{stored}.{suffix}", tensor, kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32)
    for name, tensor in (extra or {}).items():
        _add(writer, name, tensor, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    data: Any = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
