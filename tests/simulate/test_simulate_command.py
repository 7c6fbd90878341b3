"""`looseleaf simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 400 * i, "input_length": 1024, "output_length": 8, "hash_ids": [i % 3, 10 + i % 3]}
        for i in range(12)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_every_combination_of_what_ifs_is_a_row(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "simulate",
                str(trace),
                "--block-size",
                "16",
                "32",
                "--pool-tokens",
                "4096",
                "65536",
                "--policy",
                "lru",
                "cost",
            ]
        )
        == 0
    )
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["block", "pool", "tokens"]
    assert [row.split()[:4] for row in rows] == [
        [block_size, pool_tokens, policy, "-"]
        for block_size in ("16", "32")
        for pool_tokens in ("4096", "65536")
        for policy in ("lru", "cost")
    ]
    assert all(row.split()[4] == "12" for row in rows), "not every request has finished"


def test_json_has_every_number(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", str(trace), "--json", str(out), "--base-s", "0.5", "--rate", "0.1"]) == 0
    document = json.loads(out.read_text())
    assert document["cost"]["base_s"] == 0.5
    (row,) = document["rows"]
    assert row["report"]["finished"] == 12
    assert row["hit_rate"] == pytest.approx(9 * 1008 / (12 * 1024))
    assert row["report"]["duration_s"] > 100, "arrivals are not stretched to one in ten seconds"


def test_a_larger_budget_for_steps_without_decodes_saves_steps(trace: Path, tmp_path: Path) -> None:
    steps = []
    for budget in ("256", "1024"):
        out = tmp_path / f"{budget}.json"
        flags = ["--token-budget", "256", "--prefill-budget", budget, "--rate", "0.1", "--json", str(out)]
        assert main(["simulate", str(trace), *flags]) == 0
        steps.append(json.loads(out.read_text())["rows"][0]["report"]["steps"])
    # Apart from one another three of the twelve prompts find nothing cached: four chunks of 256 each, or one.
    assert steps[0] - steps[1] == 3 * 3


def test_resampled_requests_share_nothing(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", str(trace), "--requests", "50", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["report"]["finished"], row["report"]["cached_tokens"]) == (50, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-s", "-1"], "bad cost"),
        (["--block-size", "48"], "do not make blocks of 48"),
        (["--prefill-budget", "100"], "prefill_budget is 100 and must be at least token_budget, 2048"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
    ],
)
def test_what_cannot_be_simulated_ends_with_one_line_and_code_2(
    trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["simulate", str(trace), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_trace_without_times_needs_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("input_tokens,output_tokens\n10,2\n20,3\n")
    assert main(["simulate", str(file), "--requests", "5"]) == 2
    assert "--requests needs --rate" in capsys.readouterr().err
    assert main(["simulate", str(file), "--requests", "5", "--rate", "2"]) == 0


@pytest.mark.parametrize("flags", [["--pool-tokens", "0"], ["--rate", "0"], ["--cost", "abacus"]])
def test_bad_flags_are_refused_by_name(trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", str(trace), *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
