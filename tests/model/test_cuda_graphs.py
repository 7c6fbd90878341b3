"""Decodes through plans that stay where they are, as a CUDA graph reads them, on the emulated kernels; a replay is the forward pass called again.

What only a GPU can show, capture itself, is a step of ops/gpu/check.sh.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.cuda_ops import CudaOps
from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import select_backend
from service.engine.batch import StepEntry
from service.model import graphs as graphs_module
from service.model import loading
from service.model.cuda_graphs import Forward, GraphBackend, GraphedDecodes, sizes_up_to
from service.model.graphs import StepGraphs
from service.model.loading import LoadedModel, load_model
from service.model.packing import pack
from tests.cuda_emulation.backend import EmulatedBackend, LoadedModule
from tests.cuda_emulation.module import missing
from tests.model.no_sync import HostSync, no_host_sync
from tests.model.steps import CPU, make_entry

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

BLOCK = 16


@pytest.fixture(scope="module")
def model(data: Path) -> LoadedModel:
    """With the operations that a GPU gets, emulated as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_ops", lambda device, dtype: CudaOps(LoadedModule))
        return load_model(data / "golden/tiny-llama", dtype="float32")


class Bench:
    """A model over the emulated kernels, computed both ways over pools of their own."""

    def __init__(self, model: LoadedModel, max_sequences: int = 4) -> None:
        self.decoder = model.decoder
        self.backend = EmulatedBackend()
        assert isinstance(self.backend, GraphBackend)
        self.spec = self.decoder.kv_cache_spec(BLOCK)
        self.pools = [KVCache(self.spec, 60, CPU) for _ in range(2)]
        self.captured: list[int] = []
        self.graphed = GraphedDecodes(
            self.decoder,
            self.backend,
            device=CPU,
            max_sequences=max_sequences,
            table_width=40,
            capture=self.capture,
        )
        self.eager = StepGraphs(self.decoder, self.backend, device=CPU, max_tokens=0)

    def capture(self, forward: Forward) -> Forward:
        self.captured.append(len(self.captured))
        return forward

    def both(self, entries: Sequence[StepEntry]) -> tuple[Tensor, Tensor | None]:
        """Compute a step launched piece by piece and by a graph."""
        with torch.inference_mode():
            self.decoder.bind_cache(self.pools[0])
            wanted = self.eager.forward(pack(entries, BLOCK)).clone()
            self.decoder.bind_cache(self.pools[1])
            return wanted, self.graphed.forward(pack(entries, BLOCK))

    def fill(self, contexts: Sequence[int]) -> list[tuple[int, ...]]:
        """Compute prompts in both pools and return their block tables."""
        tables, free = [], iter(range(1, 60))
        for number, length in enumerate(contexts):
            blocks = tuple(next(free) for _ in range(length // BLOCK + 1))
            tables.append(blocks)
            prompt = make_entry([(7 * i + number) % 90 + 3 for i in range(length)], block_ids=blocks, seeds=())
            for pool in self.pools:
                with torch.inference_mode():
                    self.decoder.bind_cache(pool)
                    self.eager.forward(pack([prompt], BLOCK))
        return tables


def test_padded_and_replayed_decodes_give_what_launching_gives(model: LoadedModel) -> None:
    """Steps of one, three and two sequences, long and short, through graphs that were made for others."""
    bench = Bench(model)
    contexts = [20, 330, 3]
    tables = bench.fill(contexts)
    for chosen in ([0], [0, 1, 2], [2, 1], [2, 0, 1], [2]):
        entries = [make_entry([5 + s], start=contexts[s], block_ids=tables[s]) for s in chosen]
        wanted, hidden = bench.both(entries)
        assert hidden is not None
        torch.testing.assert_close(hidden, wanted, rtol=2e-5, atol=2e-5)
    assert (
        len(bench.captured) == bench.graphed.num_graphs == 3
    )  # 1, 2 and 4 sequences; two steps shared the one of 4, two that of 1


def test_a_step_with_a_prompt_and_one_that_is_too_large_are_left_to_the_caller(model: LoadedModel) -> None:
    bench = Bench(model, max_sequences=2)
    tables = bench.fill([20, 20, 20])
    decodes = [make_entry([5], start=20, block_ids=blocks) for blocks in tables]
    assert bench.both([decodes[0], make_entry([5, 6], block_ids=tables[1])])[1] is None
    assert bench.both(decodes)[1] is None
    assert bench.both(decodes[:2])[1] is not None
    long = make_entry([5], start=41 * BLOCK - 1, block_ids=(0,) * 41)
    assert bench.graphed.forward(pack([long], BLOCK)) is None


def test_a_step_neither_waits_for_the_device_nor_copies_lists_to_it(model: LoadedModel) -> None:
    """Packing, planning and the forward pass, launched and replayed; the results are what a step waits for, after it."""
    bench = Bench(model)
    contexts = [20, 330]
    tables = bench.fill(contexts)
    decodes = [make_entry([5], start=length, block_ids=blocks) for length, blocks in zip(contexts, tables, strict=True)]
    prompt = [make_entry(range(3, 20), start=0, block_ids=tables[1]), decodes[0]]
    for entries in (decodes, prompt, decodes):
        packed = pack(entries, BLOCK)
        with torch.inference_mode(), no_host_sync():
            bench.decoder.bind_cache(bench.pools[0])
            bench.eager.forward(packed)
            bench.graphed.forward(packed)


@pytest.mark.parametrize("fault", ["item", "tolist", "nonzero", "mask", "truth", "list"])
def test_a_hidden_wait_would_be_noticed(model: LoadedModel, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(model)
    [blocks] = bench.fill([20])
    rms_norm = bench.decoder._ops.rms_norm

    def faulty(x: Tensor, *rest: object) -> Tensor:
        match fault:
            case "item":
                x.sum().item()
            case "tolist":
                x[0].tolist()
            case "nonzero":
                (x > 0).nonzero()
            case "mask":
                x[x > 0]
            case "truth":
                assert (x == x).any()
            case "list":
                torch.tensor([1, 2], device=x.device)
        return rms_norm(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.decoder._ops, "rms_norm", faulty)
    packed = pack([make_entry([5], start=20, block_ids=blocks)], BLOCK)
    with torch.inference_mode(), pytest.raises(HostSync), no_host_sync():
        bench.graphed.forward(packed)


def test_graphs_are_made_on_cuda_alone(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for backends whose plans can stay; `select_backend` on a CPU gives none that has graphs."""
    made: list[dict[str, object]] = []

    class Spy:
        sizes = (1, 2)

        def __init__(self, model: object, backend: object, **options: object) -> None:
            made.append(options)

    monkeypatch.setattr(graphs_module, "GraphedDecodes", Spy)
    monkeypatch.setattr(graphs_module, "Staging", lambda device: None)
    cuda = torch.device("cuda", 0)
    assert StepGraphs(model.decoder, EmulatedBackend(), device=cuda, max_tokens=64, table_width=9).sizes == (1, 2)
    assert made == [{"device": cuda, "max_sequences": 64, "table_width": 9}]
    StepGraphs(model.decoder, EmulatedBackend(), device=cuda, max_tokens=0, table_width=9)
    StepGraphs(model.decoder, EmulatedBackend(), device=CPU, max_tokens=64, table_width=9)
    reference = select_backend("reference", model.decoder.kv_cache_spec(BLOCK), DeviceInfo("cpu")).backend
    StepGraphs(model.decoder, reference, device=cuda, max_tokens=64, table_width=9)
    assert len(made) == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 50, 64, 256])
def test_sizes_grow_so_that_padding_stays_small(limit: int) -> None:
    sizes = sizes_up_to(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, limit + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(3, size / 2)
    assert len(sizes) <= 16
