#!/usr/bin/env python3
"""Write a GGUF checkpoint as a Hugging Face directory in bfloat16, so that peers which read no GGUF get the same weights.

    python ops/bench/hf_from_gguf.py MODEL.gguf OUT_DIR --tokenizer tests/data/golden/smollm2-135m

Only the `llama` architecture is known, which is what the benchmark model has. This is not the server's loader: it
exists so that the peers do not depend on the code they are compared with.
Invariant: the output holds exactly the dequantised tensors, rounded once to bfloat16, under their Hugging Face names.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The checkpoint holds something this converter does not know; the message names it."""


def convert(gguf_path: Path, out_dir: Path, tokenizer_dir: Path) -> None:
    """Write `out_dir` with config, generation config, tokenizer files and `model.safetensors`.

    The directory appears under its final name only when complete, so a directory that exists is usable.
    Raises ConversionError for another architecture or an unknown tensor.
    """
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(metadata, {tensor.name for tensor in reader.tensors})

    part = out_dir.with_name(out_dir.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {hf_name(tensor.name): to_bfloat16(tensor_values(tensor, config)) for tensor in reader.tensors}
    save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (part / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_dir / name, part / name)
    shutil.rmtree(out_dir, ignore_errors=True)
    part.rename(out_dir)


def hf_config(metadata: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """Translate GGUF metadata into a transformers `LlamaConfig`."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ConversionError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_names:
        raise ConversionError(f"scaled rotary embeddings (rope.scaling.type {scaling!r}) cannot be converted")
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def hf_name(name: str) -> str:
    """Translate one tensor's name, e.g. `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ConversionError(f"tensor {name!r} has no place in a Hugging Face llama checkpoint")


def tensor_values(tensor: Any, config: dict[str, Any]) -> NDArray[np.float32]:
    """Dequantise one tensor, [rows, columns], and put q and k rows into Hugging Face's order."""
    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if ".attn_q." in tensor.name:
        return split_rotary_halves(values, config["num_attention_heads"])
    if ".attn_k." in tensor.name:
        return split_rotary_halves(values, config["num_key_value_heads"])
    return values


def split_rotary_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's llama row order: there a rotary pair is rows (2i, 2i+1) of a head, here it is (i, i + D/2)."""
    out, columns = rows.shape
    pairs = rows.reshape(num_heads, out // num_heads // 2, 2, columns)  # [heads, D/2, which of the pair, columns]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out, columns))


def to_bfloat16(values: NDArray[np.float32]) -> torch.Tensor:
    """Round to the nearest bfloat16, ties to even."""
    return torch.from_numpy(np.array(values, copy=True)).to(torch.bfloat16).contiguous()


def main() -> None:
    """Convert the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with " + ", ".join(TOKENIZER_FILES))
    args = parser.parse_args()
    convert(args.gguf, args.out, args.tokenizer)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
