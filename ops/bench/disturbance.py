"""One other process that wants a core, for as long as a `with` lasts.

It counts in a plain loop and is bound to no core, as a neighbour's program is: the kernel decides who waits for whom.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from process_group import parse_stat

SETTLE_S = 0.5  # until the loop runs and the kernel has given it a core


class BusyProcess:
    """The process. `cpu_s` is what it has got, also when it has ended."""

    def __enter__(self) -> BusyProcess:
        self._process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        self._cpu_s = 0.0
        time.sleep(SETTLE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cpu_s()
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        if self._process.poll() is None:
            self._cpu_s = parse_stat(Path(f"/proc/{self._process.pid}/stat").read_text()).cpu_s
        return self._cpu_s
