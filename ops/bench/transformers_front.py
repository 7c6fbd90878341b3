"""transformers' continuous batching as a peer: its manager behind `front.py`.

Runs inside the environment of the peer `transformers` and imports nothing of ours but front.py. The manager steps on a thread of its
own and hands tokens to the event loop itself. Its cache is bounded here: on a CPU it sizes itself by the memory of the whole machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers  # type: ignore[import-not-found, unused-ignore]  # lives in the peer's environment only
from front import Deliver, EngineFailed, parser, serve

CACHE_TOKENS = 65_536  # 32 sequences of 2048
PAGE_TOKENS = 256  # its default
MAX_BATCH_TOKENS = 2048
MAX_SEQUENCES = 64


class TransformersEngine:
    """Passes requests to a continuous batching manager."""

    def __init__(self, model_dir: str) -> None:
        """Load the model in bfloat16 and start the manager's thread."""
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
        config = transformers.ContinuousBatchingConfig(
            num_blocks=CACHE_TOKENS // PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=MAX_SEQUENCES,
        )
        # -1: no end-of-sequence id, so nothing stops early.
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager: Any = model.init_continuous_batching(greedy, config)
        self._manager.start()
        self._ids = itertools.count()

    def submit(self, prompt_ids: list[int], max_tokens: int, deliver: Deliver) -> Callable[[], None]:
        """Start a request; the manager tells all tokens so far with every step."""
        name, num_seen = f"request-{next(self._ids)}", 0

        def receive(output: Any) -> None:
            nonlocal num_seen
            if output.error is not None:
                deliver(EngineFailed(str(output.error)))
                return
            new = list(output.generated_tokens[num_seen:])
            num_seen += len(new)
            if new:
                deliver(new)

        self._manager.register_result_handler(name, receive)
        self._manager.add_request(prompt_ids, name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)
        return lambda: self._manager.cancel_request(name)


def main() -> None:
    """Load the model named on the command line and serve it."""
    options = parser(__doc__ or "").parse_args()
    loop = asyncio.new_event_loop()
    serve(TransformersEngine(options.model), options, loop)


if __name__ == "__main__":
    main()
