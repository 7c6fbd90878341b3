"""transformers' `generate` as a peer: reads batches from stdin, answers on stdout, one JSON document a line.

Runs inside the environment of the peer `transformers` and imports nothing of ours. In: `{"prompts": [...],
"max_tokens": N}`. Out: `{"step_s": [...], "prompt_tokens": [...], "output_tokens": [...]}`, where `step_s` are the
seconds from having read the batch to the end of each step. The first line out is `{"ready": true}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import transformers  # type: ignore[import-not-found, unused-ignore]  # lives in the peer's environment only


def main() -> None:
    """Load the model named on the command line and serve batches until stdin ends."""
    # Libraries print to stdout as they like: keep the real one, and send theirs to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (model_dir,) = sys.argv[1:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        answer = generate(model, tokenizer, batch["prompts"], batch["max_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


def generate(model: Any, tokenizer: Any, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Run one static batch, greedy, to exactly `max_tokens` new tokens each."""
    start = time.perf_counter()
    step_s: list[float] = []

    def note_step(_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        step_s.append(time.perf_counter() - start)
        return torch.zeros(len(prompts), dtype=torch.bool)

    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    # No end-of-sequence id: nothing stops a row early, as `ignore_eos` does for the servers.
    model.generation_config.eos_token_id = None
    output = model.generate(
        **inputs,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        stopping_criteria=[note_step],
    )
    width = inputs["input_ids"].shape[1]
    return {
        "step_s": step_s,
        "prompt_tokens": inputs["attention_mask"].sum(dim=1).tolist(),
        "output_tokens": [output.shape[1] - width] * len(prompts),
    }


if __name__ == "__main__":
    main()
