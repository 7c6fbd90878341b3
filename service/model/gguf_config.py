"""Read a GGUF file's metadata into a `DecoderConfig`. Knows llama.cpp's key names and what its files leave unsaid.

Keys are prefixed by the architecture (`llama.block_count`). Invariant: whatever scaling the metadata declares is applied or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import structlog

from service.errors import ModelLoadError
from service.model.config import MAX_LAYERS, DecoderConfig
from service.model.fields import Fields
from service.model.registry import BiasRule, Family, family_of_gguf
from service.model.rope import RopeSettings, RopeType

log = structlog.get_logger()

SOURCE = "GGUF metadata"
SCALING_TYPES: Mapping[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
DEFAULT_THETA = 10_000.0
GEMMA3_LOCAL_THETA = 10_000.0  # not in the files
GEMMA3_PERIOD = 6  # every sixth layer is global; not in the files either
GEMMA3_27B_LAYERS = 62  # the one size whose query scale is hidden / heads instead of the head size
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"  # a file without the second ties it to the first
EOS_KEYS = ("eos", "eot", "eom")


def read_gguf_config(
    metadata: Mapping[str, object],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, Sequence[float]],
) -> DecoderConfig:
    """Build the configuration; raises `ModelLoadError` naming the key, architecture or scaling type at fault."""
    general = Fields(metadata, SOURCE)
    architecture = general.optional_text("general.architecture")
    if architecture is None:
        raise ModelLoadError(f"{SOURCE}: general.architecture is missing")
    family = family_of_gguf(architecture)
    prefix = architecture + "."
    fields = Fields(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
        f"{SOURCE}: {architecture}",
    )
    if fields.optional_int("expert_count"):
        raise ModelLoadError(
            f"{SOURCE}: {prefix}expert_count is {fields.raw('expert_count')}; mixtures of experts are not supported"
        )

    num_layers = fields.required_size("block_count")
    if num_layers > MAX_LAYERS:
        raise ModelLoadError(f"{SOURCE}: {prefix}block_count is {num_layers}, the limit is {MAX_LAYERS}")
    hidden_size = fields.required_size("embedding_length")
    num_heads = fields.required_size("attention.head_count")
    if not tensor_shapes.get(EMBEDDING):
        raise ModelLoadError(f"tensor {EMBEDDING} is missing")
    head_size = _head_size(fields, hidden_size, num_heads)
    windows = _windows(fields, family, num_layers)
    full = _rope(fields, head_size, rope_factors)
    local = full
    if family.name == "gemma3":
        theta = fields.optional_float("rope.freq_base_swa") or GEMMA3_LOCAL_THETA
        local = RopeSettings(
            rope_type="default", theta=theta, rotary_size=full.rotary_size, max_position=full.max_position
        )
    scale_size = hidden_size // num_heads if family.name == "gemma3" and num_layers == GEMMA3_27B_LAYERS else head_size
    return DecoderConfig(
        family=family,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.required_size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.optional_size("attention.head_count_kv") or num_heads,
        head_size=head_size,
        vocab_size=tensor_shapes[EMBEDDING][0],
        max_position=fields.required_size("context_length"),
        rms_norm_eps=fields.required_float("attention.layer_norm_rms_epsilon"),
        ropes=tuple(full if window is None or family.windows != "pattern" else local for window in windows),
        windows=windows,
        activation="gelu_tanh" if family.name == "gemma3" else "silu",
        tie_embeddings=OUTPUT not in tensor_shapes,
        qkv_bias=_has_bias(family.qkv_bias, "attn_q.bias", tensor_shapes),
        o_bias=_has_bias(family.o_bias, "attn_output.bias", tensor_shapes),
        mlp_bias=_has_bias(family.mlp_bias, "ffn_down.bias", tensor_shapes),
        qk_norm=family.has_qk_norm,
        attention_scale=scale_size**-0.5,
        attention_soft_cap=fields.optional_float("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_float("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else None,
        eos_ids=frozenset[int]().union(*(general.token_ids(f"tokenizer.ggml.{name}_token_id") for name in EOS_KEYS)),
        bos_id=general.optional_int("tokenizer.ggml.bos_token_id"),
    )


def _has_bias(rule: BiasRule, name: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Decide by presence where the family leaves it to the checkpoint: the metadata has no key for it."""
    if rule in ("never", "always"):
        return rule == "always"
    return any(tensor.endswith("." + name) for tensor in tensor_shapes)


def _head_size(fields: Fields, hidden_size: int, num_heads: int) -> int:
    key, value = fields.optional_size("attention.key_length"), fields.optional_size("attention.value_length")
    if key is not None and value is not None and key != value:
        raise ModelLoadError(f"{SOURCE}: keys of size {key} and values of size {value} are not supported")
    stated = key if key is not None else value
    if stated is not None:
        return stated
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{SOURCE}: embedding_length {hidden_size} is no multiple of {num_heads} heads and there is no key_length"
        )
    return hidden_size // num_heads


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_int("attention.sliding_window") or None  # 0 means none
    if window is None and family.windows == "pattern":
        raise ModelLoadError(f"{SOURCE}: attention.sliding_window is missing")
    if family.windows != "pattern":
        return (window,) * num_layers
    period = fields.optional_size("attention.sliding_window_pattern") or GEMMA3_PERIOD
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _rope(fields: Fields, head_size: int, rope_factors: Mapping[str, Sequence[float]]) -> RopeSettings:
    max_position = fields.required_size("context_length")
    rotary_size = fields.optional_size("rope.dimension_count") or head_size
    theta = fields.optional_float("rope.freq_base")
    if theta is None:
        theta = DEFAULT_THETA
        log.warning("model.rope_theta_assumed", rope_theta=theta)
    name = fields.optional_text("rope.scaling.type")
    linear = fields.optional_float("rope.scale_linear")  # what old files have instead
    if name is None:
        name = "longrope" if "rope_factors_long" in rope_factors else "none" if linear in (None, 1.0) else "linear"
    if name not in SCALING_TYPES:
        raise ModelLoadError(
            f"{SOURCE}: rope scaling type {name!r} is not supported; known are {', '.join(SCALING_TYPES)}"
        )
    kind = SCALING_TYPES[name]
    divisors = tuple(rope_factors.get("rope_freqs", ()))
    if divisors and kind != "default":
        raise ModelLoadError(f"{SOURCE}: rope scaling {name!r} together with a rope_freqs tensor is not supported")
    original = fields.optional_size("rope.scaling.original_context_length")
    factor = fields.optional_float("rope.scaling.factor") or linear
    if kind in ("linear", "yarn") and factor is None:
        raise ModelLoadError(f"{SOURCE}: rope scaling {name!r} needs rope.scaling.factor")
    if kind == "longrope" and factor is None:
        factor = max_position / (original or max_position)
    if theta <= 1 or (factor is not None and factor <= 0):
        raise ModelLoadError(
            f"{SOURCE}: rope.freq_base {theta} must be above 1, and the scaling factor {factor} above 0"
        )
    factors = {key: tuple(rope_factors.get(key, ())) for key in ("rope_factors_short", "rope_factors_long")}
    for key, values in {"rope_freqs": divisors, **factors}.items():
        is_needed = kind == "longrope" and key in factors
        if (values or is_needed) and len(values) != rotary_size // 2:
            raise ModelLoadError(f"{SOURCE}: {key} has {len(values)} numbers, expected {rotary_size // 2}")
    return RopeSettings(
        rope_type=kind,
        theta=theta,
        rotary_size=rotary_size,
        max_position=max_position,
        factor=cast("float", factor) if kind != "default" else 1.0,
        original_max_position=original,
        attention_factor=fields.optional_float("rope.scaling.attn_factor") if kind == "longrope" else None,
        beta_fast=fields.optional_float("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=fields.optional_float("rope.scaling.yarn_beta_slow") or 1.0,
        short_factor=factors["rope_factors_short"],
        long_factor=factors["rope_factors_long"],
        frequency_divisors=divisors,
    )
