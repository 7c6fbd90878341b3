"""The forward pass of a step, captured once and replayed where that is possible. Knows tensors and plans, not requests or sampling.

A forward pass is written once, in the model. Launching it piece by piece costs Python some microseconds for each of several hundred kernels,
the same ones in every step; a `StepCapture` computes the same from a copy that was taken once:

    CPU    `RecordedStep`: the launches as a program, see `backends.numba_kernels.recording`; any step of up to `max_tokens` tokens
    CUDA   `GraphedDecodes` (cuda_graphs.py): CUDA graphs of a few sizes; steps of single tokens

A capture owns the inputs that it was taken with, and a step is copied into them. Invariant: whether a step was replayed or not changes no
bit of its result on a CPU, and none of its attention's on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol

import structlog
import torch
from torch import Tensor

from backends.interface import AttentionBackend, AttentionLayer, PlanT, ReplayableBackend
from backends.kv_cache import KVCache
from backends.staging import Staging
from service.model.cuda_graphs import GraphBackend, GraphedDecodes
from service.model.packing import PackedStep

log = structlog.get_logger()


class StepModel(Protocol):
    """What the runner needs of a decoder."""

    def bind_cache(self, cache: KVCache) -> object:
        """Make the attention layers views of `cache`."""
        ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The layers, bound to the cache."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, plan: Any, backend: AttentionBackend[Any]) -> Tensor:
        """Compute [T] tokens at [T] positions → hidden states [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden] into new logits [R, vocab], float32 or the model's dtype."""
        ...


class StepCapture(Protocol):
    """A forward pass that was captured for some kind of steps. It plans for itself, since it may pad a step first."""

    def forward(self, step: PackedStep) -> Tensor | None:
        """Compute a step that lies on the host → hidden states [T, hidden], valid until the next call; None if no capture serves it."""
        ...


class StepGraphs(Generic[PlanT]):
    """Forward passes of one model on one backend: captured where possible, else called. Used from the step thread."""

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend[PlanT],
        *,
        device: torch.device,
        max_tokens: int,
        table_width: int = 0,
    ) -> None:
        """Capture steps of up to `max_tokens` tokens; 0 captures none. The model is bound to its cache.

        `table_width`: blocks of the longest sequence, for which graphs reserve memory; 0 makes none.
        """
        self._model = model
        self._backend = backend
        self._staging = Staging(device)
        self._capture: StepCapture | None = None
        self.sizes: Sequence[int] = ()  # decodes in a step that a capture is made for, each to be warmed up
        if max_tokens > 0 and device.type == "cpu" and isinstance(backend, ReplayableBackend):
            self._capture = RecordedStep(model, backend, max_tokens)
        if max_tokens > 0 and device.type == "cuda" and table_width > 0 and isinstance(backend, GraphBackend):
            graphed = GraphedDecodes(model, backend, device=device, max_sequences=max_tokens, table_width=table_width)
            self._capture, self.sizes = graphed, graphed.sizes

    def forward(self, step: PackedStep) -> Tensor:
        """Compute a step that lies on the host → hidden states [T, hidden], valid until the next step."""
        if self._capture is not None:
            hidden = self._capture.forward(step)
            if hidden is not None:
                return hidden
        step = step.sent(self._staging)
        plan = self._backend.plan(step.meta, self._model.attention_layers)
        return self._model.forward(step.token_ids, step.positions, plan, self._backend)


class RecordedStep:
    """The `StepCapture` of compiled CPU kernels: one recording serves decodes and prefill chunks of any number of tokens."""

    def __init__(self, model: StepModel, backend: ReplayableBackend[Any], max_tokens: int) -> None:
        """Record at the first step. A model that computes with anything but kernels is not recorded, and its steps are left to the caller."""
        self._model = model
        self._backend = backend
        self._max_tokens = max_tokens
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64)
        self._plan: Any = None  # the one whose place the recording reads
        self._recorded: Any = None
        self._refused_threads: int | None = None  # with so many threads recording was refused

    def forward(self, step: PackedStep) -> Tensor | None:
        """Replay; None for a step that is too large or a model that cannot be recorded."""
        num_tokens = len(step.token_ids)
        if num_tokens > self._max_tokens or not self._is_ready(step):
            return None
        plan = self._backend.plan(step.meta, self._model.attention_layers)  # kept alive until the replay is over
        self._backend.load_plan(self._plan, plan)
        self._token_ids[:num_tokens] = step.token_ids
        self._positions[:num_tokens] = step.positions
        hidden: Tensor = self._recorded.replay(num_tokens)
        return hidden

    def _is_ready(self, step: PackedStep) -> bool:
        """Record for the present number of threads, unless that has been done or refused."""
        threads = torch.get_num_threads()
        if self._recorded is not None and self._recorded.num_threads == threads:
            return True
        if self._refused_threads == threads:
            return False
        from backends.numba_kernels.recording import NotReplayable
        from backends.numba_kernels.threads import RecordedKernels

        # Of this plan only the place matters, not what it says: nothing is computed while recording.
        self._plan = self._backend.plan(step.meta, self._model.attention_layers)
        self._recorded = None
        try:
            self._recorded = RecordedKernels(self._forward, self._max_tokens)
        except NotReplayable as error:
            self._refused_threads = threads
            log.info("step.not_recorded", reason=str(error))
            return False
        return True

    def _forward(self, rows: int) -> Tensor:
        return self._model.forward(self._token_ids[:rows], self._positions[:rows], self._plan, self._backend)
