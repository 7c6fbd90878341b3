"""Forbids whatever makes the host wait for a device, on a CPU where nothing has to: reading a number, a list, a shape that depends on content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")
READERS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__")


class HostSync(AssertionError):
    """Something would have waited."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in FORBIDDEN:
            raise HostSync(f"{func} waits for its input")
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostSync(f"{func} by a mask waits for how many are set")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise `HostSync` at anything of that kind inside the block. A CPU tensor's `tolist` never reaches the dispatcher: it is replaced."""

    def reader(name: str) -> Any:
        def refuse(tensor: Tensor, *_: object, **__: object) -> None:
            raise HostSync(f"Tensor.{name} waits for the tensor")

        return refuse

    def from_list(data: object, *_: object, device: object = None, **__: object) -> None:
        raise HostSync("torch.tensor copies from pageable memory and waits for the copy")

    readers = mock.patch.multiple(Tensor, **{name: reader(name) for name in READERS})
    with readers, mock.patch.multiple(torch, tensor=from_list, as_tensor=from_list), _Watch():
        yield
