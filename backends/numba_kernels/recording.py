"""Records the kernels that a function launches, and replays them for any number of rows in one compiled call. Knows no model.

A step of a small model has some three hundred launches; in Python each costs microseconds of packing arguments and allocating, and nothing
of it changes from step to step but the number of rows. So the function is called a few times with different numbers of rows and its launches
are written down instead of being carried out. Where the arguments of an operation differ between these calls they must follow rows * a + b;
anything else is refused, as is every operation of torch that computes something: what was refused runs as it did before.

Memory that the function allocates is taken from an arena which hands it out again once nothing refers to it, as the allocator would. It belongs
to the program, sized for the most rows.

Invariant: a replay does what the function would have done with so many rows, bit for bit, or there is no program.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 128  # bytes; two cache lines, because processors fetch lines in pairs
# int64 fields of an operation of a program: address of the body, address of its arguments, most threads, rows under which it runs on one.
OPERATION_FIELDS = 4
PATCH_FIELDS = 3  # address of an argument, a, b: the argument is rows * a + b
ALONE, ALWAYS = 1 << 62, 0


class NotReplayable(Exception):
    """The function cannot be recorded; the message says which operation is in the way."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel was asked for. `work` is None where the number of threads does not depend on it."""

    name: str
    address: int
    arguments: tuple[int, ...]  # without the counter
    num_threads: int
    work: int | None


@dataclass(slots=True)
class _Open(threading.local):
    """The recording that is open on this thread."""

    launches: list[Launch] | None = None


_open = _Open()


def recorded_launches() -> list[Launch] | None:
    """Return the list that launches of this thread go to instead of being carried out; None while nothing is recorded."""
    return _open.launches


@contextmanager
def _recording(arena: _Arena) -> Iterator[list[Launch]]:
    """Write down the launches of this thread inside the block."""
    if _open.launches is not None:
        raise NotReplayable("a recording inside a recording")
    launches: list[Launch] = []
    _open.launches = launches
    try:
        with _Watch(arena):
            yield launches
    finally:
        _open.launches = None


@dataclass(slots=True)
class Program:
    """Recorded operations with the memory they work on. `output` has the most rows; a replay with T rows writes its first T."""

    max_rows: int
    output: Tensor
    num_operations: int
    operations: npt.NDArray[np.int64]  # [operations, OPERATION_FIELDS]
    patches: npt.NDArray[np.int64]  # [patches, PATCH_FIELDS]
    num_bytes: int  # of the arena
    _kept: tuple[object, ...] = field(repr=False, default=())


def record(function: Callable[[int], Tensor], max_rows: int, parallel_work: int) -> Program:
    """Record `function(rows)`, which returns a tensor of as many rows, for 1 to `max_rows` rows.

    The function launches kernels and makes tensors and views of them, no more; it must not look at the contents of any. Operations started
    with less than `parallel_work` run on one thread. Raises `NotReplayable`.
    """
    arena = _Arena()
    sizes = sorted({max_rows, max_rows // 2 + 1, min(2, max_rows), 1}, reverse=True)
    output: Tensor | None = None
    recorded = []
    for rows in sizes:
        arena.begin()
        with _recording(arena) as launches:
            result = function(rows)
        if rows == max_rows:
            output = result
        elif output is None or result.data_ptr() != output.data_ptr() or result.stride() != output.stride():
            raise NotReplayable("the result stands elsewhere for another number of rows")
        recorded.append(launches)
        del result, launches
    assert output is not None
    return _assemble(sizes, recorded, output, arena, parallel_work)


def _assemble(
    sizes: Sequence[int], recorded: Sequence[list[Launch]], output: Tensor, arena: _Arena, parallel_work: int
) -> Program:
    """Find what each argument is as a function of the rows, and lay the program out."""
    if len({len(launches) for launches in recorded}) != 1:
        raise NotReplayable("the number of launches depends on the number of rows")
    operations, patches, blocks = [], [], []
    for index, calls in enumerate(zip(*recorded, strict=True)):
        first = calls[0]
        if any(call.address != first.address or len(call.arguments) != len(first.arguments) for call in calls):
            raise NotReplayable(f"operation {index} is another kernel for another number of rows")
        where = f"operation {index} ({first.name})"
        block = (ctypes.c_int64 * (len(first.arguments) + 1))(0, *first.arguments)
        blocks.append(block)
        address = ctypes.addressof(block)
        for position, values in enumerate(zip(*(call.arguments for call in calls), strict=True)):
            slope, base = _line(sizes, values, f"argument {position} of {where}")
            if slope:
                patches.append((address + 8 * (position + 1), slope, base))
        threads, base = _line(sizes, [call.num_threads for call in calls], f"the number of threads of {where}")
        if threads:
            raise NotReplayable(f"the number of threads of {where} depends on the number of rows")
        operations.append((first.address, address, base, _rows_alone(sizes, calls, where, parallel_work)))
    return Program(
        max_rows=sizes[0],
        output=output,
        num_operations=len(operations),
        operations=np.array(operations, np.int64).reshape(-1, OPERATION_FIELDS),
        patches=np.array(patches, np.int64).reshape(-1, PATCH_FIELDS),
        num_bytes=arena.num_bytes,
        _kept=(blocks, arena),
    )


def _line(sizes: Sequence[int], values: Sequence[int], what: str) -> tuple[int, int]:
    """Return a, b with value = rows * a + b."""
    slope = 0 if len(sizes) == 1 else (values[0] - values[-1]) // (sizes[0] - sizes[-1])
    base = values[0] - slope * sizes[0]
    if any(rows * slope + base != value for rows, value in zip(sizes, values, strict=True)):
        shown = ", ".join(f"{value} for {rows}" for rows, value in zip(sizes, values, strict=True))
        raise NotReplayable(f"{what} is not proportional to the number of rows: {shown}")
    return slope, base


def _rows_alone(sizes: Sequence[int], calls: Sequence[Launch], where: str, parallel_work: int) -> int:
    """Return the number of rows from which on an operation is shared out."""
    works = [call.work for call in calls]
    if None in works:
        return ALWAYS
    slope, base = _line(sizes, [work for work in works if work is not None], f"the work of {where}")
    if slope <= 0:
        return ALWAYS if base >= parallel_work else ALONE
    return max(0, -(-(parallel_work - base) // slope))


class _Arena:
    """Memory for the tensors of a recording: handed out again as soon as no tensor uses it, at the same places in every pass."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._users: list[weakref.ref[npt.NDArray[np.uint8]] | None] = []
        self._places: list[int] = []  # chunk of each allocation of the first pass
        self._next = 0
        self._is_first = True
        self.num_bytes = 0

    def begin(self) -> None:
        """Begin a pass; all but the first have smaller tensors, in the places of the first."""
        self._is_first = not self._places
        self._next = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with undefined contents."""
        size = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        if self._is_first:
            self._places.append(self._find(size))
        elif self._next >= len(self._places) or len(self._chunks[self._places[self._next]]) < size:
            raise NotReplayable("the tensors that are allocated depend on the number of rows")
        place = self._places[self._next]
        self._next += 1
        memory = self._chunks[place][:size]  # an object of its own, alive as long as a tensor uses it
        self._users[place] = weakref.ref(memory)
        numbers = torch.from_numpy(memory)
        return numbers[: size // dtype.itemsize * dtype.itemsize].view(dtype)[: int(np.prod(shape))].view(tuple(shape))

    def _find(self, size: int) -> int:
        """Return the smallest chunk that is free and large enough, a new one if there is none."""
        free = [
            (len(chunk), place)
            for place, (chunk, user) in enumerate(zip(self._chunks, self._users, strict=True))
            if len(chunk) >= size and (user is None or user() is None)
        ]
        if free:
            return min(free)[1]
        memory = np.empty(size + ALIGNMENT, np.uint8)
        skipped = -memory.ctypes.data % ALIGNMENT
        self._chunks.append(memory[skipped : skipped + size])
        self._users.append(None)
        self.num_bytes += size
        return len(self._chunks) - 1


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives tensors memory of the arena, lets views pass, refuses what computes."""

    def __init__(self, arena: _Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch's compiler need not be kept away: no function is compiled here, and keeping it away imports all of it (1.2 s, 60 MB)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch: every operation that reaches a device comes here."""
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::empty":
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if name == "aten::empty_like" and args[0].is_contiguous():
            return self._arena.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func._schema.is_mutable:
            raise NotReplayable(f"torch computes {name} between the kernels")
        result = func(*args, **kwargs)
        inputs = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        outputs = result if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(value, Tensor) and value.untyped_storage().data_ptr() in inputs for value in outputs):
            raise NotReplayable(f"torch computes {name} between the kernels")
        return result
