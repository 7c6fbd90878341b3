"""Rotary scaling against formulas written here, one dimension pair at a time, from the papers and from Llama 3.1's published recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.rope import RopeSettings, inverse_frequencies, make_rope_table
from tests.model.checkpoints import load, random_state, tiny_config, write_folder
from tests.model.dense import dense_logits, plain_frequencies
from tests.model.paged import PagedDecoder

CPU = torch.device("cpu")
THETA, SIZE, ORIGINAL = 10_000.0, 16, 64


def linear(theta: float, size: int, factor: float) -> Tensor:
    return torch.tensor([theta ** (-2 * i / size) / factor for i in range(size // 2)], dtype=torch.float64)


def dynamic(theta: float, size: int, factor: float, declared: int, length: int) -> Tensor:
    base = theta * ((factor * max(length, declared) / declared) - (factor - 1)) ** (size / (size - 2))
    return plain_frequencies(base, size)


def llama3(theta: float, size: int, factor: float, low: float, high: float, original: int) -> Tensor:
    scaled = []
    for i in range(size // 2):
        frequency = theta ** (-2 * i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def yarn(
    theta: float, size: int, factor: float, original: int, fast: float = 32, slow: float = 1, *, truncates: bool = True
) -> Tensor:
    def boundary(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = boundary(fast), boundary(slow)
    if truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i in range(size // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)  # 0: keep, 1: interpolate
        frequency = theta ** (-2 * i / size)
        scaled.append(frequency / factor * ramp + frequency * (1 - ramp))
    return torch.tensor(scaled, dtype=torch.float64)


LONG, SHORT = [1.0, 1.5, 2, 3, 4, 6, 8, 12], [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07]
YARN_FACTOR = 0.1 * math.log(4) + 1

# Name → (rope settings of config.json, max_model_len, expected inv_freq, expected factor on cosines and sines).
SCALINGS: dict[str, tuple[dict[str, Any], int, Tensor, float]] = {
    "default": ({"rope_type": "default"}, 256, plain_frequencies(THETA, SIZE), 1.0),
    "linear": ({"type": "linear", "factor": 4.0}, 256, linear(THETA, SIZE, 4.0), 1.0),
    "dynamic within the declared context": (
        {"type": "dynamic", "factor": 4.0},
        256,
        plain_frequencies(THETA, SIZE),
        1.0,
    ),
    "dynamic beyond it": ({"type": "dynamic", "factor": 4.0}, 1024, dynamic(THETA, SIZE, 4.0, 256, 1024), 1.0),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        256,
        llama3(THETA, SIZE, 8.0, 1.0, 4.0, ORIGINAL),
        1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        256,
        yarn(THETA, SIZE, 4.0, ORIGINAL),
        YARN_FACTOR,
    ),
    "yarn without an original context": (
        {"type": "yarn", "factor": 4.0},
        1024,
        yarn(THETA, SIZE, 4.0, 256),
        YARN_FACTOR,
    ),
    "yarn with its attention factor": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.7},
        256,
        yarn(THETA, SIZE, 4.0, ORIGINAL),
        0.7,
    ),
    "yarn with mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
        },
        256,
        yarn(THETA, SIZE, 4.0, ORIGINAL),
        (0.1 * 0.8 * math.log(4) + 1) / (0.1 * 0.4 * math.log(4) + 1),
    ),
    "yarn with its betas": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 8,
            "beta_slow": 2,
        },
        256,
        yarn(THETA, SIZE, 4.0, ORIGINAL, 8, 2),
        YARN_FACTOR,
    ),
    "yarn without rounding its borders": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "truncate": False},
        256,
        yarn(THETA, SIZE, 4.0, ORIGINAL, truncates=False),
        YARN_FACTOR,
    ),
    "longrope beyond the original context": (
        {"type": "longrope", "long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": ORIGINAL},
        256,
        plain_frequencies(THETA, SIZE) / torch.tensor(LONG, dtype=torch.float64),
        math.sqrt(1 + math.log(4) / math.log(ORIGINAL)),
    ),
    "longrope within it, by its old name": (
        {"type": "su", "long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": ORIGINAL},
        ORIGINAL,
        plain_frequencies(THETA, SIZE) / torch.tensor(SHORT, dtype=torch.float64),
        math.sqrt(1 + math.log(4) / math.log(ORIGINAL)),
    ),
}


def settings(scaling: dict[str, Any], **changes: Any) -> RopeSettings:
    config = tiny_config(head_dim=SIZE, rope_theta=THETA, rope_scaling=scaling, **changes)
    return DecoderConfig.from_hf(config).ropes[0]


@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_follows_the_published_formula_at_every_position(name: str) -> None:
    """NUM-02: positions 0, the original context, the declared one and up to four times it."""
    scaling, max_model_len, expected, factor = SCALINGS[name]
    rope = settings(scaling)
    inv_freq, attention_factor = inverse_frequencies(rope, max_model_len)
    assert torch.allclose(inv_freq, expected, rtol=1e-12, atol=0)
    assert attention_factor == pytest.approx(factor, rel=1e-12)
    table = make_rope_table(rope, max_model_len, CPU)
    for position in (0, 1, ORIGINAL - 1, ORIGINAL, 255, 256, 1000, 1023):
        if position < max_model_len:
            angles = position * expected
            assert torch.allclose(table.cos[position].double(), angles.cos() * factor, rtol=0, atol=1e-7)
            assert torch.allclose(table.sin[position].double(), angles.sin() * factor, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_whole_model_with_scaling_gives_the_logits_of_the_formula(name: str, tmp_path: Path) -> None:
    """NUM-02: the rotation reaches the logits, at short and at long positions, whole and in chunks."""
    scaling, max_model_len, expected, factor = SCALINGS[name]
    config = tiny_config(head_dim=SIZE, rope_theta=THETA, rope_scaling=scaling)
    state = random_state(config)
    folder = write_folder(tmp_path, config, state)
    ids = [(7 * i * i + 3 * i) % config["vocab_size"] for i in range(min(max_model_len, 300))]
    wanted = dense_logits(config, state, ids, expected, attention_factor=factor)
    model = load(folder, max_model_len=max_model_len)
    for chunk in (None, 37):
        got = PagedDecoder(model.decoder).whole(ids, chunk=chunk)
        assert torch.allclose(got.double(), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_part_of_the_dimensions_rotates(place: str, tmp_path: Path) -> None:
    config = tiny_config(head_dim=SIZE, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    (config["rope_parameters"] if place == "inside" else config)["partial_rotary_factor"] = 0.5
    state = random_state(config)
    model = load(write_folder(tmp_path, config, state))
    ids = list(range(3, 60))
    wanted = dense_logits(config, state, ids, plain_frequencies(THETA, SIZE // 2))
    assert torch.allclose(PagedDecoder(model.decoder).whole(ids).double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("spelling", ["top", "inside", "both"])
def test_a_large_base_reaches_positions_far_out_from_every_place(spelling: str, tmp_path: Path) -> None:
    """NUM-01: logits at positions 0, 50 and 500 equal the reference's with base 1e6, and not those with 1e4."""
    inside = {"rope_type": "default", "rope_theta": 1e6}
    places = {
        "top": {"rope_theta": 1e6},
        "inside": {"rope_theta": None, "rope_parameters": inside},
        "both": {"rope_theta": 1e6, "rope_parameters": inside},
    }
    config = tiny_config(max_position_embeddings=512, **places[spelling])
    state = random_state(config)
    ids = [(5 * i * i + i) % config["vocab_size"] for i in range(501)]
    got = PagedDecoder(load(write_folder(tmp_path, config, state)).decoder).whole(ids)
    wanted = dense_logits(config, state, ids, plain_frequencies(1e6, 12))
    wrong = dense_logits(config, state, ids, plain_frequencies(1e4, 12))
    for position in (0, 50, 500):
        assert torch.allclose(got[position].double(), wanted[position], rtol=0, atol=2e-4)
    assert not torch.allclose(got[500].double(), wrong[500], rtol=0, atol=0.1)


def test_the_table_does_not_depend_on_the_length_of_a_sequence() -> None:
    """The dynamic type takes its base from the context chosen at load, so two loads differ and one load never does."""
    rope = settings({"type": "dynamic", "factor": 4.0})
    short, long = make_rope_table(rope, 256, CPU), make_rope_table(rope, 1024, CPU)
    assert not torch.allclose(short.cos[200], long.cos[200], atol=1e-2)
    assert torch.equal(make_rope_table(rope, 1024, CPU).cos, long.cos)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "default"}, 256),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_a_context_longer_than_the_rotation_was_made_for_is_refused(
    scaling: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    config = tiny_config(head_dim=SIZE, rope_scaling=scaling)
    folder = write_folder(tmp_path, config, random_state(config))
    assert load(folder, max_model_len=longest).decoder.max_model_len == longest
    assert load(folder).max_model_len == 256  # what is declared
    with pytest.raises(ModelLoadError, match=f"max_model_len is {longest + 1}; this model takes 1 to {longest}"):
        load(folder, max_model_len=longest + 1)


def test_an_absurd_declared_context_is_refused_before_tables_are_made(tmp_path: Path) -> None:
    config = tiny_config(max_position_embeddings=10**13)
    with pytest.raises(ModelLoadError, match="max_model_len is 10000000000000; this model takes 1 to 4194304"):
        load(write_folder(tmp_path, config, random_state(config)))
