"""Turns a step's entries into the tensors of one forward pass. Knows positions and blocks, not models, text or sampling.

Tokens of all entries stand in one row after another, no padding between them. The arrays are new for each step: a plan is a value that
may outlive the step, and allocating a few kilobytes costs less than guarding a shared buffer would. They are made on the host, whatever the
device: who computes the step sends them over, all in one copy (`PackedStep.sent`), or lays them into memory of its own.

Invariant: the token at position p of a sequence goes to slot `block_ids[p // B] * B + p % B`, and every block table covers the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.interface import AttentionMetadata
from backends.staging import Staging
from service.engine.batch import StepEntry


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The tensors of one step, on the host as `pack` makes them. `row_starts[e]` is the row of entry e's first token."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    meta: AttentionMetadata
    row_starts: list[int]  # [S + 1]

    def sent(self, staging: Staging) -> PackedStep:
        """Return the step on the device of `staging`, after one copy that is not waited for; on a CPU this very memory."""
        if not staging.is_staged:
            return self
        meta = self.meta
        tensors = (
            *(self.token_ids, self.positions, meta.slot_mapping),
            *(meta.query_start_loc, meta.seq_lens, meta.block_tables),
        )
        token_ids, positions, slots, starts, seq_lens, tables = staging.send([tensor.numpy() for tensor in tensors])
        on_device = replace(meta, query_start_loc=starts, seq_lens=seq_lens, block_tables=tables, slot_mapping=slots)
        return PackedStep(token_ids, positions, on_device, self.row_starts)


def pack(entries: Sequence[StepEntry], block_size: int) -> PackedStep:
    """Lay out `entries`, each with at least one token. Raises `ValueError` if a block table does not cover its last token."""
    num_entries = len(entries)
    query_lens = np.fromiter((len(entry.token_ids) for entry in entries), np.int64, num_entries)
    starts = np.fromiter((entry.start for entry in entries), np.int64, num_entries)
    row_starts = np.zeros(num_entries + 1, np.int64)
    np.cumsum(query_lens, out=row_starts[1:])
    num_tokens = int(row_starts[-1])
    seq_lens = starts + query_lens

    token_ids = np.fromiter(chain.from_iterable(entry.token_ids for entry in entries), np.int64, num_tokens)
    positions = np.arange(num_tokens) + np.repeat(starts - row_starts[:-1], query_lens)
    tables = block_tables(entries, seq_lens, block_size)
    owners = np.repeat(np.arange(num_entries), query_lens)
    # tables is int32, as kernels want it; a slot of a large pool is not: widen before the multiplication.
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size

    meta = AttentionMetadata(
        query_start_loc=torch.from_numpy(row_starts.astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        host_lengths=(query_lens, seq_lens),
    )
    return PackedStep(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        meta,
        row_starts.tolist(),
    )


def block_tables(
    entries: Sequence[StepEntry], seq_lens: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int32]:
    """Return the block tables [S, most blocks needed] int32, padded with the null block. Blocks held ahead of need are left out."""
    needed = -(-seq_lens // block_size)
    width = int(needed.max())
    tables = np.zeros((len(entries), width), np.int32)
    for row, (entry, count) in enumerate(zip(entries, needed.tolist(), strict=True)):
        if len(entry.block_ids) < count:
            raise ValueError(
                f"sequence {entry.sequence_id}: {len(entry.block_ids)} blocks of {block_size} tokens do not cover "
                f"its {entry.seq_len} tokens"
            )
        tables[row, :count] = entry.block_ids[:count]
    return tables


def shared_slot(slot_mapping: Tensor) -> int | None:
    """Return a slot that two tokens of the step would both write, None if there is none (there never should be)."""
    ordered = slot_mapping.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if len(twice) > 0 else None
