"""GGUF files written by the gguf library from the tensors of a Hugging Face folder: the same model, or a clear refusal."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from service.errors import ModelLoadError
from service.model.config import DecoderConfig
from service.model.dequantise import dequantise
from service.model.gguf_file import GgufFile
from service.model.gguf_header import read_gguf_header
from service.model.weights import TensorSpec
from tests.conftest import DATA
from tests.model.checkpoints import folder_state, load, random_state, tiny_config, write_folder, write_gguf
from tests.model.dense import dense_logits, plain_frequencies
from tests.model.paged import PagedDecoder

IDS = [(17 * i + 3) % 90 for i in range(50)]
ARCHITECTURES = {
    "tiny-mistral": "llama",  # what converters call Mistral
    "tiny-qwen2": "qwen2",
    "tiny-qwen3": "qwen3",
    "tiny-phi3": "phi3",
    "tiny-gemma3": "gemma3",
}


def from_golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = DATA / "golden" / name
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), folder_state(folder)


def llama(
    heads: int = 4, kv_heads: int = 2, *, has_bias: bool = False, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random Llama whose rows are multiples of 32, as Q8_0 needs."""
    config = tiny_config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        attention_bias=has_bias or None,
        **changes,
    )
    state = random_state(config, has_bias=has_bias)
    if has_bias:
        for layer in range(2):
            state[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.linspace(-1, 1, 64)
    return config, state


# --- the same model as the folder ---


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 3)])
def test_query_and_key_rows_of_llama_come_back_in_order_exactly(
    heads: int, kv_heads: int, has_bias: bool, tmp_path: Path
) -> None:
    """MDL-05: F32 weights equal exactly, biases permuted too, logits within tolerance."""
    config, state = llama(heads, kv_heads, has_bias=has_bias)
    file = write_gguf(tmp_path / "model.gguf", "llama", config, state)
    source = GgufFile(file)
    for role, count in (("q", heads), ("k", kv_heads), ("v", None)):
        for kind in ("weight", "bias") if has_bias else ("weight",):
            wanted = state[f"model.layers.1.self_attn.{role}_proj.{kind}"]
            got = torch.empty_like(wanted)
            source.read(TensorSpec(source.naming.layer(1, role, kind), tuple(wanted.shape), count), got)
            assert torch.equal(got, wanted), (role, kind)
    folder = PagedDecoder(load(write_folder(tmp_path / "folder", config, state)).decoder).whole(IDS)
    assert torch.equal(PagedDecoder(load(file).decoder).whole(IDS), folder)
    wanted_logits = dense_logits(config, state, IDS, plain_frequencies(10_000, 16))
    assert torch.allclose(folder.double(), wanted_logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_loads_from_gguf_as_from_its_folder(name: str, kind: Kind, tmp_path: Path) -> None:
    """MDL-05: Qwen2, Qwen3, Phi-3 and Gemma 3 are not permuted; Gemma's norms are stored whole."""
    config, state = from_golden(name)
    if name == "tiny-gemma3":  # the files do not state them: llama.cpp's layer pattern and query scale
        config.update(layer_types=["sliding_attention"] * 3, query_pre_attn_scalar=32)
    stored = {
        key: torch.from_numpy(np.array(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)))
        if tensor.dim() > 1
        else tensor
        for key, tensor in state.items()
    }
    wanted = PagedDecoder(load(write_folder(tmp_path / "folder", config, stored)).decoder).whole(IDS)
    model = load(write_gguf(tmp_path / "model.gguf", ARCHITECTURES[name], config, state, kind=kind))
    assert model.config.family.name == ARCHITECTURES[name]
    assert torch.allclose(PagedDecoder(model.decoder).whole(IDS), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("prompt", [3, 5])
def test_llama3_scaling_that_the_converter_worked_out_is_applied(prompt: int, tmp_path: Path) -> None:
    """NUM-02: a GGUF file of Llama 3 has a tensor of divisors instead of scaling keys; the golden tokens show that it is used."""
    config, state = from_golden("tiny-llama")
    divisors = []
    for i in range(8):
        wavelength = 2 * torch.pi * 10_000 ** (2 * i / 16)
        smooth = min(max((64 / wavelength - 1) / (4 - 1), 0), 1)
        divisors.append(1 / ((1 - smooth) / 8 + smooth))
    file = write_gguf(
        tmp_path / "model.gguf", "llama", config, state, extra={"rope_freqs.weight": torch.tensor(divisors)}
    )
    golden = json.loads((DATA / "golden" / "tiny-llama" / "golden.json").read_text(encoding="utf-8"))["prompts"][prompt]
    got = PagedDecoder(load(file).decoder).whole(golden["ids"])
    assert torch.allclose(got[-1], torch.tensor(golden["last_logits"]), rtol=0, atol=1e-3)


def test_a_file_without_an_output_tensor_is_tied(tmp_path: Path) -> None:
    """MDL-03: presence decides, not the model's fame."""
    config, state = llama()
    untied = load(write_gguf(tmp_path / "untied.gguf", "llama", config, state))
    del state["lm_head.weight"]
    tied = load(write_gguf(tmp_path / "tied.gguf", "llama", config, state))
    assert (untied.config.tie_embeddings, tied.config.tie_embeddings) == (False, True)
    wanted = dense_logits(config, state, IDS, plain_frequencies(10_000, 16))
    assert torch.allclose(PagedDecoder(tied.decoder).whole(IDS).double(), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Kind.F32, torch.float32), (Kind.F16, torch.bfloat16), (Kind.Q8_0, torch.bfloat16), (Kind.BF16, torch.bfloat16)],
)
def test_auto_follows_the_type_of_most_weights(kind: Kind, expected: torch.dtype, tmp_path: Path) -> None:
    config, state = llama()
    assert load(write_gguf(tmp_path / "model.gguf", "llama", config, state, kind=kind), dtype="auto").dtype == expected


# Where a block has its float16 scales: random bits there may be NaN.
SCALES = {
    Kind.Q4_0: slice(0, 2),
    Kind.Q4_1: slice(0, 4),
    Kind.Q5_0: slice(0, 2),
    Kind.Q5_1: slice(0, 4),
    Kind.Q8_0: slice(0, 2),
    Kind.Q4_K: slice(0, 4),
    Kind.Q5_K: slice(0, 4),
    Kind.Q6_K: slice(208, 210),
}


@pytest.mark.parametrize("kind", [*SCALES, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_blocks_decode_to_the_numbers_of_the_gguf_library(kind: Kind) -> None:
    """Bit for bit in float32; rounded once in bfloat16. More blocks than are converted at a time."""
    rng = np.random.default_rng(3)
    rows, columns = 300, 256
    if kind in SCALES:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (rows, columns // block_size * block_bytes), dtype=np.uint8)
        blocks = raw.reshape(-1, block_bytes)
        num_scales = len(range(block_bytes)[SCALES[kind]]) // 2
        blocks[:, SCALES[kind]] = rng.standard_normal((len(blocks), num_scales)).astype(np.float16).view(np.uint8)
    else:
        raw = gguf.quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), kind).view(np.uint8)
    wanted = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
    wide, narrow = torch.empty(rows, columns), torch.empty(rows, columns, dtype=torch.bfloat16)
    dequantise(raw.reshape(-1), kind, wide)
    dequantise(raw.reshape(-1), kind, narrow)
    assert torch.equal(wide, wanted)
    assert torch.equal(narrow, wanted.to(torch.bfloat16))


def test_metadata_is_plain_python(tmp_path: Path) -> None:
    config, state = llama()
    model = load(write_gguf(tmp_path / "model.gguf", "llama", config, state))
    assert isinstance(model.tokenizer_source, dict)
    tokens, scores = model.tokenizer_source["tokenizer.ggml.tokens"], model.tokenizer_source["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    assert tokens[:2] == ["token 0", "token 1"]
    assert scores[:2] == [0.0, -1.0]
    assert type(scores[1]) is float
    assert model.eos_ids == {2}
    assert model.name == "model"


# --- refusals ---


def test_missing_and_misshapen_tensors_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    """MDL-01."""
    config, state = llama()
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(16, 64)
    state["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
    with pytest.raises(ModelLoadError) as raised:
        load(write_gguf(tmp_path / "model.gguf", "llama", config, state))
    assert "1 tensors are missing: blk.1.ffn_up.weight" in raised.value.message
    assert "blk.0.attn_v.weight is [16, 64], expected [32, 64]" in raised.value.message


def test_quantised_files_account_for_every_tensor_too(tmp_path: Path) -> None:
    """MDL-01: the quantised equivalent."""
    config, state = llama()
    del state["model.norm.weight"]
    with pytest.raises(ModelLoadError, match=r"1 tensors are missing: output_norm\.weight"):
        load(write_gguf(tmp_path / "model.gguf", "llama", config, state, kind=Kind.Q8_0))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    config, state = llama()
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: GGUF architecture 'mamba' is not supported; known are llama"
    ):
        load(write_gguf(tmp_path / "model.gguf", "mamba", config, state))


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    """MDL-01: the other parts hold the missing tensors."""
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"part\.gguf is one of 3 parts"):
        load(tmp_path / "part.gguf")


def metadata(**changes: object) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    values: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
    }
    values.update({f"llama.{key.replace('__', '.')}": value for key, value in changes.items()})
    return {key: value for key, value in values.items() if value is not None}, {"token_embd.weight": (96, 64)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama: block_count is missing"),
        ({"block_count": 2**40}, "block_count is 1099511627776, the limit is"),
        ({"attention__head_count": 3}, "embedding_length 64 is no multiple of 3 heads"),
        ({"attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"attention__head_count_kv": [2, 2]}, "head_count_kv is .* expected a whole number"),
        ({"attention__key_length": 16, "attention__value_length": 32}, "keys of size 16 and values of size 32"),
        (
            {"rope__scaling__type": "spiral"},
            "rope scaling type 'spiral' is not supported; known are none, linear, yarn, longrope",
        ),
        ({"rope__scaling__type": "yarn"}, "rope scaling 'yarn' needs rope.scaling.factor"),
        ({"rope__scaling__type": "longrope"}, "rope_factors_short has 0 numbers, expected 8"),
        ({"rope__dimension_count": 7}, "7 of 16 dimensions would rotate"),
        ({"expert_count": 8}, "mixtures of experts are not supported"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused_by_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        DecoderConfig.from_gguf(*metadata(**changes))


def test_rotary_scaling_in_the_metadata_is_read() -> None:
    """NUM-02: linear by its new and its old key, yarn with its original context."""
    for changes in ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}):
        rope = DecoderConfig.from_gguf(*metadata(**changes)).ropes[0]
        assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    changes = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    }
    rope = DecoderConfig.from_gguf(*metadata(**changes)).ropes[0]
    assert (rope.rope_type, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)


# --- damaged files ---


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A whole GGUF file, to damage."""
    return write_gguf(tmp_path / "model.gguf", "llama", *llama(), kind=Kind.Q8_0)


def patched(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:offset] + data + whole[offset + len(data) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: b"", r"is empty \(0 bytes\)"),
        (lambda whole: whole[:3], r"\(3 bytes\) is no GGUF file: it starts with b'GGU'"),
        (lambda whole: whole[:12], r"has 12 bytes, .* need 8 where 4 are left"),
        (lambda whole: whole[:200], r"has 200 bytes, .*are left"),
        (lambda whole: whole[:1500], r"has 1500 bytes, .*are left"),
        (lambda whole: whole[:-20_000], r"has \d+ bytes, but tensor blk\.1\.\S+ would end at \d+; it is cut off"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "is no GGUF file: it is a Git LFS pointer"),
        (lambda whole: b"<html><body>not found</body></html>", "is no GGUF file: it is a web page"),
        (patched(4, struct.pack("<I", 1)), "is GGUF version 1; supported are 2, 3"),
        (patched(4, struct.pack(">I", 3)), r"is GGUF version 50331648 \(a big-endian file\?\)"),
        (patched(8, struct.pack("<Q", 2**60)), r"1152921504606846976 tensors and \d+ metadata keys .* are left"),
        (patched(16, struct.pack("<Q", 2**62)), r"tensors and 4611686018427387904 metadata keys .* are left"),
        (patched(24, struct.pack("<Q", 2**50)), r"a string at byte 32 need 1125899906842624"),
    ],
)
def test_a_damaged_file_is_one_clear_line(damage: Callable[[bytes], bytes], message: str, sound: Path) -> None:
    """MDL-08: cut at magic, metadata, tensor data; wrong version; absurd counts, none of which is allocated."""
    sound.write_bytes(damage(sound.read_bytes()))
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(sound)
    assert "model.gguf" in raised.value.message
    assert "\n" not in raised.value.message


def test_a_file_cut_anywhere_is_refused(sound: Path) -> None:
    """MDL-08: every prefix of the header, and some of the data."""
    whole = sound.read_bytes()
    first_tensor = min(entry.start for entry in read_gguf_header(sound).tensors.values())
    for size in [*range(0, first_tensor, 61), *range(first_tensor, len(whole), 20_011), len(whole) - 64]:
        sound.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError):
            load(sound)


def test_any_byte_of_the_header_may_be_wrong_without_another_kind_of_failure(sound: Path) -> None:
    """MDL-08: the file loads or is refused; no other exception, no huge allocation."""
    whole = sound.read_bytes()
    first_tensor = min(entry.start for entry in read_gguf_header(sound).tensors.values())
    refused = 0
    for offset in range(4, first_tensor, 23):
        sound.write_bytes(patched(offset, b"\xff")(whole))
        try:
            read_gguf_header(sound)
        except ModelLoadError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("count", [2**61, 2**32])
def test_absurd_list_lengths_are_refused_before_anything_is_allocated(count: int, tmp_path: Path) -> None:
    """MDL-08: a list of strings and a list of numbers."""
    for kind, name in ((8, "strings"), (5, "values")):
        key = b"general.x"
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, count) + b"\0" * 64
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
        with pytest.raises(ModelLoadError, match=f"{count} {name} at byte"):
            load(file)
