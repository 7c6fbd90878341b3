"""Compiles the kernels of the Numba CUDA backend to PTX, without a GPU or a driver.

Needs `numba-cuda` and libnvvm (the wheel `nvidia-nvvm`, or a toolkit). Numba compiles for types and knows no variants: element types travel
as integers and are told apart at run time, so a few carriers stand for all.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

CARRIERS = (
    ("float32", "float32"),
    ("int16", "int16"),
    ("float16", "int8"),
)  # of queries, of the pool: f32, bf16, f16 over 8 bits


def compile_all(carriers: tuple[str, str], capability: tuple[int, int]) -> dict[str, str]:
    """Return the PTX of each kernel by name. Raises whatever Numba raises."""
    from numba import types
    from numba.cuda import compile_ptx, dispatcher

    from backends import numba_cuda

    # Inner functions are compiled for "the current device", which is all that asks for a driver.
    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        return {
            name: compile_ptx(getattr(numba_cuda, name), signature, cc=capability)[0]
            for name, signature in _signatures(*(getattr(types, kind) for kind in carriers)).items()
        }
    finally:
        dispatcher.get_current_device = before


def faults(ptx: dict[str, str], capability: tuple[int, int]) -> list[str]:
    """Return what is wrong with compiled kernels."""
    found = []
    for name, text in ptx.items():
        if f".target sm_{capability[0]}{capability[1]}" not in text or name not in text:
            found.append(f"{name}: not for sm_{capability[0]}{capability[1]}")
    attend = ptx["_attend"]
    if "bar.sync" not in attend and "barrier" not in attend:
        found.append("_attend: no barrier")
    if "fma.rn.f32" not in attend:
        found.append("_attend: no float32 multiply-add")
    if "fma.rn.f64" in attend:  # a float64 constant would make the sums run at a small part of the speed
        found.append("_attend: sums in float64")
    return found


def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        import numba_cuda  # noqa: F401
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _signatures(q: Any, kv: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types of each kernel's arguments."""
    from numba import types

    def array(kind: Any, dimensions: int) -> Any:
        return types.Array(kind, dimensions, "A")

    i32, i64, f32, flag = types.int32, types.int64, types.float32, types.boolean
    step = (array(i32, 2), array(i32, 1), array(i32, 1), array(i32, 2))
    return {
        "_attend": (
            *(array(q, 3), array(kv, 5), array(f32, 4), *step, array(q, 3), array(f32, 2), array(f32, 3)),
            *(array(f32, 2), i64, i64, flag, flag, i64, i64, f32, f32),
        ),
        "_merge": (
            *(array(i32, 2), array(i32, 1), array(f32, 3), array(f32, 2), array(q, 3), array(f32, 2)),
            *(i64, flag, i64),
        ),
        "_store": (array(q, 3), array(q, 3), array(i64, 1), array(kv, 5), array(f32, 4), i64, i64),
    }
