"""Drives a decoder step by step over scattered blocks, as the model runner does but with every row's logits in view."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.interface import AttentionBackend, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import open_backend, probe
from service.model.decoder import Decoder


class PagedDecoder:
    """A decoder with a cache and growing sequences, each named by an integer."""

    def __init__(
        self, decoder: Decoder, backend: str = "reference", *, block_size: int = 16, num_blocks: int = 64
    ) -> None:
        self.decoder = decoder
        self.block_size = block_size
        spec = decoder.kv_cache_spec(block_size)
        device = DeviceInfo("cpu")
        refusals = probe(spec, device)[backend]
        if refusals:
            pytest.skip(f"{backend}: {'; '.join(refusals)}")
        self.backend: AttentionBackend[Any] = open_backend(backend, spec, device)
        decoder.bind_cache(KVCache(spec, num_blocks, torch.device("cpu")))
        self._free = list(range(1, num_blocks))
        random.Random(7).shuffle(self._free)  # a table of neighbouring blocks would hide a wrong look-up
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of some sequences in one batch; returns every row's logits [tokens, V] by sequence."""
        token_ids, positions, slots, starts, seq_lens = [], [], [], [0], []
        for name, piece in pieces.items():
            table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            end = start + len(piece)
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            token_ids += list(piece)
            positions += list(range(start, end))
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
            starts.append(len(token_ids))
            seq_lens.append(end)
            self.lengths[name] = end
        width = max(len(self.tables[name]) for name in pieces)
        meta = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [self.tables[name] + [0] * (width - len(self.tables[name])) for name in pieces], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(len(piece) for piece in pieces.values()),
            max_seq_len=max(seq_lens),
        )
        with torch.inference_mode():
            plan = self.backend.plan(meta, self.decoder.attention_layers)
            hidden = self.decoder.forward(torch.tensor(token_ids), torch.tensor(positions), plan, self.backend)
            logits = self.decoder.logits(hidden).float()
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(pieces)}

    def whole(self, ids: Sequence[int], *, chunk: int | None = None) -> Tensor:
        """Compute a new sequence, at once or in chunks; returns every row's logits."""
        name = len(self.tables)
        size = chunk or len(ids)
        return torch.cat([self.step({name: ids[i : i + size]})[name] for i in range(0, len(ids), size)])
