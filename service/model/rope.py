"""Rotary position embedding: settings, and the tables of cosines and sines. Knows positions and angles, neither weights nor layers.

Dimension pair i of a head turns by position * inv_freq[i] (Su et al., 2021, "RoFormer"). The scaling types change inv_freq and, for two
of them, multiply both tables by an attention factor. Tables are computed in float64 and rounded once to float32.

Invariant: a table depends on the settings and on the context length chosen at load, never on the length of the sequence at hand, so that
a prompt computed in chunks, from the prefix cache or beside others gets the same rotation. Hence two deliberate choices: "dynamic" (NTK)
takes its base for `max_model_len`, where Hugging Face recomputes it as the sequence grows (and then mixes keys turned by different
bases); "longrope" takes the long factors if `max_model_len` is above the original context, the short ones otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROWS_AT_ONCE = 1 << 14  # bounds the float64 temporaries of a long table
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """How one kind of layer rotates. Only the fields of its `rope_type` are read; `frequency_divisors` applies to "default" alone."""

    rope_type: RopeType
    theta: float
    rotary_size: int  # dimensions that turn, R ≤ head size, even
    max_position: int  # what the checkpoint declares
    factor: float = 1.0  # how far the original context is stretched
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn, longrope; None: from the paper's formula
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncates: bool = True
    short_factor: tuple[float, ...] = ()  # longrope, [R/2]
    long_factor: tuple[float, ...] = ()
    frequency_divisors: tuple[
        float, ...
    ] = ()  # GGUF's `rope_freqs` tensor, [R/2]: llama3 scaling worked out by the converter

    @property
    def longest_context(self) -> int:
        """Positions that the rotation was made for: above `max_position` only for types that stretch a shorter declared context."""
        if self.rope_type == "yarn":
            return max(self.max_position, int((self.original_max_position or self.max_position) * self.factor))
        if self.rope_type == "dynamic":
            return max(self.max_position, int(self.max_position * self.factor))
        return self.max_position


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos`, `sin`: [max_model_len, R/2] float32, the attention factor multiplied in."""

    cos: Tensor
    sin: Tensor


def make_rope_table(settings: RopeSettings, max_model_len: int, device: torch.device) -> RopeTable:
    """Compute the table of positions 0 … max_model_len - 1."""
    inv_freq, attention_factor = inverse_frequencies(settings, max_model_len)
    cos = torch.empty((max_model_len, settings.rotary_size // 2), dtype=torch.float32)
    sin = torch.empty_like(cos)
    for first in range(0, max_model_len, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, max_model_len)
        angles = torch.arange(first, last, dtype=torch.float64)[:, None] * inv_freq[None, :]
        cos[first:last] = angles.cos().mul_(attention_factor)
        sin[first:last] = angles.sin().mul_(attention_factor)
    return RopeTable(cos=cos.to(device), sin=sin.to(device))


def inverse_frequencies(settings: RopeSettings, max_model_len: int) -> tuple[Tensor, float]:
    """Return inv_freq [R/2] float64 (radians a position) and the factor on both tables."""
    match settings.rope_type:
        case "default":
            plain = _plain(settings.theta, settings.rotary_size)
            if settings.frequency_divisors:
                plain = plain / torch.tensor(settings.frequency_divisors, dtype=torch.float64)
            return plain, 1.0
        case "linear":  # position interpolation, Chen et al., 2023
            return _plain(settings.theta, settings.rotary_size) / settings.factor, 1.0
        case "dynamic":
            return _plain(_ntk_base(settings, max_model_len), settings.rotary_size), 1.0
        case "llama3":
            return _llama3(settings), 1.0
        case "yarn":
            return _yarn(settings), _yarn_attention_factor(settings)
        case "longrope":
            return _longrope(settings, max_model_len)


def _plain(theta: float, size: int) -> Tensor:
    return theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)


def _ntk_base(settings: RopeSettings, max_model_len: int) -> float:
    """Grow the base so that the slowest pair, stretched to `max_model_len`, turns as far as it did over the declared context."""
    length = max(max_model_len, settings.max_position)
    stretch = settings.factor * length / settings.max_position - (settings.factor - 1)
    return settings.theta * float(stretch ** (settings.rotary_size / (settings.rotary_size - 2)))


def _llama3(settings: RopeSettings) -> Tensor:
    """Slow pairs divided by `factor`, fast ones kept, a ramp between the two wavelengths (Llama 3.1)."""
    original = settings.original_max_position or settings.max_position
    inv_freq = _plain(settings.theta, settings.rotary_size)
    turns = original * inv_freq / (2 * math.pi)  # how often a pair goes round within the original context
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(
        0.0, 1.0
    )  # 0: wavelength above original / low; 1: below original / high
    return inv_freq * (kept + (1 - kept) / settings.factor)


def _yarn(settings: RopeSettings) -> Tensor:
    """Interpolate pairs that turn less than `beta_slow` times over the original context, keep those above `beta_fast` (Peng et al., 2023)."""
    size, theta = settings.rotary_size, settings.theta
    original = settings.original_max_position or settings.max_position

    def pair_that_turns(times: float) -> float:
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(settings.beta_fast), pair_that_turns(settings.beta_slow)
    if settings.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = (high - low) or 0.001  # as the published code does, against division by zero
    interpolated = ((torch.arange(size // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    inv_freq = _plain(theta, size)
    return inv_freq * (1 - interpolated) + inv_freq / settings.factor * interpolated


def _yarn_attention_factor(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if settings.factor <= 1 else 0.1 * scale * math.log(settings.factor) + 1.0

    if settings.mscale and settings.mscale_all_dim:
        return magnitude(settings.mscale) / magnitude(settings.mscale_all_dim)
    return magnitude(1.0)


def _longrope(settings: RopeSettings, max_model_len: int) -> tuple[Tensor, float]:
    """Divide each pair's frequency by its own searched factor (Ding et al., 2024, "LongRoPE")."""
    original = settings.original_max_position or settings.max_position
    chosen = settings.long_factor if max_model_len > original else settings.short_factor
    inv_freq = _plain(settings.theta, settings.rotary_size) / torch.tensor(chosen, dtype=torch.float64)
    if settings.attention_factor is not None:
        return inv_freq, settings.attention_factor
    if settings.factor <= 1:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(settings.factor) / math.log(original))
