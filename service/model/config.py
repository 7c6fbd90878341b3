"""The shape of a decoder: every fact that its maths needs, whichever file it was read from. Holds no weights and opens no files.

Hugging Face's config.json is read in `hf_config.py`, a GGUF file's metadata in `gguf_config.py`. Invariant: a `DecoderConfig` that exists
is consistent (head counts divide, sizes are positive, every layer has a rotation), so nothing downstream checks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.ops import Activation
from service.errors import ModelLoadError
from service.model.registry import Family
from service.model.rope import RopeSettings

MAX_LAYERS = 1024  # far above any real model: a larger number is a damaged header


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder. Raises `ModelLoadError` at construction for sizes that cannot be."""

    family: Family
    architecture: str  # as the checkpoint spells it
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    max_position: int  # context length that the checkpoint declares
    rms_norm_eps: float
    ropes: tuple[RopeSettings, ...]  # by layer
    windows: tuple[int | None, ...]  # by layer; None: all earlier positions are seen
    activation: Activation
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float | None = None
    eos_ids: frozenset[int] = frozenset()  # union of every source that the checkpoint has
    bos_id: int | None = None
    declared_dtype: str | None = None  # "bfloat16", as config.json names it

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "vocab_size",
            "max_position",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{self.architecture}: {name} is {getattr(self, name)}, it must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise ModelLoadError(f"{self.architecture}: num_layers is {self.num_layers}, the limit is {MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.architecture}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        for rope in self.ropes:
            if not 2 <= rope.rotary_size <= self.head_size or rope.rotary_size % 2:
                raise ModelLoadError(
                    f"{self.architecture}: {rope.rotary_size} of {self.head_size} dimensions would rotate; it must be an even number of them"
                )
        for window in self.windows:
            if window is not None and window < 1:
                raise ModelLoadError(f"{self.architecture}: the sliding window is {window}, it must be at least 1")
        if len(self.ropes) != self.num_layers or len(self.windows) != self.num_layers:
            raise ModelLoadError(f"{self.architecture}: {len(self.windows)} layer types for {self.num_layers} layers")
        if self.rms_norm_eps <= 0 or self.attention_scale <= 0:
            raise ModelLoadError(f"{self.architecture}: rms_norm_eps and the attention scale must be positive")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
    ) -> DecoderConfig:
        """Read config.json and, if there is one, generation_config.json; raises `ModelLoadError` naming the key at fault."""
        from service.model.hf_config import read_hf_config

        return read_hf_config(config, generation_config)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, object],
        tensor_shapes: Mapping[str, tuple[int, ...]],
        rope_factors: Mapping[str, Sequence[float]] | None = None,
    ) -> DecoderConfig:
        """Read a GGUF file's metadata; raises `ModelLoadError` naming the key at fault.

        Some facts only the tensors tell: `tensor_shapes` [rows, columns] by name, and `rope_factors`, the contents of the tensors
        `rope_freqs`, `rope_factors_long` and `rope_factors_short` where present.
        """
        from service.model.gguf_config import read_gguf_config

        return read_gguf_config(metadata, tensor_shapes, rope_factors or {})

    @property
    def longest_context(self) -> int:
        """The largest `max_model_len` that every layer's rotation was made for."""
        return min(rope.longest_context for rope in self.ropes)
