"""How fast attention over blocks is, against gathering the blocks and calling torch's scaled_dot_product_attention, in the same run.

    python ops/bench/attention.py [--threads 2] [--backend numba-cpu] [--rounds 9] [--only decode] [--layers 30]

The shape is that of SmolLM2-135M: 9 query heads over 3 kv heads, head size 64, blocks of 16, bfloat16; the last columns have the same over
pools of 8-bit elements. One layer's keys may stay in the caches from one round to the next; those of a whole model do not, which is what
`--layers` is for: so many are computed one after the other, and the times are those of one.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_timing import best_times, read_bandwidth
from torch import Tensor
from torch.nn import functional

from backends.interface import AttentionBackend, AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCache, KVCacheSpec
from backends.registry import open_backend

SPEC = KVCacheSpec(num_layers=1, num_heads=9, num_kv_heads=3, head_size=64, block_size=16, dtype=torch.bfloat16)
QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Name → sequences of (queries, keys).
CASES = {
    "decode 1 x 512": [(1, 512)],
    "decode 1 x 4096": [(1, 4096)],
    "decode 4 x 4096": [(1, 4096)] * 4,
    "decode 32 x 264": [(1, 264)] * 32,
    "decode 16 x 512": [(1, 512)] * 16,
    "decode 16 x 2048": [(1, 2048)] * 16,
    "prefill 512": [(512, 512)],
    "prefill 1900": [(1900, 1900)],
    "chunk 256 of 1900": [(256, 1900)],
    "16 decodes + chunk 256": [(1, 512)] * 16 + [(256, 512)],
}


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", default="numba-cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=1, help="layers of a pool; times are divided by them")
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    backend = open_backend(options.backend, SPEC, DeviceInfo("cpu"))
    spec = dataclasses.replace(SPEC, num_layers=options.layers)
    print(f"{options.backend}, {options.threads} threads, read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    for name, sequences in CASES.items():
        if options.only not in name:
            continue
        run, gathered, kv_bytes, flops = prepare(backend, sequences, spec)
        contenders = {"run": run, "gathered": gathered}
        for name_8, elements in QUANTISED.items():
            contenders[name_8] = prepare(backend, sequences, dataclasses.replace(spec, quantised=elements))[0]
        best = best_times(contenders, options.rounds)
        times = {contender: seconds / options.layers for contender, seconds in best.items()}
        seconds = times["run"]
        narrow = ", ".join(f"{name_8} {times[name_8] * 1e6:8.0f} us" for name_8 in QUANTISED)
        print(
            f"{name:24} {seconds * 1e6:8.0f} us {kv_bytes / seconds / 1e9:6.1f} GB/s {flops / seconds / 1e9:6.0f} GFLOP/s"
            f" | gather + SDPA {times['gathered'] * 1e6:8.0f} us, {times['gathered'] / seconds:.1f} times ours"
            f" | {narrow}",
            flush=True,
        )


def prepare(
    backend: AttentionBackend[Any], sequences: Sequence[tuple[int, int]], spec: KVCacheSpec = SPEC
) -> tuple[Callable[[], None], Callable[[], None], float, float]:
    """Lay the sequences out in random blocks of every layer; return both contenders, and of one layer the bytes of keys and values, and the
    multiply-adds times two."""
    B, D = spec.block_size, spec.head_size
    counts = [(length + B - 1) // B for _, length in sequences]
    cache = KVCache(spec, sum(counts) + 1, torch.device("cpu"))
    free = (torch.randperm(sum(counts)) + 1).to(torch.int32)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for s, part in enumerate(free.split(counts)):
        tables[s, : counts[s]] = part
    starts = torch.tensor([0, *(n for n, _ in sequences)]).cumsum(0).to(torch.int32)
    T = int(starts[-1])
    lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
    slots = torch.zeros(T, dtype=torch.int64)
    meta = AttentionMetadata(starts, lengths, tables, slots, max(n for n, _ in sequences), int(lengths.max()))
    layers = [_filled_layer(cache, index) for index in range(spec.num_layers)]
    q = torch.randn(T, SPEC.num_heads, D).bfloat16()
    out = torch.empty_like(q)
    plan = backend.plan(meta, layers)

    def run() -> None:
        for layer in layers:
            backend.run(q, layer, plan, out)

    def gathered() -> None:
        for layer in layers:
            gather(layer)

    def gather(layer: AttentionLayer) -> None:
        """Sequences of one shape go together, as torch can batch them."""
        groups: dict[tuple[int, int], list[int]] = {}
        for s, shape in enumerate(sequences):
            groups.setdefault(shape, []).append(s)
        for (count, length), members in groups.items():
            rows = torch.cat([q[int(starts[s]) : int(starts[s]) + count] for s in members]).view(
                len(members), count, SPEC.num_heads, D
            )
            blocks = layer.cache[tables[members, : (length + B - 1) // B].long()]  # [S, blocks, 2, Hkv, B, D]
            k, v = (blocks[:, :, i].transpose(1, 2).flatten(2, 3)[:, :, :length] for i in (0, 1))
            attend(rows.transpose(1, 2), k, v)

    def attend(queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, length = queries.shape[2], k.shape[2]
        mask = None
        if 1 < count < length:
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        return functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=mask, is_causal=count == length > 1, enable_gqa=True
        )

    kv_bytes = sum(length for _, length in sequences) * spec.bytes_per_token / spec.num_layers
    pairs = sum(n * (2 * length - n + 1) / 2 for n, length in sequences)
    return run, gathered, kv_bytes, pairs * SPEC.num_heads * D * 4


def _filled_layer(cache: KVCache, index: int) -> AttentionLayer:
    elements, scales, spec = cache.layer(index), cache.scales(index), cache.spec
    if scales is None:
        elements.normal_()
    elif elements.dtype == torch.int8:
        elements.random_(-127, 128)
        scales.fill_(1 / 40)
    else:
        elements.copy_(torch.randn(elements.shape))
        scales.fill_(1)
    D = spec.head_size
    return AttentionLayer(
        index, spec.num_heads, spec.num_kv_heads, D, D**-0.5, elements, scales=scales, dtype=spec.dtype
    )


if __name__ == "__main__":
    main()
