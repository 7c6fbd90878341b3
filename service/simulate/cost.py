"""What a step costs: four coefficients, given, fitted, or derived from a device's data sheet.

The terms are added up, as if reading memory and computing never overlapped, so times err on the long side.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

Cost = Annotated[float, Meta(ge=0.0)]


class Work(NamedTuple):
    """What a step does, in the counts that cost time."""

    num_tokens: int  # tokens computed
    num_context: int  # cached positions read: each sequence's length once
    num_pairs: int  # (query, position) pairs of attention


class StepCost(Struct, frozen=True, kw_only=True):
    """Seconds of a step: `base_s + token_s × tokens + context_s × context + pair_s × pairs`."""

    base_s: Cost  # whatever is in the batch: reading the weights, launching
    token_s: Cost  # the linear layers of one token
    context_s: Cost = 0.0  # reading the keys and values of one position
    pair_s: Cost = 0.0  # one query attending to one position

    def seconds(self, work: Work) -> float:
        """Return how long a step takes."""
        return (
            self.base_s
            + self.token_s * work.num_tokens
            + self.context_s * work.num_context
            + self.pair_s * work.num_pairs
        )


def data_sheet_cost(
    *,
    num_parameters: float,
    kv_bytes_per_token: float,
    attention_width: int,
    num_layers: int,
    bytes_per_s: float,
    flops_per_s: float,
    efficiency: float = 0.6,
    overhead_s: float = 0.001,
) -> StepCost:
    """Derive the coefficients for 16-bit weights from data sheet figures, of which `efficiency` is reached.

    `attention_width` is query heads × head size. `overhead_s` is everything between two steps.
    """
    return StepCost(
        base_s=overhead_s + 2 * num_parameters / (bytes_per_s * efficiency),
        token_s=2 * num_parameters / (flops_per_s * efficiency),
        context_s=kv_bytes_per_token / (bytes_per_s * efficiency),
        pair_s=4 * num_layers * attention_width / (flops_per_s * efficiency),
    )


# Data sheets: NVIDIA A100 80 GB SXM (2.039 TB/s, 312 Tflop/s bf16), H100 SXM (3.35 TB/s, 989 Tflop/s bf16 dense).
COSTS = {
    "llama-2-13b-a100": data_sheet_cost(
        num_parameters=13.0e9,
        kv_bytes_per_token=2 * 40 * 5120 * 2,  # 40 layers, 40 heads of 128, no grouping
        attention_width=5120,
        num_layers=40,
        bytes_per_s=2.039e12,
        flops_per_s=312e12,
    ),
    "llama-3.1-8b-h100": data_sheet_cost(
        num_parameters=8.03e9,
        kv_bytes_per_token=2 * 32 * 1024 * 2,  # 32 layers, 8 key-value heads of 128
        attention_width=4096,
        num_layers=32,
        bytes_per_s=3.35e12,
        flops_per_s=989e12,
    ),
}
