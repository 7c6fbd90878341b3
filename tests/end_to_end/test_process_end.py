"""How the process ends: at once after a second signal, and by itself with a code of its own after a fault of the engine."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.end_to_end.server import Server, start

ENDLESS = {"prompt": "The cat sat", "max_tokens": 480, "ignore_eos": True, "stream": True}

# The engine's runner with a fault that a request chooses by its seed: 1 ends the engine, 2 slows every step down.
FAULTY = """
import sys, time
import service.assembly as assembly
from service.cli import main
from service.errors import EngineDead

made = assembly.assemble

def assemble(config, report):
    whole = made(config, report)
    execute = whole.runner.execute
    def faulty(batch):
        seeds = {entry.sampling.seed for entry in batch.entries}
        if 1 in seeds:
            raise EngineDead("injected")
        if 2 in seeds:
            time.sleep(0.02)
        return execute(batch)
    whole.runner.execute = faulty
    return whole

assembly.assemble = assemble
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def faulty(data: Path, tmp_path: Path) -> Iterator[Server]:
    server = start(tmp_path, "--model", str(data / "golden" / "tiny-llama"), program=FAULTY)
    server.wait_until_ready()
    yield server
    server.process.kill()  # where a test failed; else it has ended
    server.process.wait()


async def read_stream(session: aiohttp.ClientSession, begun: asyncio.Event, **fields: object) -> str:
    """Stream an answer; returns the code of the error that ended it, "done", or "cut" if the connection broke."""
    last = ""
    try:
        async with session.post("/v1/completions", json={**ENDLESS, **fields}) as answer:
            async for line in answer.content:
                begun.set()
                last = line.decode().strip() or last
    except aiohttp.ClientError:
        return "cut"
    if last == "data: [DONE]":
        return "done"
    return str(json.loads(last.removeprefix("data: "))["error"]["code"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once_what_the_first_lets_finish(faulty: Server, number: signal.Signals) -> None:
    """OPS-03: the answer would take ten seconds more and the drain limit is thirty; the socket file is gone."""
    begun = asyncio.Event()
    async with aiohttp.ClientSession(faulty.url) as session:
        stream = asyncio.create_task(read_stream(session, begun, seed=2))
        await begun.wait()
        faulty.process.send_signal(number)
        await asyncio.to_thread(faulty.wait_for_log, "service.draining")
        faulty.process.send_signal(number)
        assert await asyncio.to_thread(faulty.process.wait, 3) == 130
        assert await stream == "cut"
    await asyncio.to_thread(faulty.assert_nothing_left)


async def test_a_fault_of_the_engine_ends_every_stream_with_an_error_and_the_process_with_1(faulty: Server) -> None:
    """OPS-01, API-02: running ones get their error event, and a supervisor sees the exit code."""
    begun = asyncio.Event()
    async with aiohttp.ClientSession(faulty.url) as session:
        streams = [asyncio.create_task(read_stream(session, begun)) for _ in range(10)]
        await begun.wait()
        async with session.post("/v1/completions", json={**ENDLESS, "stream": False, "seed": 1}) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "engine_dead"
        assert set(await asyncio.gather(*streams)) == {"engine_dead"}
    assert await asyncio.to_thread(faulty.process.wait, 10) == 1
    await asyncio.to_thread(faulty.wait_for_log, "service.stopped")
    assert not await asyncio.to_thread(Path(faulty.rpc.removeprefix("unix:")).exists)


def test_an_interrupt_of_an_idle_server_is_a_clean_end(data: Path, tmp_path: Path) -> None:
    """OPS-04: SIGINT is as good as SIGTERM."""
    server = start(tmp_path, "--model", str(data / "golden" / "tiny-llama"))
    server.wait_until_ready()
    assert server.get("/healthz")[0] == 200
    assert server.stop(signal.SIGINT, limit_s=5.0) == 0
    server.assert_nothing_left()
