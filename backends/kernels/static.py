"""Plans whose arrays stay where they are: what a CUDA graph that was captured with one of them reads again at each replay.

A graph freezes grids and addresses. So a step of decodes is padded to a number of sequences, its items to a number with room for them, and
all of it is written over the last step's in one copy. A padding sequence has one query and no key, and its token goes to the null block; a
padding item has no rows, and its thread block returns at once. Room comes in powers of two, so that idle blocks are never more than those
that work. Invariant: the rows of real sequences get the bits that an unpadded plan gives them.

    memory of a plan, one run:  token ids | positions | slots | query starts | lengths | items, merges per kind | block tables, side by side
                                                                                          these go to rows of a fixed width ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata
from backends.kernels import launch
from backends.kernels.dispatch import Shape
from backends.kernels.plans import KernelPlan, LayerKind, cut_step, workspace_sizes
from backends.kernels.variants import Variant
from backends.kernels.work import FIELDS, Work
from backends.staging import Staging, layout, view

MAX_ITEMS = 1 << 14  # of one kind: more idle blocks than that cost more than launching does


@dataclass(frozen=True, slots=True)
class KindRoom:
    """What a graph freezes of one kind of layer: the kernel, and how many items it launches."""

    kind: LayerKind
    shape: Shape
    num_tiles: int  # items of a step that splits no sequence
    num_items: int

    @property
    def num_merges(self) -> int:
        """Merges that are launched: none where nothing is split, else one for each tile."""
        return self.num_tiles if self.num_items > self.num_tiles else 0

    @property
    def num_parts(self) -> int:
        """The most partial rows there can be, per kv head."""
        group = self.kind.num_heads // self.kind.num_kv_heads
        return self.num_items * min(self.shape.tile_rows, group) if self.num_merges else 0


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """One token each of some sequences, cut for every kind of layer. Steps of equal `room` can be computed by one graph."""

    seq_lens: NDArray[np.int64]  # [S], padding sequences included
    works: tuple[Work, ...]
    room: tuple[KindRoom, ...]


def cut_decodes(
    attention: Callable[[LayerKind], Variant], seq_lens: NDArray[np.int64], layers: Sequence[AttentionLayer]
) -> DecodeCut | None:
    """Cut one token each of sequences of `seq_lens` [S] keys, 0 for padding. None if a kind has too many items for a graph."""
    cut = cut_step(attention, np.ones(len(seq_lens), np.int64), seq_lens, layers)
    rooms, works = [], []
    for kind, passes in cut.items():
        [(shape, work)] = passes  # all decodes of a kind have few rows, or all have many
        tiles = len(seq_lens) * -(-(kind.num_heads // kind.num_kv_heads) // shape.tile_rows)
        count = len(work.items)
        rooms.append(KindRoom(kind, shape, tiles, tiles if count == tiles else 1 << (count - 1).bit_length()))
        works.append(work)
    if max((room.num_items for room in rooms), default=0) > MAX_ITEMS:
        return None
    return DecodeCut(seq_lens, tuple(works), tuple(rooms))


class Scratch:
    """Workspaces that plans share, by size: replays run one after another on one stream."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, room: Sequence[KindRoom], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return memory for partial results and for their sums, enough for these kinds."""
        parts, heads = workspace_sizes([(one.num_parts, one.kind) for one in room])
        if (parts, heads) not in self._kept:
            self._kept[parts, heads] = (
                torch.empty(parts, dtype=torch.float32, device=device),
                torch.empty(heads, dtype=torch.float32, device=device),
            )
        return self._kept[parts, heads]


class StaticDecodes:
    """A plan for decodes of a fixed number of sequences, its inputs, and the memory that both are views of."""

    def __init__(
        self, num_sequences: int, room: tuple[KindRoom, ...], table_width: int, device: torch.device, scratch: Scratch
    ) -> None:
        """Grant memory for steps with this room, of sequences of up to `table_width` blocks. Until it is filled, all of it is padding."""
        self._room = room
        inputs = np.zeros(num_sequences, np.int64)
        idle = [Work(_idle(0), _idle(0), 0, one.shape.tile_rows) for one in room]
        step = DecodeCut(inputs, tuple(idle), room)
        arrays = self._arrays((inputs, inputs, inputs), step, np.zeros((num_sequences, table_width), np.int32))
        self._offsets, size = layout(arrays)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        views = [view(self._memory, offset, array) for offset, array in zip(self._offsets, arrays, strict=True)]
        self.token_ids, self.positions, slots, starts, seq_lens, *works, _ = views
        starts.copy_(torch.arange(num_sequences + 1))
        self._tables = torch.zeros((num_sequences, table_width), dtype=torch.int32, device=device)
        spaces = scratch.of(room, device)
        self.plan = KernelPlan(
            AttentionMetadata(starts, seq_lens, self._tables, slots, 1, 0),
            {
                one.kind: ((one.shape, launch.WorkOnDevice(items, merges, *spaces)),)
                for one, items, merges in zip(room, works[::2], works[1::2], strict=True)
            },
            num_sequences,
        )

    def fill(
        self,
        staging: Staging,
        step: DecodeCut,
        inputs: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        tables: NDArray[np.int32],
    ) -> None:
        """Write a step of the same room over the last one, and wait for nothing.

        `inputs` are token ids, positions and slots [S]; `tables` [S, blocks of the longest] at most as wide as the plan's.
        """
        staging.send_to(self._memory, self._arrays(inputs, step, tables), self._offsets)
        side_by_side = view(self._memory, self._offsets[-1], tables)
        self._tables[:, : tables.shape[1]].copy_(side_by_side)

    def _arrays(
        self,
        inputs: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        step: DecodeCut,
        tables: NDArray[np.int32],
    ) -> list[NDArray[Any]]:
        """Return what lies in the memory, in its order."""
        starts = np.arange(len(step.seq_lens) + 1, dtype=np.int32)
        works = [
            array
            for one, work in zip(self._room, step.works, strict=True)
            for array in (_padded(work.items, one.num_items), _padded(work.merges, one.num_merges))
        ]
        return [*inputs, starts, step.seq_lens.astype(np.int32), *works, tables]


def _padded(rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return rows [n, 8] with idle ones behind them."""
    return np.concatenate([rows, _idle(count - len(rows))])


def _idle(count: int) -> NDArray[np.int32]:
    """Return items or merges of no rows, whose thread blocks return at once."""
    return np.zeros((count, FIELDS), np.int32)
