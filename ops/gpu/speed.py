"""How fast attention is: against the device's own copy and matmul, measured in the same run, and against what torch offers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from bench import BF16, FP8, INT8, Bench, Skipped, Work, copy_bandwidth
from torch import Tensor
from torch.nn import functional

from backends.kv_cache import KVCacheSpec


def spec_of(bench: Bench, quantised: torch.dtype | None = None) -> KVCacheSpec:
    """Return one layer of an 8B model, a tiny one in a dry run."""
    if bench.is_dry:
        return KVCacheSpec(1, 4, 2, 64, 16, BF16, quantised)
    return KVCacheSpec(1, 32, 8, 128, 16, BF16, quantised)


def decode_bandwidth(bench: Bench) -> None:
    """GB/s of decodes against a copy measured here; the goal is 90 % at 4 k and batch 16, 80 % at batch 1 with 32 k."""
    copied = copy_bandwidth(bench)
    bench.say(f"copy {copied / 1e9:.0f} GB/s", copy_gb_s=copied / 1e9)
    cases = [(16, 4096), (64, 4096), (1, 32768), (256, 1024), (1, 4096), (32, 8192)] if not bench.is_dry else [(2, 70)]
    for name in bench.backends:
        for quantised in (None, INT8, FP8):
            spec = spec_of(bench, quantised)
            backend = bench.open(name, spec)
            if backend is None:
                continue
            for batch, context in cases if name != "numba-cuda" else cases[:3]:
                work = Work(bench, backend, spec, [(1, context)] * batch)
                rate = batch * context * spec.bytes_per_token / bench.seconds(work.run, 9)
                label = f"{name} {spec.element_dtype}".replace("torch.", "")
                bench.say(
                    f"{label:<26} {batch:>3} x {context:<6} {rate / 1e9:7.0f} GB/s {rate / copied:6.1%} of the copy",
                    **{f"{label} {batch}x{context}": rate / copied},
                )


def prefill_rate(bench: Bench) -> None:
    """TFLOP/s of prompts against a matmul measured here (the goal is 45 % at 8 k)."""
    size = 8192 if not bench.is_dry else 128
    a, b = (torch.randn(size, size, dtype=BF16, device=bench.torch_device) for _ in range(2))
    peak = 2 * size**3 / bench.seconds(lambda: a @ b)
    bench.say(f"matmul {peak / 1e12:.0f} TFLOP/s", matmul_tflop_s=peak / 1e12)
    cases = [[(2048, 2048)], [(8192, 8192)], [(1024, 1024)] * 16, [(512, 16384)]]
    spec = spec_of(bench)
    if bench.is_dry:
        cases = [[(40, 70)]]
    for name in bench.backends:
        backend = bench.open(name, spec)
        if backend is None:
            continue
        for sequences in cases if name != "numba-cuda" else cases[:1]:
            work = Work(bench, backend, spec, sequences)
            pairs = sum(n * (2 * length - n + 1) / 2 for n, length in sequences)
            flops = pairs * spec.num_heads * spec.head_size * 4
            ours = bench.seconds(work.run, 7)
            label = f"{len(sequences)} x {sequences[0][0]} of {sequences[0][1]}"
            bench.say(
                f"{name} {label:<20} {flops / ours / 1e12:6.1f} TFLOP/s {flops / ours / peak:6.1%} of the matmul",
                **{f"{name} {label}": flops / ours / peak},
            )


def alternatives(bench: Bench) -> None:
    """What torch offers, as multiples of our time: on keys that lie in one piece already, and with the gathering that a paged cache needs."""
    spec = spec_of(bench)
    cases = (
        [(16, 1, 4096), (64, 1, 4096), (1, 1, 32768), (1, 8192, 8192)]
        if not bench.is_dry
        else [(2, 1, 70), (1, 40, 70)]
    )
    name = bench.backends[0]
    backend = bench.open(name, spec)
    if backend is None:
        return
    for batch, queries, length in cases:
        work = Work(bench, backend, spec, [(queries, length)] * batch)
        work.run()
        ours = bench.seconds(work.run, 9)
        bench.say(f"{name} {batch} x {queries} of {length}: {ours * 1e6:.0f} us")
        k, v = work.gather()
        gather = bench.seconds(work.gather, 5)
        for label, prepare in (("SDPA", _sdpa), ("varlen", _varlen), ("flex", _flex)):
            try:
                attend = prepare(bench, work)
                found = attend(k, v)
                error = float((found.float() - work.out.float()).norm() / work.out.float().norm())
                dense = bench.seconds(lambda: attend(k, v), 7)  # noqa: B023  # called in this round only
            except Skipped as reason:
                bench.say(f"   {label}: skipped, {reason}")
                continue
            except Exception as reason:
                bench.say(f"   {label}: {type(reason).__name__} {reason}"[:160])
                continue
            bench.say(
                f"   {label:<7} {dense / ours:6.2f} x on keys in one piece, {(dense + gather) / ours:6.2f} x with the gathering",
                **{
                    f"{label} {batch}x{queries}/{length}": dense / ours,
                    f"gather + {label} {batch}x{queries}/{length}": (dense + gather) / ours,
                },
            )
            if error > 0.02:
                bench.fault(f"{label}: differs from ours by {error:.1%}")


def _sdpa(bench: Bench, work: Work) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: ARG001  # as its siblings
    q, mask = work.dense_queries(), None
    if 1 < work.queries < work.length:
        mask = torch.ones(work.queries, work.length, dtype=torch.bool, device=q.device).tril(work.length - work.queries)
    options = {"attn_mask": mask, "is_causal": work.queries == work.length > 1, "enable_gqa": True}
    return lambda k, v: _rows(functional.scaled_dot_product_attention(q, k, v, **options))


def _varlen(bench: Bench, work: Work) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's ragged flash attention; its arguments have changed from release to release."""
    if bench.is_dry:
        raise Skipped("it has no CPU kernel")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Skipped(str(error)) from error
    device = work.q.device
    starts = [
        torch.arange(work.batch + 1, dtype=torch.int32, device=device) * count for count in (work.queries, work.length)
    ]
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if work.queries > 1:  # a single query at the end sees all keys
        options = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    group = work.spec.num_heads // work.spec.num_kv_heads

    def attend(k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (k, v)]  # [S L, Hkv, D], views
        if "enable_gqa" not in parameters:
            rows = [x.repeat_interleave(group, 1) for x in rows]
        found: Tensor = varlen_attn(work.q, *rows, *starts, work.queries, work.length, **options)
        return found

    return attend


def _flex(bench: Bench, work: Work) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's compiled flexible attention; in a dry run not compiled, which takes minutes on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offset, mask = work.length - work.queries, None
    if work.queries > 1:
        mask = create_block_mask(
            lambda _b, _h, query, key: query + offset >= key,
            None, None, work.queries, work.length, device=str(work.q.device),
        )  # fmt: skip
    call: Any = flex_attention if bench.is_dry else torch.compile(flex_attention, dynamic=False)
    q = work.dense_queries().contiguous()
    return lambda k, v: _rows(call(q, k.contiguous(), v.contiguous(), block_mask=mask, enable_gqa=True))


def _rows(out: Tensor) -> Tensor:
    """Turn [S, H, n, D] into the rows that our backends write, [S n, H, D]."""
    return out.transpose(1, 2).flatten(0, 1)
