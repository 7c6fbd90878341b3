"""The arithmetic of benchmark reports."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load import Answer
from report import percentile, summarise, table


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(0, 100))
def test_percentiles_equal_those_of_numpy(values: list[float], q: int) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_summary_counts_tokens_and_times_of_good_answers_only() -> None:
    good = Answer(due=0.0, first=0.5, last=2.5, done=2.6, gaps=[0.5, 1.5], prompt_tokens=10, output_tokens=5)
    slow = Answer(due=1.0, first=2.5, last=3.5, done=3.6, gaps=[1.0], prompt_tokens=20, output_tokens=3)
    bad = Answer(due=0.0, first=0.1, last=9.0, done=9.0, gaps=[9.0], output_tokens=99, error="HTTP 500: oh")
    summary = summarise([good, bad, slow, bad], wall_s=4.0)
    assert summary.num_requests == 4
    assert summary.errors == {"HTTP 500: oh": 2}
    assert summary.output_tokens_per_s == 2.0  # (5 + 3) / 4 s
    assert summary.total_tokens_per_s == 9.5  # (15 + 23) / 4 s
    assert summary.ttft_p50_ms == pytest.approx(1000)  # of 500 and 1500
    assert summary.ttft_p95_ms == pytest.approx(1450)
    assert summary.itl_p50_ms == pytest.approx(1000)  # of 500, 1500 and 1000
    assert summary.tpot_median_ms == pytest.approx(500)  # of 2 s / 4 and 1 s / 2


def test_a_run_in_which_everything_failed_has_no_times() -> None:
    summary = summarise([Answer(due=0.0, done=1.0, error="refused")], wall_s=1.0)
    assert summary.output_tokens_per_s == 0
    assert summary.ttft_p50_ms is None
    assert summary.tpot_median_ms is None


def test_a_table_is_markdown_with_numbers_to_the_right() -> None:
    assert table(("peer", "tok/s"), [("ours", "1.0"), ("another", "123.4")]) == (
        "| peer    | tok/s |\n|---------|------:|\n| ours    |   1.0 |\n| another | 123.4 |"
    )
