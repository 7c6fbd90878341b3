"""config.json in every spelling that checkpoints have: what is read, what has a default, what stops the load."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.registry import MODELS
from tests.conftest import DATA
from tests.model.checkpoints import tiny_config


def read(
    architecture: str = "LlamaForCausalLM", generation: dict[str, Any] | None = None, **changes: Any
) -> DecoderConfig:
    return DecoderConfig.from_hf(tiny_config(architecture, **changes), generation)


def test_the_base_of_the_rotation_is_found_in_every_place_it_may_stand() -> None:
    """NUM-01: (a) at the top, (b) inside rope_parameters, (c) both and equal."""
    inside = {"rope_type": "default", "rope_theta": 1e6}
    with capture_logs() as logs:
        thetas = [
            read(rope_theta=1e6).ropes[0].theta,
            read(rope_theta=None, rope_parameters=inside).ropes[0].theta,
            read(rope_theta=1e6, rope_parameters=inside).ropes[0].theta,
            read(rope_theta=None, rope_scaling={"type": "linear", "factor": 2, "rope_theta": 1e6}).ropes[0].theta,
        ]
    assert thetas == [1e6] * 4
    assert not logs


def test_a_base_that_stands_nowhere_is_the_documented_default_with_a_warning() -> None:
    """NUM-01 (d)."""
    with capture_logs() as logs:
        assert read(rope_theta=None).ropes[0].theta == 10_000
    assert [(log["event"], log["log_level"]) for log in logs] == [("model.rope_theta_assumed", "warning")]


def test_two_bases_that_differ_stop_the_load() -> None:
    with pytest.raises(ModelLoadError, match=r"rope_theta is 10000\.0 at the top, but 1000000\.0"):
        read(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_scaling_that_two_places_state_differently_stops_the_load() -> None:
    with pytest.raises(ModelLoadError, match=r"factor is 2, but .*factor is 4"):
        read(rope_parameters={"rope_type": "linear", "factor": 2}, rope_scaling={"type": "linear", "factor": 4})


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_keys_of_the_scaling_type_are_understood(key: str) -> None:
    """NUM-02."""
    rope = read(rope_scaling={key: "linear", "factor": 4.0}).ropes[0]
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_original_context_is_found_inside_and_outside_the_scaling(where: str) -> None:
    """NUM-02."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
    if where == "inside":
        scaling["original_max_position_embeddings"] = 64
        rope = read(rope_scaling=scaling).ropes[0]
    else:
        rope = read(rope_scaling=scaling, original_max_position_embeddings=64).ropes[0]
    assert rope.original_max_position == 64


@pytest.mark.parametrize(
    ("scaling", "missing"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "dynamic"}, "factor"),
        ({"type": "yarn"}, "factor"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            "original_max_position_embeddings",
        ),
        (
            {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4, "original_max_position_embeddings": 64},
            "low_freq_factor",
        ),
        ({"rope_type": "longrope", "long_factor": [1.0] * 6}, "short_factor"),
    ],
)
def test_scaling_without_a_key_it_needs_stops_the_load(scaling: dict[str, Any], missing: str) -> None:
    """NUM-02: a missing needed key is named."""
    with pytest.raises(ModelLoadError, match=f"{missing} is missing"):
        read(rope_scaling=scaling)


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_stops_the_load_and_is_named(section: str) -> None:
    """NUM-02."""
    with pytest.raises(ModelLoadError, match="rope type 'spiral' is not supported; known are default, linear"):
        read(**{section: {"rope_type": "spiral", "factor": 2.0}})


def test_an_unknown_architecture_stops_the_load_and_is_named() -> None:
    with pytest.raises(ModelLoadError, match="'MambaForCausalLM' is not supported; known are LlamaForCausalLM"):
        read("MambaForCausalLM")


def test_no_two_families_claim_one_architecture() -> None:
    for names in ([n for f in MODELS for n in f.hf_architectures], [n for f in MODELS for n in f.gguf_architectures]):
        assert len(names) == len(set(names))


def test_the_head_size_is_the_stated_one_else_hidden_by_heads() -> None:
    """NUM-05: explicit, absent, null, and stated where hidden is no multiple of the heads."""
    assert read(hidden_size=64, head_dim=32).head_size == 32
    assert read(hidden_size=64).head_size == 16
    assert read(hidden_size=64, head_dim=...).head_size == 16
    assert read("Qwen3ForCausalLM", hidden_size=64, head_dim=...).head_size == 16
    assert read("Qwen3ForCausalLM", hidden_size=64).head_size == 128  # this family's default
    assert read(hidden_size=62, head_dim=16).head_size == 16


def test_hidden_size_that_heads_do_not_divide_stops_the_load() -> None:
    """NUM-05."""
    with pytest.raises(ModelLoadError, match="hidden_size 62 is no multiple of 4 heads"):
        read(hidden_size=62)


def test_head_counts_that_cannot_be_grouped_are_refused() -> None:
    """NUM-07: 3 query heads over 2 key/value heads."""
    with pytest.raises(ModelLoadError, match="3 attention heads cannot share 2 key/value heads"):
        read(num_attention_heads=3, num_key_value_heads=2)


def test_key_value_heads_default_to_the_query_heads() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(num_key_value_heads=...).num_kv_heads == 4


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_that_is_not_switched_on_is_not_used(architecture: str) -> None:
    """NUM-03: use_sliding_window false is respected."""
    assert read(architecture, sliding_window=32, use_sliding_window=False, max_window_layers=0).windows == (None, None)
    assert read(architecture, sliding_window=32).windows == (None, None)
    assert read(architecture, sliding_window=32, use_sliding_window=True, max_window_layers=1).windows == (None, 32)


def test_windows_follow_the_layer_types_where_they_are_stated() -> None:
    """NUM-03: full layers are unaffected."""
    kinds = ["full_attention", "sliding_attention"]
    assert read("MistralForCausalLM", sliding_window=32, layer_types=kinds).windows == (None, 32)
    assert read("MistralForCausalLM", sliding_window=32).windows == (32, 32)
    assert read("MistralForCausalLM", sliding_window=...).windows == (None, None)
    assert read("MistralForCausalLM").windows == (4096, 4096)


def test_a_layer_type_that_is_not_known_stops_the_load() -> None:
    with pytest.raises(ModelLoadError, match="layer type 'linear_attention' is not supported"):
        read("MistralForCausalLM", sliding_window=32, layer_types=["full_attention", "linear_attention"])


def test_gemmas_pattern_makes_every_sixth_layer_global() -> None:
    config = read("Gemma3ForCausalLM", num_hidden_layers=12, sliding_window=64, rope_theta=1e6)
    assert [layer for layer, window in enumerate(config.windows) if window is None] == [5, 11]
    assert {rope.theta for rope, window in zip(config.ropes, config.windows, strict=True) if window} == {10_000}
    assert {rope.theta for rope, window in zip(config.ropes, config.windows, strict=True) if not window} == {1e6}


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    text = tiny_config("Gemma3ForCausalLM", num_hidden_layers=6, head_dim=16, sliding_window=32, rope_theta=None)
    del text["architectures"], text["num_attention_heads"], text["tie_word_embeddings"], text["eos_token_id"]
    text["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    config = DecoderConfig.from_hf(nested)
    assert (config.num_layers, config.hidden_size, config.num_heads) == (6, 48, 8)  # 8 is the family's default
    assert config.tie_embeddings
    assert config.eos_ids == {1, 106}
    assert [rope.rope_type for rope in config.ropes] == ["default"] * 5 + ["linear"]
    assert config.attention_scale == 256**-0.5


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, {2}),
        ([2, 4], None, {2, 4}),
        (..., [7], {7}),
        (None, 7, {7}),
        (2, [4, 7], {2, 4, 7}),
        (2, ..., {2}),
        (None, None, set()),
    ],
)
def test_end_of_text_ids_are_united_over_all_sources(in_config: Any, in_generation: Any, expected: set[int]) -> None:
    """MDL-04: an id, a list, null or nothing, in either file."""
    generation = None if in_generation is None else {"eos_token_id": None if in_generation is ... else in_generation}
    assert read(generation=generation, eos_token_id=in_config).eos_ids == expected


def test_weights_quantised_by_other_tools_are_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="'gptq' are not supported"):
        read(quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48', expected a whole number"),
        ({"hidden_size": True}, "hidden_size is 'True', expected a whole number"),
        ({"hidden_size": 0}, "hidden_size is '0', expected at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, the limit is"),
        ({"num_attention_heads": 0}, "num_attention_heads is '0', expected at least 1"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is '-2', expected at least 1"),
        ({"vocab_size": -1}, "vocab_size is '-1', expected at least 1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps and the attention scale must be positive"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is '0'"),
        ({"rope_theta": 0.5}, "rope_theta 0.5 must be above 1"),
        ({"rope_scaling": [1]}, "rope_scaling is .* expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "the rope factor 0.0 above 0"),
        ({"hidden_act": "swishy"}, "activation 'swishy' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
        ({"partial_rotary_factor": 0.25}, "3 of 12 dimensions would rotate"),
        ({"partial_rotary_factor": 2.0}, "24 of 12 dimensions would rotate"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"architectures": []}, "architectures is"),
    ],
)
def test_a_value_that_cannot_be_stops_the_load_and_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**change)


def test_the_recorded_configurations_have_a_row_for_every_family() -> None:
    seen = set()
    for folder in sorted((DATA / "golden").glob("tiny-*")):
        seen.add(DecoderConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8"))).family.name)
    assert seen == {family.name for family in MODELS}
