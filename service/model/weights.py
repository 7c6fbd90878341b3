"""Which tensors a decoder needs, under which names, and how they become layers. Knows no file format: a `TensorSource` reads.

A tensor's *role* ("q", "mlp_norm") is the same for every family and format; a `Naming` turns it into the file's own name, which is what
errors show. Invariant: nothing is allocated or read before every needed tensor was found with the right shape.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
import torch
from torch import Tensor

from backends.ops import Weight
from backends.quantised_weights import QuantisedWeight
from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.quantisation import Quantisation, quantised_weight

log = structlog.get_logger()

MAX_NAMED = 8  # tensors named in one message
MAX_READERS = 4  # threads that read layers; each holds one layer more


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One needed tensor: its name in the file and its shape. `rotary_heads`: the heads in its rows, for q and k."""

    name: str
    shape: tuple[int, ...]
    rotary_heads: int | None = None


class Naming(Protocol):
    """The file's name of a role."""

    def top(self, role: str) -> str:
        """Name a tensor outside the layers: "embedding", "final_norm" or "head"."""
        ...

    def layer(self, index: int, role: str, kind: str) -> str:
        """Name a layer's tensor; `kind` is "weight" or "bias"."""
        ...


class TensorSource(Protocol):
    """Files that hold a checkpoint, opened and found sound."""

    description: str  # what errors call it
    shapes: Mapping[str, tuple[int, ...]]  # by the file's names, [rows, columns]
    norm_offset: float  # what the family's norms lack in this file

    @property
    def naming(self) -> Naming:
        """How this file names roles."""
        ...

    def is_ignorable(self, name: str) -> bool:
        """Tell whether a tensor that nobody needs is known to be harmless."""
        ...

    def read(self, spec: TensorSpec, out: Tensor) -> None:
        """Fill `out`, a tensor of the spec's shape and any float dtype and device, in Hugging Face's row order."""
        ...

    def blocks(self, spec: TensorSpec) -> QuantisedWeight | None:
        """Return a matrix in the same order as the integers that the file holds; None where it holds others or none."""
        ...

    def exact_dtype(self, name: str) -> torch.dtype:
        """Return the float type that a tensor's numbers are read into without a loss, float32 at most."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H query heads, Hkv key/value heads of size D, hidden size N, intermediate size I. Norms are float32."""

    attention_norm: Tensor  # [N]
    qkv: Weight  # [(H + 2 Hkv) D, N]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    o: Weight  # [N, H D]
    o_bias: Tensor | None
    post_attention_norm: Tensor | None  # [N]
    mlp_norm: Tensor  # [N]
    gate_up: Weight  # [2 I, N]
    gate_up_bias: Tensor | None
    down: Weight  # [N, I]
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. `layers` reads one layer at a time, so that packing a layer need not keep two copies of all."""

    embedding: Weight  # [V, N]
    final_norm: Tensor  # [N] float32
    head: Weight  # [V, N]; the embedding itself where they are tied
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    layers: Iterator[LayerWeights]


def read_weights(
    config: DecoderConfig,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    quantisation: Quantisation = "none",
) -> DecoderWeights:
    """Check all tensors, then read those outside the layers; `layers` reads the rest as it is consumed.

    Raises `ModelLoadError` with every missing tensor and every wrong shape by name.
    """
    needs = _Needs(config, source.naming)
    _check(needs, source, config)
    reader = _Reader(source, dtype, device, quantisation)
    embedding = reader.weight(needs.embedding, is_table=True)
    head = embedding if config.tie_embeddings else reader.weight(needs.head, is_table=True)
    # Some exporters leave a copy of the embedding in; another matrix means that the configuration or the export is wrong.
    has_copy = config.tie_embeddings and source.shapes.get(needs.head.name) == needs.head.shape
    if has_copy and not torch.equal(reader.matrix(needs.head), reader.matrix(needs.embedding)):
        log.warning("model.tied_head_differs", source=source.description, name=needs.head.name)
    return DecoderWeights(
        embedding=embedding,
        final_norm=reader.norm(needs.final_norm),
        head=head,
        dtype=dtype,
        layers=_read_ahead(partial(_read_layer, needs, reader), config.num_layers),
    )


def _read_ahead(read: Callable[[int], LayerWeights], num_layers: int) -> Iterator[LayerWeights]:
    """Read layers on threads while the caller packs the ones before; at most one a thread waits to be taken."""
    ahead = min(MAX_READERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with ThreadPoolExecutor(ahead, thread_name_prefix="looseleaf-weights") as readers:
        under_way: deque[Future[LayerWeights]] = deque()
        try:
            for index in range(num_layers):
                under_way.append(readers.submit(read, index))
                if len(under_way) > ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for layer in under_way:
                layer.cancel()


class _Needs:
    """The tensors of a configuration under one naming."""

    def __init__(self, config: DecoderConfig, naming: Naming) -> None:
        hidden, head_size = config.hidden_size, config.head_size
        self._config = config
        self._naming = naming
        self._widths = {
            "q": config.num_heads * head_size,
            "k": config.num_kv_heads * head_size,
            "v": config.num_kv_heads * head_size,
        }
        self.embedding = TensorSpec(naming.top("embedding"), (config.vocab_size, hidden))
        self.final_norm = TensorSpec(naming.top("final_norm"), (hidden,))
        self.head = TensorSpec(naming.top("head"), (config.vocab_size, hidden))

    def qkv(self, index: int, kind: str) -> list[TensorSpec]:
        """The tensors that stack to q, k, v: three, or one in families that fuse them."""
        inner = (self._config.hidden_size,) if kind == "weight" else ()
        if self._config.family.has_fused_qkv:
            return [TensorSpec(self._naming.layer(index, "qkv", kind), (sum(self._widths.values()), *inner))]
        heads = {"q": self._config.num_heads, "k": self._config.num_kv_heads, "v": None}
        return [
            TensorSpec(self._naming.layer(index, role, kind), (width, *inner), heads[role])
            for role, width in self._widths.items()
        ]

    def gate_up(self, index: int, kind: str) -> list[TensorSpec]:
        """The tensors that stack to gate, up."""
        inner = (self._config.hidden_size,) if kind == "weight" else ()
        size = self._config.intermediate_size
        if self._config.family.has_fused_gate_up:
            return [TensorSpec(self._naming.layer(index, "gate_up", kind), (2 * size, *inner))]
        return [TensorSpec(self._naming.layer(index, role, kind), (size, *inner)) for role in ("gate", "up")]

    def single(self, index: int, role: str, kind: str = "weight") -> TensorSpec:
        """A tensor that stands alone."""
        config = self._config
        if role in ("q_norm", "k_norm"):
            shape: tuple[int, ...] = (config.head_size,)
        elif role == "o" and kind == "weight":
            shape = (config.hidden_size, config.num_heads * config.head_size)
        elif role == "down" and kind == "weight":
            shape = (config.hidden_size, config.intermediate_size)
        else:
            shape = (config.hidden_size,)
        return TensorSpec(self._naming.layer(index, role, kind), shape)

    def layer(self, index: int) -> Iterator[TensorSpec]:
        """Every tensor of a layer."""
        config = self._config
        yield from self.qkv(index, "weight")
        yield from self.gate_up(index, "weight")
        yield from (self.single(index, role) for role in ("attention_norm", "o", "mlp_norm", "down"))
        if config.qkv_bias:
            yield from self.qkv(index, "bias")
        if config.o_bias:
            yield self.single(index, "o", "bias")
        if config.mlp_bias:
            yield from self.gate_up(index, "bias")
            yield self.single(index, "down", "bias")
        if config.qk_norm:
            yield from (self.single(index, role) for role in ("q_norm", "k_norm"))
        if config.family.has_sandwich_norms:
            yield from (self.single(index, role) for role in ("post_attention_norm", "post_mlp_norm"))

    def all(self) -> Iterator[TensorSpec]:
        """Every tensor of the decoder, the head only where it is not tied."""
        yield from (self.embedding, self.final_norm)
        if not self._config.tie_embeddings:
            yield self.head
        for index in range(self._config.num_layers):
            yield from self.layer(index)


class _Reader:
    """Allocates tensors of the model's dtype and fills them from the source; quantises matrices where that is asked for."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, quantisation: Quantisation
    ) -> None:
        self._source = source
        self._norm_offset = source.norm_offset
        self._dtype = dtype
        self._device = device
        self._quantisation = quantisation

    def weight(self, *specs: TensorSpec, is_table: bool = False) -> Weight:
        """Read matrices stacked along their first dimension, in the form that the quantisation wants; a table is an embedding or a head."""
        if self._quantisation == "none":
            return self.matrix(*specs)
        quantised = quantised_weight(self._source, specs, self._quantisation, is_table=is_table)
        return self.matrix(*specs) if quantised is None else quantised

    def matrix(self, *specs: TensorSpec) -> Tensor:
        """Read tensors stacked along their first dimension."""
        rows = [spec.shape[0] for spec in specs]
        out = torch.empty((sum(rows), *specs[0].shape[1:]), dtype=self._dtype, device=self._device)
        for spec, part in zip(specs, torch.split(out, rows), strict=True):
            self._source.read(spec, part)
        return out

    def norm(self, spec: TensorSpec) -> Tensor:
        """Read a norm's weight as the factor that it is, in float32."""
        out = torch.empty(spec.shape, dtype=torch.float32, device=self._device)
        self._source.read(spec, out)
        return out.add_(self._norm_offset) if self._norm_offset else out


def _read_layer(needs: _Needs, reader: _Reader, index: int) -> LayerWeights:
    config = needs._config
    has_sandwich = config.family.has_sandwich_norms
    return LayerWeights(
        attention_norm=reader.norm(needs.single(index, "attention_norm")),
        qkv=reader.weight(*needs.qkv(index, "weight")),
        qkv_bias=reader.matrix(*needs.qkv(index, "bias")) if config.qkv_bias else None,
        q_norm=reader.norm(needs.single(index, "q_norm")) if config.qk_norm else None,
        k_norm=reader.norm(needs.single(index, "k_norm")) if config.qk_norm else None,
        o=reader.weight(needs.single(index, "o")),
        o_bias=reader.matrix(needs.single(index, "o", "bias")) if config.o_bias else None,
        post_attention_norm=reader.norm(needs.single(index, "post_attention_norm")) if has_sandwich else None,
        mlp_norm=reader.norm(needs.single(index, "mlp_norm")),
        gate_up=reader.weight(*needs.gate_up(index, "weight")),
        gate_up_bias=reader.matrix(*needs.gate_up(index, "bias")) if config.mlp_bias else None,
        down=reader.weight(needs.single(index, "down")),
        down_bias=reader.matrix(needs.single(index, "down", "bias")) if config.mlp_bias else None,
        post_mlp_norm=reader.norm(needs.single(index, "post_mlp_norm")) if has_sandwich else None,
    )


def _check(needs: _Needs, source: TensorSource, config: DecoderConfig) -> None:
    """Compare what is needed with what the file has; unknown extras are logged, unless the decoder has a place for them."""
    wanted = {spec.name: spec.shape for spec in needs.all()}
    missing = [name for name in wanted if name not in source.shapes]
    misshapen = [
        f"{name} is {list(source.shapes[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    extras = [name for name in source.shapes if name not in wanted and not source.is_ignorable(name)]
    if config.tie_embeddings and needs.head.name in extras:
        extras.remove(needs.head.name)
    # A bias or norm of a module that is used would change the result: to drop it silently is to compute another model.
    modules = {name.rpartition(".")[0] for name in wanted}
    unplaced = [name for name in extras if name.rpartition(".")[0] in modules]
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if misshapen:
        problems.append(f"{len(misshapen)} tensors have another shape: {_some(misshapen, '; ')}")
    if unplaced:
        problems.append(f"{len(unplaced)} tensors have no place in this configuration: {_some(unplaced)}")
    if problems:
        raise ModelLoadError(f"{source.description}: {'. '.join(problems)}")
    if extras:
        log.warning("model.tensors_ignored", source=source.description, count=len(extras), names=_some(extras))


def _some(names: list[str], separator: str = ", ") -> str:
    shown = separator.join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
