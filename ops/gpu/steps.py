"""What the GPU check computes; see check.py. A step takes a `Bench` and says its findings, which are kept at once."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backends import registry
from backends.interface import AttentionBackend, AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kernels.dispatch import dispatched
from backends.kernels.variants import Variant
from backends.kv_cache import KVCache, KVCacheSpec, quantise
from tests.backends.steps import LSE_TOLERANCE, TOLERANCE, Shape, Step, assert_rows_agree, attend, expected, make_step

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
ROOT = Path(__file__).parents[2]


class Skipped(Exception):
    """What a step needs is not here."""


class Bench:
    """Where a step runs and where it says what it found."""

    def __init__(self, file: Path, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.faults = 0
        self._file = file
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}
        self.device = DeviceInfo("cpu")
        if is_dry:
            # The emulation is an ordinary backend, known to this process alone.
            emulated = {"cupy-emulated": "tests.cuda_emulation.backend:EmulatedBackend"}
            registry.BACKENDS = MappingProxyType({**registry.BACKENDS, **emulated})
            torch.set_num_threads(1)
        else:
            if not torch.cuda.is_available():
                raise Skipped("torch sees no CUDA device")
            self.device = DeviceInfo("cuda", 0, torch.cuda.get_device_capability(0))
        self.backends = ["cupy-emulated"] if is_dry else ["cupy", "numba-cuda"]

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def say(self, line: str, **values: Any) -> None:
        """Add a line of the table, and numbers to the JSON file; both are on disk when this returns."""
        print(line, values or "", flush=True)
        self._lines.append(line)
        self._values.update(values)
        self._file.write_text(
            json.dumps({"lines": self._lines, "values": self._values, "faults": self.faults}, indent=1)
        )

    def fault(self, line: str) -> None:
        """Say that something is wrong and go on."""
        self.faults += 1
        self.say(f"FAULT {line}"[:300])

    def open(self, name: str, spec: KVCacheSpec) -> AttentionBackend[Any] | None:
        """Open a backend, or say why it refuses."""
        reasons = registry.probe(spec, self.device)[name]
        if reasons:
            self.say(f"{name} refuses: {'; '.join(reasons)}"[:200])
            return None
        return registry.open_backend(name, spec, self.device)

    def seconds(self, work: Callable[[], object], rounds: int = 15) -> float:
        """Return the median time of `work`, on the device where there is one."""
        if self.is_dry:
            work()
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        for _ in range(3):
            work()
        times = []
        for _ in range(rounds):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times)


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


def graphs(bench: Bench) -> None:
    """Capture 30 layers of writes and attention, replay them over new contents; the cost of a launch, with and without a graph."""
    if bench.is_dry:
        raise Skipped("CUDA graphs need a GPU")
    shape, layers = Shape(32, 8, 128, 16), 30
    spec = KVCacheSpec(layers, 32, 8, 128, 16, BF16)
    for name in bench.backends:
        backend = bench.open(name, spec)
        if backend is None:
            continue
        step = make_step(shape, [(1, 900)] * 8, BF16, device=bench.torch_device)
        layer = step.layer()
        plan = backend.plan(step.meta, [layer])
        out = torch.full_like(step.q, torch.nan)

        def step_of_layers() -> None:
            for _ in range(layers):
                backend.store_kv(step.k, step.v, layer, plan)  # noqa: B023  # called in this round only
                backend.run(step.q, layer, plan, out)  # noqa: B023

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step_of_layers()  # compile, load and grant memory before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step_of_layers()
        step.q.normal_()  # a replay must read what is there now
        graph.replay()
        replayed = out.clone()
        step_of_layers()
        if not torch.equal(replayed, out):
            bench.fault(f"{name}: a replay differs from a launch")
        eager, replay = bench.seconds(step_of_layers), bench.seconds(graph.replay)
        launches = layers * 3
        begin = time.perf_counter()
        step_of_layers()
        host_us = (time.perf_counter() - begin) / launches * 1e6
        torch.cuda.synchronize()
        bench.say(
            f"{name}: {eager / layers * 1e6:.1f} us a layer launched, {replay / layers * 1e6:.1f} us replayed, host {host_us:.1f} us a launch"
        )


def decode_bandwidth(bench: Bench) -> None:
    """GB/s of decodes against a copy measured here; the goal is 90 % at 4 k and batch 16, 80 % at batch 1 with 32 k."""
    copied = _copy_bandwidth(bench)
    bench.say(f"copy {copied / 1e9:.0f} GB/s", copy_gb_s=copied / 1e9)
    cases = [(16, 4096), (64, 4096), (1, 32768), (256, 1024), (1, 4096), (32, 8192)] if not bench.is_dry else [(2, 70)]
    kinds = [(BF16, None), (BF16, INT8), (BF16, FP8)]
    for name in bench.backends:
        for dtype, quantised in kinds:
            spec = KVCacheSpec(1, 32, 8, 128, 16, dtype, quantised)
            if bench.is_dry:
                spec = KVCacheSpec(1, 4, 2, 64, 16, dtype, quantised)
            backend = bench.open(name, spec)
            if backend is None:
                continue
            for batch, context in cases:
                run, _ = _attention_work(bench, backend, spec, [(1, context)] * batch)
                rate = batch * context * spec.bytes_per_token / bench.seconds(run)
                label = f"{name} {spec.element_dtype}".replace("torch.", "")
                bench.say(
                    f"{label:<26} {batch:>3} x {context:<6} {rate / 1e9:7.0f} GB/s {rate / copied:6.1%} of the copy",
                    **{f"{label} {batch}x{context}": rate / copied},
                )


def prefill_rate(bench: Bench) -> None:
    """TFLOP/s of prompts against a matmul measured here (the goal is 45 % at 8 k), and torch's SDPA on gathered keys beside it."""
    size = 8192 if not bench.is_dry else 128
    a, b = (torch.randn(size, size, dtype=BF16, device=bench.torch_device) for _ in range(2))
    peak = 2 * size**3 / bench.seconds(lambda: a @ b)
    bench.say(f"matmul {peak / 1e12:.0f} TFLOP/s", matmul_tflop_s=peak / 1e12)
    cases = [[(2048, 2048)], [(8192, 8192)], [(1024, 1024)] * 16, [(512, 16384)]]
    spec = KVCacheSpec(1, 32, 8, 128, 16, BF16)
    if bench.is_dry:
        cases, spec = [[(40, 70)]], KVCacheSpec(1, 4, 2, 64, 16, BF16)
    for name in bench.backends:
        backend = bench.open(name, spec)
        if backend is None:
            continue
        for sequences in cases if name != "numba-cuda" else cases[:1]:
            run, gathered = _attention_work(bench, backend, spec, sequences)
            pairs = sum(n * (2 * length - n + 1) / 2 for n, length in sequences)
            flops = pairs * spec.num_heads * spec.head_size * 4
            ours, theirs = bench.seconds(run, 7), bench.seconds(gathered, 7)
            label = f"{len(sequences)} x {sequences[0][0]} of {sequences[0][1]}"
            bench.say(
                f"{name} {label:<20} {flops / ours / 1e12:6.1f} TFLOP/s {flops / ours / peak:6.1%} of the matmul, {theirs / ours:.2f} x gather + SDPA",
                **{f"{name} {label}": flops / ours / peak},
            )


def decode_ratios(bench: Bench) -> None:
    """Decodes against SDPA, with the blocks gathered each time and with keys that already lie in one piece."""
    spec = KVCacheSpec(1, 32, 8, 128, 16, BF16) if not bench.is_dry else KVCacheSpec(1, 4, 2, 64, 16, BF16)
    for name in bench.backends:
        backend = bench.open(name, spec)
        if backend is None:
            continue
        for batch, context in [(16, 4096), (64, 4096), (1, 32768)] if not bench.is_dry else [(2, 70)]:
            run, gathered = _attention_work(bench, backend, spec, [(1, context)] * batch)
            keys = torch.randn(
                2, batch, spec.num_kv_heads, context, spec.head_size, dtype=BF16, device=bench.torch_device
            )
            q = torch.randn(batch, spec.num_heads, 1, spec.head_size, dtype=BF16, device=bench.torch_device)
            ours = bench.seconds(run)
            dense = bench.seconds(lambda: functional.scaled_dot_product_attention(q, *keys, enable_gqa=True))  # noqa: B023
            gather = bench.seconds(gathered, 7)
            bench.say(
                f"{name} {batch:>3} x {context:<6} {ours * 1e6:7.0f} us; SDPA on dense keys {dense / ours:.2f} x, gather + SDPA {gather / ours:.2f} x"
            )


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


def end_to_end(bench: Bench) -> None:
    """Tokens a second of a Llama-8B-shaped model through the engine, eager, against its roofline: weights and keys read once a step."""
    try:
        from random_model import random_llama

        from service.messages import SamplingParams
        from tests.golden.engine import GoldenEngine
    except ImportError as error:
        raise Skipped(f"{error}; give the folder of wheels") from error
    sizes = (32, 4096, 14336, 32, 8, 128256, 2048) if not bench.is_dry else (2, 256, 320, 4, 2, 500, 512)
    prompt_len, new_tokens = (512, 24) if not bench.is_dry else (40, 4)
    model = random_llama(*sizes, bench.torch_device)
    copied = _copy_bandwidth(bench)
    layers, hidden, width, heads, kv_heads, vocab, _ = sizes
    head_size = hidden // heads
    matrices = layers * (hidden * (2 * hidden + 2 * kv_heads * head_size) + 3 * hidden * width) + vocab * hidden
    spec = model.decoder.kv_cache_spec(16)
    name = bench.backends[0]
    if bench.open(name, spec) is None:
        return
    for batch in (1, 32, 256) if not bench.is_dry else (1, 2):
        engine = GoldenEngine(
            model,
            name,
            num_blocks=1 + batch * -(-(prompt_len + new_tokens) // 16),
            token_budget=4096,
            has_prefix_cache=False,
            max_num_seqs=batch,
            device=bench.device,
        )
        prompts = torch.randint(vocab, (batch, prompt_len)).tolist()
        engine.run(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))
        steps = [
            seconds
            for taken, seconds in zip(engine.batches, engine.seconds, strict=True)
            if taken.num_tokens == len(taken.entries) == batch
        ]
        step_s = statistics.median(steps)
        moved = matrices * 2 + batch * (prompt_len + new_tokens / 2) * spec.bytes_per_token
        bench.say(
            f"{name} batch {batch:>3}: {batch / step_s:8.0f} tokens/s, {step_s * 1e3:.2f} ms a step, {moved / step_s / copied:.1%} of the roofline",
            **{f"tokens/s at {batch}": batch / step_s},
        )


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
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=25, check=False)
        except subprocess.TimeoutExpired:
            bench.say(f"{check}: over 25 s")
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


STEPS = (
    CheckStep("facts", 25, facts),
    CheckStep("compile every shipped kernel", 60, compile_kernels),
    CheckStep("kernels against float64", 60, correctness),
    CheckStep("golden tokens through the engine", 60, golden_tokens),
    CheckStep("equal bits", 20, determinism),
    CheckStep("decode bandwidth", 60, decode_bandwidth),
    CheckStep("prefill rate", 60, prefill_rate),
    CheckStep("8B-shaped model end to end", 90, end_to_end),
    CheckStep("CUDA graphs and launch cost", 35, graphs),
    CheckStep("decode against torch", 40, decode_ratios),
    CheckStep("compute-sanitizer", 60, sanitize),
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


def _copy_bandwidth(bench: Bench) -> float:
    count = 2**32 if not bench.is_dry else 2**22
    source = torch.ones(count, dtype=torch.uint8, device=bench.torch_device)
    target = torch.empty_like(source)
    return 2 * count / bench.seconds(lambda: target.copy_(source))


def _attention_work(
    bench: Bench, backend: AttentionBackend[Any], spec: KVCacheSpec, sequences: Sequence[tuple[int, int]]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Lay `sequences` of one length out in random blocks; return our attention, and gathering the blocks for torch's SDPA."""
    device, B, D = bench.torch_device, spec.block_size, spec.head_size
    [(queries, length)] = set(sequences)
    batch, per_sequence = len(sequences), -(-length // B)
    pool = KVCache(spec, batch * per_sequence + 1, device)
    layer_rows = torch.randn(pool.layer(0).shape, dtype=BF16, device=device) * 0.5
    scales = pool.scales(0)
    if scales is None:
        pool.layer(0).copy_(layer_rows)
    else:
        elements, factors = quantise(layer_rows, spec.element_dtype)
        pool.layer(0).view(torch.uint8).copy_(elements.view(torch.uint8))
        scales.copy_(factors)
    tables = (torch.randperm(batch * per_sequence) + 1).view(batch, per_sequence).to(torch.int32).to(device)
    T = batch * queries
    meta = AttentionMetadata(
        torch.arange(0, T + 1, queries, dtype=torch.int32, device=device),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        tables,
        torch.zeros(T, dtype=torch.int64, device=device),
        queries,
        length,
    )
    layer = AttentionLayer(
        0, spec.num_heads, spec.num_kv_heads, D, D**-0.5, pool.layer(0), scales=scales, dtype=spec.dtype
    )
    q = torch.randn(T, spec.num_heads, D, dtype=spec.dtype, device=device)
    out = torch.empty_like(q)
    plan = backend.plan(meta, [layer])
    mask = None
    if 1 < queries < length:
        mask = torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)

    def gathered() -> Tensor:
        blocks = layer_rows[tables.long()]  # [S, blocks, 2, Hkv, B, D]
        k, v = (blocks[:, :, side].transpose(1, 2).flatten(2, 3)[:, :, :length].to(spec.dtype) for side in (0, 1))
        rows = q.view(batch, queries, spec.num_heads, D).transpose(1, 2)
        return functional.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, is_causal=queries == length > 1, enable_gqa=True
        )

    return lambda: backend.run(q, layer, plan, out), gathered
