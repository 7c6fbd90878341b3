"""Windows, head counts and head sizes of a whole decoder, on every backend, against the dense float64 definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.kv_cache import KVCache
from backends.registry import BACKENDS
from service.errors import ModelLoadError
from tests.model.checkpoints import load, random_state, tiny_config, write_folder
from tests.model.dense import dense_logits, plain_frequencies
from tests.model.paged import PagedDecoder

BLOCK = 16


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("window", [4, 1, BLOCK, BLOCK + 1])
def test_a_query_sees_itself_and_the_window_minus_one_before_it_in_every_phase(
    window: int, backend: str, tmp_path: Path
) -> None:
    """NUM-03: prompts of 3 … 20 tokens and one of 60, prefill only, decode only, chunked; the second layer sees everything."""
    kinds = ["sliding_attention", "full_attention"]
    config = tiny_config("MistralForCausalLM", head_dim=16, sliding_window=window, layer_types=kinds)
    state = random_state(config)
    decoder = load(write_folder(tmp_path, config, state)).decoder
    assert [layer.window for layer in PagedDecoder(decoder, backend).decoder.attention_layers] == [window, None]
    for length in (3, 4, 5, 16, 17, 18, 20, 60):
        ids = [(11 * i + length) % config["vocab_size"] for i in range(length)]
        wanted = dense_logits(config, state, ids, plain_frequencies(10_000, 16), windows=[window, None])
        for chunk in (None, 1, 3):
            got = PagedDecoder(decoder, backend, block_size=BLOCK).whole(ids, chunk=chunk)
            assert torch.allclose(got.double(), wanted, rtol=0, atol=2e-4), (length, chunk)


def test_a_window_that_is_off_by_one_would_be_seen() -> None:
    """Guards the test above: one key more or less moves the logits far beyond its tolerance."""
    config = tiny_config("MistralForCausalLM")
    state, ids = random_state(config), list(range(2, 22))
    frequencies = plain_frequencies(10_000, 12)
    right = dense_logits(config, state, ids, frequencies, windows=[4, None])
    for wrong in (3, 5):
        assert float((dense_logits(config, state, ids, frequencies, windows=[wrong, None]) - right).abs().max()) > 0.05


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (14, 2), (28, 4), (24, 8), (12, 3), (6, 2), (5, 5)]
)
def test_every_ratio_of_query_to_key_heads_matches_the_definition(
    heads: int, kv_heads: int, backend: str, tmp_path: Path
) -> None:
    """NUM-07."""
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    state = random_state(config)
    decoder = load(write_folder(tmp_path, config, state)).decoder
    ids = [(13 * i) % config["vocab_size"] for i in range(21)]
    wanted = dense_logits(config, state, ids, plain_frequencies(10_000, 16))
    for chunk in (None, 5):
        got = PagedDecoder(decoder, backend).whole(ids, chunk=chunk)
        assert torch.allclose(got.double(), wanted, rtol=0, atol=2e-4)


def test_three_query_heads_over_two_key_heads_are_refused_at_load(tmp_path: Path) -> None:
    """NUM-07: 3/2."""
    config = tiny_config(num_attention_heads=3, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ModelLoadError, match="3 attention heads cannot share 2 key/value heads"):
        load(write_folder(tmp_path, config, random_state(config)))


@pytest.mark.parametrize(
    ("hidden", "head_dim", "size"),
    [(64, 32, 32), (64, ..., 16), (64, None, 16), (62, 8, 8)],
    ids=["explicit", "null", "absent", "odd"],
)
def test_the_head_size_shapes_cache_and_projections(hidden: int, head_dim: object, size: int, tmp_path: Path) -> None:
    """NUM-05: 64 hidden and 4 heads with head_dim 32, null, absent; hidden no multiple of the heads with head_dim given."""
    config = tiny_config(hidden_size=hidden, head_dim=head_dim)
    state = random_state(config)
    decoder = load(write_folder(tmp_path, config, state)).decoder
    assert decoder.kv_cache_spec(BLOCK).head_size == size
    paged = PagedDecoder(decoder, num_blocks=8)
    assert paged.decoder.attention_layers[0].cache.shape == (8, 2, 2, BLOCK, size)
    assert paged.decoder.attention_layers[0].scale == size**-0.5
    ids = list(range(5, 45))
    wanted = dense_logits(config, state, ids, plain_frequencies(10_000, size))
    assert torch.allclose(paged.whole(ids).double(), wanted, rtol=0, atol=2e-4)


def test_weights_of_another_head_size_are_refused_naming_the_tensors(tmp_path: Path) -> None:
    """NUM-05."""
    config = tiny_config(hidden_size=64, head_dim=32)
    state = random_state(tiny_config(hidden_size=64))  # made for 16
    with pytest.raises(
        ModelLoadError, match=r"layers\.0\.self_attn\.q_proj\.weight is \[64, 64\], expected \[128, 64\]"
    ):
        load(write_folder(tmp_path, config, state))


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_model_whose_products_leave_half_precision_stays_finite_and_right(backend: str, tmp_path: Path) -> None:
    """NUM-06: q and k so large that q · k is beyond float16; float32 follows the definition, bfloat16 is finite everywhere."""
    config = tiny_config("Qwen2ForCausalLM", head_dim=128, hidden_size=64)
    state = random_state(config, has_bias=True)
    for layer in range(2):
        for role in ("q", "k"):
            state[f"model.layers.{layer}.self_attn.{role}_proj.bias"] *= 250
    q, k = (state[f"model.layers.0.self_attn.{role}_proj.bias"].view(-1, 128) for role in ("q", "k"))
    assert float((q @ k.T).abs().max()) > 65_504
    folder = write_folder(tmp_path, config, state)
    ids = [(13 * i * i + i) % config["vocab_size"] for i in range(70)]
    wanted = dense_logits(config, state, ids, plain_frequencies(10_000, 128))
    exact = PagedDecoder(load(folder).decoder, backend).whole(ids)
    assert torch.allclose(
        exact.double(), wanted, rtol=0, atol=0.05
    )  # the angles of such products are float32 themselves
    half = PagedDecoder(load(folder, dtype="bfloat16").decoder, backend).whole(ids, chunk=9)
    assert half.isfinite().all()


def test_a_cache_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    first = load(write_folder(tmp_path / "a", config, random_state(config))).decoder
    wide = tiny_config(num_key_value_heads=4)
    second = load(write_folder(tmp_path / "b", wide, random_state(wide))).decoder
    with pytest.raises(ModelLoadError, match="does not fit the model"):
        second.bind_cache(KVCache(first.kv_cache_spec(BLOCK), 4, torch.device("cpu")))
