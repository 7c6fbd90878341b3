"""Where a step of the GPU check runs and where it says what it found, and the attention that several steps measure. See check.py."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from backends import registry
from backends.interface import AttentionBackend, AttentionLayer, AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCache, KVCacheSpec, quantise

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


def copy_bandwidth(bench: Bench) -> float:
    """Return bytes a second, read and written, of copying 4 GiB on the device."""
    count = 2**32 if not bench.is_dry else 2**22
    source = torch.ones(count, dtype=torch.uint8, device=bench.torch_device)
    target = torch.empty_like(source)
    return 2 * count / bench.seconds(lambda: target.copy_(source))


class Work:
    """Sequences of one length in random blocks: our attention over them, and the same keys and values gathered for torch's."""

    def __init__(
        self, bench: Bench, backend: AttentionBackend[Any], spec: KVCacheSpec, sequences: Sequence[tuple[int, int]]
    ) -> None:
        """`sequences`: (queries, keys) of each, all the same."""
        device, B, D = bench.torch_device, spec.block_size, spec.head_size
        [(self.queries, self.length)] = set(sequences)
        self.spec, self.batch = spec, len(sequences)
        per_sequence = -(-self.length // B)
        pool = KVCache(spec, self.batch * per_sequence + 1, device)
        self.layer_rows = torch.randn(pool.layer(0).shape, dtype=BF16, device=device) * 0.5
        scales = pool.scales(0)
        if scales is None:
            pool.layer(0).copy_(self.layer_rows)
        else:
            elements, factors = quantise(self.layer_rows, spec.element_dtype)
            pool.layer(0).view(torch.uint8).copy_(elements.view(torch.uint8))
            scales.copy_(factors)
        blocks = torch.randperm(self.batch * per_sequence) + 1
        self.tables = blocks.view(self.batch, per_sequence).to(torch.int32).to(device)
        T = self.batch * self.queries
        meta = AttentionMetadata(
            torch.arange(0, T + 1, self.queries, dtype=torch.int32, device=device),
            torch.full((self.batch,), self.length, dtype=torch.int32, device=device),
            self.tables,
            torch.zeros(T, dtype=torch.int64, device=device),
            self.queries,
            self.length,
        )
        self.layer = AttentionLayer(
            0, spec.num_heads, spec.num_kv_heads, D, D**-0.5, pool.layer(0), scales=scales, dtype=spec.dtype
        )
        self.q = torch.randn(T, spec.num_heads, D, dtype=spec.dtype, device=device)
        self.out = torch.empty_like(self.q)
        self._backend = backend
        self._plan = backend.plan(meta, [self.layer])

    def run(self) -> None:
        """Attend with our backend."""
        self._backend.run(self.q, self.layer, self._plan, self.out)

    def gather(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in one piece, [S, Hkv, L, D] each."""
        blocks = self.layer_rows[self.tables.long()]  # [S, blocks, 2, Hkv, B, D]
        k, v = (
            blocks[:, :, side].transpose(1, 2).flatten(2, 3)[:, :, : self.length].to(self.spec.dtype) for side in (0, 1)
        )
        return k, v

    def dense_queries(self) -> Tensor:
        """Return the queries as torch wants them, [S, H, n, D]."""
        return self.q.view(self.batch, self.queries, self.spec.num_heads, self.spec.head_size).transpose(1, 2)
