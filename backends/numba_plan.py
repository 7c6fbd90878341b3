"""Cuts a step into the tiles that compiled attention works on; see `numba_kernels.parts` for the arrays. Reads lengths and block tables,
never keys or values.

Three kinds of tiles:

    prompts   a run of queries with all of their keys
    decodes   all keys of a sequence; if threads would else be idle, a tile for each part of PART_KEYS
    shared    the parts that begin several sequences, in the same blocks, with the queries of all of them: read once instead of once each
              (cascade attention). What follows is a part like others in each sequence, and parts are folded as ever.

Invariant: every key that a row sees is in exactly one of its tiles. How keys are cut changes no bit of a result, so the number of threads
and the neighbours in a step may decide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.interface import AttentionLayer, AttentionMetadata
from backends.numba_kernels.parts import HEADER_FIELDS, PART_KEYS, QUERY_FIELDS, TILE_FIELDS

# Rows of (query, head) in a tile: enough that laying out values costs a few percent, few enough that the tile stays in L2.
TILE_ROWS = 144
# The same for a tile over a shared beginning, of which there are few.
SHARED_ROWS = 48
# Decodes are cut into parts until each thread has so many tiles of about the same size.
TILES_PER_THREAD = 4
# From so many tiles a thread on, and with at most so many queries in each, whoever takes a tile takes it for all kv heads in turn: what
# processors fetch behind the end of a head's keys is then the beginning of the next one's (ops/bench/README.md).
TILES_TOGETHER, QUERIES_TOGETHER = 8, 9
# From two sequences on, reading a shared part once saves more than writing and folding partial results costs (measured: a tenth).
MIN_MEMBERS = 2


@dataclass(frozen=True, slots=True)
class NumbaPlan:
    """One step as kernels read it, see `numba_kernels.parts`. `header` holds addresses of the other arrays and must not outlive them.

    Launches that were recorded with this plan compute another step once its header has been copied into this one's.
    """

    header: npt.NDArray[np.int64]  # [HEADER_FIELDS]
    address: int  # of the header
    tiles: npt.NDArray[np.int64]  # [tiles, TILE_FIELDS]
    queries: npt.NDArray[np.int64]  # [T and those of shared tiles once more, QUERY_FIELDS]
    slots: Tensor  # [T] int64
    tables: Tensor  # [S, max_blocks] int32
    part_sums: Tensor  # [places, widest H * D] float32
    part_states: Tensor  # [places, widest H, 2] float32
    parts_done: npt.NDArray[np.int64]  # [T, widest Hkv], zero between launches
    num_threads: int


def make_plan(meta: AttentionMetadata, layers: Sequence[AttentionLayer], num_threads: int) -> NumbaPlan:
    """Lay out the tiles of a step for `num_threads` threads."""
    first_rows, seq_lens = meta.query_start_loc.numpy(), meta.seq_lens.numpy()
    starts: list[int] = first_rows.tolist()
    lengths: list[int] = seq_lens.tolist()
    T, num_rows = meta.num_tokens, starts[-1]
    table_bytes = meta.block_tables.stride(0) * 4
    group = max((layer.num_heads // layer.num_kv_heads for layer in layers), default=1)
    run, shared_run = max(1, TILE_ROWS // group), max(1, SHARED_ROWS // group)
    share = max(PART_KEYS * 3 // 2, sum(lengths) // (TILES_PER_THREAD * num_threads))
    queries = np.zeros((T, QUERY_FIELDS), np.int64)  # row of q, position, place of its first part, number of parts
    queries[:, 0] = np.arange(T)
    queries[:num_rows, 1] = queries[:num_rows, 0] + np.repeat(seq_lens - first_rows[1:], np.diff(first_rows))
    tiles: list[tuple[int, ...]] = []
    prefixes = dict(_shared_prefixes(meta, layers, starts, lengths, shared_run))
    begun = {s: shared for members, shared in prefixes.items() for s in members}
    num_places = longest = 0
    for s, length in enumerate(lengths):
        row, count = starts[s], starts[s + 1] - starts[s]
        position, table = length - count, s * table_bytes
        longest = max(longest, min(run, count))
        shared = begun.get(s, 0)
        if shared or (0 < count <= run and length > share):
            first_part = 1 if shared else 0  # the first is the shared one, as long as it may be
            firsts = range(shared, length, PART_KEYS)
            for part, first in enumerate(firsts, first_part + 1):
                tiles.append((row, count, first, min(first + PART_KEYS, length), table, part))
            parts = first_part + len(firsts)
            for i in range(row, row + count):
                queries[i, 2], queries[i, 3] = num_places + (i - row) * parts, parts
            num_places += parts * count
            continue
        # The last queries of a prompt see the most keys: they go first, so that no thread starts the longest tile last.
        for first in range((count - 1) // run * run, -1, -run):
            size = min(run, count - first)
            tiles.append((row + first, size, 0, max(position + first + size, 0), table, 0))
    # Rows that belong to no sequence stand at no position and see no key: they become zeros.
    for row in range(num_rows, T, run):
        queries[row : row + run, 1] = -1
        tiles.append((row, min(run, T - row), 0, 0, 0, 0))
        longest = max(longest, min(run, T - row))
    if prefixes:
        shared_tiles, copies = _shared_tiles(prefixes, starts, table_bytes, shared_run, T)
        tiles[:0] = shared_tiles
        queries = np.concatenate([queries, queries[copies]])
        longest = max(longest, *(tile[1] for tile in shared_tiles))
    is_together = not prefixes and longest <= QUERIES_TOGETHER and len(tiles) >= TILES_TOGETHER * num_threads
    return _assemble(meta, layers, tiles, queries, num_places, longest, is_together, num_threads)


def _shared_prefixes(
    meta: AttentionMetadata, layers: Sequence[AttentionLayer], starts: list[int], lengths: list[int], run: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Find sequences that begin with the same blocks, and how many tokens of them: whole parts, which every query of theirs sees.

    A sequence is in one group at most. Looks at one column of the tables unless something is shared: blocks of equal contents are the same
    block, so two tables that agree in the last block of a part mostly agree before it.
    """
    block_size = layers[0].cache.shape[3] if layers else PART_KEYS
    if PART_KEYS % block_size or len(lengths) < MIN_MEMBERS:
        return
    part_blocks = PART_KEYS // block_size
    candidates = [
        s
        for s, length in enumerate(lengths)
        if starts[s] < starts[s + 1] <= starts[s] + run // MIN_MEMBERS
        and length - (starts[s + 1] - starts[s]) >= PART_KEYS
    ]
    if len(candidates) < MIN_MEMBERS:
        return
    tables = meta.block_tables.numpy()
    groups: dict[int, list[int]] = {}
    for s, block in zip(candidates, tables[candidates, part_blocks - 1].tolist(), strict=True):
        groups.setdefault(block, []).append(s)
    for members in groups.values():
        if len(members) < MIN_MEMBERS:
            continue
        most = min(lengths[s] - (starts[s + 1] - starts[s]) for s in members) // PART_KEYS
        theirs = tables[members, : most * part_blocks]
        agrees = (theirs == theirs[0]).all(axis=0)
        num_parts = (len(agrees) if agrees.all() else int(agrees.argmin())) // part_blocks
        if num_parts:
            yield tuple(members), num_parts * PART_KEYS


def _shared_tiles(
    prefixes: dict[tuple[int, ...], int], starts: list[int], table_bytes: int, run: int, num_queries: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return tiles over shared beginnings, and the rows whose queries stand once more, from `num_queries` on, because these tiles need them in a row."""
    tiles: list[tuple[int, ...]] = []
    copies: list[int] = []
    for members, shared in prefixes.items():
        rows = [row for s in members for row in range(starts[s], starts[s + 1])]
        num_tiles = -(-len(rows) // run)
        for index in range(num_tiles):
            some = rows[index * len(rows) // num_tiles : (index + 1) * len(rows) // num_tiles]
            tiles.append((num_queries + len(copies), len(some), 0, shared, members[0] * table_bytes, 1))
            copies += some
    return tiles, copies


def _assemble(
    meta: AttentionMetadata,
    layers: Sequence[AttentionLayer],
    tiles: Sequence[tuple[int, ...]],
    queries: npt.NDArray[np.int64],
    num_places: int,
    longest: int,
    is_together: bool,
    num_threads: int,
) -> NumbaPlan:
    """Put the arrays where kernels find them."""
    T = meta.num_tokens
    width = max((layer.num_heads * layer.head_size for layer in layers), default=0) if num_places else 0
    heads = max((layer.num_heads for layer in layers), default=0) if num_places else 0
    tile_array = np.array(tiles, dtype=np.int64).reshape(-1, TILE_FIELDS)
    part_sums, part_states = torch.empty(num_places, width), torch.empty(num_places, heads, 2)
    parts_done = np.zeros(T * heads, np.int64)
    header = np.array(
        (
            meta.slot_mapping.data_ptr(), meta.block_tables.data_ptr(), tile_array.ctypes.data, len(tiles),
            queries.ctypes.data, part_sums.data_ptr(), part_states.data_ptr(), parts_done.ctypes.data, T, longest,
            is_together,
        ),
        dtype=np.int64,
    )  # fmt: skip
    assert len(header) == HEADER_FIELDS
    return NumbaPlan(
        header=header,
        address=header.ctypes.data,
        tiles=tile_array,
        queries=queries,
        slots=meta.slot_mapping,
        tables=meta.block_tables,
        part_sums=part_sums,
        part_states=part_states,
        parts_done=parts_done,
        num_threads=num_threads,
    )
