"""Options: layers, paths in errors, flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config import FLAG_ALIASES, Config, load_config, option_paths, parse_bytes
from service.errors import ConfigError


def test_without_layers_every_value_is_the_default() -> None:
    loaded = load_config()
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}


def test_a_flag_wins_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "looseleaf.toml"
    file.write_text('[cache]\nblock_size = 8\nnum_blocks = 10\n[model]\npath = "a"\n', encoding="utf-8")
    loaded = load_config(
        file=file,
        environment={"LOOSELEAF_CACHE__BLOCK_SIZE": "32", "LOOSELEAF_MODEL__PATH": "b", "HOME": "x"},
        flags={"model.path": "c"},
    )
    assert (loaded.config.model.path, loaded.config.cache.block_size, loaded.config.cache.num_blocks) == ("c", 32, 10)
    assert loaded.sources["model.path"] == "flag"
    assert loaded.sources["cache.block_size"] == "environment"
    assert loaded.sources["cache.num_blocks"] == "file"
    assert loaded.sources["server.port"] == "default"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"cache.block_size": "33"}, ["33", "$.cache.block_size"]),
        ({"server.port": "70000"}, ["65535", "$.server.port"]),
        ({"server.port": "x"}, ["'x'", "$.server.port"]),
        ({"scheduler.max_num_seqs": "0"}, [">= 1", "$.scheduler.max_num_seqs"]),
        ({"model.dtype": "int3"}, ["int3", "$.model.dtype"]),
        ({"cache.kv_dtype": "int4"}, ["int4", "$.cache.kv_dtype"]),
        ({"cache.size": "lots"}, ["lots", "$.cache.size"]),
        ({"cache.sise": "1GiB"}, ["cache.sise"]),
        ({"scheduler.speculation": "eagle"}, ["eagle", "$.scheduler.speculation"]),
        ({"scheduler.prefill_budget": "100"}, ["100", "256", "$.scheduler.prefill_budget"]),
        ({"scheduler.token_budget": "512", "scheduler.prefill_budget": "511"}, ["511", "512", "prefill_budget"]),
        ({"scheduler.prefill_budget": "0"}, [">= 1", "$.scheduler.prefill_budget"]),
        ({"scheduler.min_ngram": "4"}, ["4", "3", "$.scheduler.min_ngram"]),
    ],
)
def test_a_bad_value_is_refused_with_its_path(flags: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_key_in_the_file_is_refused_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "looseleaf.toml"
    file.write_text("[server]\nprot = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prot.*\$\.server"):
        load_config(file=file)


def test_an_unknown_variable_with_the_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="LOOSELEAF_SERVER__PROT"):
        load_config(environment={"LOOSELEAF_SERVER__PROT": "1"})


@pytest.mark.parametrize("content", ["[cache", "\x00"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_config(file=file)


@pytest.mark.parametrize(
    ("text", "expected"), [("1048576", 2**20), ("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29)]
)
def test_sizes_are_read_with_binary_and_decimal_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_every_short_flag_names_an_option() -> None:
    assert set(FLAG_ALIASES.values()) <= {path for path, _ in option_paths()}


def test_the_example_file_is_valid_and_shows_the_defaults() -> None:
    loaded = load_config(file=Path(__file__).parent.parent / "ops/config/looseleaf.toml")
    assert loaded.config == Config()
    assert "file" in loaded.sources.values()
