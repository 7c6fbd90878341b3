"""The peers' copy of the weights is the same weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hf_from_gguf import ConversionError, convert
from safetensors.torch import load_file

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, FEED_FORWARD, VOCABULARY = 4, 2, 8, 32, 64, 11
TOKENIZER = Path(__file__).resolve().parents[1] / "data/golden/smollm2-135m"


def rotary_pairs_together(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order q or k rows as GGUF does for llama: written out row by row, unlike the code under test."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + i + size // 2]
    return out


def write_model(path: Path, architecture: str = "llama", extra_tensor: str | None = None) -> dict[str, np.ndarray]:
    """Write a one-layer model, attention in Q8_0, and return its dequantised weights under Hugging Face names."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(50000.0)
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    layer = "model.layers.0."
    plain = {
        "token_embd.weight": ("model.embed_tokens.weight", draw(VOCABULARY, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", draw(HIDDEN)),
        "blk.0.attn_norm.weight": (layer + "input_layernorm.weight", draw(HIDDEN)),
        "blk.0.ffn_norm.weight": (layer + "post_attention_layernorm.weight", draw(HIDDEN)),
        "blk.0.ffn_gate.weight": (layer + "mlp.gate_proj.weight", draw(FEED_FORWARD, HIDDEN)),
        "blk.0.ffn_up.weight": (layer + "mlp.up_proj.weight", draw(FEED_FORWARD, HIDDEN)),
        "blk.0.ffn_down.weight": (layer + "mlp.down_proj.weight", draw(HIDDEN, FEED_FORWARD)),
    }
    expected = {}
    for name, (hf_name, values) in plain.items():
        writer.add_tensor(name, values)
        expected[hf_name] = values
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", 0), ("o", 0)):
        rows = draw({"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "o": HEADS}[part] * HEAD_SIZE, HIDDEN)
        packed = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        rows = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        stored = rotary_pairs_together(rows, heads) if heads else rows
        name = "blk.0.attn_output.weight" if part == "o" else f"blk.0.attn_{part}.weight"
        stored_packed = gguf.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, stored_packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        expected[f"{layer}self_attn.{part}_proj.weight"] = gguf.dequantize(
            gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
        )
    if extra_tensor:
        writer.add_tensor(extra_tensor, draw(4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_every_tensor_comes_out_dequantised_reordered_and_rounded_once(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "hf", TOKENIZER)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_the_configuration_says_what_the_metadata_said(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "hf", TOKENIZER)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["vocab_size"], config["rope_theta"], config["tie_word_embeddings"]) == (11, 50000.0, True)
    assert (tmp_path / "hf/tokenizer.json").exists()
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"extra_tensor": "rope_freqs.weight"}, "scaled rotary"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "'blk.0.attn_q.bias' has no place"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name_and_leaves_no_directory(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    write_model(tmp_path / "m.gguf", **options)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "hf", TOKENIZER)
    assert not (tmp_path / "hf").exists()
