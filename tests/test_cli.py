"""The command line: cheap help, honest exit codes, a report that explains itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.cli import main


def looseleaf(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom service.cli import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'aiohttp', 'uvloop', 'tokenizers', 'structlog'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_client_commands_do_not_import_torch() -> None:
    program = "import sys, service.terminal, service.client\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--block-size", "7"], ["7", "$.cache.block_size"]),
        (["serve", "--config", "no-such-file.toml"], ["no-such-file.toml"]),
        (["serve", "--port", "0", "--model", "no/such/folder/x.gguf"], ["no/such/folder/x.gguf"]),
        (
            ["serve", "--port", "0", "--backend", "abacus", "--model", "tests/data/golden/tiny-llama"],
            ["abacus", "numba-cpu"],
        ),
        (["serve", "--port", "0", "--device", "cuda", "--model", "tests/data/golden/tiny-llama"], ["cuda"]),
    ],
)
def test_what_cannot_start_says_why_in_one_line_and_exits_with_2(arguments: list[str], words: list[str]) -> None:
    done = looseleaf(*arguments)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("looseleaf: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last


def test_an_unknown_flag_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--blok-size", "8"])
    assert caught.value.code == 2
    assert "--blok-size" in capsys.readouterr().err


def test_check_shows_values_their_sources_and_every_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOSELEAF_SERVER__API_KEY", "secret")
    assert main(["check", "--block-size", "32", "--dtype", "float16", "--speculation", "ngram"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert lines["cache.block_size"].split()[1:] == ["32", "flag"]
    assert lines["server.port"].split()[1:] == ["8000", "default"]
    assert "environment" in lines["server.api_key"]
    assert "secret" not in shown
    assert lines["scheduler.speculation"].split()[1:] == ["'ngram'", "flag"]
    assert "up to 8 tokens" in lines["speculation"]
    assert "can run" in lines["reference"]
    assert "float16" in lines["numba-cpu"]  # the reason why it cannot


def test_chat_without_a_server_says_so(tmp_path: Path) -> None:
    done = looseleaf("chat", "--url", "http://127.0.0.1:9", stdin="hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("looseleaf: no server at http://127.0.0.1:9")
