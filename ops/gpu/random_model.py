"""A Llama of any size with random weights, made on the device: for speed, where the words do not matter and there is no network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backends.ops import open_ops
from service.model.config import DecoderConfig
from service.model.decoder import Decoder
from service.model.loading import LoadedModel
from service.model.safetensors_files import HfNaming
from service.model.weights import TensorSpec, read_weights


class RandomSource:
    """A `TensorSource` whose tensors are drawn when they are read."""

    def __init__(self, config: DecoderConfig) -> None:
        self.description = "random weights"
        self.norm_offset = 0.0
        self.naming = HfNaming("model.", "lm_head.weight", config.family)
        N, width = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        shapes = {"model.embed_tokens.weight": (config.vocab_size, N), "lm_head.weight": (config.vocab_size, N)}
        of_a_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (N,),
            "post_attention_layernorm": (N,),
            "self_attn.q_proj": (queries, N),
            "self_attn.k_proj": (keys, N),
            "self_attn.v_proj": (keys, N),
            "self_attn.o_proj": (N, queries),
            "mlp.gate_proj": (width, N),
            "mlp.up_proj": (width, N),
            "mlp.down_proj": (N, width),
        }
        layers = {
            f"model.layers.{index}.{name}.weight": shape
            for index in range(config.num_layers)
            for name, shape in of_a_layer.items()
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {**shapes, **layers, "model.norm.weight": (N,)}

    def is_ignorable(self, name: str) -> bool:  # noqa: ARG002  # every name has the same answer
        """Tell that every tensor is needed."""
        return False

    def read(self, spec: TensorSpec, out: Tensor) -> None:
        """Draw a matrix; a norm is ones."""
        if len(spec.shape) == 1:
            out.fill_(1)
        else:
            out.normal_(0, spec.shape[1] ** -0.5)


def random_llama(
    layers: int, hidden: int, width: int, heads: int, kv_heads: int, vocab: int, max_len: int, device: torch.device
) -> LoadedModel:
    """Build the model in bfloat16. (32, 4096, 14336, 32, 8, 128256) has the shape of Llama 3.1 8B."""
    config = DecoderConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        None,
    )
    weights = read_weights(config, RandomSource(config), torch.bfloat16, device)
    decoder = Decoder(config, weights, open_ops(device, torch.bfloat16), max_len)
    return LoadedModel(
        name="random-llama",
        decoder=decoder,
        config=config,
        dtype=torch.bfloat16,
        max_model_len=max_len,
        tokenizer_source={},
        eos_ids=frozenset(),
    )
