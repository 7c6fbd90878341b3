"""A tier on disk that survives a restart: one file a block, checksummed and stamped.

    file    magic · stamp 32 · key 32 · payload length 8 · payload digest 16 · payload

The stamp is a digest of everything the bytes depend on (layout, dtype, model, rope settings …), so another model's or
version's file is a miss, and so is a torn one. Files are written beside their place and renamed into it.

Invariant: `read` returns exactly what `write` was given, or None.
"""

import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from allocator.errors import OutOfRange

MAGIC = b"LLKVTIER\1\0\0\0"
KEY_BYTES = 32
LENGTH_BYTES = 8
DIGEST_BYTES = 16
HEADER_BYTES = len(MAGIC) + 32 + KEY_BYTES + LENGTH_BYTES + DIGEST_BYTES
SUFFIX = ".kv"
UNFINISHED = ".part"
SECRET_FILE = "secret"


def make_stamp(facts: Mapping[str, str]) -> bytes:
    """Digest what a payload's bytes depend on: name → value, in any order."""
    stamp = hashlib.sha256(b"looseleaf tier stamp 1\0")
    for name in sorted(facts):
        for part in (name.encode(), facts[name].encode()):
            stamp.update(len(part).to_bytes(8, "little"))
            stamp.update(part)
    return stamp.digest()


def load_secret(folder: Path) -> bytes:
    """Return the secret of the block hashes that are kept in a folder, made on first use, readable by its owner only.

    Give it to `PrefixCache`: with a new secret the hashes of the last run would mean nothing. Raises `OSError`.
    """
    path = folder / SECRET_FILE
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        part = folder / f"{SECRET_FILE}.{os.getpid()}{UNFINISHED}"
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
        try:
            os.link(part, path)  # whole or not at all, and never over another process's
        finally:
            part.unlink()
    return path.read_bytes()


class FileTier:
    """Payloads in files under `folder`, for one stamp. Least recently used ones go first, also over a restart."""

    def __init__(self, folder: Path, facts: Mapping[str, str], max_bytes: int, name: str = "file") -> None:
        """`facts`: what a payload depends on (`make_stamp`). `max_bytes`: of files, headers included.

        Raises `OSError` when the folder cannot be used at all; later faults of single files are misses.
        """
        if max_bytes < 1:
            raise OutOfRange("max_bytes", max_bytes, 1)
        self.max_bytes = max_bytes
        self.num_refused = 0  # files that were torn, foreign or could not be read or written
        self._name = name
        self._stamp = make_stamp(facts)
        self._folder = folder / self._stamp.hex()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # key → bytes of its file, least recently used first
        self._used_bytes = 0
        self._part_numbers = count()
        self._scan()

    @property
    def name(self) -> str:
        """What events call it."""
        return self._name

    @property
    def used_bytes(self) -> int:
        """Bytes of all its files."""
        return self._used_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def read(self, key: bytes) -> bytes | None:
        """Return a payload whose file is whole and ours; any other file is dropped."""
        if key not in self._sizes:
            return None
        path = self._path(key)
        try:
            content = path.read_bytes()
            payload = self._verified(key, content)
            if payload is not None:
                os.utime(path)  # so that the order of use survives a restart
        except OSError:
            payload = None
        if payload is None:
            self.num_refused += 1
            self.discard(key)
            return None
        self._sizes.move_to_end(key)
        return payload

    def capacity(self, payload_bytes: int) -> int:
        """Count the payloads of this size that it could hold if it were empty."""
        return self.max_bytes // (payload_bytes + HEADER_BYTES)

    def make_room(self, num_payloads: int, payload_bytes: int) -> list[bytes]:
        """Drop least recently used files until so many more fit."""
        dropped = []
        while self._sizes and self._used_bytes + num_payloads * (payload_bytes + HEADER_BYTES) > self.max_bytes:
            key = next(iter(self._sizes))
            self.discard(key)
            dropped.append(key)
        return dropped

    def write(self, key: bytes, payload: bytes) -> bool:
        """Keep a payload if there is room; a disk that is full or broken keeps nothing and raises nothing."""
        if len(key) != KEY_BYTES:
            raise OutOfRange("len(key)", len(key), KEY_BYTES, KEY_BYTES)
        if key in self._sizes:
            return True
        size = HEADER_BYTES + len(payload)
        if self._used_bytes + size > self.max_bytes:
            return False
        path = self._path(key)
        part = path.with_name(f"{os.getpid()}-{next(self._part_numbers)}{UNFINISHED}")
        try:
            path.parent.mkdir(exist_ok=True)
            with part.open("xb") as file:
                file.write(self._header(key, payload))
                file.write(payload)
            part.replace(path)
        except OSError:
            self.num_refused += 1
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        self._sizes[key] = size
        self._used_bytes += size
        return True

    def discard(self, key: bytes) -> None:
        """Drop a file, if it is there."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self._used_bytes -= size
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Learn which files are there; drop those cut off before they got their name, and what exceeds the cap."""
        files = []
        for path in self._folder.glob("*/*"):
            try:
                if path.suffix == UNFINISHED:
                    path.unlink()
                    continue
                status = path.stat()
                key = bytes.fromhex(path.stem)
            except (OSError, ValueError):
                continue
            if path.suffix == SUFFIX and len(key) == KEY_BYTES:
                files.append((status.st_mtime_ns, key, status.st_size))
        for _, key, size in sorted(files):
            self._sizes[key] = size
            self._used_bytes += size
        while self._used_bytes > self.max_bytes:
            self.discard(next(iter(self._sizes)))

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / (name + SUFFIX)

    def _header(self, key: bytes, payload: bytes) -> bytes:
        digest = hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
        return MAGIC + self._stamp + key + len(payload).to_bytes(LENGTH_BYTES, "little") + digest

    def _verified(self, key: bytes, content: bytes) -> bytes | None:
        payload = content[HEADER_BYTES:]
        return payload if content[:HEADER_BYTES] == self._header(key, payload) else None
