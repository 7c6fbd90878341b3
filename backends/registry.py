"""Which attention backends exist, and which of them can serve a cache on a device. A new backend is one line in `BACKENDS`.

Invariant: importing this file imports no backend; a backend whose import fails has a reason, it is not an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from backends.errors import BackendError
from backends.interface import AttentionBackend, DeviceInfo
from backends.kv_cache import KVCacheSpec

AUTO = "auto"

# Name → "module:class", best first on each device: `auto` takes the first that has no objection.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "numba-cpu": "backends.numba_cpu:NumbaCpuBackend",
        "cupy": "backends.cupy_raw:CupyBackend",
        "numba-cuda": "backends.numba_cuda:NumbaCudaBackend",
        "reference": "backends.reference:ReferenceBackend",
    }
)


@dataclass(frozen=True, slots=True)
class Selection:
    """An opened backend, and why each backend that was preferred to it was refused (`looseleaf check` and the log show it)."""

    backend: AttentionBackend[Any]
    refusals: dict[str, list[str]]


def select_backend(name: str, spec: KVCacheSpec, device: DeviceInfo) -> Selection:
    """Open `name`, or for "auto" the first of `BACKENDS` that can serve `spec` on `device`.

    Raises `BackendError` for an unknown name, for a named backend that cannot run, and when `auto` finds none.
    """
    if name != AUTO and name not in BACKENDS:
        raise BackendError(name, [f"unknown backend; known are {', '.join([AUTO, *BACKENDS])}"])
    refusals: dict[str, list[str]] = {}
    for candidate in BACKENDS if name == AUTO else [name]:
        backend, reasons = _examine(candidate, spec, device)
        if backend is not None and not reasons:
            return Selection(backend, refusals)
        refusals[candidate] = reasons
    raise BackendError(
        name,
        [
            f"{candidate}: {reason}" if name == AUTO else reason
            for candidate in refusals
            for reason in refusals[candidate]
        ],
    )


def open_backend(name: str, spec: KVCacheSpec, device: DeviceInfo) -> AttentionBackend[Any]:
    """Open a backend as `select_backend` does, for a caller that has no use for the refusals."""
    return select_backend(name, spec, device).backend


def probe(spec: KVCacheSpec, device: DeviceInfo) -> dict[str, list[str]]:
    """Ask every registered backend why it could not serve `spec` on `device`; an empty list means that it can. Never raises."""
    return {name: _examine(name, spec, device)[1] for name in BACKENDS}


def _examine(name: str, spec: KVCacheSpec, device: DeviceInfo) -> tuple[AttentionBackend[Any] | None, list[str]]:
    module_name, _, class_name = BACKENDS[name].partition(":")
    try:
        module = importlib.import_module(module_name)
        backend = cast("AttentionBackend[Any]", getattr(module, class_name)())
        return backend, backend.unsupported(spec, device)
    # A missing library is an ImportError, a broken driver or a compiler that dislikes this machine can be anything.
    except Exception as error:
        return None, [f"{type(error).__name__}: {error}"]
