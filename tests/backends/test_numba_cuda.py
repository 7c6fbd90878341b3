"""The Numba CUDA kernels without a GPU: in Numba's simulator, which is chosen when the process starts, and compiled to PTX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.interface import DeviceInfo
from backends.kv_cache import KVCacheSpec
from backends.registry import probe

SIMULATED = """
import torch
from backends.interface import DeviceInfo
from backends.kv_cache import KVCacheSpec
from backends.registry import open_backend
from tests.backends import test_parity as parity, test_quantised as quantised
from tests.backends.steps import LSE_TOLERANCE, TOLERANCE, Shape, assert_rows_agree, attend, expected, make_step

TINY = Shape(4, 2, 16, 8)
F32, F16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
backend = open_backend("numba-cuda", KVCacheSpec(1, 4, 2, 16, 8, F32), DeviceInfo("cpu"))
decodes = [(1, 1), (1, 7), (1, 8), (1, 17), (0, 0), (0, 9)]
cases = [
    (F32, None, TINY, decodes, {}),
    (F32, None, TINY, [(5, 5), (9, 21), (2, 3)], {}),
    (F32, None, TINY, [(9, 21), (1, 30)], {"window": 4}),
    (F32, None, TINY, [(3, 21), (1, 300)], {"soft_cap": 2.0}),
    (F32, None, TINY, [(1, 300)], {"window": 280}),
    (F32, None, Shape(3, 1, 20, 12), [(3, 15), (1, 13)], {}),
    (BF16, None, TINY, [*decodes, (9, 21)], {}),
    (BF16, None, Shape(1, 1, 80, 16), [(2, 20)], {"window": 17, "soft_cap": 5.0}),
    (F16, None, TINY, [(1, 17), (5, 9)], {}),
    (F32, INT8, TINY, [(1, 17), (5, 9)], {"window": 6}),
    (BF16, INT8, TINY, [(1, 17), (5, 9)], {}),
    (F32, FP8, TINY, [(1, 17), (5, 9)], {}),
    (BF16, FP8, TINY, [(1, 17), (5, 9)], {"soft_cap": 3.0}),
]
for dtype, kind, shape, sequences, options in cases:
    step = make_step(shape, sequences, dtype, quantised=kind, spare_rows=2)
    layer = step.layer(**options)
    out, lse = attend(backend, step, layer)
    wanted, wanted_lse = expected(step, layer)
    count = len(wanted)
    assert_rows_agree(out[:count], wanted, TOLERANCE[dtype])
    assert ((lse[:count] - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all()
    assert (out[count:] == 0).all() and (lse[count:] == -torch.inf).all()
for kind in (INT8, FP8):
    for dtype in (F32, BF16):
        quantised.test_stored_rows_are_the_definitions_bits_and_nothing_else_changes("numba-cuda", dtype, kind)
step = make_step(TINY, [(1, 9), (3, 12)], F32)
H, D, T = 4, 16, len(step.q)
fused = torch.cat([x.reshape(T, -1) for x in (step.q, step.k, step.v)], dim=1).view(T, -1, D)
layer, out = step.layer(), torch.full((T, 2 * H, D), torch.nan)[:, :H]
plan = backend.plan(step.meta, [layer])
backend.store_kv(fused[:, H : H + 2], fused[:, H + 2 :], layer, plan)
backend.run(fused[:, :H], layer, plan, out)
assert_rows_agree(out, expected(step, layer)[0], TOLERANCE[F32])
parity.test_an_empty_step_writes_nothing_and_fails_nothing("numba-cuda")
print(len(cases), "cases")
"""

GOLDEN = """
from tests.model.test_golden_checkpoints import golden, loaded
from tests.model.paged import PagedDecoder
for name in ("tiny-llama", "tiny-gemma3"):
    [prompt, *_] = sorted(golden(name)["prompts"], key=lambda prompt: len(prompt["ids"]))
    paged = PagedDecoder(loaded(name).decoder, "numba-cuda")
    logits = paged.step({0: prompt["ids"]})[0]
    for wanted in prompt["greedy"][:8]:
        assert int(logits[-1].argmax()) == wanted["id"]
        logits = paged.step({0: [wanted["id"]]})[0]
print("golden")
"""


def simulate(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_a_dozen_tiny_steps_equal_the_dense_computation_in_the_simulator() -> None:
    """NUM-03, NUM-07: types, windows, caps, splits, odd head and block sizes, int8 and fp8; what is stored is the definition's bits."""
    assert simulate(SIMULATED) == "13 cases"


@pytest.mark.slow
def test_tiny_checkpoints_generate_the_golden_tokens_in_the_simulator() -> None:
    assert simulate(GOLDEN) == "golden"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_is_refused_outside_the_simulator_with_the_way_into_it() -> None:
    spec = KVCacheSpec(1, 4, 2, 512, 16, torch.float64)
    reasons = "; ".join(probe(spec, DeviceInfo("cpu"))["numba-cuda"])
    assert all(word in reasons for word in ("NUMBA_ENABLE_CUDASIM=1", "head_size is 512", "float64"))


@pytest.mark.slow
def test_kernels_compile_to_ptx_without_a_gpu() -> None:
    """One combination of types; `make check-kernels` translates the others, for other architectures too."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "ops/gpu"))
    import numba_ptx

    absent = numba_ptx.missing()
    if absent is not None:
        pytest.skip(f"cannot compile here: {absent}")
    ptx = numba_ptx.compile_all(("int16", "int16"), (9, 0))
    assert set(ptx) == {"_attend", "_merge", "_store"}
    assert numba_ptx.faults(ptx, (9, 0)) == []
    assert numba_ptx.faults({**ptx, "_attend": ptx["_attend"].replace("fma.rn.f32", "fma.rn.f64")}, (9, 0))
