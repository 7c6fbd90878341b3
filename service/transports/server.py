"""What every transport is to the process that runs it, and how its listening sockets are made.

Invariant: a socket that cannot be had is a `StartupError` of one line, raised before anything slow such as loading a model.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Protocol

from service.errors import StartupError

# Small, so that a reader who stops reading is noticed after some hundred kilobytes instead of the megabytes the kernel would take.
# Accepted sockets inherit it from the listening one.
SEND_BUFFER_BYTES = 64 * 1024
BACKLOG = 512


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


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; stop the other program or choose another port"
    return os.strerror(error.errno) if error.errno else str(error)
