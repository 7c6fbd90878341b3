"""A decoder in a page of float64: no cache, no blocks, no fusion, written from the published definitions to judge the real one by.

Serves the families without norms after their blocks. What a test varies (rotation, windows) is passed in, worked out by the test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def dense_logits(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    ids: Sequence[int],
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    windows: Sequence[int | None] | None = None,
) -> Tensor:
    """Return the logits [T, V] of a whole sequence. `state` has Hugging Face's names, q, k, v unfused."""
    weights = {name: tensor.double() for name, tensor in state.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    num_tokens = len(ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weights[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ weights[name + ".weight"].T
        return out + weights[name + ".bias"] if name + ".bias" in weights else out

    angles = torch.arange(num_tokens, dtype=torch.float64)[:, None, None] * inv_freq.double()  # [T, 1, R / 2]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    half = inv_freq.shape[0]

    def rotate(x: Tensor) -> Tensor:
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)

    position = torch.arange(num_tokens)
    distance = position[:, None] - position[None, :]
    hidden = weights["model.embed_tokens.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        x = norm(hidden, at + "input_layernorm")
        q = linear(x, at + "self_attn.q_proj").view(num_tokens, heads, head_size)
        k = linear(x, at + "self_attn.k_proj").view(num_tokens, kv_heads, head_size)
        v = linear(x, at + "self_attn.v_proj").view(num_tokens, kv_heads, head_size)
        if at + "self_attn.q_norm.weight" in weights:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = rotate(q), rotate(k)
        hidden_from_view = distance < 0
        window = windows[layer] if windows is not None else None
        if window is not None:
            hidden_from_view = hidden_from_view | (distance >= window)
        outputs = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / head_size**0.5
            scores = scores.masked_fill(hidden_from_view, -torch.inf)
            outputs.append(scores.softmax(-1) @ v[:, group])
        hidden = hidden + linear(torch.cat(outputs, dim=-1), at + "self_attn.o_proj")
        x = norm(hidden, at + "post_attention_layernorm")
        gate, up = linear(x, at + "mlp.gate_proj"), linear(x, at + "mlp.up_proj")
        hidden = hidden + linear(gate * gate.sigmoid() * up, at + "mlp.down_proj")
    head_name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return norm(hidden, "model.norm") @ weights[head_name].T


def plain_frequencies(theta: float, size: int) -> Tensor:
    """Return theta ** (-2 i / size) for i = 0 … size / 2 - 1, float64."""
    return torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
