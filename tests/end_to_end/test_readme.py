"""The README's snippets run as they stand, but for the addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.server import Server

pytestmark = pytest.mark.model

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_a_snippet_for_each_use() -> None:
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["openai", "websocket", "rpc"])
def test_a_snippet_prints_an_answer(server: Server, snippet: str) -> None:
    model = server.stats()["model"]
    program = (
        snippet.replace("http://127.0.0.1:8000", server.url)
        .replace("ws://127.0.0.1:8000", server.url.replace("http", "ws"))
        .replace("unix:/tmp/looseleaf.sock", server.rpc)
        .replace('model="smollm2-135m"', f'model="{model}"')
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
