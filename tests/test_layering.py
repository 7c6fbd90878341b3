"""The import arrows of the architecture, read from the source: a package may import only what its row allows."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"allocator", "backends", "service"}
LEAVES = {"service.messages", "service.errors", "service.config", "service.frames", "service.metrics", "service.log"}
CORE = {
    "service.engine.request",
    "service.engine.batch",
    "service.engine.flight",
    "service.engine.ngram",
    "service.engine.prefixes",
    "service.engine.roster",
    "service.engine.scheduler",
    "service.engine.speculation",
    "service.engine.core",
}

# Row: module prefix → (our modules it may import, third-party packages it may import). The longest matching prefix counts.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "allocator": ({"allocator"}, set()),
    "backends": ({"backends"}, {"torch", "numpy"}),
    "backends.numba_cpu": ({"backends"}, {"torch", "numpy", "numba", "llvmlite"}),
    "backends.numba_kernels": ({"backends"}, {"torch", "numpy", "numba", "llvmlite"}),
    "backends.cupy_raw": ({"backends"}, {"torch", "numpy", "cupy"}),
    "backends.numba_cuda": ({"backends"}, {"torch", "numpy", "numba"}),
    "backends.numba_linear": ({"backends"}, {"torch", "numpy", "numba", "llvmlite"}),
    "backends.numba_quantised": ({"backends"}, {"torch", "numpy", "numba", "llvmlite"}),
    "backends.numba_ops": ({"backends"}, {"torch", "numpy", "numba", "llvmlite"}),
    "service.errors": (set(), set()),
    "service.messages": ({"service.errors"}, {"msgspec"}),
    "service.frames": ({"service.errors", "service.messages"}, {"msgspec"}),
    "service.config": ({"service.errors"}, {"msgspec"}),
    "service.metrics": (LEAVES, {"prometheus_client", "msgspec"}),
    "service.log": (LEAVES, {"structlog", "msgspec"}),
    "service.text": ({"service.text"} | LEAVES, {"tokenizers", "jinja2", "msgspec"}),
    "service.engine": ({"service.engine", "service.text", "allocator"} | LEAVES, {"msgspec", "structlog"}),
    "service.model": (
        {"service.model", "service.engine.batch", "backends"} | LEAVES,
        {"torch", "numpy", "numba", "safetensors", "gguf", "msgspec", "structlog"},
    ),
    "service.model.fetch": (LEAVES, {"structlog", "huggingface_hub"}),
    "service.simulate": (CORE | {"service.simulate", "allocator"} | LEAVES, {"msgspec"}),
    "service.transports": ({"service.transports"} | LEAVES, {"aiohttp", "msgspec", "structlog", "prometheus_client"}),
    "service.client": (LEAVES, {"msgspec"}),
    "service.web": (set(), set()),
    "service.app": (OURS, {"aiohttp", "msgspec", "structlog", "uvloop", "prometheus_client", "torch"}),
    "service.cli": (OURS, {"aiohttp", "msgspec", "structlog", "uvloop", "torch"}),
    "service.assembly": (OURS, {"torch", "msgspec"}),
    "service.check": (OURS, {"torch", "msgspec"}),
    "service.terminal": (LEAVES, {"aiohttp", "msgspec"}),
    "service": ({"service"}, set()),
}
for module in CORE:
    RULES[module] = (CORE | {"allocator"} | LEAVES, {"msgspec"})


def modules() -> Iterator[tuple[str, Path]]:
    for package in sorted(OURS):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rule_of(module: str) -> tuple[set[str], set[str]]:
    candidates = [prefix for prefix in RULES if module == prefix or module.startswith(prefix + ".")]
    return RULES[max(candidates, key=len)]


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_a_module_imports_only_what_its_row_allows(module: str, path: Path) -> None:
    ours, foreign = rule_of(module)
    for name in imports(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            if module.startswith(("allocator",)) or module in CORE:
                assert top not in {"asyncio", "threading", "socket", "time"}, f"{module} imports {name}"
            continue
        assert is_within(name, ours if top in OURS else foreign), f"{module} imports {name}"


def test_no_rule_is_left_without_a_module() -> None:
    names = {name for name, _ in modules()}
    seats = {"service.metrics", "service.log", "service.client", "service.app", "service.cli", "service.model.fetch"}
    seats |= {"service.assembly", "service.check", "service.terminal"}
    seats |= {"backends.numba_cpu", "backends.numba_kernels", "backends.numba_ops"} | CORE
    unknown = {prefix for prefix in RULES if not any(n == prefix or n.startswith(prefix + ".") for n in names)} - seats
    assert not unknown
