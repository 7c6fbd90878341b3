"""Traces are read whole or refused with the line, and ids become block names that mean the same."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from service.errors import ConfigError
from service.simulate import TraceRequest, assign_tenants, num_common_ids, read_trace, resample
from service.simulate.trace import block_hashes


def named(num_prompt: int, *ids: int, tenant: str = "") -> TraceRequest:
    return TraceRequest(arrival_s=0.0, num_prompt=num_prompt, num_output=1, hash_ids=ids, tenant=tenant)


@pytest.mark.parametrize(
    ("name", "rows", "prompt_tokens", "output_tokens"),
    [
        ("azure2023_conv.csv.gz", 19_366, 22_361_870, 4_088_665),
        ("azure2023_code.csv.gz", 8_819, 18_059_974, 245_896),
        ("arxiv_summarization_lengths.csv.gz", 10_000, 25_733_585, 3_001_641),
        ("mooncake_conversation.jsonl.gz", 12_031, 144_793_823, 4_122_048),
        ("mooncake_synthetic.jsonl.gz", 3_993, 61_194_628, 595_432),
    ],
)
def test_every_trace_is_read_whole(data: Path, name: str, rows: int, prompt_tokens: int, output_tokens: int) -> None:
    trace = read_trace(data / "traces" / name)
    assert len(trace) == rows
    assert sum(request.num_prompt for request in trace) == prompt_tokens
    assert sum(request.num_output for request in trace) == output_tokens
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(trace))


def test_rows_are_ordered_by_arrival_whatever_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("t_ms,input_tokens,output_tokens,tenant\n900,10,2,a\n100,20,3,b\n")
    first, second = read_trace(file)
    assert (first.arrival_s, first.num_prompt, first.tenant) == (0.1, 20, "b")
    assert (second.arrival_s, second.num_output, second.tenant) == (0.9, 2, "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_ms,input_tokens\n0,5\n", "the header lacks output_tokens"),
        ("", "the header lacks input_tokens and output_tokens"),
        ("input_tokens,output_tokens\n", "has no requests"),
        ("input_tokens,output_tokens\n5,1\nfive,1\n", r"line 3: invalid literal"),
        ("input_tokens,output_tokens\n0,1\n", r"line 2: lengths and arrivals are positive"),
        ("t_ms,input_tokens,output_tokens\nnan,5,1\n", r"line 2: lengths and arrivals are positive"),
        ('{"input_length": 5, "output_length": 1}\n{"input_length": 5}\n', r"line 2: .*output_length"),
        ('{"input_length": 513, "output_length": 1, "hash_ids": [1]}', r"line 1: 513 tokens have 2 hash ids"),
        ('{"input_length": 513,', r"line 1: "),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(file)


def test_a_missing_or_torn_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "absent.csv")
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress(b"input_tokens,output_tokens\n5,1\n")[:-6])
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(torn)


def test_an_id_becomes_the_names_of_its_full_blocks() -> None:
    names = block_hashes(named(512 + 40, 7, 9), block_size=16)
    assert len(names) == len(set(names)) == 32 + 2, "the 8 tokens left over fill no block"
    assert all(len(name) == 32 for name in names)


def test_prompts_share_as_many_names_as_they_share_ids() -> None:
    one, two = block_hashes(named(1536, 7, 9, 11), 16), block_hashes(named(1536, 7, 9, 12), 16)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 64 + [False] * 32
    assert not set(one) & set(block_hashes(named(1536, 7, 9, 11, tenant="other"), 16))


@pytest.mark.parametrize(("block_size", "expected"), [(8, 192), (512, 3), (1024, 1)])
def test_blocks_may_be_smaller_or_larger_than_what_an_id_stands_for(block_size: int, expected: int) -> None:
    names = block_hashes(named(1536, 7, 9, 11), block_size)
    assert len(set(names)) == expected
    assert names == block_hashes(named(1600, 7, 9, 11, 13), block_size)[:expected]


def test_block_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not make blocks of 48"):
        block_hashes(named(1536, 7, 9, 11), 48)


def test_resampling_is_repeatable_and_keeps_the_rate_and_the_lengths() -> None:
    trace = [named(10, 1), named(20, 2)]
    drawn = list(resample(trace, 2000, rate=4.0, seed=1))
    assert drawn == list(resample(trace, 2000, rate=4.0, seed=1))
    assert drawn != list(resample(trace, 2000, rate=4.0, seed=2))
    assert drawn[-1].arrival_s == pytest.approx(500, rel=0.1)
    assert 800 < sum(request.num_prompt == 10 for request in drawn) < 1200
    assert not any(request.hash_ids for request in drawn)


def test_prompts_that_begin_alike_belong_to_one_tenant() -> None:
    trace = [named(600, 5, 6), named(600, 5, 7), named(600, 6, 8), named(600, 8, 9), named(10)]
    tenants = [request.tenant for request in assign_tenants(trace, 2)]
    assert tenants[0] == tenants[1] != tenants[2]
    assert set(tenants) == {"tenant-0", "tenant-1"}


def test_a_system_prompt_of_all_does_not_make_them_one_tenant() -> None:
    trace = [
        named(
            1100,
            0,
            1,
            6,
        ),
        named(1100, 0, 1, 7),
        named(1100, 0, 2, 8),
        named(600, 0, 1),
        named(600, 0, 2),
    ]
    assert num_common_ids(trace) == 1
    tenants = [request.tenant for request in assign_tenants(trace, 2, num_common=1)]
    assert tenants[0] == tenants[1] == tenants[3] != tenants[2] == tenants[4]
    assert num_common_ids([]) == num_common_ids([named(10)]) == 0
    assert num_common_ids(trace[:1]) == 3
