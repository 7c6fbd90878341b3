"""The RPC client against a real server, over a Unix socket and over TCP."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from service.client import RpcClient, compacted
from service.errors import ContextTooLong, Draining, EngineDead, InvalidRequest, MessageTooLarge, Unauthorized
from service.frames import FrameReader, Welcome, encode_frame
from service.messages import ChatMessage, Delta, Finished, Started, Usage
from tests.transports.conftest import rpc_serving
from tests.transports.fake_engine import MODEL, FakeEngine, spoken


async def test_five_lines_stream_a_generation(address: str) -> None:
    async with rpc_serving(FakeEngine(), address) as server, RpcClient(server.address) as client:
        events = [event async for event in client.generate(prompt="Say hello", max_tokens=32)]
    assert isinstance(events[0], Started)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "Hello, world"
    assert events[-1] == Finished(usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=2))


async def test_complete_and_chat_return_text(address: str) -> None:
    async with rpc_serving(FakeEngine(), address) as server, RpcClient(server.address) as client:
        assert await client.complete("Say hello") == "Hello, world"
        assert await client.complete([5, 6, 7], max_tokens=1) == "Hello"
        assert await client.chat([{"role": "user", "content": "Hi"}]) == "Hello, world"
        assert await client.chat([ChatMessage(role="user", content="Hi")], max_tokens=2) == "Hello,"
        with pytest.raises(InvalidRequest, match="generate"):
            await client.complete("Say hello", n=2)


async def test_stats_and_health_are_those_of_the_engine(address: str) -> None:
    engine = FakeEngine()
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        assert (await client.stats()).model == MODEL
        assert await client.health() == engine.health_now


async def test_calls_run_side_by_side_on_one_connection(address: str) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, [str(request.prompt), "!"], pause=gate))
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        answers = [asyncio.create_task(client.complete(f"p{i}")) for i in range(50)]
        await engine.until(lambda engine: engine.num_running == 50)
        gate.set()
        assert await asyncio.gather(*answers) == [f"p{i}!" for i in range(50)]


async def test_a_refused_request_raises_the_servers_error_with_its_field(address: str) -> None:
    engine = FakeEngine(lambda request: [ContextTooLong("too long by 7 tokens", param="prompt")])
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        with pytest.raises(InvalidRequest) as bad_value:
            await client.complete("x", temperature=9)
        assert bad_value.value.param == "temperature"
        with pytest.raises(ContextTooLong, match="7 tokens") as too_long:
            await client.complete("x")
        assert too_long.value.param == "prompt"
        assert engine.num_failed == 1


async def test_an_error_in_the_middle_comes_after_the_text_before_it() -> None:
    def script(request):  # type: ignore[no-untyped-def]
        yield from list(spoken(request, ["a", "b"]))[:2]
        yield EngineDead("the engine stopped")

    async with rpc_serving(FakeEngine(script), "tcp:127.0.0.1:0") as server, RpcClient(server.address) as client:
        events = client.generate(prompt="x")
        assert isinstance(await anext(events), Started)
        assert isinstance(await anext(events), Delta)
        with pytest.raises(EngineDead, match="the engine stopped"):
            await anext(events)


async def test_closing_the_iterator_cancels_on_the_server(address: str) -> None:
    never = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        async with aclosing(client.generate(prompt="x")) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await engine.until(lambda engine: engine.num_running == 0)
        assert engine.num_aborted == 1
        assert (await client.health()).is_alive  # the connection goes on


async def test_a_client_that_goes_away_aborts_its_answers(address: str) -> None:
    """API-03: over an RPC socket close."""
    never = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))
    async with rpc_serving(engine, address) as server:
        client = RpcClient(server.address)
        await client.connect()
        calls = [asyncio.create_task(client.complete("x")) for _ in range(50)]
        await engine.until(lambda engine: engine.num_running == 50)
        await client.close()
        await engine.until(lambda engine: engine.num_running == 0)
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert engine.num_aborted == 50
    assert all(isinstance(result, EngineDead) for result in results)


async def test_a_stopped_server_says_so_and_is_gone_afterwards(address: str) -> None:
    never = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        where = server.address
        call = asyncio.create_task(client.complete("x"))
        await engine.until(lambda engine: engine.num_running == 1)
        await server.stop()
        with pytest.raises(Draining):
            await call
        with pytest.raises(EngineDead, match="lost"):
            await client.complete("again")
        with pytest.raises(EngineDead, match="cannot connect"):
            await RpcClient(where).connect()


@pytest.mark.parametrize(("last_words", "reason"), [(b"", "lost"), (b"\xff" * 8, "does not speak this protocol")])
async def test_a_server_that_dies_or_talks_nonsense_raises_engine_dead(last_words: bytes, reason: str) -> None:
    async def die_after_the_welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Welcome(looseleaf=1, max_frame_bytes=1000, model="m")))
        hello = FrameReader(1000)
        while len(list(hello.feed(await reader.read(1000)))) < 1:
            pass
        await reader.read(1000)  # the call
        writer.write(last_words)
        writer.close()

    server = await asyncio.start_server(die_after_the_welcome, "127.0.0.1", 0)
    async with server, RpcClient(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(EngineDead, match=reason):
            await client.complete("x")
        with pytest.raises(EngineDead, match=reason):
            await client.stats()


async def test_a_drain_cuts_a_long_answer_with_a_typed_error(address: str) -> None:
    """OPS-03, mechanism 30: a final frame with the reason, then the connection closes."""
    never = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, ["a", "b"], pause=never))
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        call = asyncio.create_task(client.complete("x"))
        await engine.until(lambda engine: engine.num_running == 1)
        await server.drain(0.01)
        with pytest.raises(Draining):
            await call
    assert engine.num_aborted == 1


async def test_a_wrong_key_is_refused_at_the_handshake(address: str) -> None:
    async with rpc_serving(FakeEngine(), address, api_key="sesame") as server:
        with pytest.raises(Unauthorized):
            await RpcClient(server.address, api_key="guess").connect()
        with pytest.raises(Unauthorized):
            await RpcClient(server.address).connect()
        async with RpcClient(server.address, api_key="sesame") as client:
            assert await client.complete("x") == "Hello, world"


async def test_half_a_surrogate_pair_arrives_as_the_replacement_character(address: str) -> None:
    """API-08: replaced, as over HTTP and WebSocket; a whole pair stays."""
    engine = FakeEngine()
    async with rpc_serving(engine, address) as server, RpcClient(server.address) as client:
        await client.complete("a\ud83d \U0001f600", stop=["\udc00"])
    assert engine.requests[0].prompt == "a\ufffd \U0001f600"
    assert engine.requests[0].sampling.stop == ("\ufffd",)


async def test_a_call_above_the_frame_limit_raises_without_harming_others(address: str) -> None:
    async with (
        rpc_serving(FakeEngine(), address, max_message_bytes=1000) as server,
        RpcClient(server.address) as client,
    ):
        with pytest.raises(MessageTooLarge, match="1000"):
            await client.complete("x" * 2000)
        assert await client.complete("x") == "Hello, world"


def test_a_lagging_reader_gets_merged_deltas_that_say_the_same() -> None:
    """Mechanism 26."""
    deltas = [Delta(index=i % 2, text=f"{i} ", token_ids=(i,)) for i in range(10)]
    started = Started(request_id="r", prompt_token_ids=(1,))
    finished = Finished(usage=Usage(prompt_tokens=1, completion_tokens=10))
    assert compacted([started, *deltas, finished]) == [
        started,
        Delta(index=0, text="0 2 4 6 8 ", token_ids=(0, 2, 4, 6, 8)),
        Delta(index=1, text="1 3 5 7 9 ", token_ids=(1, 3, 5, 7, 9)),
        finished,
    ]
