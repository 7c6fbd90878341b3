"""Decodes as CUDA graphs: a step's launches captured once per size and replayed. Knows tensors and plans, not requests or sampling.

A step of single tokens is padded to a number of sequences from a short list, so that a handful of graphs serves every batch; steps with a
prompt in them are launched piece by piece. Padding sequences have no keys and write to the null block. How much attention work a graph has
room for is frozen as well: a graph is captured when a step needs one that is not there, in a fraction of a second, and those of short
contexts before the first request. Graphs share one pool of memory, since they run one after another.

Invariant: attention gives the rows of a step the bits that an unpadded step gives them; matrix products may round differently for another
number of rows, on any GPU, graph or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionBackend, AttentionLayer
from backends.staging import Staging
from service.model.packing import PackedStep

MAX_SEQUENCES = 256  # in a graph; larger batches are launched
Forward = Callable[[], Tensor]


class StaticPlan(Protocol):
    """A plan that captured launches read, with the inputs of the forward pass."""

    plan: Any
    token_ids: Tensor  # [S] int64
    positions: Tensor  # [S] int64

    def fill(
        self,
        staging: Staging,
        step: Any,
        inputs: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        tables: NDArray[np.int32],
    ) -> None:
        """Write a step over the last one: token ids, positions and slots [S], block tables [S, any width]; waits for nothing."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend[Any], Protocol):
    """A backend that can lay decodes into a plan which stays where it is."""

    def cut_decodes(self, seq_lens: NDArray[np.int64], layers: Sequence[AttentionLayer]) -> Any:
        """Divide the work of one token each of sequences of `seq_lens` keys. What comes has a hashable `room`, which a graph freezes; or None."""
        ...

    def static_decodes(self, like: Any, table_width: int, device: torch.device) -> StaticPlan:
        """Return a plan for steps with the room of `like`."""
        ...


class DecodeModel(Protocol):
    """What a graph captures."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The layers, bound to the cache."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, backend: AttentionBackend[Any]) -> Tensor:
        """Compute [T] tokens at [T] positions → hidden states [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured size."""

    inputs: StaticPlan
    replay: Forward  # → hidden states [S, hidden], valid until the next replay of any graph


class GraphedDecodes:
    """The `StepCapture` of CUDA graphs. Used from the step thread."""

    def __init__(
        self,
        model: DecodeModel,
        backend: GraphBackend,
        *,
        device: torch.device,
        max_sequences: int,
        table_width: int,
        capture: Callable[[Forward], Forward] | None = None,
    ) -> None:
        """Capture nothing yet. `table_width`: blocks of the longest sequence. `capture` makes a replay of a forward pass; a fake in tests."""
        self._model = model
        self._backend = backend
        self._device = device
        self._sizes = sizes_up_to(min(max_sequences, MAX_SEQUENCES))
        self._table_width = table_width
        self._capture = capture or CudaCapture()
        self._staging = Staging(device)
        self._graphs: dict[tuple[int, Any], Graph] = {}

    def forward(self, step: PackedStep) -> Tensor | None:
        """Replay a step of decodes; None for a step with prompts in it, for one that is too large, and for more work than a graph is worth."""
        count, meta = len(step.row_starts) - 1, step.meta
        if meta.max_query_len != 1 or count > self._sizes[-1] or meta.block_tables.shape[1] > self._table_width:
            return None
        size = next(size for size in self._sizes if size >= count)
        assert meta.host_lengths is not None, "packing gives the lengths of every step"
        seq_lens = _padded(meta.host_lengths[1], size)
        cut = self._backend.cut_decodes(seq_lens, self._model.attention_layers)
        if cut is None:
            return None
        inputs = tuple(_padded(part.numpy(), size) for part in (step.token_ids, step.positions, meta.slot_mapping))
        graph = self._graphs.get((size, cut.room))
        plan = self._backend.static_decodes(cut, self._table_width, self._device) if graph is None else graph.inputs
        plan.fill(self._staging, cut, (inputs[0], inputs[1], inputs[2]), _padded(meta.block_tables.numpy(), size))
        if graph is None:
            graph = Graph(plan, self._capture(lambda: self._forward(plan)))
            self._graphs[size, cut.room] = graph
        return graph.replay()[:count]

    @property
    def num_graphs(self) -> int:
        """How many sizes have been captured."""
        return len(self._graphs)

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of sequences that a step is padded to."""
        return self._sizes

    def _forward(self, inputs: StaticPlan) -> Tensor:
        return self._model.forward(inputs.token_ids, inputs.positions, inputs.plan, self._backend)


class CudaCapture:
    """Captures a forward pass in a CUDA graph on the current device."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, forward: Forward) -> Forward:
        """Run once, so that everything is compiled, loaded and granted, then capture, and return what replays it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream  # torch leaves its constructor untyped
        side = stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay


def sizes_up_to(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then multiples of 8 to 32, of 16 to 64, of 32 to 256, and the limit itself: at most a third of a step is padding."""
    steps = (1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, MAX_SEQUENCES + 1, 32))
    return (*(size for size in steps if size < limit), limit)


def _padded(rows: NDArray[Any], size: int) -> NDArray[Any]:
    """Return rows [n, ...] with zeros behind them, [size, ...]."""
    if len(rows) == size:
        return rows
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
