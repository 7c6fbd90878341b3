"""A chat client for the terminal, over the server's WebSocket. Ctrl-C stops the answer; at the prompt it leaves, as Ctrl-D does.

A turn has a connection of its own, so that nothing has to answer heartbeats while the user thinks.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import aiohttp
import msgspec

HELP = "Enter sends · Ctrl-C stops the answer · /new starts over · Ctrl-D or /quit leaves"


def chat(url: str, *, api_key: str | None, system: str | None, max_tokens: int | None) -> int:
    """Talk to the server at `url` until the user leaves; returns the exit code."""
    conversation = _Conversation(url.rstrip("/"), api_key, system, max_tokens)
    try:
        print(f"{asyncio.run(conversation.greet())}\n{HELP}")
        while True:
            try:
                text = input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if text in {"/quit", "/exit"}:
                return 0
            if text == "/new":
                conversation.messages.clear()
            elif text:
                asyncio.run(conversation.turn(text))
    except (aiohttp.ClientError, OSError) as error:
        print(f"looseleaf: no server at {url}: {error}", file=sys.stderr)
        return 1


class _Conversation:
    def __init__(self, url: str, api_key: str | None, system: str | None, max_tokens: int | None) -> None:
        self.messages: list[dict[str, str]] = []
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._system = [{"role": "system", "content": system}] if system else []
        self._options = {"max_tokens": max_tokens} if max_tokens else {}

    async def greet(self) -> str:
        """Return a line about what is served."""
        async with self._session() as session, session.get(self._url + "/api/stats") as response:
            stats = await response.json()
        return f"{stats['model']} · {stats['backend']} · {stats['dtype']} · {stats['max_model_len']} tokens of context"

    async def turn(self, text: str) -> None:
        """Send one turn and print its answer as it comes."""
        question = {"role": "user", "content": text}
        request = {"type": "chat", "id": "turn", "messages": [*self._system, *self.messages, question], **self._options}
        async with self._session() as session, session.ws_connect(self._url + "/ws", max_msg_size=0) as socket:
            await _send(socket, request)
            loop = asyncio.get_running_loop()
            cancels: set[asyncio.Task[None]] = set()  # keeps the tasks alive
            can_cancel = sys.platform != "win32"
            if can_cancel:
                cancel = {"type": "cancel", "id": "turn"}
                loop.add_signal_handler(signal.SIGINT, lambda: cancels.add(loop.create_task(_send(socket, cancel))))
            try:
                answer = await _print_answer(socket)
            finally:
                if can_cancel:
                    loop.remove_signal_handler(signal.SIGINT)
        self.messages += [question, {"role": "assistant", "content": answer}]

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=self._headers, raise_for_status=True)


async def _print_answer(socket: aiohttp.ClientWebSocketResponse) -> str:
    answer = ""
    async for frame in socket:
        event: dict[str, Any] = msgspec.json.decode(frame.data)
        if event["type"] == "delta":
            answer += event["text"]
            print(event["text"], end="", flush=True)
        elif event["type"] == "finished":
            print()
            return answer
        elif event["type"] == "failed":
            print(f"\n[{event['message']}]")
            return answer
    raise aiohttp.ClientConnectionError(f"the connection was lost (close code {socket.close_code})")


async def _send(socket: aiohttp.ClientWebSocketResponse, message: dict[str, Any]) -> None:
    await socket.send_str(msgspec.json.encode(message).decode())
