"""What every transport is to the process that runs it, and how its listening sockets are made.

Invariant: a socket that cannot be had is a `StartupError` of one line, raised before anything slow such as loading a model.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

from service.errors import StartupError

# Small, so that a reader who stops reading is noticed after some hundred kilobytes instead of the megabytes the kernel would take.
# Accepted sockets inherit it from the listening one.
SEND_BUFFER_BYTES = 64 * 1024
BACKLOG = 512
MAX_UNIX_PATH_BYTES = 107  # Linux's sun_path holds 108 with the closing zero


FileId = tuple[int, int]  # device and inode


class TransportServer(Protocol):
    """A transport in operation. Each verb may be called once, in this order; `drain` may be left out."""

    async def start(self) -> None:
        """Accept connections; raises `StartupError` when the address cannot be had."""
        ...

    async def drain(self, limit_s: float) -> None:
        """Accept nothing new, let running answers end, and end those with a typed error that still run after `limit_s`."""
        ...

    async def stop(self) -> None:
        """Close every connection at once."""
        ...


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port` (0: any free port); the backlog holds early clients until the server starts."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {_reason(error)}") from error
    listener.setblocking(False)
    return listener


def listen_unix(path: str) -> tuple[socket.socket, FileId]:
    """Listen on a socket file that only this user may open.

    A file left behind by a dead server is replaced; a living server, any other kind of file, a missing directory and a path too long for
    the kernel are `StartupError`s that leave everything as it was.
    """
    where = f"cannot listen on unix:{path}"
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise StartupError(f"{where}: the path has {len(os.fsencode(path))} bytes, above {MAX_UNIX_PATH_BYTES}")
    _remove_stale(path, where)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)  # nobody can connect before listen, so that no wider mode is ever open
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"{where}: {_reason(error)}") from error
    listener.setblocking(False)
    return listener, _file_id(Path(path).lstat())


def unlink_own(path: str, file_id: FileId) -> None:
    """Remove the socket file at `path`, unless another server has put its own in that place."""
    with contextlib.suppress(OSError):
        if _file_id(Path(path).lstat()) == file_id:
            Path(path).unlink()


def _file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _remove_stale(path: str, where: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(f"{where}: {_reason(error)}") from error
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{where}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()  # nobody listens: its server died
        except TimeoutError as error:
            raise StartupError(f"{where}: another server, which is busy, listens there") from error
        except OSError as error:
            raise StartupError(f"{where}: {_reason(error)}") from error
        else:
            raise StartupError(f"{where}: another server listens there")


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop the other program or choose another port"
    return os.strerror(error.errno) if error.errno else str(error)
