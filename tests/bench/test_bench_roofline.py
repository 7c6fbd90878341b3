"""The ideal is the arithmetic that its description states."""

import dataclasses

import pytest
from roofline import (
    Ceilings,
    ModelShape,
    Roofline,
    decode_step_s,
    ideal_tokens_per_s,
    ideal_tpot_s,
    ideal_ttft_s,
    prefill_flops,
)

# The benchmark's model, and a machine of round numbers.
SHAPE = ModelShape(
    num_layers=30,
    query_width=576,
    kv_width=192,
    layer_weights=106_168_320,
    head_weights=28_311_552,
    weight_bytes={"bf16": 268_959_744, "int8": 135_298_560, "int4": 96_436_224},
)
MACHINE = Roofline(SHAPE, Ceilings({"bf16": 20e9, "int8": 20e9, "int4": 20e9}, matmul_flops_per_s=1.1e12))


def test_keys_and_values_of_a_token_take_what_the_cache_stores() -> None:
    assert SHAPE.kv_bytes_per_token("bf16") == 2 * 30 * 192 * 2 == 23_040
    assert SHAPE.kv_bytes_per_token("int4") == SHAPE.kv_bytes_per_token("int8") == 11_520


def test_a_prompt_costs_two_operations_a_weight_and_token_plus_one_row_of_logits_and_causal_attention() -> None:
    assert prefill_flops(SHAPE, 1) == 2 * (106_168_320 + 28_311_552) + 2 * 576 * 30
    assert prefill_flops(SHAPE, 1900) == 2 * 106_168_320 * 1900 + 2 * 28_311_552 + 2 * 1900**2 * 576 * 30


def test_a_small_step_takes_the_time_of_its_reads() -> None:
    expected = (268_959_744 + 4 * 264 * 23_040) / 20e9
    assert decode_step_s(MACHINE, "bf16", 4, 264) == pytest.approx(expected)
    assert ideal_tpot_s(MACHINE, "bf16", 4, 200, 128) == pytest.approx(expected)


def test_a_step_of_many_rows_takes_the_time_of_its_products() -> None:
    slow = Roofline(SHAPE, dataclasses.replace(MACHINE.ceilings, matmul_flops_per_s=1e10))
    flops = 32 * (2 * (106_168_320 + 28_311_552) + 4 * 264 * 576 * 30)
    assert decode_step_s(slow, "bf16", 32, 264) == pytest.approx(flops / 1e10)


def test_the_ideal_counts_prefill_and_all_steps_but_the_first_token() -> None:
    prefill_s = prefill_flops(SHAPE, 200) / 1.1e12
    step_s = (96_436_224 + 16 * 264 * 11_520) / 20e9
    ideal = ideal_tokens_per_s(MACHINE, "int4", 16, 200, 128)
    assert ideal == pytest.approx(16 * 128 / (16 * prefill_s + 127 * step_s))
    assert ideal_ttft_s(MACHINE, 200) == pytest.approx(prefill_s)


def test_fewer_bytes_and_more_requests_give_a_higher_ideal() -> None:
    by_format = [ideal_tokens_per_s(MACHINE, weights, 1, 200, 128) for weights in ("bf16", "int8", "int4")]
    by_concurrency = [ideal_tokens_per_s(MACHINE, "int8", c, 200, 128) for c in (1, 4, 16, 32)]
    assert by_format == sorted(by_format)
    assert by_concurrency == sorted(by_concurrency)
