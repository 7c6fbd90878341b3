"""What is measured on each peer: a load and the conditions it runs under, as the command line writes them.

    w1:16         closed loop, 16 requests under way
    w4:3          chats, 3 requests a second
    w1:16+busy    beside one process that keeps a core busy
    w1:16@2       in the first two rounds only

Not measurement (measuring.py). Invariant: a case's label says everything about it but the number of rounds.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from prompts import WORKLOADS, Workload

CHATS = Workload("w4", prompt_tokens=0, max_tokens=0)  # its lengths come from the trace
SYNTAX = re.compile(r"(?P<name>\w+):(?P<number>[\d.]+)(?P<busy>\+busy)?(?:@(?P<rounds>\d+))?")


@dataclass(frozen=True, slots=True)
class Case:
    """A workload at a concurrency (closed loop), or with `rate` chats' requests a second (open loop)."""

    workload: Workload
    concurrency: int = 0
    rate: float | None = None
    is_disturbed: bool = False
    max_rounds: int | None = None  # None: in every round

    @property
    def label(self) -> str:
        load = f"c={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"
        return f"{self.workload.name} {load}{' busy' if self.is_disturbed else ''}"

    @property
    def calm_label(self) -> str:
        """The label of the same load undisturbed."""
        return dataclasses.replace(self, is_disturbed=False).label

    def is_due(self, round_number: int) -> bool:
        """Say whether the case is measured in this round, counted from 0."""
        return self.max_rounds is None or round_number < self.max_rounds


def parse_case(text: str) -> Case:
    """Parse what the module's description shows. Raises ValueError for anything else."""
    found = SYNTAX.fullmatch(text)
    if found is None or float(found["number"]) <= 0:
        raise ValueError(text)
    busy, rounds = found["busy"] is not None, int(found["rounds"]) if found["rounds"] else None
    if rounds == 0:
        raise ValueError(text)
    if found["name"] == CHATS.name:
        return Case(CHATS, rate=float(found["number"]), is_disturbed=busy, max_rounds=rounds)
    if found["name"] not in WORKLOADS:
        raise ValueError(text)
    return Case(WORKLOADS[found["name"]], int(found["number"]), is_disturbed=busy, max_rounds=rounds)
