"""Ratios to single peers, and to whoever was best in that round."""

import pytest
from load import Answer
from ratios import GOODPUT, SPEED, TTFT, ahead_by_round, ratio_table
from report import summarise
from results import CaseRun, PeerRun


def turn(peer: str, round_number: int, tokens_per_s: int, ttft_s: float = 0.1, error: str | None = None) -> PeerRun:
    answer = Answer(
        due=0.0, first=ttft_s, last=ttft_s + 1, done=2.0, prompt_tokens=1, output_tokens=tokens_per_s, error=error
    )
    run = CaseRun("w2 c=16", summarise([answer], wall_s=1.0), cpu_s=1.0, others_cores=0.0)
    return PeerRun(peer, round_number, cases=[run])


RUNS = [
    turn("looseleaf", 0, 100), turn("looseleaf-int8", 0, 200), turn("vllm", 0, 50, 0.3), turn("llama-q4_1", 0, 80, 0.2),
    turn("looseleaf", 1, 120), turn("looseleaf-int8", 1, 90), turn("vllm", 1, 60, 0.1), turn("llama-q4_1", 1, 40, 0.4),
]  # fmt: skip
PEERS = ["looseleaf", "looseleaf-int8", "vllm", "llama-q4_1"]


def test_the_best_peer_is_the_best_of_each_round() -> None:
    assert ahead_by_round("w2 c=16", SPEED, "looseleaf", ["vllm", "llama-q4_1"], RUNS) == [100 / 80, 120 / 60]
    assert ahead_by_round("w2 c=16", SPEED, "looseleaf-int8", ["llama-q4_1"], RUNS) == [200 / 80, 90 / 40]


def test_less_time_is_ahead() -> None:
    assert ahead_by_round("w2 c=16", TTFT, "looseleaf", ["vllm", "llama-q4_1"], RUNS) == pytest.approx([2.0, 1.0])


def test_a_failed_run_and_a_goodput_of_nothing_have_no_ratio() -> None:
    failed = [turn("looseleaf", 0, 100), turn("vllm", 0, 50, error="HTTP 500")]
    assert ahead_by_round("w2 c=16", SPEED, "looseleaf", ["vllm"], failed) == []
    late = [turn("looseleaf", 0, 100), turn("vllm", 0, 50, ttft_s=9.0)]
    assert ahead_by_round("w2 c=16", GOODPUT, "looseleaf", ["vllm"], late) == []


def test_the_table_has_each_peer_the_best_of_its_bits_and_the_best_of_all() -> None:
    text = ratio_table("w2 c=16", SPEED, PEERS, RUNS)
    assert text is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert rows == [
        ["vllm", "2.00 (2.00–2.00)", "2.75 (1.50–4.00)"],
        ["llama-q4_1", "2.12 (1.25–3.00)", "2.38 (2.25–2.50)"],
        ["best bf16 peer", "2.00 (2.00–2.00)", "2.75 (1.50–4.00)"],
        ["best peer", "1.62 (1.25–2.00)", "2.00 (1.50–2.50)"],
    ]


def test_without_peers_there_is_no_table() -> None:
    assert ratio_table("w2 c=16", SPEED, ["looseleaf"], RUNS) is None
