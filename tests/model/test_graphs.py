"""A replayed step gives the bits of a step that is computed call by call, for every number of tokens, family and kind of pool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import open_backend
from service.engine.batch import StepBatch, StepEntry
from service.model.graphs import RecordedStep, StepGraphs
from service.model.loading import LoadedModel
from service.model.packing import pack
from service.model.runner import ModelRunner
from tests.conftest import DATA
from tests.model.checkpoints import load, random_state, tiny_config, write_folder
from tests.model.steps import CPU, make_entry

BLOCK, BLOCKS, MOST = 8, 64, 70
GOLDEN = DATA / "golden"
# Shapes that kernels take; `tiny_config` itself has heads of 12.
WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random checkpoints beside the golden ones, whose rotations are too narrow for the kernels in most families."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, architecture, has_bias in (("llama", "LlamaForCausalLM", False), ("qwen2", "Qwen2ForCausalLM", True)):
        config = tiny_config(architecture, tie_word_embeddings=has_bias, **WIDE)
        write_folder(folder / name, config, random_state(config, has_bias=has_bias))
    return folder


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Twins:
    """Two runs of a model over pools of their own: one replays, one calls."""

    def __init__(self, model: LoadedModel, quantised: torch.dtype | None = None, most: int = MOST) -> None:
        spec = model.decoder.kv_cache_spec(BLOCK, quantised=quantised)
        self.backend = open_backend("numba-cpu", spec, DeviceInfo("cpu"))
        self.decoder = model.decoder
        self.caches = [KVCache(spec, BLOCKS, CPU) for _ in range(2)]
        self.decoder.bind_cache(self.caches[0])
        self.graphs = StepGraphs(self.decoder, self.backend, device=CPU, max_tokens=most)
        self.layers = self.decoder.attention_layers
        self.decoder.bind_cache(self.caches[1])
        self.other_layers = self.decoder.attention_layers

    @property
    def is_recorded(self) -> bool:
        capture = self.graphs._capture
        assert isinstance(capture, RecordedStep)
        return capture._recorded is not None

    def check(self, *entries: StepEntry) -> None:
        """Compute a step both ways; hidden states and pools must be equal to the bit."""
        with torch.inference_mode():
            step = pack(entries, BLOCK)
            self.decoder.attention_layers = self.layers
            hidden = self.graphs.forward(step)
            self.decoder.attention_layers = self.other_layers
            plan = self.backend.plan(step.meta, self.other_layers)
            wanted = self.decoder.forward(step.token_ids, step.positions, plan, self.backend)
            assert torch.equal(hidden, wanted)
            assert not wanted.isnan().any()
            for index in range(self.caches[0].spec.num_layers):
                ours, theirs = (cache.layer(index)[1:] for cache in self.caches)
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))

    def check_a_life(self) -> None:
        """Prefill, chunks beside decodes, decodes alone, a chunk that is too large: a mixture of everything."""
        chance = random.Random(1)
        ids = [chance.randrange(90) for _ in range(200)]
        blocks = list(range(1, BLOCKS))
        chance.shuffle(blocks)
        tables = [blocks[:25], blocks[25:40], blocks[40:60]]
        self.check(make_entry(ids[:50], block_ids=tables[0], sequence_id=1))
        self.check(make_entry(ids[50:51], start=50, block_ids=tables[0]), make_entry(ids[:17], block_ids=tables[1]))
        for step in range(3):
            self.check(
                make_entry(ids[60:61], start=51 + step, block_ids=tables[0]),
                make_entry(ids[70:71], start=17 + step, block_ids=tables[1]),
                make_entry(ids[step * 40 : step * 40 + 40], start=step * 40, block_ids=tables[2]),
            )
        self.check(make_entry(ids[: MOST + 1], block_ids=tables[0]))  # more than was recorded
        self.check(make_entry(ids[99:100], start=MOST + 1, block_ids=tables[0]))


def bfloat16(path: Path) -> LoadedModel:
    return load(path, dtype="bfloat16")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("quantised", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_life_of_replayed_steps(name: str, quantised: torch.dtype | None, folders: Path, num_threads: int) -> None:
    twins = Twins(bfloat16(folders / name), quantised)
    twins.check_a_life()
    assert twins.is_recorded


# Rotations of fewer than 32 dimensions, as most of these have, are torch's.
IS_RECORDED = {"tiny-gemma3": True, "tiny-qwen3": True}


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("tiny-*")))
def test_every_family_is_replayed_or_computed_call_by_call(name: str) -> None:
    twins = Twins(bfloat16(GOLDEN / name))
    twins.check_a_life()
    assert twins.is_recorded == IS_RECORDED.get(name, False)


def test_float32_is_computed_call_by_call_since_its_products_are_torchs() -> None:
    twins = Twins(load(GOLDEN / "tiny-qwen3"))
    twins.check_a_life()
    assert not twins.is_recorded


def test_one_recording_serves_every_number_of_tokens(folders: Path) -> None:
    twins = Twins(bfloat16(folders / "llama"))
    ids = [3 * i % 95 for i in range(MOST)]
    for count in range(1, MOST + 1):
        twins.check(make_entry(ids[:count], block_ids=range(1, 20)))
        assert twins.is_recorded


def test_another_number_of_threads_gets_another_recording(folders: Path) -> None:
    before = torch.get_num_threads()
    twins = Twins(bfloat16(folders / "llama"))
    entry = make_entry(range(20), block_ids=range(1, 20))
    try:
        for threads in (2, 1, 3, 2):
            torch.set_num_threads(threads)
            twins.check(entry)
            assert twins.is_recorded
            assert twins.graphs._capture._recorded.num_threads == threads  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(before)


class _Tampered:
    """A model that does something with torch between the layers and the result."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, *arguments: Any) -> Tensor:
        hidden: Tensor = self._decoder.forward(*arguments)
        return hidden + 1


def test_a_model_with_torch_in_its_forward_pass_is_computed_call_by_call(folders: Path) -> None:
    twins = Twins(bfloat16(folders / "llama"))
    twins.decoder.attention_layers = twins.layers
    graphs = StepGraphs(_Tampered(twins.decoder), twins.backend, device=CPU, max_tokens=MOST)
    step = pack([make_entry(range(20), block_ids=range(1, 20))], BLOCK)
    with torch.inference_mode():
        assert torch.equal(graphs.forward(step), twins.graphs.forward(step) + 1)


def test_none_is_recorded_where_none_is_wanted_or_the_backend_cannot(folders: Path) -> None:
    model = bfloat16(folders / "llama")
    backend = open_backend("reference", model.decoder.kv_cache_spec(BLOCK), DeviceInfo("cpu"))
    assert StepGraphs(model.decoder, backend, device=CPU, max_tokens=MOST)._capture is None
    assert Twins(model, most=0).graphs._capture is None


def test_a_step_that_fails_leaves_the_next_one_as_it_would_have_been(folders: Path) -> None:
    model = bfloat16(folders / "llama")
    spec = model.decoder.kv_cache_spec(BLOCK)
    outputs = []
    for faulty in (False, True):
        backend = open_backend("numba-cpu", spec, DeviceInfo("cpu"))
        runner = ModelRunner(
            model.decoder,
            backend,
            KVCache(spec, BLOCKS, CPU),
            num_valid_ids=96,
            max_model_len=64,
            max_captured_tokens=MOST,
        )
        if faulty:
            with pytest.raises(ValueError, match="do not cover"):
                runner.execute(StepBatch(step_id=1, entries=(make_entry(range(20), block_ids=(1,)),)))
        entry = make_entry(range(20), block_ids=range(1, 20), logprobs=3)
        outputs.append(runner.execute(StepBatch(step_id=2, entries=(entry,))).outputs)
    assert outputs[0] == outputs[1]
