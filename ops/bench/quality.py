"""What weights and keys in few bits cost: perplexity of the fixed text, and agreement with the golden tokens of float32, teacher-forced.

    python ops/bench/quality.py [--tokens 2000] [--max-prompt 300] [--only bfloat16,int4]

Deterministic: the same commit on the same kind of processor prints the same numbers; how busy the machine is changes nothing. The text is
scored in chunks of 100 tokens, so that quantised keys are read back; the reference are the numbers of transformers in the golden file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.interface import AttentionMetadata, DeviceInfo
from backends.kv_cache import KVCache
from backends.registry import open_backend
from service.model.fetch import resolve_model
from service.model.loading import DtypeName, load_model
from service.model.quantisation import Quantisation
from service.text import Tokenizer

DATA = Path(__file__).parents[2] / "tests/data"
BLOCK_SIZE, CHUNK = 16, 100
INT8, FP8 = torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Variant:
    """One way to hold the model: type of activations, weights, elements of the KV cache."""

    name: str
    dtype: DtypeName = "bfloat16"
    quantise: Quantisation = "none"
    kv: torch.dtype | None = None


VARIANTS = [
    Variant("float32", dtype="float32"),
    Variant("bfloat16"),
    Variant("int8", quantise="int8"),
    Variant("stored", quantise="stored"),
    Variant("int4", quantise="int4"),
    Variant("bfloat16, int8 KV", kv=INT8),
    Variant("bfloat16, fp8 KV", kv=FP8),
    Variant("int8, int8 KV", quantise="int8", kv=INT8),
    Variant("int4, int8 KV", quantise="int4", kv=INT8),
]


class Scorer:
    """A model with a cache for one sequence at a time."""

    def __init__(self, path: Path, variant: Variant, max_tokens: int) -> None:
        device = DeviceInfo(kind="cpu")
        self.model = load_model(path, dtype=variant.dtype, quantise=variant.quantise)
        spec = self.model.decoder.kv_cache_spec(BLOCK_SIZE, quantised=variant.kv)
        self._backend: Any = open_backend("numba-cpu", spec, device)
        self._num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.model.decoder.bind_cache(KVCache(spec, self._num_blocks + 1, device.torch_device))

    def logprobs(self, ids: Sequence[int], first: int) -> Tensor:
        """Return the log probabilities of the token behind each of ids[first:], [len(ids) - first, V]."""
        decoder, rows = self.model.decoder, []
        table = torch.arange(1, self._num_blocks + 1, dtype=torch.int32).unsqueeze(0)
        for start in range(0, len(ids), CHUNK):
            positions = torch.arange(start, min(start + CHUNK, len(ids)))
            end = start + len(positions)
            meta = AttentionMetadata(
                query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_tables=table,
                slot_mapping=positions + BLOCK_SIZE,  # block 0 is the null block
                max_query_len=len(positions),
                max_seq_len=end,
            )
            plan = self._backend.plan(meta, decoder.attention_layers)
            hidden = decoder.forward(torch.tensor(ids[start:end]), positions, plan, self._backend)
            if end > first:
                rows.append(decoder.logits(hidden[max(0, first - start) :]).log_softmax(-1))
        return torch.cat(rows)


def measure(path: Path, variant: Variant, num_tokens: int, prompts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return perplexity, the share of golden tokens that are the likeliest, the largest gap among the others, and the largest logprob difference."""
    longest = max([num_tokens, *(len(prompt["ids"]) + len(prompt["steps"]) for prompt in prompts)])
    scorer = Scorer(path, variant, longest)
    tokenizer = Tokenizer.from_gguf_metadata(scorer.model.tokenizer_source)  # type: ignore[arg-type]
    text = (DATA / "text/alice.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: 10 * num_tokens])[:num_tokens]
    scored = scorer.logprobs(ids[:-1], 0).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    steps = agreed = 0
    largest_gap = largest_difference = 0.0
    for prompt in prompts:
        wanted = prompt["steps"]
        got = scorer.logprobs([*prompt["ids"], *(step["id"] for step in wanted[:-1])], len(prompt["ids"]) - 1)
        for step, row in zip(wanted, got, strict=True):
            steps += 1
            if int(row.argmax()) == step["id"]:
                agreed += 1
            else:
                largest_gap = max(largest_gap, step["gap"])
            largest_difference = max(largest_difference, abs(float(row[step["id"]]) - step["top"][0][1]))
    return {
        "perplexity": math.exp(-float(scored.double().mean())),
        "agreement": agreed / steps,
        "gap": largest_gap,
        "difference": largest_difference,
        "steps": steps,
    }


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=2000, help="of the text (default: %(default)s, what the golden file scored)"
    )
    parser.add_argument(
        "--max-prompt", type=int, default=300, help="longest golden prompt in tokens (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="names of variants, separated by commas")
    options = parser.parse_args()
    golden = json.loads((DATA / "golden/smollm2-135m/golden.json").read_text(encoding="utf-8"))
    prompts = [prompt for prompt in golden["prompts"] if len(prompt["ids"]) <= options.max_prompt]
    path = resolve_model("smollm2-135m", report=str)
    base = None
    print(
        "| weights, KV | perplexity | against the first | golden tokens kept | largest gap lost | largest logprob difference |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for variant in VARIANTS:
        if options.only and variant.name not in options.only.split(","):
            continue
        found = measure(path, variant, options.tokens, prompts)
        base = base or found["perplexity"]
        print(
            f"| {variant.name} | {found['perplexity']:.4f} | {found['perplexity'] / base - 1:+.2%} | {found['agreement']:.2%} of "
            f"{found['steps']} | {found['gap']:.3f} | {found['difference']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
