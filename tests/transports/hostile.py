"""Makes malformed requests of every kind, for HTTP, WebSocket and RPC, and sends them to a running server.

    report = await attack_http("http://127.0.0.1:8000", count=10_000, seed=1)

Each `attack_*` sends `count` inputs drawn from its kinds with a seeded generator and checks each outcome: an error of the documented shape or
a connection that the server closed, never a status of 500 or above, silence, or an answer to what is no request. It knows the wire only, so
it can be pointed at any running server.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from typing import Any

import aiohttp
import msgspec

from service.errors import error_classes
from tests.transports.wires import RpcWire

TIMEOUT_S = 20
MESSAGES = [{"role": "user", "content": "hi"}]
CODES = set(error_classes())


class HostileReport(msgspec.Struct):
    """How often each kind was sent, by (kind, outcome)."""

    outcomes: Counter[tuple[str, str]]

    @property
    def total(self) -> int:
        """Inputs sent."""
        return self.outcomes.total()

    @property
    def kinds(self) -> set[str]:
        """Kinds that were drawn."""
        return {kind for kind, _ in self.outcomes}


def odd_value(rng: random.Random) -> Any:
    """A value that no field takes, or few do."""
    depth = rng.randint(1, 40)
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested] if rng.random() < 0.5 else {"k": nested}
    return rng.choice(
        [
            None,
            "5",
            5.5,
            -1,
            -(2**40),
            2**63,
            2**64 + 1,
            1e308,
            [],
            [[]],
            {},
            {"a": {}},
            [None],
            "\x00",
            "\ud83d",
            nested,
        ]
    )


FIELDS = [
    "max_tokens", "min_tokens", "n", "temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "logprobs", "priority",
]  # fmt: skip


def bad_fields(rng: random.Random) -> dict[str, Any]:
    """The fields of a completion or chat of which at least one is wrong for certain, and others may be."""
    base: dict[str, Any] = {"prompt": "hi"} if rng.random() < 0.5 else {"messages": MESSAGES}
    wrong: dict[str, Any] = rng.choice(
        [
            {"temprature": 1},
            {"temperature": "hot"},
            {"temperature": 3},
            {"max_tokens": -1},
            {"max_tokens": 1.5},
            {"n": 0},
            {"n": 10**6},
            {"top_k": -2},
            {"top_p": 1.5},
            {"seed": 2**63},
            {"stop": [""]},
            {"stop": ["x"] * 17},
            {"logit_bias": {"abc": 1}},
            {"logit_bias": {"1": 101}},
            {"stop_token_ids": [-1]},
            {"ignore_eos": "yes"},
            {"model": "another"},
            {"tools": [{}]},
            {"max_tokens": 5, "max_completion_tokens": 6},
            {"prompt": {"a": 1}, "messages": None},
            {"prompt": [[]], "messages": None},
            {"prompt": None, "messages": []},
            {"prompt": None, "messages": [{"role": "user"}]},
            {"prompt": None, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"prompt": None, "messages": None},
            {"prompt": "hi", "messages": MESSAGES},
        ]
    )
    noise = {rng.choice(FIELDS): odd_value(rng) for _ in range(rng.randint(0, 3))}
    return {**base, **noise, **wrong}


def bad_json(rng: random.Random) -> bytes:
    """Text that is not one JSON object."""
    good = json.dumps({"prompt": "hi", "messages": MESSAGES}).encode()
    cut = rng.randrange(1, len(good))
    return rng.choice(
        [
            b"",
            good[:cut],
            good + b"}",
            good[:-1] + b",}",
            b"\xef\xbb\xbf" + good,
            good[:cut] + b"\xff" + good[cut:],
            b"[" * rng.randint(1, 5000),
            b"[" + good + b"]",
            b'{"prompt": NaN}',
            b'{"prompt": "x", "temperature": 1e400}',
            b'{"prompt": "x", "prompt": "y"}',
            json.dumps("x" * rng.randint(0, 1000)).encode(),
            rng.randbytes(rng.randint(1, 200)),
            good.decode().encode("utf-16"),
        ]
    )


async def attack_http(url: str, *, count: int, seed: int = 0, headers: dict[str, str] | None = None) -> HostileReport:
    """Send bad HTTP requests; every answer must be an error below 500, and the server must go on answering."""
    rng = random.Random(seed)
    outcomes: Counter[tuple[str, str]] = Counter()
    host, port = url.removeprefix("http://").rsplit(":", 1)
    paths = ["/v1/completions", "/v1/chat/completions"]
    json_headers = {"Content-Type": "application/json", **(headers or {})}

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def send(kind: str, method: str, path: str, **options: Any) -> None:
            async with session.request(method, url + path, **options) as response:
                text = await response.text()
            assert 400 <= response.status < 500, (kind, options, response.status, text)
            _check_error(kind, strict_object(text)["error"])
            outcomes[kind, str(response.status)] += 1

        async def send_raw(kind: str, data: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
            except ConnectionError:
                answer = b""
            finally:
                writer.close()
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (kind, data[:200], answer[:200])
            outcomes[kind, answer[9:12].decode() or "closed"] += 1

        for number in range(count):
            path = rng.choice(paths)
            kind = rng.choice(
                [
                    "fields",
                    "fields",
                    "fields",
                    "json",
                    "json",
                    "type",
                    "method",
                    "path",
                    "line",
                    "length",
                    "chunk",
                    "cut",
                ]
            )
            if kind == "fields":
                fields = bad_fields(rng)
                path = paths["messages" in fields] if rng.random() < 0.8 else path
                await send(kind, "POST", path, data=json.dumps(fields).encode(), headers=json_headers)
            elif kind == "json":
                await send(kind, "POST", path, data=bad_json(rng), headers=json_headers)
            elif kind == "type":
                content_type = rng.choice(["text/plain", "application/xml", "multipart/form-data; boundary=x", "x"])
                bad = {**(headers or {}), "Content-Type": content_type}
                await send(kind, "POST", path, data=b'{"prompt": "x"}', headers=bad)
            elif kind == "method":
                await send(kind, rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"]), path, headers=headers)
            elif kind == "path":
                await send(
                    kind, "POST", rng.choice(["/v1", "/v2/completions", "/%00", "/v1/completions/x"]), headers=headers
                )
            elif kind == "line":
                await send_raw(kind, rng.choice([b"\x00" * 50, b"GET\r\n\r\n", b"\x16\x03\x01" + rng.randbytes(40)]))
            elif kind == "length":
                length = rng.choice([b"-1", b"x", b"1, 2", b"99999999999999999999"])
                await send_raw(kind, _head(path, headers) + b"Content-Length: " + length + b"\r\n\r\n{}")
            elif kind == "chunk":
                chunk = rng.choice([b"zz\r\n{}", b"-5\r\n{}", b"5\r\nab", b"ffffffffffffffffff\r\n{}"])
                await send_raw(kind, _head(path, headers) + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
            else:
                await send_raw(kind, _head(path, headers) + b'Content-Length: 500\r\n\r\n{"prompt": "x')
            if number % 100 == 0:
                async with session.get(url + "/healthz") as response:
                    assert response.status == 200
    return HostileReport(outcomes)


async def attack_websocket(url: str, *, count: int, seed: int = 0, max_message_bytes: int) -> HostileReport:
    """Send bad messages over WebSockets; each gets a failed message, or a close code where the frame itself is wrong."""
    rng = random.Random(seed)
    outcomes: Counter[tuple[str, str]] = Counter()
    async with aiohttp.ClientSession() as session:
        socket = await session.ws_connect(url + "/ws", max_msg_size=0)
        for number in range(count):
            kind = rng.choice(["fields", "fields", "json", "json", "envelope", "binary", "large", "utf8"])
            if kind == "fields":
                fields = bad_fields(rng)
                name = "chat" if "messages" in fields and rng.random() < 0.8 else "completion"
                await socket.send_str(json.dumps({**fields, "type": name, "id": str(number)}))
            elif kind == "json":
                await socket.send_str(bad_json(rng).decode("utf-8", "replace"))
            elif kind == "envelope":
                envelope = {"type": odd_value(rng), "id": odd_value(rng), "prompt": "hi"}
                await socket.send_str(json.dumps(envelope))
            elif kind == "binary":
                await socket.send_bytes(rng.randbytes(rng.randint(0, 100)))
            elif kind == "large":
                await socket.send_str("x" * (max_message_bytes + rng.randint(1, 1000)))
            else:
                await socket.send_frame(b'{"type": "\xff"}', aiohttp.WSMsgType.TEXT)
            message = await socket.receive(timeout=TIMEOUT_S)
            if kind in ("large", "utf8"):
                expected = 1009 if kind == "large" else 1007
                assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), (kind, message)
                assert socket.close_code == expected, (kind, socket.close_code)
                outcomes[kind, str(expected)] += 1
                socket = await session.ws_connect(url + "/ws", max_msg_size=0)
                continue
            assert message.type is aiohttp.WSMsgType.TEXT, (kind, message)
            failed = strict_object(message.data)
            assert failed["type"] == "failed", (kind, failed)
            _check_error(kind, failed)
            outcomes[kind, failed["code"]] += 1
        await socket.close()
    return HostileReport(outcomes)


async def attack_rpc(
    address: str, *, count: int, seed: int = 0, max_message_bytes: int, api_key: str | None = None
) -> HostileReport:
    """Send bad frames over RPC; each gets an error, and the connection stays unless its length or its first frame was wrong."""
    rng = random.Random(seed)
    outcomes: Counter[tuple[str, str]] = Counter()

    async def greeted() -> RpcWire:
        wire = await RpcWire(address, hello=False).__aenter__()
        wire.send({"looseleaf": 1, "api_key": api_key})
        assert (await wire.receive())["looseleaf"] == 1
        return wire

    wire = await greeted()
    for number in range(count):
        kind = rng.choice(["fields", "fields", "body", "body", "call", "length", "hello", "cut"])
        if kind == "fields":
            fields = bad_fields(rng)
            wire.send(mended({"id": number, "method": "generate", "params": fields}))
        elif kind == "body":
            wire.send_body(bad_msgpack(rng))
        elif kind == "call":
            call = {"id": number, "method": "dance", "params": {}}
            call[rng.choice(["id", "method", "params", "colour"])] = rng.choice(["x", -1, 1.5, [1], None])
            wire.send(call)
        else:
            await wire.__aexit__()
            if kind == "hello":
                wire = await RpcWire(address, hello=False).__aenter__()
                wire.send(rng.choice([{"looseleaf": 2}, [], {"id": 1, "method": "stats"}, "x", {"looseleaf": None}]))
            else:
                wire = await greeted()
                length = rng.choice([max_message_bytes + 1, 2**31, 2**32 - 1]) if kind == "length" else 100
                wire.writer.write(struct.pack(">I", length) + b"x" * 10)
        if kind != "cut":
            reply = await wire.receive()
            _check_error(kind, reply["error"])
            outcomes[kind, reply["error"]["code"]] += 1
        else:
            outcomes[kind, "closed"] += 1
        if kind in ("length", "hello"):
            assert await asyncio.wait_for(wire.reader.read(), TIMEOUT_S) == b""
        if kind in ("length", "hello", "cut"):
            await wire.__aexit__()
            wire = await greeted()
    assert "result" in await wire.ask(id=1, method="health")
    await wire.__aexit__()
    return HostileReport(outcomes)


def bad_msgpack(rng: random.Random) -> bytes:
    """A body that is not one msgpack map."""
    good = msgspec.msgpack.encode({"id": 1, "method": "stats"})
    bombs = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    return rng.choice(
        [
            b"",
            good[: rng.randrange(1, len(good))],
            good + b"\x00",
            b"\x91" * rng.randint(1, 50_000),
            b"\x81\xa1k" * rng.randint(1, 10_000),
            b"\xc1",
            rng.choice(bombs),
            b"\x81\xa2id" + rng.choice(bombs),
            b"\x81\xa2id\xa2\xed\xa0",
            msgspec.msgpack.encode(rng.choice([None, 5, "x", [], [1], 1.5, True])),
        ]
    )


def mended(value: Any) -> Any:
    """Drop what msgpack cannot carry: half surrogate pairs and integers above 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 2**64 - 1)
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    return [mended(item) for item in value] if isinstance(value, list) else value


def strict_object(text: str) -> dict[str, Any]:
    """Decode JSON; NaN and Infinity fail."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return value


def _check_error(kind: str, error: dict[str, Any]) -> None:
    assert error["code"] in CODES, (kind, error)
    assert error["code"] != "internal_error", (kind, error)
    assert error["message"], (kind, error)
    assert len(error["message"]) < 2000, (kind, error)


def _head(path: str, headers: dict[str, str] | None) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}".encode()
