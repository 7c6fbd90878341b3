"""A model that cannot be served stops the start with exit code 2 and one line that names the file; no traceback, whatever is wrong.

What each loader says in detail is its own tests' matter. All damaged models are started one after another in one process, since a process
of its own for each would spend its time on imports.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.tiny_service import copy_checkpoint
from tests.model.checkpoints import random_state, tiny_config, write_gguf

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 269060552\n"
WEB_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>403</body></html>" * 4
SEPARATOR = "\n@@@ exit code "

Damage = Callable[[Path], object]


def written(file: str, data: bytes) -> Damage:
    return lambda model: (model / file).write_bytes(data)


def cut(file: str, size: int) -> Damage:
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:size])


def removed(file: str) -> Damage:
    return lambda model: (model / file).unlink()


def changed(file: str, **changes: Any) -> Damage:
    def change(model: Path) -> None:
        content = json.loads((model / file).read_text(encoding="utf-8"))
        (model / file).write_text(json.dumps({**content, **changes}), encoding="utf-8")

    return change


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Checkpoint, damage, words of the line.
FOLDERS: dict[str, tuple[str, Damage, list[str]]] = {
    "cut at the header": ("tiny-llama", cut(WEIGHTS, 300), [WEIGHTS, "300 bytes", "cut off"]),
    "cut in the data": ("tiny-llama", cut(WEIGHTS, 20_000), [WEIGHTS, "20000 bytes"]),
    "empty": ("tiny-llama", written(WEIGHTS, b""), [WEIGHTS, "0 bytes"]),
    "a pointer": ("tiny-llama", written(WEIGHTS, LFS_POINTER), [WEIGHTS, "Git LFS pointer"]),
    "a web page": ("tiny-llama", written(WEIGHTS, WEB_PAGE), [WEIGHTS, "web page"]),
    "an absurd header": ("tiny-llama", written(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), [WEIGHTS, str(2**60)]),
    "no weights": ("tiny-llama", removed(WEIGHTS), ["no safetensors file"]),
    "a broken config": ("tiny-llama", cut("config.json", 40), ["config.json", "not valid JSON"]),
    "no config": ("tiny-llama", removed("config.json"), ["config.json"]),
    "a broken generation_config": ("tiny-llama", written("generation_config.json", b"{"), ["generation_config.json"]),
    "a broken tokenizer": ("tiny-llama", cut("tokenizer.json", 900), ["tokenizer.json"]),
    "a tokenizer that is a page": ("tiny-llama", written("tokenizer.json", WEB_PAGE), ["tokenizer.json"]),
    "no tokenizer": ("tiny-llama", removed("tokenizer.json"), ["tokenizer.json", "does not exist"]),
    "a broken tokenizer_config": ("tiny-llama", cut("tokenizer_config.json", 50), ["tokenizer_config.json"]),
    "a broken index": ("tiny-llama-tied-bf16", cut(INDEX, 100), [INDEX]),
    "a missing shard": (
        "tiny-llama-tied-bf16",
        removed("model-00002-of-00002.safetensors"),
        ["model-00002-of-00002.safetensors"],
    ),
    "an end that is no id": ("tiny-llama", changed("generation_config.json", eos_token_id="x"), ["eos_token_id"]),
    "an unknown rotation": (
        "tiny-llama",
        changed("config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ["spiral"],
    ),
    "heads that do not divide": ("tiny-llama", changed("config.json", num_attention_heads=3), ["3", "2", "heads"]),
    "an unknown family": ("tiny-llama", changed("config.json", architectures=["NoSuchModel"]), ["NoSuchModel"]),
    "a broken template": (
        "tiny-llama",
        changed("tokenizer_config.json", chat_template="one\n{% for %}"),
        ["chat template", "line 2"],
    ),
    "a template that is no text": ("tiny-llama", written("chat_template.jinja", b"\xff\xfe{"), ["chat_template.jinja"]),
    "a template without end": (
        "tiny-llama",
        written("chat_template.jinja", b"{{ " + b"(" * 20_000),
        ["chat template"],
    ),
}
GGUF: dict[str, tuple[Callable[[bytes], bytes], list[str]]] = {
    "cut at the magic": (lambda whole: whole[:3], ["3 bytes"]),
    "cut in the metadata": (lambda whole: whole[:200], ["200 bytes"]),
    "cut in the data": (lambda whole: whole[:-20_000], ["cut off"]),
    "another version": (lambda whole: whole[:4] + struct.pack("<I", 1) + whole[8:], ["version 1"]),
    "absurd counts": (lambda whole: whole[:8] + struct.pack("<Q", 2**60) + whole[16:], [str(2**60)]),
    "a page": (lambda whole: WEB_PAGE, ["web page"]),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Every damaged model, with the words that its line must have."""
    folder = tmp_path_factory.mktemp("damaged")
    models = {}
    for number, (name, (checkpoint, damage, words)) in enumerate(FOLDERS.items()):
        model = copy_checkpoint(folder / f"folder{number}", checkpoint)
        damage(model)
        models[name] = (model, words)
    config = tiny_config()
    sound = write_gguf(folder / "sound.gguf", "llama", config, random_state(config)).read_bytes()
    for number, (name, (spoil, words)) in enumerate(GGUF.items()):
        file = folder / f"file{number}.gguf"
        file.write_bytes(spoil(sound))
        models[f"GGUF {name}"] = (file, [file.name, *words])
    return models


def test_every_damaged_model_is_refused_with_exit_code_2_and_one_line(
    damaged: dict[str, tuple[Path, list[str]]],
) -> None:
    """MDL-01, MDL-08, NUM-02, NUM-07, TOK-05, TOK-06."""
    program = (
        "import sys\nfrom service.cli import main\n"
        f"for path in sys.argv[1:]:\n    print({SEPARATOR!r}, main(['serve', '--port', '0', '--model', path]), file=sys.stderr)"
    )
    paths = [str(path) for path, _ in damaged.values()]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    pieces = done.stderr.split(SEPARATOR)
    assert len(pieces) == len(damaged) + 1, done.stderr
    codes = [piece.split()[0] for piece in pieces[1:]]
    for (name, (_, words)), code, piece, before in zip(damaged.items(), codes, pieces, ["", *codes], strict=False):
        lines = piece.removeprefix(before).strip().splitlines()
        assert code == "2", name
        assert [line for line in lines if line.startswith("looseleaf: ")] == lines[-1:], (name, lines)
        for word in words:
            assert word in lines[-1], (name, lines[-1])
