"""RPC below the client: frames that lie, calls that are wrong, peers that do not read, and the socket file."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from service.client import RpcClient
from service.config import ServerConfig
from service.errors import ConfigError, MessageTooLarge, StartupError
from service.frames import FrameReader, Reply, TcpAddress, UnixAddress, encode_frame, parse_address
from service.messages import Delta, Failed, GenerateRequest
from service.transports.rpc import RpcServer
from tests.transports.conftest import rpc_serving
from tests.transports.fake_engine import MODEL, FakeEngine, spoken, started
from tests.transports.wires import RpcWire

LIMIT = 2000
GENERATE = {"method": "generate", "params": {"prompt": "x"}}


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
async def test_a_length_above_the_limit_is_answered_and_the_connection_closed_unread(address: str, length: int) -> None:
    """API-12: nothing is allocated for it, and a neighbour does not notice."""
    async with (
        rpc_serving(FakeEngine(), address, max_message_bytes=LIMIT) as server,
        RpcWire(server.address) as neighbour,
        RpcWire(server.address) as wire,
    ):
        wire.writer.write(struct.pack(">I", length) + b"x" * 100)
        reply = await wire.receive()
        assert (reply["id"], reply["error"]["code"]) == (None, "message_too_large")
        assert str(LIMIT) in reply["error"]["message"]
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.receive()
        assert "error" not in await neighbour.ask(id=1, **GENERATE)


async def test_a_frame_of_exactly_the_limit_is_taken(address: str) -> None:
    """API-12."""
    body = msgspec.msgpack.encode({"id": 1, "method": "generate", "params": {"prompt": ""}})
    prompt = "x" * (LIMIT - len(body) - 2)  # text of that length has a header of three bytes instead of one
    async with (
        rpc_serving(FakeEngine(), address, max_message_bytes=LIMIT) as server,
        RpcWire(server.address) as wire,
    ):
        body = msgspec.msgpack.encode({"id": 1, "method": "generate", "params": {"prompt": prompt}})
        assert len(body) == LIMIT
        wire.send_body(body)
        assert (await wire.receive())["events"][0]["type"] == "started"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xff" * 50,
        b"\xdd\xff\xff\xff\xff",  # an array that announces 2**32 - 1 items
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xdb\xff\xff\xff\xff",  # text
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\x91" * 1900,
        b"\x81\xa1a" * 600,
        b"\x01",
        b"\xc0",
        b"\x90",
        msgspec.msgpack.encode({"id": 1, "method": "stats"}) + b"\x00",
        b"\x81\xa2id\xa2\xed\xa0",
        b"\x81\x80\x01",  # a key that cannot be hashed
        b"\x81\x90\x01",
        b"\x81\xc0\x01",
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xc7\x05\x50hello",  # an unknown extension
    ],
)
async def test_a_body_that_is_no_call_is_answered_and_the_connection_stays_usable(address: str, body: bytes) -> None:
    """API-12: the frame was consumed whole."""
    async with (
        rpc_serving(FakeEngine(), address, max_message_bytes=LIMIT) as server,
        RpcWire(server.address) as wire,
    ):
        wire.send_body(body)
        reply = await wire.receive()
        assert (reply["id"], reply["error"]["code"]) == (None, "invalid_request")
        assert "error" not in await wire.ask(id=1, **GENERATE)


@pytest.mark.parametrize(
    ("call", "reply_id", "code", "param"),
    [
        ({"id": 1, "method": "dance"}, 1, "not_found", "method"),
        ({"id": 1}, 1, "invalid_request", "method"),
        ({"method": "stats"}, None, "invalid_request", "id"),
        ({"id": "1", "method": "stats"}, None, "invalid_request", "id"),
        ({"id": -1, "method": "stats"}, None, "invalid_request", "id"),
        ({"id": 2**63, "method": "stats"}, None, "invalid_request", "id"),
        ({"id": 1.0, "method": "stats"}, None, "invalid_request", "id"),
        ({"id": True, "method": "stats"}, None, "invalid_request", "id"),
        ({"id": 1, "method": 5}, 1, "invalid_request", "method"),
        ({"id": 1, "method": "stats", "params": []}, 1, "invalid_request", "params"),
        ({"id": 1, "method": "stats", "params": {"x": 1}}, 1, "invalid_request", "x"),
        ({"id": 1, "method": "stats", "colour": 1}, 1, "invalid_request", "colour"),
        ({"id": 1, "method": "cancel", "params": {"id": "a"}}, 1, "invalid_request", "id"),
        ({"id": 1, "method": "generate"}, 1, "invalid_request", "prompt"),
        ({"id": 1, "method": "generate", "params": {1: 2}}, 1, "invalid_request", "params"),
        ({"id": 1, "method": "generate", "params": {"prompt": b"x"}}, 1, "invalid_request", "prompt"),
        ({"id": 1, "method": "generate", "params": {"prompt": "x", "top_k": 1.5}}, 1, "invalid_request", "top_k"),
        (
            {"id": 1, "method": "generate", "params": {"prompt": "x", "request_id": 5}},
            1,
            "invalid_request",
            "request_id",
        ),
    ],
)
async def test_a_wrong_call_gets_an_error_that_names_the_field(
    address: str, call: dict[str, Any], reply_id: int | None, code: str, param: str
) -> None:
    """API-12: unknown method, missing field, wrong type."""
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address) as wire:
        wire.send(call)
        reply = await wire.receive()
        assert (reply.get("id"), reply["error"]["code"]) == (reply_id, code)
        assert (reply["error"]["param"] or "").startswith(param)
        assert "error" not in await wire.ask(id=1, **GENERATE)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"looseleaf": 2}, "invalid_request"),
        ({"looseleaf": "1"}, "invalid_request"),
        ({"looseleaf": 1, "colour": 2}, "invalid_request"),
        ({"id": 1, "method": "stats"}, "invalid_request"),
        ([], "invalid_request"),
        ("GET / HTTP/1.1", "invalid_request"),
    ],
)
async def test_a_first_frame_that_is_no_hello_of_this_version_ends_the_connection(
    address: str, hello: object, code: str
) -> None:
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address, hello=False) as wire:
        wire.send(hello)
        reply = await wire.receive()
        assert (reply["id"], reply["error"]["code"]) == (None, code)
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.receive()


async def test_the_welcome_tells_the_limit_and_the_model(address: str) -> None:
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address, hello=False) as wire:
        wire.send({"looseleaf": 1})
        assert await wire.receive() == {"looseleaf": 1, "max_frame_bytes": 4 * 2**20, "model": MODEL}


async def test_a_running_id_is_refused_without_touching_the_running_call(address: str) -> None:
    """API-11: the refusal names no call; the same id on another connection is another call."""
    gate = asyncio.Event()
    engine = FakeEngine(lambda request: spoken(request, [str(request.prompt), "!"], pause=gate))
    async with (
        rpc_serving(engine, address) as server,
        RpcWire(server.address) as wire,
        RpcWire(server.address) as other,
    ):
        wire.send({"id": 7, "method": "generate", "params": {"prompt": "first"}})
        wire.send({"id": 7, "method": "generate", "params": {"prompt": "second"}})
        other.send({"id": 7, "method": "generate", "params": {"prompt": "third"}})
        await engine.until(lambda engine: engine.num_running == 2)
        gate.set()
        texts, refusals = [""], 0
        for peer in (wire, other):
            texts.append("")
            while True:
                reply = await peer.receive()
                if reply.get("id") is None:
                    assert reply["error"]["param"] == "id"
                    refusals += 1
                    continue
                texts[-1] += "".join(event.get("text", "") for event in reply["events"])
                if reply["events"][-1]["type"] == "finished":
                    break
        assert (texts, refusals) == (["", "first!", "third!"], 1)
        gate.set()
        assert "error" not in await wire.ask(id=7, **GENERATE)


async def test_frames_may_come_in_any_pieces(address: str) -> None:
    async with rpc_serving(FakeEngine(), address) as server, RpcWire(server.address) as wire:
        body = msgspec.msgpack.encode({"id": 1, "method": "stats"})
        for byte in (struct.pack(">I", len(body)) + body) * 2:
            wire.writer.write(bytes([byte]))
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert (await wire.receive())["result"]["model"] == MODEL
        assert (await wire.receive())["result"]["model"] == MODEL


async def test_a_peer_that_never_reads_is_cut_and_others_keep_streaming(address: str) -> None:
    """API-05: what is taken from the engine for it stays bounded."""
    taken = 0

    def script(request: GenerateRequest) -> Any:
        nonlocal taken
        if request.prompt != "slow":
            yield from spoken(request, ["a", "b"])
            return
        yield [started(request)]
        while True:
            taken += 1
            yield [Delta(index=0, text="x" * 10_000, token_ids=(1,))]

    engine = FakeEngine(script)
    async with (
        rpc_serving(engine, address, slow_consumer_s=0.3) as server,
        RpcWire(server.address) as slow,
        RpcClient(server.address) as other,
    ):
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send({"id": 1, "method": "generate", "params": {"prompt": "slow"}})
        await engine.until(lambda engine: engine.num_running == 1)
        for _ in range(20):
            assert await other.complete("x") == "ab"
        await engine.until(lambda engine: engine.num_aborted == 1)
        assert taken * 10_000 < 8 * 2**20  # mostly what the kernel takes on loopback


async def test_a_bug_in_an_answer_is_logged_and_told_without_its_details(address: str) -> None:
    engine = FakeEngine(lambda request: [RuntimeError("secret")])
    with structlog.testing.capture_logs() as lines:
        async with rpc_serving(engine, address) as server, RpcWire(server.address) as wire:
            reply = await wire.ask(id=1, **GENERATE)
    assert (reply["error"]["code"], reply["error"]["message"]) == ("internal_error", "internal error")
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["request.failed"]


async def test_a_socket_file_of_a_dead_server_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    """OPS-06."""
    path = tmp_path / "l.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # closing does not remove the file, as after SIGKILL
    assert path.is_socket()
    async with rpc_serving(FakeEngine(), f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with RpcClient(server.address) as client:
            assert (await client.health()).is_alive
    assert not path.exists()


async def test_a_living_server_is_left_alone(tmp_path: Path) -> None:
    """OPS-06."""
    address = f"unix:{tmp_path / 'l.sock'}"
    async with rpc_serving(FakeEngine(), address) as server, RpcClient(server.address) as client:
        with pytest.raises(StartupError, match="another server listens"):
            RpcServer(FakeEngine(), ServerConfig(rpc=address)).bind()
        assert await client.complete("x") == "Hello, world"
        async with RpcClient(server.address) as second:
            assert (await second.health()).is_alive


async def test_a_stop_does_not_remove_another_servers_file(tmp_path: Path) -> None:
    """OPS-06: the file was replaced behind our back."""
    path = tmp_path / "l.sock"
    async with rpc_serving(FakeEngine(), f"unix:{path}"):
        path.unlink()
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"


def test_paths_that_cannot_be_had_are_start_up_errors_of_one_line(tmp_path: Path) -> None:
    """OPS-06: a regular file, a directory, a missing directory, a path too long; before anything is started."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    cases = {
        "file": "not a socket",
        "directory": "not a socket",
        "missing/l.sock": "No such file",
        "x" * 200: "above 107",
    }
    for name, reason in cases.items():
        with pytest.raises(StartupError, match=reason) as caught:
            RpcServer(FakeEngine(), ServerConfig(rpc=f"unix:{tmp_path / name}")).bind()
        assert "\n" not in caught.value.message
    assert (tmp_path / "file").read_text() == "precious"


def test_a_tcp_port_in_use_is_a_start_up_error() -> None:
    """OPS-06."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(StartupError, match="in use"):
            RpcServer(FakeEngine(), ServerConfig(rpc=f"tcp:127.0.0.1:{other.getsockname()[1]}")).bind()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_a_start_up_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StartupError, match="Permission denied"):
        RpcServer(FakeEngine(), ServerConfig(rpc=f"unix:{tmp_path / 'l.sock'}")).bind()


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp:", "tcp:host", "tcp:host:", "tcp:host:x", "tcp:h:70000", "http://x", "tcp::1"]
)
def test_an_address_that_is_none_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unix:/path/to\.sock or tcp:host:port"):
        parse_address(text)


def test_addresses_are_read() -> None:
    assert parse_address("unix:/run/a:b.sock") == UnixAddress("/run/a:b.sock")
    assert parse_address("tcp:127.0.0.1:0") == TcpAddress("127.0.0.1", 0)
    assert parse_address("tcp:[::1]:9000") == TcpAddress("::1", 9000)


def test_any_cutting_of_the_bytes_gives_the_same_frames() -> None:
    replies = [Reply(id=i, error=Failed(code="c", message="m" * i)) for i in range(20)]
    data = b"".join(map(encode_frame, replies))
    for size in (1, 2, 3, 7, 50, len(data)):
        reader = FrameReader(1000)
        bodies = [body for start in range(0, len(data), size) for body in reader.feed(data[start : start + size])]
        assert [msgspec.msgpack.decode(body, type=Reply) for body in bodies] == replies


def test_a_reader_gives_the_frames_before_a_length_that_is_too_large() -> None:
    reader = FrameReader(10)
    frames = reader.feed(struct.pack(">I", 2) + b"ab" + struct.pack(">I", 11))
    assert next(frames) == b"ab"
    with pytest.raises(MessageTooLarge, match="11 bytes"):
        next(frames)
