"""The same service with another backend or another pool, by one option: the same prompt gets the same tokens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import MappingProxyType

import pytest

from backends import registry
from tests.cuda_emulation.backend import LINE, NAME
from tests.cuda_emulation.module import missing
from tests.end_to_end.server import running
from tests.end_to_end.tiny_service import tiny_service

SIMULATED = """
import asyncio
from tests.end_to_end.test_backend_swap import answer
print(asyncio.run(answer("numba-cuda")))
"""


async def answer(backend: str, kv_dtype: str = "auto") -> list[int]:
    """Serve a checkpoint and ask over HTTP; `assemble` compiles, warms up and sizes the pool as for any model."""
    options = {"backend": {"name": backend}, "model": {"max_model_len": 32}, "cache": {"kv_dtype": kv_dtype}}
    async with tiny_service("tiny-llama", **options) as service:
        assert service.engine.stats().backend == backend
        return (await service.ask("http completion", max_tokens=8)).ids


@pytest.fixture(scope="module")
def reference() -> list[int]:
    ids = asyncio.run(answer("reference"))
    assert len(ids) == 8
    return ids


async def test_numba_cpu_answers_as_the_reference(reference: list[int]) -> None:
    assert await answer("numba-cpu") == reference


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_the_cuda_kernels_answer_as_the_reference(reference: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", MappingProxyType({**registry.BACKENDS, NAME: LINE}))
    assert await answer(NAME) == reference


@pytest.mark.slow
def test_numba_cuda_in_the_simulator_answers_as_the_reference(reference: list[int]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1] == str(reference)


@pytest.mark.parametrize("backend", ["reference", "numba-cpu"])
async def test_a_quantised_pool_serves_and_both_cpu_backends_read_it_alike(backend: str) -> None:
    """The first token of a random model is safe; later ones are near ties that 8 bits may tip, in the same way for both."""
    for kv_dtype in ("int8", "fp8"):
        ids = await answer(backend, kv_dtype)
        assert len(ids) == 8
        assert ids == await answer("reference", kv_dtype)


def command_answer(folder: Path, data: Path, backend: str) -> str:
    """Start the README's command with `backend` and ask it over HTTP."""
    options = ("--model", str(data / "golden/tiny-llama"), "--max-model-len", "32", "--backend", backend)
    with running(folder, *options) as server:
        assert server.stats()["backend"] == backend
        body = {"prompt": "The cat sat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = json.loads(response.read())["choices"][0]["text"]
            return text


@pytest.fixture(scope="module")
def command_reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return command_answer(tmp_path_factory.mktemp("reference"), data, "reference")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numba-cpu", "numba-cuda"])
def test_the_readmes_commands_answer_alike(
    backend: str, command_reference: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own each: the simulator is chosen when Python starts."""
    if backend == "numba-cuda":
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert len(command_reference) >= 8
    assert command_answer(tmp_path, data, backend) == command_reference


def test_the_readme_shows_the_commands_that_are_tested() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for backend in ("reference", "numba-cpu", "numba-cuda"):
        assert f"looseleaf serve --model tests/data/golden/tiny-llama --max-model-len 32 --backend {backend}" in readme
