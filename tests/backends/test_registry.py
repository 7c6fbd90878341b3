"""Opening backends by name: refusals with reasons, lazy imports, and the order of preference."""

from __future__ import annotations

import subprocess
import sys
from types import MappingProxyType

import pytest
import torch

from backends import registry
from backends.errors import BackendError
from backends.interface import DeviceInfo
from backends.kv_cache import KVCacheSpec

CPU = DeviceInfo("cpu")


def specification(head_size: int = 64, dtype: torch.dtype = torch.float32) -> KVCacheSpec:
    return KVCacheSpec(num_layers=2, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=16, dtype=dtype)


def test_auto_takes_the_first_backend_without_an_objection() -> None:
    selection = registry.select_backend("auto", specification(), CPU)
    assert selection.backend.name == next(iter(registry.BACKENDS)) == "numba-cpu"
    assert selection.refusals == {}


def test_auto_says_why_it_passed_over_a_faster_backend() -> None:
    selection = registry.select_backend("auto", specification(head_size=40), CPU)
    assert selection.backend.name == "reference"
    assert selection.refusals["numba-cpu"] == ["head_size 40 is not a multiple of 16"]
    assert list(selection.refusals) == list(registry.BACKENDS)[:-1]


def test_a_named_backend_that_cannot_run_is_an_error_with_its_reasons() -> None:
    with pytest.raises(BackendError) as raised:
        registry.open_backend("numba-cpu", specification(head_size=40, dtype=torch.float16), DeviceInfo("cuda"))
    assert raised.value.name == "numba-cpu"
    assert len(raised.value.reasons) == 3
    for word in ("cuda", "float16", "40"):
        assert word in str(raised.value)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"unknown backend; known are auto, numba-cpu, cupy, .*reference"):
        registry.open_backend("quantum", specification(), CPU)


def test_auto_without_any_willing_backend_lists_every_refusal() -> None:
    with pytest.raises(BackendError) as raised:
        registry.open_backend("auto", KVCacheSpec(1, 3, 2, 64, 16, torch.float32), CPU)
    assert {reason.partition(":")[0] for reason in raised.value.reasons} == set(registry.BACKENDS)


def test_a_backend_that_cannot_be_imported_has_a_reason_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"broken": "backends.no_such_module:Backend", "odd": "backends.reference:NoSuchClass", **registry.BACKENDS}
    monkeypatch.setattr(registry, "BACKENDS", MappingProxyType(broken))
    reasons = registry.probe(specification(), CPU)
    assert "ModuleNotFoundError" in reasons["broken"][0]
    assert "AttributeError" in reasons["odd"][0]
    assert reasons["reference"] == []
    assert registry.open_backend("auto", specification(), CPU).name == "numba-cpu"


@pytest.mark.parametrize("name", registry.BACKENDS)
def test_every_backend_has_its_registered_name_and_describes_itself(name: str) -> None:
    reasons = registry.probe(specification(), CPU)[name]
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    backend = registry.open_backend(name, specification(), CPU)
    assert backend.name == name
    facts = backend.describe()
    assert facts["threads"] == str(torch.get_num_threads())
    assert all(isinstance(value, str) and value for value in facts.values())


@pytest.mark.parametrize("field", ["num_layers", "num_heads", "num_kv_heads", "head_size", "block_size"])
def test_an_impossible_shape_is_refused_by_every_backend_and_names_the_field(field: str) -> None:
    shape = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_size": 16, "block_size": 8, field: 0}
    for reasons in registry.probe(KVCacheSpec(**shape, dtype=torch.float32), CPU).values():
        assert any(field in reason for reason in reasons)


def test_importing_the_registry_imports_no_backend() -> None:
    code = "import sys, backends.registry; print(sorted(m for m in sys.modules if m == 'numba' or m.startswith('backends.')))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (
        answer.stdout.strip() == "['backends.errors', 'backends.interface', 'backends.kv_cache', 'backends.registry']"
    )
