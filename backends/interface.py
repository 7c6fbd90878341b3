"""The contract of an attention backend: `unsupported`, `prepare`, `plan`, `store_kv`, `run`. Nothing of requests, users or text.

A step calls `plan` once and then, for every layer, `store_kv` and `run`. A plan is a value and is never stored on the backend, so that
overlapping steps and graph replay cannot corrupt each other.

S sequences, T query tokens in the step, H query heads, Hkv key/value heads, D head size, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.kv_cache import KVCacheSpec

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Where a backend would run. `capability` is CUDA's (major, minor), None on a CPU."""

    kind: str  # "cpu" or "cuda"
    index: int = 0
    capability: tuple[int, int] | None = None

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device(self.kind)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What differs by layer, fixed at load. Query i at position p sees keys p - window + 1 … p (all up to p if `window` is None)."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # multiplies q · k
    cache: Tensor  # [num_blocks, 2, Hkv, B, D], a view of the pool; [:, 0] keys, [:, 1] values
    window: int | None = None
    soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    scales: Tensor | None = None  # [num_blocks, 2, Hkv, B] float32 of a quantised pool, see `backends.kv_cache`
    dtype: torch.dtype | None = (
        None  # of queries, keys and values; None: that of `cache`, which a quantised pool does not say
    )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's sequences. Tensors are on the device of the cache; maxima are host integers.

    `query_start_loc` [S + 1] int32: tokens of sequence s are rows query_start_loc[s] … query_start_loc[s + 1] - 1 of q.
    `seq_lens` [S] int32: keys of sequence s after this step's tokens have been stored; its first query stands at position
    seq_lens[s] - query_len[s]. `block_tables` [S, max_blocks] int32: entries past a sequence's last block are undefined.
    `slot_mapping` [T] int64: where token t's key and value go, block * B + offset.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    host_lengths: tuple[NDArray[np.int64], NDArray[np.int64]] | None = (
        None  # queries and keys of each sequence, to plan without waiting
    )

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.slot_mapping.shape[0]


class AttentionBackend(Protocol[PlanT]):
    """Computes attention over blocks. Stateless but for compiled kernels; used from one thread."""

    name: str

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        """Return why this backend cannot serve `spec` on `device`; an empty list means it can."""
        ...

    def describe(self) -> dict[str, str]:
        """Facts for `looseleaf check`: threading layer, number of threads, vector features, cache folder."""
        ...

    def prepare(self, spec: KVCacheSpec, report: Callable[[str], None]) -> None:
        """Compile or load every kernel that `spec` needs, once, before the first step; `report` hears of each."""
        ...

    def plan(self, meta: AttentionMetadata, layers: Sequence[AttentionLayer]) -> PlanT:
        """Prepare one step; covers every kind of layer in `layers`. Raises nothing: limits are refused by `unsupported`."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, layer: AttentionLayer, plan: PlanT) -> None:
        """Write k, v [T, Hkv, D] (any strides with a contiguous last dimension) into the slots of the step, quantised if the pool is."""
        ...

    def run(self, q: Tensor, layer: AttentionLayer, plan: PlanT, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend: q [T, H, D] → out [T, H, D], and the natural log-sum-exp [T, H] float32 if `lse` is given.

        Allocates nothing that a CUDA graph could not replay. A sequence without keys gives zeros and -inf.
        """
        ...


@runtime_checkable
class ReplayableBackend(AttentionBackend[PlanT], Protocol[PlanT]):
    """A backend whose kernels read a plan from memory, so that what was launched with one plan can compute another step."""

    def load_plan(self, captured: PlanT, step: PlanT) -> None:
        """Make `captured`, which launches were recorded or captured with, say what `step` says; `step` must live until they have run."""
        ...
