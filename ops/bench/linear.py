"""How fast weights stream through the linears of SmolLM2-135M, against the machine's read bandwidth and torch's own products.

    python ops/bench/linear.py [--threads 2] [--rows 1 4 16 32] [--rounds 9]

Each shape uses enough different matrices that none stays in a cache, as in a model. `prepacked` is oneDNN with weights reordered for that
number of rows: a second copy of them, so it is a yardstick here, not a choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from kernel_timing import best_times, read_bandwidth
from torch import Tensor
from torch.nn import functional

from backends.ops import open_ops

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate, up": (3072, 576), "down": (576, 1536), "lm head": (49152, 576)}
STREAMED_BYTES = 100e6


def main() -> None:
    """Print one line per shape and number of rows, then the sum over a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print(f"{options.threads} threads, read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    print(
        f"{'':9} {'N x K':>12} {'rows':>5} | {'ours':>17} | {'F.linear':>17} | {'prepacked':>17} | ours TFLOP/s, F.linear / ours"
    )
    model = dict.fromkeys(options.rows, 0.0)
    for name, (N, K) in SHAPES.items():
        count = max(2, min(60, int(STREAMED_BYTES / (N * K * 2))))
        weights = [torch.randn(N, K).bfloat16() for _ in range(count)]
        ours = [open_ops(torch.device("cpu"), torch.bfloat16).pack_linear(weight) for weight in weights]
        for rows in options.rows:
            x = torch.randn(rows, K).bfloat16()
            contenders = {"ours": through(ours, x), "F.linear": through([plain(w) for w in weights], x)}
            if torch.backends.mkldnn.is_available():
                contenders["prepacked"] = through([prepacked(w, rows) for w in weights], x)
            times = {key: value / count for key, value in best_times(contenders, options.rounds).items()}
            cells = [f"{t * 1e6:7.0f} us {N * K * 2 / t / 1e9:4.1f} GB/s" for t in times.values()]
            speed = 2 * N * K * rows / times["ours"] / 1e12
            print(
                f"{name:9} {N:>6} x {K:>4} {rows:>4} | {' | '.join(cells)} | {speed:.3f}, {times['F.linear'] / times['ours']:.2f}",
                flush=True,
            )
            model[rows] += times["ours"] * (1 if name == "lm head" else 30)
    for rows, seconds in model.items():
        print(f"all linears of SmolLM2-135M, {rows} rows: {seconds * 1e3:.1f} ms, {0.269 / seconds:.1f} GB/s")


def through(linears: list[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], None]:
    """Return a function that applies every linear to x."""

    def apply() -> None:
        for linear in linears:
            linear(x)

    return apply


def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return torch's product."""
    return lambda x: functional.linear(x, weight)


def prepacked(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """Return oneDNN's product with a weight reordered for `rows` rows."""
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


if __name__ == "__main__":
    main()
