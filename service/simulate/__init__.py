"""Replay a trace of token counts through the real scheduler and allocator, with a model of what a step costs.

No model, no tensor, no clock: a day of traffic takes minutes, and every what-if (block size, pool size, eviction policy, tenants) is
answered by the code that serves.
"""

from service.simulate.cost import COSTS, StepCost, Work
from service.simulate.simulator import Engine, Report, simulate
from service.simulate.trace import TraceRequest, assign_tenants, num_common_ids, read_trace, resample

__all__ = [
    "COSTS",
    "Engine",
    "Report",
    "StepCost",
    "TraceRequest",
    "Work",
    "assign_tenants",
    "num_common_ids",
    "read_trace",
    "resample",
    "simulate",
]
