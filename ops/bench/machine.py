"""What a reader must know of the machine to judge the numbers, and how busy it is.

Linux only: reads /proc.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Return what a reader must know of the machine to judge the numbers."""
    info = Path("/proc/cpuinfo").read_text()
    flags = set(next(iter(re.findall(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)), "").split())
    notable = (
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "asimd",
        "i8mm",
        "bf16",
    )
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": next(iter(re.findall(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in notable if flag in flags],
        "memory_gb": round(int(memory.group(1)) / 1e6, 1) if memory else None,
        "python": platform.python_version(),
        "looseleaf_commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def machine_busy_s() -> float:
    """Return the CPU seconds that all cores have worked since boot, time stolen by the hypervisor included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def describe_machine(facts: dict[str, Any]) -> str:
    """Write the facts in one line."""
    return (
        f"{facts['cores']} cores of {facts['cpu']} ({', '.join(facts['flags'])}), {facts['memory_gb']} GB, "
        f"Python {facts['python']}, commit {facts['looseleaf_commit']}, {facts['date']}."
    )
