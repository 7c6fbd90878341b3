"""The CuPy backend without a GPU: refusals, and machine code that is compiled once and kept by all that it depends on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.cupy_raw import CupyBackend, CupyModule, cubin
from backends.errors import BackendError
from backends.interface import DeviceInfo
from backends.kernels.dispatch import attention_variant
from backends.kernels.launch import Launch
from backends.kernels.variants import CACHE, SHIPPED
from backends.kv_cache import KVCacheSpec

SPEC = KVCacheSpec(1, 4, 2, 64, 16, torch.bfloat16)


def test_a_cpu_is_refused() -> None:
    assert CupyBackend().unsupported(SPEC, DeviceInfo("cpu")) == ["device is cpu; this backend runs on an NVIDIA GPU"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    [reason] = CupyBackend().unsupported(SPEC, DeviceInfo("cuda"))
    assert "torch sees no usable CUDA device" in reason


def on_a_card(
    monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int], driver: int, nvrtc: tuple[int, int] = (13, 0)
) -> CupyBackend:
    """The backend as it would see a machine with such a card and driver."""
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(driverGetVersion=lambda: driver), nvrtc=SimpleNamespace(getVersion=lambda: nvrtc)
        )
    )
    for module, content in {"cupy": cupy, "cupy.cuda": cupy.cuda}.items():
        monkeypatch.setitem(__import__("sys").modules, module, content)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    return CupyBackend()


def test_a_driver_older_than_the_compiler_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_a_card(monkeypatch, capability=(9, 0), driver=12080)
    [reason] = backend.unsupported(SPEC, DeviceInfo("cuda"))
    assert "CUDA 12.8" in reason
    assert "needs CUDA 13" in reason
    assert on_a_card(monkeypatch, capability=(9, 0), driver=13000).unsupported(SPEC, DeviceInfo("cuda")) == []


def test_an_old_card_is_refused_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    volta = on_a_card(monkeypatch, capability=(7, 0), driver=13000).unsupported(SPEC, DeviceInfo("cuda"))
    assert any("7.0" in reason and "7.5" in reason for reason in volta)
    turing = on_a_card(monkeypatch, capability=(7, 5), driver=13000)
    assert any("bf16 queries" in reason for reason in turing.unsupported(SPEC, DeviceInfo("cuda")))
    halves = KVCacheSpec(1, 4, 2, 64, 16, torch.float16)
    assert turing.unsupported(halves, DeviceInfo("cuda")) == []


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_a_card(monkeypatch, capability=(9, 0), driver=13000)
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    [reason] = backend.unsupported(SPEC, DeviceInfo("cuda"))
    assert "CuPy is not installed" in reason


def test_a_cubin_is_compiled_once_and_named_by_architecture_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    file = cubin(CACHE, (9, 0))
    assert file.read_bytes()[:4] == b"\x7fELF"
    assert "sm_90-nvrtc" in file.name
    stamp = file.stat().st_mtime_ns
    assert cubin(CACHE, (9, 0)) == file
    assert file.stat().st_mtime_ns == stamp
    assert cubin(CACHE, (8, 0)) != file
    assert len(list(tmp_path.rglob("*"))) == 3  # the folder and two files, no scratch


def test_what_does_not_compile_is_an_error_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    tensor_cores = attention_variant(torch.bfloat16, torch.bfloat16, 64, (8, 0))
    assert tensor_cores is not None
    with pytest.raises(BackendError, match="sm_75"):
        cubin(tensor_cores, (7, 5))
    assert not list(tmp_path.rglob("*.cubin"))


def test_every_variant_has_a_name_of_its_own() -> None:
    assert len({variant.name for variant in SHIPPED}) == len({variant.digest for variant in SHIPPED}) == len(SHIPPED)


class FakeKernel:
    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 0
        self.launches: list[tuple[object, ...]] = []

    def __call__(self, grid: object, block: object, args: object, *, shared_mem: int) -> None:
        self.launches.append((grid, block, args, shared_mem))


def test_a_kernel_is_granted_its_shared_memory_once_and_launched_on_torchs_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FakeKernel()
    streams: list[object] = []

    class Stream:
        def __init__(self, handle: object) -> None:
            self.handle = handle

        def __enter__(self) -> None:
            streams.append(self.handle)

        def __exit__(self, *_: object) -> None:
            streams.append(None)

    lookups: list[str] = []
    module = SimpleNamespace(get_function=lambda name: lookups.append(name) or kernel)
    fake = SimpleNamespace(
        RawModule=lambda path: module, cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=Stream))
    )
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    monkeypatch.setattr("backends.cupy_raw.cubin", lambda variant, capability: Path("x"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    current = SimpleNamespace(cuda_stream=77, __cuda_stream__=lambda: (0, 77))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    compiled = CupyModule(CACHE)
    launch = Launch("attention", (3, 2, 1), (128, 1, 1), (), 60_000)
    compiled.run(launch)
    compiled.run(launch)
    assert lookups == ["attention"]
    assert kernel.max_dynamic_shared_size_bytes == 60_000
    assert kernel.launches == [((3, 2, 1), (128, 1, 1), (), 60_000)] * 2
    assert streams == [current, None, current, None]
