"""Runs `looseleaf serve` as its users do: a process of its own, real sockets, a signal at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

START_LIMIT_S = 180.0  # a first start compiles kernels


class Server:
    """A running server process. `url` is its HTTP root, `rpc` its RPC address, `log` the file with its stderr."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, rpc: str, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.rpc = rpc
        self.log = log

    def get(self, path: str) -> tuple[int, bytes]:
        """Fetch `path`; returns (status, body), also for an error status."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stats(self) -> dict[str, Any]:
        """The engine's snapshot."""
        stats: dict[str, Any] = msgspec.json.decode(self.get("/api/stats")[1])
        return stats

    def wait_until_idle(self, limit_s: float = 20.0) -> dict[str, Any]:
        """Wait until nothing runs or waits and no block is held; returns the snapshot, fails after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == stats["pool"]["used"] == 0:
                return stats
            assert time.monotonic() < deadline, f"not idle after {limit_s} s: {stats}"
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        """Wait for /readyz; fails with the log when the process ends first."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_LIMIT_S} s:\n{self.log.read_text()}")

    def wait_for_log(self, text: str, limit_s: float = 20.0) -> None:
        """Wait until the log has `text`; fails with the log after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while text not in (log := self.log.read_text()):
            assert time.monotonic() < deadline, f"no {text!r} after {limit_s} s:\n{log}"
            time.sleep(0.01)

    def assert_nothing_left(self) -> None:
        """A server that has ended left no socket file, and no traceback in its log."""
        assert "Traceback" not in self.log.read_text()
        assert not Path(self.rpc.removeprefix("unix:")).exists()

    def stop(self, number: signal.Signals = signal.SIGTERM, limit_s: float = 40.0) -> int:
        """Send the signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=limit_s)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, *options: str, program: str | None = None) -> Server:
    """Start a server with its files in `folder`; does not wait for it. `program` is Python to run in place of the command."""
    port = free_port()
    rpc = f"unix:{folder / 'rpc.sock'}"
    log = folder / "server.log"
    python = ["-m", "service.cli"] if program is None else ["-c", program]
    command = [sys.executable, *python, "serve", "--port", str(port), "--rpc", rpc, *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=environment)
    return Server(process, port, rpc, log)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Server]:
    """A ready server that is ended with SIGTERM, and checked to have ended cleanly."""
    server = start(folder, *options)
    try:
        server.wait_until_ready()
        yield server
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise
    code = server.stop()
    assert code == 0, f"exit code {code}:\n{server.log.read_text()}"
    assert "Traceback" not in server.log.read_text()
