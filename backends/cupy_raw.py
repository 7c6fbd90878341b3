"""The CUDA kernels through CuPy: compiled by NVRTC to cubins that are kept on disk, launched on torch's current stream.

Pointers are passed as integers: no array is wrapped, copied or converted, and CuPy's own memory pool is never used. Nothing here
synchronises, so a launch inside a CUDA graph capture is recorded like any other, once `prepare` has loaded the modules. Invariant: what is
compiled is a shipped variant, and a cubin's name holds all that it depends on: source, options, architecture and compiler version.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from backends.errors import BackendError
from backends.interface import DeviceInfo
from backends.kernels.backend import KernelBackend
from backends.kernels.launch import Launch
from backends.kernels.variants import SIMT_CAPABILITY, Variant
from backends.kv_cache import KVCacheSpec

DEFAULT_SHARED_BYTES = 48 * 1024  # a kernel that wants more has to say so once


class CupyBackend(KernelBackend):
    """Raw kernels on an NVIDIA GPU."""

    name = "cupy"

    def __init__(self) -> None:
        """Look at the current device; without one `unsupported` says so."""
        available = torch.cuda.is_available()
        super().__init__(CupyModule, torch.cuda.get_device_capability() if available else (0, 0))

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        """Return why `spec` cannot be served on `device`: device, library, driver, compute capability, types, head and block size."""
        reasons = spec.faults()
        if device.kind != "cuda":
            return [*reasons, f"device is {device.kind}; this backend runs on an NVIDIA GPU"]
        if not torch.cuda.is_available():
            return [*reasons, "device is cuda, but torch sees no usable CUDA device"]
        try:
            import cupy  # noqa: F401  # whether it is there
        except ImportError as error:
            return [*reasons, f"CuPy is not installed ({error}); pip install looseleaf[cupy]"]
        fault = driver_fault()
        if fault is not None:
            reasons.append(fault)
        if self._capability < SIMT_CAPABILITY:
            major, minor = self._capability
            reasons.append(f"compute capability is {major}.{minor}; CUDA 13 compiles for 7.5 and later")
        return [*reasons, *self.refusals(spec)]

    def describe(self) -> dict[str, str]:
        """Name the versions, the device and where cubins are kept."""
        major, minor = _compiler_version()
        facts = {
            "threads": str(torch.get_num_threads()),
            "nvrtc": f"{major}.{minor}",
            "kernel_cache": str(cubin_folder()),
        }
        if torch.cuda.is_available():
            facts["device"] = (
                f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, self._capability))}"
            )
        return facts


class CupyModule:
    """A variant as a loaded module; kernels are looked up once."""

    def __init__(self, variant: Variant) -> None:
        """Compile for the current device unless the cubin is on disk, and load it. Raises `BackendError` with the compiler's words."""
        import cupy

        self._module: Any = cupy.RawModule(path=str(cubin(variant, torch.cuda.get_device_capability())))
        self._kernels: dict[str, tuple[Any, int]] = {}
        self._streams: dict[int, Any] = {}

    def run(self, launch: Launch) -> None:
        """Launch on torch's current stream, which during a capture is the one that is captured."""
        kernel, shared_bytes = self._kernels.get(launch.kernel, (None, 0))
        if kernel is None or shared_bytes < launch.shared_bytes:
            kernel = self._module.get_function(launch.kernel)
            if launch.shared_bytes > DEFAULT_SHARED_BYTES:
                kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
            self._kernels[launch.kernel] = (kernel, launch.shared_bytes)
        with self._stream():
            kernel(launch.grid, launch.block, launch.arguments, shared_mem=launch.shared_bytes)

    def _stream(self) -> Any:
        current = torch.cuda.current_stream()
        stream = self._streams.get(current.cuda_stream)
        if stream is None:
            import cupy

            if hasattr(current, "__cuda_stream__"):
                stream = cupy.cuda.Stream.from_external(current)
            else:  # torch before it spoke the CUDA stream protocol
                stream = cupy.cuda.ExternalStream(current.cuda_stream, current.device_index)
            self._streams[current.cuda_stream] = stream
        return stream


def driver_fault() -> str | None:
    """Return why the driver cannot load what NVRTC compiles, or None. Needs CuPy."""
    import cupy

    driver, (major, minor) = cupy.cuda.runtime.driverGetVersion(), _compiler_version()
    if driver // 1000 >= major:
        return None
    return f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}; NVRTC {major}.{minor} needs CUDA {major}"


def cubin(variant: Variant, capability: tuple[int, int]) -> Path:
    """Return the file of a variant's machine code for an architecture, compiling it if no earlier run did.

    Needs no GPU. Raises `BackendError` with the compiler's words.
    """
    architecture = f"sm_{capability[0]}{capability[1]}"
    major, minor = _compiler_version()
    file = cubin_folder() / f"{variant.name}-{architecture}-nvrtc{major}.{minor}-{variant.digest}.cubin"
    if not file.exists():
        machine_code = _compile(variant, architecture)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as scratch:
            scratch.write(machine_code)
        Path(scratch.name).replace(file)  # whole or not at all, whoever else writes it
    return file


def cubin_folder() -> Path:
    """Return where cubins are kept: beside CuPy's own, so that `CUPY_CACHE_DIR` moves both."""
    return Path(os.environ.get("CUPY_CACHE_DIR", Path.home() / ".cupy" / "kernel_cache")) / "looseleaf"


def _compile(variant: Variant, architecture: str) -> bytes:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(variant.text, f"{variant.name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*variant.options, f"-arch={architecture}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise BackendError(
            CupyBackend.name, [f"{variant.name} for {architecture}: {error}\n{nvrtc.getProgramLog(program)}"]
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _compiler_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    return int(major), int(minor)
