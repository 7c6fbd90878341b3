"""Read a Hugging Face config.json into a `DecoderConfig`. Knows the spellings of transformers 4 and 5, not how they are used.

Where a value may stand in two places, both are read: equal values agree, different ones stop the load, since either choice would be a
silent guess. Invariant: a default is used only where no place has the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import structlog

from backends.ops import Activation
from service.errors import ModelLoadError
from service.model.config import MAX_LAYERS, DecoderConfig
from service.model.fields import Fields
from service.model.registry import BiasRule, Family, family_of_hf
from service.model.rope import ROPE_TYPES, RopeSettings, RopeType

log = structlog.get_logger()

SOURCE = "config.json"
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_THETA = 10_000.0  # of the RoFormer paper, and of every family here that leaves the key out
DEFAULT_EPS = 1e-6
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
LONGROPE_ALIAS = "su"  # what Phi-3's first checkpoints call it


def read_hf_config(config: Mapping[str, object], generation_config: Mapping[str, object] | None) -> DecoderConfig:
    """Build the configuration; raises `ModelLoadError` naming the key, architecture or rope type at fault."""
    top = Fields(config, SOURCE)
    architecture = _architecture(config)
    family = family_of_hf(architecture)
    _refuse_quantised(top)
    text = top.optional_section("text_config")
    fields = Fields({**config, **text} if text is not None else config, SOURCE, family.defaults)

    num_layers = fields.required_size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ModelLoadError(f"{SOURCE}: num_hidden_layers is {num_layers}, the limit is {MAX_LAYERS}")
    hidden_size = fields.required_size("hidden_size")
    num_heads = fields.required_size("num_attention_heads")
    head_size = _head_size(fields, hidden_size, num_heads)
    windows = _windows(fields, family, num_layers)
    ropes = _ropes(fields, head_size)
    eps = fields.optional_float("rms_norm_eps")
    scalar = fields.optional_float("query_pre_attn_scalar")
    if scalar is not None and scalar <= 0:
        raise ModelLoadError(f"{SOURCE}: query_pre_attn_scalar is {scalar}, it must be positive")
    return DecoderConfig(
        family=family,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.required_size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.optional_size("num_key_value_heads") or num_heads,
        head_size=head_size,
        vocab_size=fields.required_size("vocab_size"),
        max_position=fields.required_size("max_position_embeddings"),
        rms_norm_eps=DEFAULT_EPS if eps is None else eps,
        ropes=tuple(ropes[FULL if window is None else SLIDING] for window in windows),
        windows=windows,
        activation=_activation(fields),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_has_bias(family.qkv_bias, fields),
        o_bias=_has_bias(family.o_bias, fields),
        mlp_bias=_has_bias(family.mlp_bias, fields),
        qk_norm=family.has_qk_norm,
        attention_scale=(head_size if scalar is None else scalar) ** -0.5,
        attention_soft_cap=fields.optional_float("attn_logit_softcapping"),
        logit_soft_cap=fields.optional_float("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else None,
        eos_ids=fields.token_ids("eos_token_id")
        | top.token_ids("eos_token_id")
        | Fields(generation_config or {}, "generation_config.json").token_ids("eos_token_id"),
        bos_id=fields.optional_int("bos_token_id"),
        declared_dtype=fields.optional_text("dtype") or fields.optional_text("torch_dtype"),
    )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"{SOURCE}: architectures is {names!r}, expected a list with the model's class name")
    return names[0]


def _refuse_quantised(top: Fields) -> None:
    quantisation = top.optional_section("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unknown")
        raise ModelLoadError(
            f"{SOURCE}: weights quantised with {method!r} are not supported; use the unquantised checkpoint or a GGUF file"
        )


def _head_size(fields: Fields, hidden_size: int, num_heads: int) -> int:
    stated = fields.optional_size("head_dim")
    if stated is not None:
        return stated
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{SOURCE}: hidden_size {hidden_size} is no multiple of {num_heads} heads and there is no head_dim"
        )
    return hidden_size // num_heads


def _activation(fields: Fields) -> Activation:
    name = fields.optional_text("hidden_activation") or fields.optional_text("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"{SOURCE}: activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _has_bias(rule: BiasRule, fields: Fields) -> bool:
    if rule in ("never", "always"):
        return rule == "always"
    return fields.flag(rule)


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; `layer_types` decides where it is stated, the family's rule otherwise."""
    if family.windows == "none" or (family.windows == "opt_in" and not fields.flag("use_sliding_window")):
        return (None,) * num_layers
    window = fields.optional_int("sliding_window")
    kinds = fields.raw("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelLoadError(f"{SOURCE}: layer_types must be a list of {num_layers} names, one a layer")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise ModelLoadError(f"{SOURCE}: layer type {kind!r} is not supported; known are {FULL}, {SLIDING}")
        if SLIDING in kinds and window is None:
            raise ModelLoadError(f"{SOURCE}: layer_types has {SLIDING} layers, but there is no sliding_window")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if family.windows == "opt_in":
        first = fields.optional_int("max_window_layers") or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if family.windows == "pattern":
        period = fields.optional_size("_sliding_window_pattern") or fields.optional_size("sliding_window_pattern") or 1
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    return (window,) * num_layers


def _ropes(fields: Fields, head_size: int) -> dict[str, RopeSettings]:
    """Return the rotation of full and of sliding layers, from `rope_parameters` (transformers 5), `rope_scaling` and `rope_theta` (4)."""
    modern = fields.optional_section("rope_parameters")
    if modern is not None and any(kind in modern for kind in (FULL, SLIDING)):
        nested = Fields(modern, f"{SOURCE}: rope_parameters")
        kinds = {kind: nested.optional_section(kind) for kind in (FULL, SLIDING)}
        spare = kinds[FULL] or kinds[SLIDING] or {}
        return {kind: _rope(section or spare, fields, head_size, theta_key=None) for kind, section in kinds.items()}
    legacy = fields.optional_section("rope_scaling")
    if modern is not None and legacy is not None:
        _refuse_contradiction(modern, legacy)
    full = _rope({**(legacy or {}), **(modern or {})}, fields, head_size, theta_key="rope_theta")
    if fields.raw("rope_local_base_freq") is None:
        return {FULL: full, SLIDING: full}
    # Gemma 3 scales only its global layers; local ones have a base of their own.
    return {FULL: full, SLIDING: _rope({}, fields, head_size, theta_key="rope_local_base_freq")}


def _refuse_contradiction(modern: Mapping[str, object], legacy: Mapping[str, object]) -> None:
    for key in modern.keys() & legacy.keys():
        if modern[key] != legacy[key]:
            raise ModelLoadError(
                f"{SOURCE}: rope_parameters.{key} is {modern[key]!r}, but rope_scaling.{key} is {legacy[key]!r}"
            )


def _rope(section: Mapping[str, object], fields: Fields, head_size: int, *, theta_key: str | None) -> RopeSettings:
    """Read one kind of layer. `theta_key`: the key of `fields` that may hold its base, None if only `section` may."""
    scaling = Fields(section, f"{SOURCE}: rope settings")
    kind = scaling.optional_text("rope_type") or scaling.optional_text("type") or "default"
    kind = "longrope" if kind == LONGROPE_ALIAS else kind
    if kind not in ROPE_TYPES:
        raise ModelLoadError(f"{SOURCE}: rope type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}")
    max_position = fields.required_size("max_position_embeddings")
    partial = scaling.optional_float("partial_rotary_factor") or fields.optional_float("partial_rotary_factor") or 1.0
    rotary_size = int(head_size * partial)
    # llama3's original context has no sensible default; the others fall back to the declared one, as their published code does
    stated = scaling.optional_size("original_max_position_embeddings")
    original = stated if stated is not None else fields.optional_size("original_max_position_embeddings")
    if kind == "llama3" and original is None:
        scaling.required_size("original_max_position_embeddings")
    factor = 1.0
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        factor = scaling.required_float("factor")
    elif kind == "longrope":
        factor = scaling.optional_float("factor") or max_position / (original or max_position)
    is_llama3, is_longrope = kind == "llama3", kind == "longrope"
    settings = RopeSettings(
        rope_type=cast("RopeType", kind),
        theta=_theta(scaling, fields, theta_key),
        rotary_size=rotary_size,
        max_position=max_position,
        factor=factor,
        original_max_position=original,
        low_freq_factor=scaling.required_float("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=scaling.required_float("high_freq_factor") if is_llama3 else 4.0,
        attention_factor=scaling.optional_float("attention_factor"),
        beta_fast=scaling.optional_float("beta_fast") or 32.0,
        beta_slow=scaling.optional_float("beta_slow") or 1.0,
        mscale=scaling.optional_float("mscale"),
        mscale_all_dim=scaling.optional_float("mscale_all_dim"),
        truncates=scaling.flag("truncate", default=True),
        short_factor=scaling.floats("short_factor", rotary_size // 2) if is_longrope else (),
        long_factor=scaling.floats("long_factor", rotary_size // 2) if is_longrope else (),
    )
    _check(settings)
    return settings


def _theta(scaling: Fields, fields: Fields, key: str | None) -> float:
    """Find the base in the two places it may stand."""
    inner = scaling.optional_float("rope_theta")
    outer = fields.optional_float(key) if key is not None and fields.states(key) else None
    if inner is not None and outer is not None and inner != outer:
        raise ModelLoadError(f"{SOURCE}: rope_theta is {outer} at the top, but {inner} in the rope settings")
    if inner is not None or outer is not None:
        return cast("float", inner if inner is not None else outer)
    default = (fields.optional_float(key) if key is not None else None) or DEFAULT_THETA
    log.warning("model.rope_theta_assumed", rope_theta=default)
    return default


def _check(settings: RopeSettings) -> None:
    if settings.theta <= 1 or settings.factor <= 0:
        raise ModelLoadError(
            f"{SOURCE}: rope_theta {settings.theta} must be above 1 and the rope factor {settings.factor} above 0"
        )
    if settings.rope_type == "llama3" and settings.high_freq_factor <= settings.low_freq_factor:
        raise ModelLoadError(f"{SOURCE}: llama3 rope needs high_freq_factor above low_freq_factor")
    if settings.rope_type == "dynamic" and settings.rotary_size <= 2:
        raise ModelLoadError(f"{SOURCE}: dynamic rope needs more than 2 rotating dimensions")
