"""One decoder layer with its weights packed. Knows its own parts, not the cache's blocks or the step's batch.

Invariant: the order of operations and of roundings is the one of the family's reference; the residual stream is changed in place only.
"""

from __future__ import annotations

from backends.ops import Activation, Linear, Ops
from service.model.weights import LayerWeights


class DecoderLayer:
    """Packed projections and norms of one layer; the fields are read by `Decoder.forward`, in the order they stand here."""

    __slots__ = (
        "attention_norm",
        "down",
        "gated",
        "k_norm",
        "mlp_norm",
        "o",
        "post_attention_norm",
        "post_mlp_norm",
        "q_norm",
        "qkv",
        "rope_index",
    )

    def __init__(self, weights: LayerWeights, rope_index: int, activation: Activation, ops: Ops) -> None:
        self.rope_index = rope_index  # which of the decoder's rope tables turns q and k
        self.attention_norm = weights.attention_norm
        self.qkv: Linear = ops.pack_linear(weights.qkv, weights.qkv_bias)
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.o: Linear = ops.pack_linear(weights.o, weights.o_bias)
        self.post_attention_norm = weights.post_attention_norm
        self.mlp_norm = weights.mlp_norm
        self.gated: Linear = ops.pack_gated_linear(weights.gate_up, weights.gate_up_bias, activation)
        self.down: Linear = ops.pack_linear(weights.down, weights.down_bias)
        self.post_mlp_norm = weights.post_mlp_norm
