"""A comparison's file can be read again, gone on with, and merged with others of the same session."""

import dataclasses
from pathlib import Path

import pytest
from cases import parse_case
from document import Document, DocumentError, check_resumable, merge, read, write
from load import Answer
from plot_scaling import draw, scaling_lines, ticks
from report import summarise
from results import CaseRun, PeerRun
from roofline import Ceilings, ModelShape, Roofline
from tables import median_roofline, problems, report

SHAPE = ModelShape(2, 64, 64, 1000, 500, {"bf16": 3000, "int8": 1600, "int4": 900})


def case_run(label: str, tokens_per_s: int, *, busy: float | None = None, good: bool = True) -> CaseRun:
    error = None if good else "HTTP 500"
    answer = Answer(due=0.0, first=0.1, last=1.0, done=1.0, prompt_tokens=8, output_tokens=tokens_per_s, error=error)
    return CaseRun(label, summarise([answer], wall_s=1.0), cpu_s=2.0, others_cores=0.01, busy_cores=busy)


def turn(peer: str, round_number: int, *runs: CaseRun) -> PeerRun:
    return PeerRun(peer, round_number, 1.5, 10_000_000, 9_000_000, 0.004, list(runs))


def document(*turns: PeerRun, cases: str = "w1:1 w1:4 w1:1+busy w4:2", seed: int = 1) -> Document:
    ceilings = Ceilings({"bf16": 3e6, "int8": 3e6, "int4": 3e6}, 1e9)
    return Document(
        {
            "cpu": "a",
            "cores": 2,
            "flags": ["avx2"],
            "memory_gb": 8.0,
            "python": "3",
            "looseleaf_commit": "0",
            "date": "d",
        },
        seed,
        None,
        {},
        [parse_case(case) for case in cases.split()],
        list(dict.fromkeys(turn.peer for turn in turns)),
        [Roofline(SHAPE, ceilings)],
        list(turns),
    )


OURS = turn("looseleaf", 0, case_run("w1 c=1", 100), case_run("w1 c=1 busy", 60, busy=0.5), case_run("w4 2/s", 50))
THEIRS = turn("vllm", 0, case_run("w1 c=1", 50), case_run("w1 c=1 busy", 5, busy=0.9), case_run("w4 2/s", 40))


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    before = document(OURS, THEIRS)
    write(before, tmp_path / "new/out.json")
    assert read(tmp_path / "new/out.json") == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.json"]


def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text('{"machine": {}}')
    with pytest.raises(DocumentError, match=r"out\.json"):
        read(tmp_path / "out.json")


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"max_tokens": 4}, {"extra": {"vllm": "-x"}}, {"cases": []}, {"machine": {"cpu": "b"}}]
)
def test_only_the_same_comparison_is_gone_on_with(change: dict[str, object]) -> None:
    check_resumable(document(OURS), document(OURS), Path("out.json"))
    with pytest.raises(DocumentError):
        check_resumable(document(OURS), dataclasses.replace(document(OURS), **change), Path("out.json"))


def test_merging_joins_peers_and_the_cases_of_a_turn() -> None:
    one = document(turn("looseleaf", 0, case_run("w1 c=1", 100)), cases="w1:1")
    more = turn("looseleaf", 0, case_run("w1 c=4", 300))
    more.peak_rss_bytes = 20_000_000
    two = document(more, THEIRS, cases="w1:4 w1:1")
    merged = merge([(Path("a"), one), (Path("b"), two)])
    assert merged.peers == ["looseleaf", "vllm"]
    assert [case.label for case in merged.cases] == ["w1 c=1", "w1 c=4"]
    ours, theirs = merged.turns
    assert [run.label for run in ours.cases] == ["w1 c=1", "w1 c=4"]
    assert ours.peak_rss_bytes == 20_000_000
    assert theirs == THEIRS
    assert len(one.turns[0].cases) == 1  # what was merged is as it was


def test_a_case_measured_again_replaces_the_earlier_one() -> None:
    first, again = document(OURS), document(turn("looseleaf", 0, case_run("w1 c=1", 70)))
    (merged,) = merge([(Path("a"), first), (Path("b"), again)]).turns
    run = merged.case("w1 c=1")
    assert run is not None
    assert run.summary.output_tokens == 70
    assert merged.case("w4 2/s") is not None


def test_other_prompts_and_other_machines_do_not_merge() -> None:
    with pytest.raises(DocumentError, match="other prompts"):
        merge([(Path("a"), document(OURS)), (Path("b"), document(THEIRS, seed=2))])
    other = document(THEIRS)
    other.machine = {**other.machine, "flags": ["avx2", "amx_tile"]}
    with pytest.raises(DocumentError, match=r"b is of another machine: flags"):
        merge([(Path("a"), document(OURS)), (Path("b"), other)])


def cells(text: str, heading: str, peer: str) -> list[str]:
    """Return a peer's row of the table below a heading."""
    section = text.split(f"### {heading}\n", 1)[1].split("\n### ")[0]
    (row,) = [line for line in section.splitlines() if line.split("|")[1:2] and line.split("|")[1].strip() == peer]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_report_says_what_is_left_beside_a_busy_process() -> None:
    text = report(document(OURS, THEIRS))
    assert cells(text, "Beside one busy process", "looseleaf") == ["looseleaf", "100.0", "60.0", "60", "60–60", "0.50"]
    assert cells(text, "Beside one busy process", "vllm") == ["vllm", "50.0", "5.0", "10", "10–10", "0.90"]


def test_the_report_has_goodput_idle_cost_and_reasons_for_what_is_missing() -> None:
    failed = PeerRun("looseleaf-int8", 0, failure="ended with status 2; the end of log:\nusage\nno --quantize here")
    text = report(document(OURS, THEIRS, failed))
    assert cells(text, "w4 2/s", "vllm")[2] == "1.00"
    assert cells(text, "Start, memory, idle", "looseleaf")[-1] == "0.4"
    assert "- looseleaf-int8, round 1: ended with status 2; the end of log … no --quantize here" in text
    assert "### w1 c=1 busy" not in text


def test_the_share_of_the_roofline_is_the_speed_over_the_ideal_of_the_peers_own_weights() -> None:
    fast = Roofline(SHAPE, Ceilings({"bf16": 5e6, "int8": 3e6, "int4": 3e6}, 3e9))
    found = document(OURS)
    found.rooflines.append(fast)
    assert median_roofline(found.rooflines).ceilings == Ceilings({"bf16": 4e6, "int8": 3e6, "int4": 3e6}, 2e9)
    section = report(found).split("### Against the roofline")[1]
    row = [
        cell.strip()
        for cell in next(line for line in section.splitlines() if line.startswith("| looseleaf")).split("|")
    ]
    assert row[2] == "bf16"
    assert int(row[4]) == pytest.approx(100 * 100 / float(row[3]), abs=3)  # the ideal is shown without decimals


def test_failures_and_noise_are_listed() -> None:
    noisy = dataclasses.replace(case_run("w1 c=1", 5), others_cores=0.6)
    failures, warnings = problems(document(turn("vllm", 1, case_run("w1 c=4", 5, good=False), noisy)))
    assert failures == ["FAILED vllm, round 2, w1 c=4: 1 x HTTP 500"]
    assert warnings == ["noisy: vllm, round 2, w1 c=1: others 0.60 cores"]


def test_the_plot_has_an_ideal_and_a_line_for_each_peer_of_a_format() -> None:
    int8 = turn("looseleaf-int8", 0, case_run("w1 c=1", 150), case_run("w1 c=4", 400))
    found = document(OURS, THEIRS, int8)
    assert [line.name for line in scaling_lines(found, "bf16")] == ["ideal", "looseleaf", "vllm"]
    ideal, ours = scaling_lines(found, "int8")
    assert [concurrency for concurrency, _ in ideal.points] == [1, 4]
    assert ours.points == [(1, 150.0), (4, 400.0)]
    svg = draw(found)
    assert svg.count("stroke-dasharray") == 2 * 2  # a line and its sample in the legend, for each of two formats
    assert "int4 weights" not in svg


def test_ticks_are_round_numbers_between_the_ends() -> None:
    assert ticks(18, 700) == [20, 50, 100, 200, 500]


def test_nothing_to_plot_is_said() -> None:
    with pytest.raises(ValueError, match="no closed-loop case"):
        draw(document(turn("vllm", 0), cases="w2:4"))
