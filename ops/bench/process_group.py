"""One measured program: a process with all its children, started, watched and ended together.

Knows Linux's /proc and nothing of what runs. Invariant: when `stop` returns, no process of the group is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc says of one process."""

    pid: int
    session_id: int
    cpu_s: float  # of itself and of children that it has waited for
    rss_bytes: int


class ProcessGroup:
    """A command in a session of its own; children belong to it however they are re-parented."""

    def __init__(
        self, command: Sequence[str | Path], *, env: Mapping[str, str], log: Path, pipes: bool = False
    ) -> None:
        """Start `command`, its output (with `pipes`: only stderr) in the file `log`; memory is sampled from now on."""
        self.started = time.perf_counter()
        with log.open("wb") as output:
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                [str(part) for part in command],
                env=dict(env),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,
            )
        self._peak_rss_bytes = 0
        self._stopping = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def stdin(self) -> IO[bytes]:
        """The program's input; only with `pipes`."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The program's output; only with `pipes`."""
        assert self._popen.stdout is not None
        return self._popen.stdout

    def exit_status(self) -> int | None:
        """Return the exit status, None while the program runs."""
        return self._popen.poll()

    def members(self) -> list[ProcessFacts]:
        """Return the facts of every process of the group."""
        return [facts for facts in all_processes() if facts.session_id == self._popen.pid]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the group has used."""
        return sum(facts.cpu_s for facts in self.members())

    def peak_rss_bytes(self) -> int:
        """Return the most resident memory seen so far, now included; shared pages count in every process."""
        return max(self._peak_rss_bytes, sum(facts.rss_bytes for facts in self.members()))

    def pss_bytes(self) -> int:
        """Return the memory now, pages shared between processes counted once. Slow: it walks the page tables."""
        return sum(_pss_bytes(facts.pid) for facts in self.members())

    def stop(self, patience_s: float = 20.0) -> None:
        """Ask the program to end, and end whatever is left of the group when `patience_s` has passed."""
        self._stopping.set()
        self._sampler.join()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience_s)
        while left := self.members():
            for facts in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(facts.pid, signal.SIGKILL)
            self._popen.poll()  # collects the leader, which would stay a member as a zombie
            time.sleep(0.05)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was still buffered for it
                    pipe.close()

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            self._peak_rss_bytes = self.peak_rss_bytes()


def all_processes() -> list[ProcessFacts]:
    """Return the facts of every process that can be read."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append(parse_stat(Path(entry.path, "stat").read_text()))
    return found


def parse_stat(line: str) -> ProcessFacts:
    """Parse /proc/PID/stat. The command's name stands in parentheses and may hold spaces and parentheses itself."""
    pid = int(line[: line.index(" ")])
    fields = line[line.rindex(")") + 2 :].split()  # from field 3 of proc(5), the state, on
    ticks = sum(int(fields[number - 3]) for number in (14, 15, 16, 17))
    return ProcessFacts(pid, int(fields[6 - 3]), ticks / TICKS_PER_S, int(fields[24 - 3]) * PAGE_BYTES)


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
