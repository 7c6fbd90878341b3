"""What a simulation reports adds up, and what-ifs move it the way they must."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from service.config import SchedulerConfig
from service.simulate import COSTS, Engine, StepCost, TraceRequest, Work, read_trace, simulate
from service.simulate.cost import data_sheet_cost

COST = StepCost(base_s=0.5, token_s=0.125)


def engine(**changes: object) -> Engine:
    fields = {"cost": COST, "num_blocks": 101, "block_size": 16, "scheduler": SchedulerConfig(token_budget=64)}
    return msgspec.convert(fields | changes, Engine, strict=False)


def ask(arrival_s: float, num_prompt: int, num_output: int, *ids: int) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, num_prompt=num_prompt, num_output=num_output, hash_ids=ids)


@pytest.mark.parametrize("is_stepwise", [False, True])
def test_one_request_takes_what_its_steps_cost(*, is_stepwise: bool) -> None:
    report = simulate([ask(10.0, 32, 5)], engine(), is_stepwise=is_stepwise)
    prefill_s, decode_s = 0.5 + 32 * 0.125, 0.5 + 0.125
    assert report.ttft_s.p50 == prefill_s
    assert report.token_s.p50 == decode_s
    assert report.latency_s.p99 == report.duration_s == prefill_s + 4 * decode_s
    assert (report.steps, report.finished, report.prompt_tokens, report.generated_tokens) == (5, 1, 32, 5)
    assert report.peak_running == 1


def test_skipping_changes_nothing_but_how_it_was_reached(data: Path) -> None:
    trace = read_trace(data / "traces" / "azure2023_conv.csv.gz")[:60]
    crowded = engine(
        cost=COSTS["llama-3.1-8b-h100"],
        num_blocks=600,
        scheduler=SchedulerConfig(max_num_seqs=16, token_budget=512),
    )
    fast, slow = simulate(trace, crowded), simulate(trace, crowded, is_stepwise=True)
    for name in (
        "finished",
        "steps",
        "preemptions",
        "generated_tokens",
        "ttft_s",
        "token_s",
        "latency_s",
        "duration_s",
    ):
        assert getattr(fast, name) == getattr(slow, name), name
    assert slow.fast_forwarded_steps == 0
    assert fast.fast_forwarded_steps > fast.steps / 2
    assert fast.mean_running == pytest.approx(slow.mean_running)
    assert fast.mean_used_share == pytest.approx(slow.mean_used_share, rel=0.02)


def test_prompts_that_repeat_are_found_and_cost_less() -> None:
    trace = [ask(1000.0 * turn, 1024, 2, 7, 8) for turn in range(3)]
    warm, cold = simulate(trace, engine()), simulate(trace, engine(prefix_caching=False))
    # The last block is never taken from the cache as a whole: its last token must be computed.
    assert (warm.cached_tokens, cold.cached_tokens) == (2 * (1024 - 16), 0)
    assert warm.hit_rate == pytest.approx(2 * 1008 / 3072)
    assert warm.ttft_s.p50 < cold.ttft_s.p50


def test_tenants_share_nothing() -> None:
    trace = [
        msgspec.structs.replace(ask(1000.0 * turn, 1024, 2, 7, 8), tenant=tenant)
        for turn, tenant in enumerate(["one", "other", "one"])
    ]
    assert simulate(trace, engine(num_blocks=301)).cached_tokens == 1024 - 16


def test_a_small_pool_preempts_and_still_finishes_everybody() -> None:
    report = simulate([ask(0.0, 16, 100) for _ in range(8)], engine(num_blocks=25))
    assert report.finished == 8
    assert report.preemptions > 0
    assert report.mean_used_share > 0.5


def test_refusals_are_counted_and_the_rest_is_served() -> None:
    queue = SchedulerConfig(max_num_seqs=1, max_waiting=2, token_budget=64)
    report = simulate([ask(0.0, 16, 4) for _ in range(5)] + [ask(0.0, 5000, 4)], engine(scheduler=queue))
    assert (report.finished, report.refused_full, report.refused_long) == (2, 3, 1)


def test_waste_is_the_share_of_held_slots_without_a_token() -> None:
    # 48 tokens in blocks of 32; the first step computes the prompt, the second and last one a token more.
    report = simulate([ask(0.0, 48, 2)], engine(block_size=32, scheduler=SchedulerConfig(token_budget=48)))
    assert report.mean_waste_share == pytest.approx(16 / 64)
    exact = simulate([ask(0.0, 33, 400)], engine(block_size=1, num_blocks=1000))
    assert exact.mean_waste_share == 0.0


def test_means_are_over_time_however_the_time_was_passed() -> None:
    trace = [ask(0.0, 16, 401), ask(0.0, 16, 201)]
    fast, slow = simulate(trace, engine()), simulate(trace, engine(), is_stepwise=True)
    assert fast.mean_running == pytest.approx(slow.mean_running)
    assert fast.mean_used_share == pytest.approx(slow.mean_used_share, rel=0.03)


def test_a_request_that_wants_no_token_ends_with_its_prompt() -> None:
    report = simulate([ask(0.0, 16, 0)], engine())
    assert (report.finished, report.generated_tokens) == (1, 0)
    assert math.isnan(report.ttft_s.p50)


def test_an_empty_trace_gives_an_empty_report() -> None:
    report = simulate([], engine())
    assert (report.finished, report.steps, report.duration_s) == (0, 0, 0.0)
    assert math.isnan(report.requests_per_s)


def test_a_trace_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order of their arrivals"):
        simulate([ask(1.0, 16, 4), ask(0.0, 16, 4)], engine())


def test_a_step_costs_the_sum_of_its_terms() -> None:
    cost = StepCost(base_s=1.0, token_s=0.5, context_s=0.25, pair_s=0.125)
    assert cost.seconds(Work(num_tokens=2, num_context=4, num_pairs=8)) == 1 + 1 + 1 + 1


def test_data_sheets_give_the_textbook_times() -> None:
    """7e9 parameters of 2 bytes at 1.4e12 B/s take 10 ms; a token's 1.4e10 operations at 1.4e14 take 0.1 ms."""
    cost = data_sheet_cost(
        num_parameters=7e9,
        kv_bytes_per_token=2.8e5,
        attention_width=1000,
        num_layers=35,
        bytes_per_s=1.4e12,
        flops_per_s=1.4e14,
        efficiency=1.0,
        overhead_s=0.0,
    )
    assert cost == StepCost(base_s=0.01, token_s=1e-4, context_s=2e-7, pair_s=1e-9)
