"""Which matrices become integers, that a file's own blocks are used, and that models of them answer as those of the numbers they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from backends.numba_ops import NumbaOps
from backends.ops import Activation, Linear, TorchOps, Weight
from backends.quantised_weights import QuantisedWeight
from service.config import load_config
from service.errors import ModelLoadError
from service.model.gguf_file import GgufFile
from service.model.loading import load_model
from service.model.quantisation import Quantisation, quantised_weight
from service.model.weights import TensorSpec
from tests.conftest import DATA
from tests.model.checkpoints import load, random_state, tiny_config, write_folder, write_gguf
from tests.model.paged import PagedDecoder

IDS = [(17 * i + 3) % 90 for i in range(50)]
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}


def llama(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = tiny_config(**{**LLAMA, **changes})
    return config, random_state(config)


def gguf_of(folder: Path, kind: Kind, **changes: Any) -> Path:
    return write_gguf(folder / f"{kind.name}.gguf", "llama", *llama(**changes), kind=kind)


class NotingOps(NumbaOps):
    """Notes the format of every weight that is packed; "dense" for floats."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.formats: list[str] = []

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        self.formats.append(weight.format if isinstance(weight, QuantisedWeight) else "dense")
        return super().pack_linear(weight, bias)

    def pack_gated_linear(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        self.formats.append(weight.format if isinstance(weight, QuantisedWeight) else "dense")
        return super().pack_linear(weight, bias)


def linears(path: Path, quantise: Quantisation) -> dict[str, str]:
    """The format of each linear of the first layer and of the head, which comes behind those of the second layer."""
    ops = NotingOps()
    load(path, dtype="auto", quantise=quantise, ops=ops)
    return dict(zip(("qkv", "o", "gate_up", "down", "head"), [*ops.formats[:4], ops.formats[8]], strict=True))


def every(form: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), form), **others}


# --- which ---


def test_blocks_of_a_file_stay_what_they_are(tmp_path: Path) -> None:
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        path = gguf_of(tmp_path, kind)
        assert linears(path, "stored") == every(kind.name.lower())
        assert linears(path, "none") == every("dense")
    assert linears(gguf_of(tmp_path, Kind.Q4_0), "int4") == every("q4_0")
    assert linears(gguf_of(tmp_path, Kind.Q8_0), "int4") == every("q4_1", head="q8_0")


def test_other_numbers_are_quantised_unless_only_stored_blocks_are_wanted(tmp_path: Path) -> None:
    """A width of 96 is no multiple of int8's 64: `down` stays floats there."""
    folder = write_folder(tmp_path / "folder", *llama())
    for path in (folder, gguf_of(tmp_path, Kind.F16)):
        assert linears(path, "stored") == every("dense")
        assert linears(path, "int4") == every("q4_1", head="q8_0")
        assert linears(path, "int8") == every("int8", down="dense")
    assert linears(gguf_of(tmp_path, Kind.Q4_1), "int8") == every("int8", down="dense")


def test_widths_without_whole_blocks_stay_floats(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", *llama(hidden_size=48, intermediate_size=40))
    assert linears(folder, "int4") == every("dense")
    assert linears(folder, "int8") == every("dense")


def test_the_rows_of_blocks_are_put_in_order_like_their_numbers(tmp_path: Path) -> None:
    """Llama's query rows are stored pair by pair; the blocks that are handed on decode to exactly what is read otherwise."""
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        source = GgufFile(gguf_of(tmp_path, kind))
        specs = [
            TensorSpec(f"blk.1.attn_{role}.weight", (64 if role == "q" else 32, 64), 4 if role == "q" else 2)
            for role in "qk"
        ]
        numbers = [torch.empty(spec.shape) for spec in specs]
        for spec, out in zip(specs, numbers, strict=True):
            source.read(spec, out)
        weight = quantised_weight(source, specs, "stored", is_table=False)
        assert isinstance(weight, QuantisedWeight)
        assert torch.equal(weight.dequantise(), torch.cat(numbers))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
def test_without_kernels_a_file_gives_the_same_numbers_and_integers(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GgufFile(gguf_of(tmp_path, kind))
    spec = TensorSpec("blk.1.ffn_up.weight", (96, 64))

    def everything() -> list[Tensor]:
        numbers = [torch.empty(spec.shape, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        for out in numbers:
            source.read(spec, out)
        weight = quantised_weight(source, [spec], "int8", is_table=False)
        assert weight is not None
        assert weight.scales is not None
        return [*numbers, weight.data, weight.scales]

    compiled = everything()
    monkeypatch.setitem(sys.modules, "backends.numba_blocks", None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled, everything(), strict=True))


# --- answers ---


@pytest.mark.parametrize("quantise", ["int8", "int4", "stored"])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F32], ids=lambda kind: kind.name)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_model_of_integers_answers_as_its_definition(
    kind: Kind, quantise: Quantisation, is_tied: bool, tmp_path: Path
) -> None:
    """The same integers through plain torch in the place of the kernels: what differs is bfloat16 and the rounding of activations."""
    config, state = llama(tie_word_embeddings=is_tied)
    path = write_gguf(tmp_path / "model.gguf", "llama", config, state, kind=kind)
    ours = PagedDecoder(load(path, dtype="auto", quantise=quantise).decoder, "numba-cpu").whole(IDS)
    theirs = PagedDecoder(load(path, dtype="auto", quantise=quantise, ops=TorchOps()).decoder).whole(IDS)
    spread = theirs.std()
    assert (ours - theirs).std() < 0.05 * spread
    likeliest = theirs.topk(2).values
    is_clear = likeliest[:, 0] - likeliest[:, 1] > 0.5 * spread
    assert is_clear.sum() >= 5
    assert torch.equal(ours.argmax(-1)[is_clear], theirs.argmax(-1)[is_clear])


@pytest.mark.parametrize("quantise", ["int8", "int4"])
@pytest.mark.parametrize("name", ["tiny-llama-tied-bf16", "tiny-qwen2", "tiny-gemma3", "tiny-phi3"])
def test_every_family_is_served_and_a_row_of_its_linears_has_the_same_bits_alone(
    name: str, quantise: Quantisation
) -> None:
    """Biases, tied tables and scaled embeddings included."""
    decoder = load(DATA / "golden" / name, dtype="auto", quantise=quantise).decoder
    whole = PagedDecoder(decoder, "numba-cpu").whole(IDS)
    assert whole.isfinite().all()
    layer = decoder._layers[0]
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for linear in (layer.qkv, layer.gated, decoder._head):
        assert torch.equal(linear(x)[7:8], linear(x[7:8]))


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    config, state = llama(tie_word_embeddings=True)
    decoder: Any = load(write_folder(tmp_path / "folder", config, state), dtype="auto", quantise="int8").decoder
    assert decoder._embed == decoder._head.rows


# --- refusals and options ---


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations_of_another_type_are_refused_by_name(dtype: Any) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"model\.quantize is int4 and model\.dtype is {dtype}: .* set model\.dtype to auto"
    ):
        load_model(DATA / "golden/tiny-llama", dtype=dtype, quantise="int4")


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"model\.quantize is int8: .* CPU only; set backend\.device to cpu"):
        load_model(DATA / "golden/tiny-llama", device=torch.device("cuda"), quantise="int8")


def test_the_option_has_a_short_flag_and_no_other_values() -> None:
    assert load_config().config.model.quantize == "none"
    assert load_config(flags={"model.quantize": "int4"}).config.model.quantize == "int4"
    with pytest.raises(Exception, match=r"\$\.model\.quantize"):
        load_config(flags={"model.quantize": "int2"})
