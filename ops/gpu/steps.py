"""What the GPU check computes; see check.py. A step takes a `Bench` and says its findings, which are kept at once."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import speed
import torch
import whole_model
from bench import BF16, F16, ROOT, Bench, Skipped

from backends import registry
from backends.interface import AttentionBackend, AttentionLayer
from backends.kernels.dispatch import dispatched
from backends.kernels.variants import Variant
from backends.kv_cache import KVCacheSpec
from tests.backends.steps import LSE_TOLERANCE, TOLERANCE, Shape, Step, assert_rows_agree, attend, expected, make_step


def facts(bench: Bench) -> None:
    """Versions, the card and what each backend says."""
    bench.say(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if not bench.is_dry:
        card = torch.cuda.get_device_properties(0)
        bench.say(f"{card.name}, {card.multi_processor_count} multiprocessors, {card.total_memory / 2**30:.0f} GiB")
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    if shutil.which(query[0]):
        bench.say(subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip())
    spec = KVCacheSpec(1, 32, 8, 128, 16, BF16)
    for name, reasons in registry.probe(spec, bench.device).items():
        bench.say(f"{name}: {'; '.join(reasons) or 'can run'}"[:200])


def compile_kernels(bench: Bench) -> None:
    """Every shipped variant for this card, in processes of its own: later steps find them in the cache."""
    if bench.is_dry:
        raise Skipped("the emulation compiles what it needs")
    from concurrent.futures import ProcessPoolExecutor

    from backends.cupy_raw import cubin

    capability = torch.cuda.get_device_capability(0)
    wanted = dispatched(capability)
    begin = time.monotonic()
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = {variant.name: pool.submit(cubin, variant, capability) for variant in wanted}
        for name, job in jobs.items():
            try:
                job.result()
            except Exception as error:
                bench.fault(f"{name}: {error}")
    bench.say(f"{len(wanted)} variants in {time.monotonic() - begin:.1f} s")


def correctness(bench: Bench) -> None:
    """Every shipped attention variant and the Numba kernels against dense float64; inputs are new in every run, outputs are poisoned."""
    seed = int.from_bytes(os.urandom(3), "big")
    bench.say(f"seed {seed}", seed=seed)
    for name in bench.backends:
        passed = 0
        for variant in _attention_variants(bench, name):
            spec, step = _random_step(bench, variant, seed)
            backend = bench.open(name, spec)
            if backend is None:
                continue
            for options in ({}, {"window": spec.block_size + 1, "soft_cap": 5.0}):
                try:
                    _compare(backend, step, step.layer(**options))
                    passed += 1
                except Exception as error:
                    bench.fault(f"{name} {variant.name} {options}: {type(error).__name__} {error}")
        bench.say(f"{name}: {passed} cases agree with float64")


def determinism(bench: Bench) -> None:
    """The same step twice, and a sequence alone and in a batch, bit for bit."""
    shape = Shape(8, 2, 64, 16)
    spec = KVCacheSpec(1, 8, 2, 64, 16, BF16)
    kinds = [(1, 700), (1, 33), (70, 300), (1, 2100)] if not bench.is_dry else [(1, 300), (1, 33), (20, 70)]
    for name in bench.backends:
        backend = bench.open(name, spec)
        if backend is None:
            continue
        step = make_step(shape, kinds, BF16, device=bench.torch_device)
        first, second = (attend(backend, step, step.layer())[0] for _ in range(2))
        alone = []
        for kind in kinds:
            single = make_step(shape, [kind], BF16, device=bench.torch_device)
            alone.append(attend(backend, single, single.layer())[0])
        if not torch.equal(first, second):
            bench.fault(f"{name}: two runs differ")
        elif not torch.equal(first, torch.cat(alone)):
            bench.fault(f"{name}: a sequence in a batch differs from itself alone")
        else:
            bench.say(f"{name}: equal bits, twice and alone")


def golden_tokens(bench: Bench) -> None:
    """The tiny checkpoints through the whole engine: every greedy token as transformers computed it."""
    try:
        from service.messages import SamplingParams
        from service.model.loading import load_model
        from tests.golden.engine import GoldenEngine
    except ImportError as error:
        raise Skipped(f"{error}; give the folder of wheels") from error
    folders = sorted((ROOT / "tests/data/golden").glob("tiny-*"))[: 2 if bench.is_dry else None]
    for name in bench.backends:
        agreed = 0
        for folder in folders:
            prompts = json.loads((folder / "golden.json").read_text(encoding="utf-8"))["prompts"]
            model = load_model(folder, dtype="float32", device=bench.torch_device)
            spec = model.decoder.kv_cache_spec(16)
            if bench.open(name, spec) is None:
                continue
            engine = GoldenEngine(model, name, num_blocks=200, device=bench.device)
            count = len(prompts[0]["greedy"]) if not bench.is_dry else 8
            sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            answers = engine.run([prompt["ids"] for prompt in prompts], sampling)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.ids != [step["id"] for step in prompt["greedy"][:count]]:
                    bench.fault(f"{name} {folder.name} {prompt['name']}: other tokens")
                else:
                    agreed += 1
        bench.say(f"{name}: {agreed} answers of {len(folders)} checkpoints are golden")


def sanitize(bench: Bench) -> None:
    """compute-sanitizer's memcheck, racecheck and synccheck over a small step of both tensor-core kernels and the merge."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if bench.is_dry or tool is None:
        raise Skipped("no compute-sanitizer here" if tool is None else "needs a GPU")
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "import torch\nfrom backends.cupy_raw import CupyBackend\nfrom tests.backends.steps import *\n"
        "step = make_step(Shape(4, 1, 64, 16), [(1, 600), (20, 90), (1, 17)], torch.bfloat16, device=torch.device('cuda'))\n"
        "out, _ = attend(CupyBackend(), step, step.layer())\nassert_rows_agree(out, expected(step, step.layer())[0], 8e-3)\n"
    )
    for check in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", code]
        try:
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=12, check=False)
        except subprocess.TimeoutExpired:
            bench.say(f"{check}: over 12 s")
            continue
        words = (result.stdout + result.stderr).strip().splitlines()
        print("\n".join(words))
        if result.returncode == 0:
            bench.say(f"{check}: clean")
        elif result.returncode == 9:
            bench.fault(f"{check}: {next((w for w in words if 'ERROR SUMMARY' in w or 'RACECHECK' in w), words[-1])}")
        else:
            bench.say(f"{check}: could not run here: {words[-1] if words else result.returncode}"[:200])


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One row of the table."""

    name: str
    limit_s: float
    run: Callable[[Bench], None]


# In order of value. Together the limits stay under nine minutes, so that the last step has its time whatever the others took.
STEPS = (
    CheckStep("facts", 20, facts),
    CheckStep("compile what serves this card", 35, compile_kernels),
    CheckStep("kernels against float64", 55, correctness),
    CheckStep("golden tokens through the engine", 50, golden_tokens),
    CheckStep("equal bits", 15, determinism),
    CheckStep("decode bandwidth", 45, speed.decode_bandwidth),
    CheckStep("prefill rate", 40, speed.prefill_rate),
    CheckStep("8B-shaped model end to end", 80, whole_model.end_to_end),
    CheckStep("CUDA graphs of the runner", 40, whole_model.graphs),
    CheckStep("attention against torch's", 55, speed.alternatives),
    CheckStep("transformers' continuous batching", 55, whole_model.transformers_batching),
    CheckStep("compute-sanitizer", 40, sanitize),
)


def _attention_variants(bench: Bench, name: str) -> list[Variant]:
    served = dispatched(bench.device.capability or (8, 0))
    variants = [variant for variant in served if variant.head_size is not None]
    if bench.is_dry:
        return [variant for variant in variants if variant.head_size == 64]
    if name == "numba-cuda":  # it compiles for each combination of types
        return [variant for variant in variants if variant.head_size in (64, 128)]
    return variants


def _random_step(bench: Bench, variant: Variant, seed: int) -> tuple[KVCacheSpec, Step]:
    D = variant.head_size
    assert D is not None
    assert variant.q_dtype is not None
    quantised = variant.kv_dtype if variant.is_quantised else None
    block_size = (8, 16, 32, 64, 128)[seed % 5] if not bench.is_dry else 16
    group, Hkv = (1, 3, 4, 8)[(seed + D) % 4], 2
    sequences = [(1, 1), (1, block_size + 1), (1, 777), (0, 5), (70, 330), (33, 33), (2, 1200)]
    if bench.is_dry:
        sequences = [(1, 1), (1, 270), (20, 90)]
    spec = KVCacheSpec(1, Hkv * group, Hkv, D, block_size, variant.q_dtype, quantised)
    shape = Shape(Hkv * group, Hkv, D, block_size)
    step = make_step(
        shape, sequences, variant.q_dtype, seed=seed, device=bench.torch_device, quantised=quantised, spare_rows=2
    )
    return spec, step


def _compare(backend: AttentionBackend[Any], step: Step, layer: AttentionLayer) -> None:
    out, lse = attend(backend, step, layer)
    wanted, wanted_lse = expected(step, layer)
    rows = len(wanted)
    tolerance = TOLERANCE[step.q.dtype]
    if step.scales is not None and step.q.dtype == F16:
        tolerance = TOLERANCE[BF16]  # weights over 8-bit values are bfloat16 whatever the model's type
    assert_rows_agree(out[:rows], wanted, tolerance)
    assert ((lse[:rows] - wanted_lse).abs() <= LSE_TOLERANCE * (1 + wanted_lse.abs())).all(), "log-sum-exp"
    assert (out[rows:] == 0).all(), "padding"
