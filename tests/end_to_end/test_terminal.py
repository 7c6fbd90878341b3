"""`looseleaf chat` at a pipe: turns, a fresh start, the end of the input."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.server import Server

pytestmark = pytest.mark.model


def test_two_turns_share_a_conversation_and_end_with_the_input(server: Server) -> None:
    before = server.stats()
    command = [sys.executable, "-m", "service.cli", "chat", "--url", server.url, "--max-tokens", "12"]
    done = subprocess.run(
        command, input="Hello there\nAnd again\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") == 3
    after = server.wait_until_idle()
    assert after["generated_tokens"] - before["generated_tokens"] <= 24
    assert after["cached_prompt_tokens"] > before["cached_prompt_tokens"], "the second turn did not find the first one"
