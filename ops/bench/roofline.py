#!/usr/bin/env python3
"""What the machine could do at best: how fast it reads memory and multiplies matrices, and what that makes of a workload.

    python ops/bench/roofline.py MODEL.gguf     # measures, and prints one JSON document

compare.py runs this at the start of every round, in a process of its own. The ideal counts what cannot be avoided and nothing else:

    prefill   2·(layers' weights)·P + 2·(head's weights) + 2·P²·(query width)·layers operations a request, at the matrix rate
    decode    (N-1) steps; each reads all weights once and the keys and values of c contexts of P + N/2 tokens,
              or multiplies c rows by all weights and attends to those contexts, whichever takes longer
    ideal     c·N / (c·prefill + (N-1)·step) output tokens a second

for prompts of P tokens, N new ones and c requests at once. Prefill and decode are added: an engine that ran one's arithmetic under the
other's reads could pass this ideal, none of these does. Norms, rotary embeddings, softmax, sampling and HTTP cost nothing here. Keys and
values have 16 bits beside bfloat16 weights and 8 beside smaller ones, as in our rows. The reading rate of a format is that of a buffer as large as its weights, so a cache that holds them raises it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

KV_BYTES = {"bf16": 2, "int8": 1, "int4": 1}  # of one number of keys or values, by the format of the weights

# The formats, and the weights that each peer reads.
FORMATS = {
    "looseleaf": "bf16",
    "looseleaf-int8": "int8",
    "looseleaf-int4": "int4",
    "looseleaf-plain": "bf16",
    "looseleaf-int8-plain": "int8",
    "looseleaf-int4-plain": "int4",
    "vllm": "bf16",
    "vllm-eager": "bf16",
    "llama-q4_1": "int4",
    "llama-q8_0": "int8",
    "openvino-bf16": "bf16",
    "openvino-int8": "int8",
    "transformers": "bf16",
    "transformers-cb": "bf16",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a checkpoint decides the work of a step."""

    num_layers: int
    query_width: int  # query heads times head size
    kv_width: int  # key and value heads times head size
    layer_weights: int  # numbers in the matrices of all layers
    head_weights: int  # numbers in the matrix that makes logits
    weight_bytes: dict[str, int]  # a step reads so much, by format

    def kv_bytes_per_token(self, weights: str) -> int:
        """Count the bytes of keys and values of one token in all layers; scales are left out."""
        return 2 * self.num_layers * self.kv_width * KV_BYTES[weights]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured. `read_bytes_per_s` by format: of a buffer of the size of its weights."""

    read_bytes_per_s: dict[str, float]
    matmul_flops_per_s: float  # bfloat16


@dataclass(frozen=True, slots=True)
class Roofline:
    """One measurement, with the shape it is meant for."""

    shape: ModelShape
    ceilings: Ceilings


def read_shape(gguf: Path) -> ModelShape:
    """Read the shape of a Llama-like GGUF checkpoint whose embedding is also its head, or not."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    kind = metadata["general.architecture"]
    heads, hidden = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
    head_size = metadata.get(f"{kind}.attention.key_length", hidden // heads)
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) == 2}
    head_name = "output.weight" if "output.weight" in matrices else "token_embd.weight"
    head = matrices[head_name]
    layers = [tensor for name, tensor in matrices.items() if name.startswith("blk.")]
    num_weights = int(sum(tensor.n_elements for tensor in [*layers, head]))
    num_rows = int(sum(tensor.shape[1] for tensor in [*layers, head]))
    return ModelShape(
        num_layers=metadata[f"{kind}.block_count"],
        query_width=heads * head_size,
        kv_width=metadata.get(f"{kind}.attention.head_count_kv", heads) * head_size,
        layer_weights=num_weights - int(head.n_elements),
        head_weights=int(head.n_elements),
        weight_bytes={
            "bf16": 2 * num_weights,
            "int8": num_weights + 4 * num_rows,  # a scale for each row
            "int4": int(sum(tensor.n_bytes for tensor in [*layers, head])),  # the file's own blocks
        },
    )


def measure_ceilings(shape: ModelShape) -> Ceilings:
    """Measure both rates on all cores; a few seconds."""
    from kernel_timing import matmul_rate, read_bandwidth

    return Ceilings({name: read_bandwidth(num_bytes) for name, num_bytes in shape.weight_bytes.items()}, matmul_rate())


def prefill_flops(shape: ModelShape, prompt_tokens: int) -> float:
    """Count the operations of one prompt, its last row's logits included; attention is causal."""
    linears = 2 * shape.layer_weights * prompt_tokens + 2 * shape.head_weights
    return linears + 2 * prompt_tokens**2 * shape.query_width * shape.num_layers


def decode_step_s(roofline: Roofline, weights: str, concurrency: int, context_tokens: float) -> float:
    """Return the seconds of one step that gives each of `concurrency` sequences a token."""
    shape, ceilings = roofline.shape, roofline.ceilings
    num_bytes = shape.weight_bytes[weights] + concurrency * context_tokens * shape.kv_bytes_per_token(weights)
    attention = 4 * context_tokens * shape.query_width * shape.num_layers
    flops = concurrency * (2 * (shape.layer_weights + shape.head_weights) + attention)
    return max(num_bytes / ceilings.read_bytes_per_s[weights], flops / ceilings.matmul_flops_per_s)


def ideal_tpot_s(roofline: Roofline, weights: str, concurrency: int, prompt_tokens: int, max_tokens: int) -> float:
    """Return the seconds of a mean decode step of a workload."""
    return decode_step_s(roofline, weights, concurrency, prompt_tokens + max_tokens / 2)


def ideal_ttft_s(roofline: Roofline, prompt_tokens: int) -> float:
    """Return the seconds to the first token of one prompt alone."""
    return prefill_flops(roofline.shape, prompt_tokens) / roofline.ceilings.matmul_flops_per_s


def ideal_tokens_per_s(
    roofline: Roofline, weights: str, concurrency: int, prompt_tokens: int, max_tokens: int
) -> float:
    """Return the output tokens a second of the formulas above."""
    prefill_s = concurrency * ideal_ttft_s(roofline, prompt_tokens)
    step_s = ideal_tpot_s(roofline, weights, concurrency, prompt_tokens, max_tokens)
    return concurrency * max_tokens / (prefill_s + (max_tokens - 1) * step_s)


def main() -> None:
    """Measure, and print the roofline of the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    shape = read_shape(parser.parse_args().gguf)
    print(json.dumps(asdict(Roofline(shape, measure_ceilings(shape)))))


if __name__ == "__main__":
    main()
