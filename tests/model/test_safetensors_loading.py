"""Hugging Face folders as they are found in the wild: shards, stray files, missing and damaged ones."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from backends.ops import Linear, TorchOps, open_ops
from service.errors import ModelLoadError
from tests.conftest import DATA
from tests.model.checkpoints import folder_state, load, random_state, tiny_config, write_folder
from tests.model.paged import PagedDecoder

SHARDED = DATA / "golden" / "tiny-llama-tied-bf16"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
IDS = [1, 17, 60, 200, 31, 5, 9]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the checkpoint with two shards, to damage."""
    return shutil.copytree(SHARDED, tmp_path / "model")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A small folder with one safetensors file, to damage."""
    config = tiny_config()
    return write_folder(tmp_path / "model", config, random_state(config))


def logits(folder: Path, ids: Sequence[int] = IDS) -> Tensor:
    return PagedDecoder(load(folder).decoder).whole([i % 96 for i in ids])


class RecordingOps(TorchOps):
    """Remembers the weights that were packed."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self.packed.append(weight)
        return super().pack_linear(weight, bias)


# --- missing parts ---


def test_a_shard_that_is_not_there_stops_the_load_and_is_named(sharded: Path) -> None:
    """MDL-01."""
    (sharded / SECOND).unlink()
    with pytest.raises(ModelLoadError, match=f"names 1 files that are not there: {SECOND}"):
        load(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    """MDL-01: the index assigns it, the shard does not hold it."""
    state = load_file(sharded / SECOND)
    name = sorted(state)[0]
    del state[name]
    save_file(state, sharded / SECOND)
    with pytest.raises(ModelLoadError, match=f"1 tensors that their shards lack: {name} \\(in {SECOND}\\)"):
        load(sharded)


def test_a_tensor_that_no_file_holds_is_named(sharded: Path) -> None:
    """MDL-01: neither the index nor a shard has it."""
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    name = "model.layers.1.mlp.up_proj.weight"
    state = load_file(sharded / index["weight_map"][name])
    del state[name]
    save_file(state, sharded / index["weight_map"].pop(name))
    (sharded / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=f"1 tensors are missing: {name}"):
        load(sharded)


def test_all_faults_of_a_checkpoint_are_in_one_message(single: Path) -> None:
    """MDL-01: two missing tensors, a wrong shape and a bias that the configuration has no place for."""
    state = folder_state(single)
    del state["model.norm.weight"], state["model.layers.0.mlp.down_proj.weight"]
    state["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(24, 47)
    state["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(state, single / "model.safetensors")
    with pytest.raises(ModelLoadError) as raised:
        load(single)
    message = raised.value.message
    assert "2 tensors are missing: model.norm.weight, model.layers.0.mlp.down_proj.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight is [24, 47], expected [24, 48]" in message
    assert "no place in this configuration: model.layers.1.self_attn.q_proj.bias" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", sorted(random_state(tiny_config())))
def test_every_tensor_of_a_checkpoint_is_needed(name: str, single: Path) -> None:
    """MDL-01: each parameter is loaded; without any one of them the load fails and names it."""
    state = folder_state(single)
    del state[name]
    save_file(state, single / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"1 tensors are missing: {name}"):
        load(single)


# --- extra parts ---


def test_files_that_the_index_does_not_name_are_ignored_with_one_line(sharded: Path) -> None:
    """MDL-02: consolidated weights, an adapter and a stray shard with other values."""
    wanted = logits(SHARDED)
    other = {name: tensor + 1 for name, tensor in load_file(sharded / SECOND).items()}
    for stray in ("consolidated.safetensors", "adapter_model.safetensors", "model-00003-of-00003.safetensors"):
        save_file(other, sharded / stray)
    (sharded / "optimizer.bin").write_bytes(b"not read")
    with capture_logs() as logs:
        got = logits(sharded)
    assert torch.equal(got, wanted)
    assert [log["event"] for log in logs] == ["model.files_ignored"]
    assert logs[0]["count"] == 3


def test_a_tensor_in_two_shards_comes_from_the_one_that_the_index_names(sharded: Path) -> None:
    """MDL-02."""
    wanted = logits(SHARDED)
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    first = "model-00001-of-00002.safetensors"
    name = next(tensor for tensor, file in index.items() if file == first)
    save_file(
        {**load_file(sharded / SECOND), name: torch.full_like(load_file(sharded / first)[name], 9)}, sharded / SECOND
    )
    assert torch.equal(logits(sharded), wanted)


def test_extras_known_to_be_harmless_are_silent_and_unknown_ones_are_warned_of(single: Path) -> None:
    """MDL-02."""
    wanted, state = logits(single), folder_state(single)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(state, single / "model.safetensors")
    with capture_logs() as logs:
        assert torch.equal(logits(single), wanted)
    assert not logs
    state["model.layers.0.adapter.weight"] = torch.ones(6)
    save_file(state, single / "model.safetensors")
    with capture_logs() as logs:
        assert torch.equal(logits(single), wanted)
    assert [(log["event"], log["log_level"], log["names"]) for log in logs] == [
        ("model.tensors_ignored", "warning", "model.layers.0.adapter.weight")
    ]


def test_an_index_cannot_name_files_outside_its_folder(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.weight"] = "../other/model.safetensors"
    (sharded / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is '\.\./other.*name of a file beside the index"):
        load(sharded)


def test_a_multimodal_prefix_and_a_bare_backbone_are_recognised(single: Path, tmp_path: Path) -> None:
    wanted, state = logits(single), folder_state(single)
    config = json.loads((single / "config.json").read_text(encoding="utf-8"))
    for number, prefix in enumerate(("language_model.model.", "model.language_model.", "")):
        renamed = {
            f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
            for name, tensor in state.items()
        }
        assert torch.equal(logits(write_folder(tmp_path / str(number), config, renamed)), wanted)


# --- tied embeddings ---


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_tied_embeddings_give_one_tensor_with_or_without_a_copy_in_the_file(architecture: str, tmp_path: Path) -> None:
    """MDL-03: tied without head; tied with an equal head; untied with an equal head gives the same logits from its own tensor."""
    config = tiny_config(architecture, tie_word_embeddings=True)
    state = random_state(config, has_bias=architecture == "Qwen2ForCausalLM")
    copied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    bare = write_folder(tmp_path / "bare", config, state)
    both = write_folder(tmp_path / "both", config, copied)
    untied = write_folder(tmp_path / "untied", {**config, "tie_word_embeddings": False}, copied)
    wanted = logits(bare)
    for folder, shares in ((bare, True), (both, True), (untied, False)):
        ops = RecordingOps()
        decoder = load(folder, ops=ops).decoder
        assert torch.allclose(PagedDecoder(decoder).whole([i % 96 for i in IDS]), wanted, rtol=0, atol=1e-5)
        ops.packed[-1][17] += 1  # changes the head's column 17, and what token 17 means only if the memory is shared
        changed = PagedDecoder(decoder).whole([17]).squeeze(0)
        alone = PagedDecoder(load(folder).decoder).whole([17]).squeeze(0)
        assert torch.allclose(changed[:17], alone[:17], rtol=0, atol=1e-5) is not shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_matrix_is_kept_once_even_where_the_head_is_packed(dtype: torch.dtype, tmp_path: Path) -> None:
    """MDL-03: what the fastest operations keep of the head serves the embedding too."""
    config = tiny_config(tie_word_embeddings=True)
    folder = write_folder(tmp_path, config, random_state(config))
    ops, given, kept = open_ops(torch.device("cpu"), dtype), [], []

    class WatchedOps:
        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
            given.append(weakref.ref(weight))
            kept.append(ops.pack_linear(weight, bias))
            return kept[-1]

    watched: Any = WatchedOps()
    decoder = load(folder, dtype=str(dtype).removeprefix("torch."), ops=watched).decoder
    gc.collect()
    is_packed = hasattr(kept[-1], "rows")
    assert (given[-1]() is None) is is_packed  # the plain matrix is gone where the packed one can look rows up
    got = PagedDecoder(decoder).whole([i % 96 for i in IDS])
    plain = load(folder, dtype=str(dtype).removeprefix("torch."), ops=TorchOps()).decoder
    wanted = PagedDecoder(plain).whole([i % 96 for i in IDS])
    assert torch.allclose(got, wanted, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_an_untied_head_of_its_own_is_used(tmp_path: Path) -> None:
    """MDL-03."""
    config = tiny_config()
    state = random_state(config)
    own = logits(write_folder(tmp_path / "own", config, state))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    equal = logits(write_folder(tmp_path / "equal", config, state))
    assert not torch.allclose(own, equal, atol=0.1)


def test_a_tied_model_whose_file_has_another_head_follows_its_configuration_with_a_warning(tmp_path: Path) -> None:
    """MDL-03."""
    config = tiny_config(tie_word_embeddings=True)
    state = random_state(config)
    wanted = logits(write_folder(tmp_path / "bare", config, state))
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    with capture_logs() as logs:
        assert torch.equal(logits(write_folder(tmp_path / "both", config, state)), wanted)
    assert [(log["event"], log["log_level"]) for log in logs] == [("model.tied_head_differs", "warning")]


def test_an_untied_model_without_a_head_stops_the_load(tmp_path: Path) -> None:
    """MDL-03: never random numbers in place of a head."""
    config = tiny_config()
    state = random_state(config)
    del state["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"1 tensors are missing: lm_head\.weight"):
        load(write_folder(tmp_path, config, state))


# --- padded vocabulary, dtypes ---


def test_padding_rows_of_the_vocabulary_are_kept(tmp_path: Path) -> None:
    """MDL-07: the decoder gives every row of the head; masking those beyond the tokenizer is the sampler's part."""
    config = tiny_config(vocab_size=136)
    state = random_state(config)
    state["lm_head.weight"][96:] *= 100
    assert logits(write_folder(tmp_path, config, state)).shape == (len(IDS), 136)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.float16, "float16", torch.float16),
        (torch.float64, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_weights_are_converted_to_the_chosen_dtype(
    stored: torch.dtype, asked: Any, expected: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_config()
    state = {name: tensor.to(stored) for name, tensor in random_state(config).items()}
    model = load(write_folder(tmp_path, config, state), dtype=asked)
    assert model.dtype == model.decoder.dtype == expected
    rounded = {name: tensor.to(expected).float() for name, tensor in state.items()}
    wanted = logits(write_folder(tmp_path / "rounded", config, rounded))
    got = PagedDecoder(model.decoder).whole([i % 96 for i in IDS])
    assert torch.allclose(got, wanted, rtol=0, atol=1e-4 if expected == torch.float32 else 0.5)


def test_tensors_of_an_integer_type_are_refused_by_name(single: Path) -> None:
    state = folder_state(single)
    state["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
    save_file(state, single / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is of type I8"):
        load(single)


# --- damaged files ---

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 269060552\n"
WEB_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>403</body></html>" * 4


def overwrite(data: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(data) and None


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes()[:size]) and None


def with_header_length(length: int) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:]) and None


def with_header(text: bytes) -> Callable[[Path], None]:
    return overwrite(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite(b""), r"model\.safetensors is empty \(0 bytes\)"),
        (cut_to(5), r"has 5 bytes: its header would have"),
        (cut_to(300), r"has 300 bytes: its header would have \d+ bytes; it is cut off"),
        (cut_to(20_000), r"has 20000 bytes, its header describes \d{5,}; it is cut off or damaged"),
        (overwrite(LFS_POINTER), r"has 7\d bytes: it is a Git LFS pointer"),
        (overwrite(WEB_PAGE), r"has \d+ bytes: it is a web page"),
        (with_header_length(2**63), r"its header would have 9223372036854775808 bytes"),
        (with_header_length(10**8 + 1), r"its header would have 100000001 bytes"),
        (with_header(b"{nonsense"), "has a broken header"),
        (with_header(b"[1, 2]"), "has a broken header: it is no JSON object"),
        (with_header(b'{"a": {"dtype": "F32"}}'), "the header's entry of tensor a is broken"),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}'),
            "the header's entry of tensor a is broken",
        ),
        (
            with_header(b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}'),
            r"has \d\d bytes, its header describes 40000000000\d\d",
        ),
    ],
)
def test_a_damaged_file_of_weights_is_one_clear_line(
    damage: Callable[[Path], None], message: str, single: Path
) -> None:
    """MDL-08: file name, expected and actual size, and nothing allocated by the header's numbers."""
    damage(single / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(single)
    assert "model.safetensors" in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"architectures": ["Lla', r"\(23 bytes\) is not valid JSON"),
        (b"", r"is empty \(0 bytes\)"),
        (LFS_POINTER, "is not valid JSON: it is a Git LFS pointer"),
        (WEB_PAGE, "is not valid JSON: it is a web page"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_damaged_json_file_is_one_clear_line(file: str, data: bytes, message: str, sharded: Path) -> None:
    """MDL-08."""
    (sharded / file).write_bytes(data)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load(sharded)
    assert file in raised.value.message
    assert "\n" not in raised.value.message


def test_what_is_missing_altogether_is_said(tmp_path: Path, single: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no model at"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="name its folder"):
        load(single / "model.safetensors")
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"no safetensors file; pytorch_model\.bin is of a format that is not supported"
    ):
        load(single)
    (single / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json: No such file"):
        load(single)


def test_several_files_without_an_index_are_not_merged(single: Path) -> None:
    """MDL-02: which of them hold the right values cannot be told."""
    state = folder_state(single)
    (single / "model.safetensors").unlink()
    save_file(state, single / "a.safetensors")
    save_file(state, single / "b.safetensors")
    with pytest.raises(ModelLoadError, match=r"2 safetensors files, but neither .*: a\.safetensors, b\.safetensors"):
        load(single)
