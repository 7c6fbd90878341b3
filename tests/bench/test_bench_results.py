"""What a comparison makes of its runs: medians and ratios that errors and odd rounds cannot bend."""

import dataclasses

import compare
from load import Answer
from report import summarise
from results import CaseRun, PeerRun, case_table, ratios_within_rounds, start_table


def case_run(tokens_per_s: int, error: str | None = None) -> CaseRun:
    answer = Answer(due=0.0, first=0.1, last=1.0, done=1.0, prompt_tokens=1, output_tokens=tokens_per_s, error=error)
    return CaseRun("w1 c=1", summarise([answer], wall_s=1.0), cpu_s=2.0, others_cores=0.0)


def turn(peer: str, round_number: int, tokens_per_s: int, error: str | None = None) -> PeerRun:
    return PeerRun(peer, round_number, first_token_s=1.0, cases=[case_run(tokens_per_s, error)])


RUNS = [
    turn("ours", 0, 100), turn("theirs", 0, 50),
    turn("theirs", 1, 10), turn("ours", 1, 30),  # a slow hour
    turn("ours", 2, 120), turn("theirs", 2, 48),
]  # fmt: skip


def test_ratios_pair_runs_of_one_round() -> None:
    assert ratios_within_rounds("w1 c=1", "ours", "theirs", RUNS) == [2.0, 3.0, 2.5]


def test_a_run_with_an_error_enters_neither_median_nor_ratio() -> None:
    runs = [*RUNS, turn("ours", 3, 1000, error="asked for 4 new tokens, got 3"), turn("theirs", 3, 50)]
    assert ratios_within_rounds("w1 c=1", "ours", "theirs", runs) == [2.0, 3.0, 2.5]
    row = case_table("w1 c=1", ["ours", "theirs"], runs).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][:4] == ["ours", "3", "100.0", "30.0–120.0"]


def test_the_table_shows_the_median_ratio_to_the_first_peer_and_its_span() -> None:
    row = case_table("w1 c=1", ["ours", "theirs"], RUNS).splitlines()[3]
    assert [cell.strip() for cell in row.strip("|").split("|")][-2:] == ["2.50", "2.00–3.00"]


def test_a_peer_that_never_started_has_dashes_instead_of_numbers() -> None:
    failed = PeerRun("theirs", 0, failure="ended with status 1 before it was ready")
    cells = case_table("w1 c=1", ["ours", "theirs"], [turn("ours", 0, 5), failed]).splitlines()[3].split("|")
    assert {cell.strip() for cell in cells[3:-1]} == {"–"}
    assert "–" in start_table(["theirs"], [failed])


def test_cpu_seconds_are_per_thousand_new_tokens() -> None:
    row = case_table("w1 c=1", ["ours"], [turn("ours", 0, 500)]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][10] == "4.00"


def test_a_turn_can_be_written_as_json() -> None:
    assert dataclasses.asdict(RUNS[0])["cases"][0]["summary"]["output_tokens"] == 100


def test_the_order_of_peers_rotates() -> None:
    assert [compare.rotated(["a", "b", "c"], by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
