"""`EmulatedBackend`: the CuPy backend with every launch run on the CPU. Planning, workspaces and arguments are the very ones of a GPU."""

from __future__ import annotations

import torch

from backends.interface import DeviceInfo
from backends.kernels.backend import KernelBackend
from backends.kernels.launch import Launch
from backends.kernels.variants import Variant
from backends.kv_cache import KVCacheSpec
from tests.cuda_emulation.module import EmulatedModule, missing

NAME = "cupy-emulated"
LINE = "tests.cuda_emulation.backend:EmulatedBackend"  # for `BACKENDS`


class EmulatedBackend(KernelBackend):
    """As compute capability 8.0."""

    name = NAME

    def __init__(self) -> None:
        super().__init__(LoadedModule, (8, 0))

    def unsupported(self, spec: KVCacheSpec, device: DeviceInfo) -> list[str]:
        reasons = spec.faults()
        if device.kind != "cpu":
            reasons.append("the emulation runs on a CPU")
        absent = missing()
        return [*reasons, *([] if absent is None else [absent]), *(self.refusals(spec) if not reasons else [])]

    def describe(self) -> dict[str, str]:
        return {"threads": str(torch.get_num_threads())}


class LoadedModule:
    """A module whose launches run at once; a GPU's refusals are errors."""

    def __init__(self, variant: Variant) -> None:
        self._module = EmulatedModule(variant)

    def run(self, launch: Launch) -> None:
        if 0 not in launch.grid:  # a GPU refuses such a launch
            self._module.run(launch)
            return
        raise AssertionError(f"{launch.kernel}: an empty grid {launch.grid}")
