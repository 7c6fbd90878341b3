"""Open files that a download may have damaged: each fault becomes one `ModelLoadError` line with the file's name and its size.

Invariant: nothing here allocates by a number that a file states.
"""

from __future__ import annotations

import json
from pathlib import Path

from service.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20  # an index of 100 000 tensors has about 10 MiB


def file_size(path: Path) -> int:
    """Return the size in bytes; raises if the file is missing, unreadable or empty."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    if not path.is_file():
        raise ModelLoadError(f"{path} is not a file")
    if size == 0:
        raise ModelLoadError(f"{path} is empty (0 bytes)")
    return size


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; raises for anything else."""
    size = file_size(path)
    if size > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes; a JSON file here has at most {MAX_JSON_BYTES}")
    data = path.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} ({size} bytes) is not valid JSON: {impostor(data) or error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def impostor(head: bytes) -> str | None:
    """Recognise from a file's first bytes what is often found in place of a model file."""
    start = head[:256].lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "it is a web page; the download was answered by an error or login page"
    return None
