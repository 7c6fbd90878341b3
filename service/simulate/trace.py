"""Traces: when requests came, how long they were, and which blocks of their prompts were equal. No text.

Two formats, by the first line, gzipped or not: CSV with a header (`input_tokens,output_tokens` and optionally `t_ms` and `tenant`), or
one JSON object a line (`timestamp` in ms, `input_length`, `output_length`, and optionally `hash_ids` and `tenant`). `hash_ids` has one
id for each started block of the prompt of HASH_TOKENS tokens; equal ids mean an equal prefix up to the end of that block.
"""

from __future__ import annotations

import csv
import gzip
import io
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from service.errors import ConfigError

HASH_TOKENS = 512  # tokens a hash id stands for, as in the Mooncake traces


class TraceRequest(Struct, frozen=True, kw_only=True):
    """One request of a trace. `hash_ids` empty: nothing is known of its prompt, so it is like no other."""

    arrival_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""


class _Line(Struct):
    input_length: int
    output_length: int
    timestamp: float = 0.0
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a whole trace, ordered by arrival. Raises `ConfigError` naming the file and the line."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read().decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    parse = _parse_jsonl if text.lstrip().startswith("{") else _parse_csv
    requests = []
    for number, request in parse(text, path):
        if request.num_prompt < 1 or request.num_output < 0 or not request.arrival_s >= 0:
            raise ConfigError(f"{path}, line {number}: lengths and arrivals are positive, and this is {request}")
        num_ids = -(-request.num_prompt // HASH_TOKENS)
        if request.hash_ids and len(request.hash_ids) != num_ids:
            raise ConfigError(
                f"{path}, line {number}: {request.num_prompt} tokens have {num_ids} hash ids of {HASH_TOKENS} tokens, "
                f"and there are {len(request.hash_ids)}"
            )
        requests.append(request)
    if not requests:
        raise ConfigError(f"the trace {path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def resample(trace: Sequence[TraceRequest], num_requests: int, *, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Draw requests with replacement, at Poisson arrivals of `rate` a second.

    Hash ids are dropped: a prompt drawn twice would be a hit that the traffic never had.
    """
    draw = random.Random(seed)
    now = 0.0
    for _ in range(num_requests):
        now += draw.expovariate(rate)
        request = trace[int(draw.random() * len(trace))]
        yield TraceRequest(
            arrival_s=now, num_prompt=request.num_prompt, num_output=request.num_output, tenant=request.tenant
        )


def num_common_ids(trace: Sequence[TraceRequest]) -> int:
    """Count the hash ids that all prompts begin with: a system prompt of the whole trace."""
    shortest = min((request.hash_ids for request in trace), key=len, default=())
    for position, id_ in enumerate(shortest):
        if any(request.hash_ids[position] != id_ for request in trace):
            return position
    return len(shortest)


def assign_tenants(trace: Iterable[TraceRequest], num_tenants: int, *, num_common: int = 0) -> Iterator[TraceRequest]:
    """Spread a trace over tenants.

    Requests whose prompts go on alike after their first `num_common` ids stay with one tenant, as the turns of a conversation do; the
    others take turns.
    """
    for position, request in enumerate(trace):
        owner = request.hash_ids[num_common] if len(request.hash_ids) > num_common else position
        yield msgspec.structs.replace(request, tenant=f"tenant-{owner % num_tenants}")


def block_hashes(request: TraceRequest, block_size: int) -> list[bytes]:
    """Name the full blocks of the prompt, `HASH_TOKENS / block_size` to an id, so that equal ids give equal names.

    Where a block spans several ids the last one names it. The tenant is part of every name. `block_size` and HASH_TOKENS: one must
    divide the other. Empty without hash ids.
    """
    if not request.hash_ids:
        return []
    if max(block_size, HASH_TOKENS) % min(block_size, HASH_TOKENS):
        raise ConfigError(f"the trace's ids stand for {HASH_TOKENS} tokens, which do not make blocks of {block_size}")
    owner = request.tenant.encode().rjust(16, b"\0")[-16:]
    num_full = request.num_prompt // block_size
    per_id = HASH_TOKENS // block_size
    if per_id <= 1:
        step = block_size // HASH_TOKENS
        return [owner + request.hash_ids[(i + 1) * step - 1].to_bytes(16, "little") for i in range(num_full)]
    children = [child.to_bytes(4, "little") for child in range(per_id)]
    names = [
        parent + child
        for id_ in request.hash_ids
        for parent in (owner + id_.to_bytes(12, "little"),)
        for child in children
    ]
    return names[:num_full]


def _parse_jsonl(text: str, path: Path) -> Iterator[tuple[int, TraceRequest]]:
    decoder = msgspec.json.Decoder(_Line)
    for number, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        try:
            line = decoder.decode(row)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        yield (
            number,
            TraceRequest(
                arrival_s=line.timestamp / 1000,
                num_prompt=line.input_length,
                num_output=line.output_length,
                hash_ids=line.hash_ids,
                tenant=line.tenant,
            ),
        )


def _parse_csv(text: str, path: Path) -> Iterator[tuple[int, TraceRequest]]:
    rows = csv.DictReader(io.StringIO(text))
    missing = {"input_tokens", "output_tokens"} - set(rows.fieldnames or ())
    if missing:
        raise ConfigError(f"{path}: the header lacks {' and '.join(sorted(missing))}")
    for number, row in enumerate(rows, start=2):
        try:
            request = TraceRequest(
                arrival_s=float(row.get("t_ms") or 0) / 1000,
                num_prompt=int(row["input_tokens"]),
                num_output=int(row["output_tokens"]),
                tenant=row.get("tenant") or "",
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        yield number, request
