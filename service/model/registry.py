"""The model families: each a row of facts about names, norms, biases and windows. One decoder class serves all of them.

Knows no tensors and reads no files. A new family whose layers have these parts is one row here; only a new part needs code in
`decoder.py`. Invariant: no two families claim the same architecture name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from service.errors import ModelLoadError

# Who decides: the family for every checkpoint, or a key of its configuration.
BiasRule = Literal["never", "always", "attention_bias", "mlp_bias"]

# Which layers have a sliding window when the configuration has no `layer_types`:
# none of them; all, if it names a window; those from `max_window_layers` on, if `use_sliding_window` is true; all but every n-th.
WindowRule = Literal["none", "all", "opt_in", "pattern"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one family apart from Llama. `defaults` are the values that its checkpoints may leave out of config.json."""

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...] = ()
    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    has_qk_norm: bool = False  # RMS norm of each head of q and k, before the rotary embedding
    has_sandwich_norms: bool = False  # norms after attention and after the MLP too, inside the residual branch
    norm_offset: float = 0.0  # Hugging Face checkpoints store the norm's weight minus this (GGUF files store it whole)
    scales_embedding: bool = False  # by the square root of the hidden size
    has_fused_qkv: bool = False  # q, k and v are one tensor in the checkpoint, in this order
    has_fused_gate_up: bool = False  # gate and up are one tensor, in this order
    windows: WindowRule = "none"
    gguf_permutes_qk: bool = False  # GGUF stores q and k rows with the two rows of a rotary pair side by side
    ignored_prefixes: tuple[str, ...] = ()  # tensors of parts that are not served, such as a vision tower
    defaults: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


_GEMMA3_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    }
)

_QWEN_WINDOWS: Mapping[str, object] = MappingProxyType({"sliding_window": 4096, "max_window_layers": 28})

MODELS: tuple[Family, ...] = (
    Family(
        name="llama",
        hf_architectures=("LlamaForCausalLM",),
        gguf_architectures=("llama",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        gguf_permutes_qk=True,
    ),
    Family(  # in GGUF files Mistral is of architecture "llama"
        name="mistral",
        hf_architectures=("MistralForCausalLM",),
        windows="all",
        defaults=MappingProxyType({"sliding_window": 4096}),
    ),
    Family(
        name="qwen2",
        hf_architectures=("Qwen2ForCausalLM",),
        gguf_architectures=("qwen2",),
        qkv_bias="always",
        windows="opt_in",
        defaults=_QWEN_WINDOWS,
    ),
    Family(
        name="qwen3",
        hf_architectures=("Qwen3ForCausalLM",),
        gguf_architectures=("qwen3",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        windows="opt_in",
        defaults=MappingProxyType({**_QWEN_WINDOWS, "head_dim": 128}),
    ),
    Family(
        name="phi3",
        hf_architectures=("Phi3ForCausalLM",),
        gguf_architectures=("phi3",),
        has_fused_qkv=True,
        has_fused_gate_up=True,
        windows="all",
        defaults=MappingProxyType({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
    ),
    Family(
        name="gemma3",
        hf_architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        gguf_architectures=("gemma3",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        has_sandwich_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
        windows="pattern",
        ignored_prefixes=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
        defaults=_GEMMA3_DEFAULTS,
    ),
)


def family_of_hf(architecture: str) -> Family:
    """Return the family of a name from config.json's `architectures`; raises `ModelLoadError` naming it and what is known."""
    for family in MODELS:
        if architecture in family.hf_architectures:
            return family
    known = ", ".join(name for family in MODELS for name in family.hf_architectures)
    raise ModelLoadError(f"architecture {architecture!r} is not supported; known are {known}")


def family_of_gguf(architecture: str) -> Family:
    """Return the family of a GGUF file's `general.architecture`; raises `ModelLoadError` naming it and what is known."""
    for family in MODELS:
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in MODELS for name in family.gguf_architectures)
    raise ModelLoadError(f"GGUF architecture {architecture!r} is not supported; known are {known}")
