"""Plans that stay where they are: padded, written over step after step, and read by the same launches, they give each row the bits of its own plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.interface import AttentionLayer
from backends.kernels import static
from backends.kernels.static import StaticDecodes
from backends.staging import Staging
from tests.backends.steps import Shape, Step, attend, make_step
from tests.cuda_emulation.backend import EmulatedBackend
from tests.cuda_emulation.module import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CPU = torch.device("cpu")
F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
WIDTH, ROWS = 80, 8
SHAPE = Shape(6, 2, 64, 16)


def layers_of(step: Step) -> list[AttentionLayer]:
    """A global layer and a local one."""
    return [step.layer(), step.layer(window=300)]


def replayed(
    backend: EmulatedBackend, plans: dict[object, StaticDecodes], step: Step
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Store and attend as a captured graph would: the plan of the step's room, whatever the last step left in it."""
    meta, count = step.meta, len(step.sequences)
    layers = layers_of(step)
    lengths = np.array([length for _, length in step.sequences] + [0] * (ROWS - count))
    cut = backend.cut_decodes(lengths, layers)
    assert cut is not None
    if cut.room not in plans:
        plans[cut.room] = backend.static_decodes(cut, WIDTH, CPU)
    plan = plans[cut.room]
    slots = np.zeros(ROWS, np.int64)
    slots[:count] = meta.slot_mapping.numpy()
    tables = np.zeros((ROWS, meta.block_tables.shape[1]), np.int32)
    tables[:count] = meta.block_tables.numpy()
    inputs = (np.arange(ROWS), np.maximum(lengths - 1, 0), slots)
    plan.fill(Staging(CPU, is_staged=True), cut, inputs, tables)
    assert plan.token_ids.tolist() == list(range(ROWS))
    assert plan.positions.tolist() == inputs[1].tolist()
    padding = torch.randn(ROWS - count, *step.q.shape[1:]).to(step.q.dtype)
    q = torch.cat([step.q, padding])
    k, v = (torch.cat([rows, padding[:, : SHAPE.num_kv_heads]]) for rows in (step.k, step.v))
    results = []
    for layer in layers:
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        backend.store_kv(k, v, layer, plan.plan)
        backend.run(q, layer, plan.plan, out, lse)
        assert (out[count:] == 0).all()
        results.append((out[:count], lse[:count]))
    return results


@pytest.mark.parametrize(("dtype", "quantised"), [(BF16, None), (F32, None), (BF16, INT8)], ids=str)
def test_a_plan_written_over_step_after_step_gives_the_bits_of_a_plan_of_its_own(
    dtype: torch.dtype, quantised: torch.dtype | None
) -> None:
    """Steps of few and of many items in turn: what an earlier, larger step left behind must not be read."""
    backend = EmulatedBackend()
    plans: dict[object, StaticDecodes] = {}
    for contexts in ([900, 40, 300], [5], [17] * ROWS, [1, 1000, 64, 65, 800], [33, 900, 1], [2, 3, 1100, 4]):
        step = make_step(SHAPE, [(1, length) for length in contexts], dtype, seed=len(contexts), quantised=quantised)
        wanted = [attend(backend, replace(step, cache=step.cache.clone()), layer) for layer in layers_of(step)]
        for (out, lse), (wanted_out, wanted_lse) in zip(replayed(backend, plans, step), wanted, strict=True):
            assert torch.equal(out, wanted_out)
            assert torch.equal(lse, wanted_lse)
    assert 2 <= len(plans) < 6  # several steps have shared a plan


def test_room_is_exact_without_splits_and_a_power_of_two_with_them() -> None:
    step = make_step(SHAPE, [(1, 1)], BF16)
    layers = layers_of(step)

    def items(lengths: list[int]) -> list[int]:
        cut = EmulatedBackend().cut_decodes(np.array(lengths), layers)
        assert cut is not None
        return [one.num_items for one in cut.room]

    assert items([100, 0, 256]) == [3, 3]
    assert items([257, 0, 0]) == [4, 4]
    assert items([1500, 1500, 0]) == [16, 8]  # 6 + 6 + 1 and 2 + 2 + 1: a window of 300 needs fewer
    assert items([2000, 2000, 2000]) == [32, 8]


def test_more_items_than_a_graph_is_worth_are_left_to_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(SHAPE, [(1, 1)], BF16)
    backend = EmulatedBackend()
    assert backend.cut_decodes(np.array([2048] * 2), [step.layer()]) is not None
    monkeypatch.setattr(static, "MAX_ITEMS", 8)
    assert backend.cut_decodes(np.array([2048] * 2), [step.layer()]) is None
