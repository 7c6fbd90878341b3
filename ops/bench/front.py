"""A small OpenAI completions server in front of an engine that has none: aiohttp, streaming, token ids in and out.

Runs inside a peer's environment (openvino_front.py, transformers_front.py) and imports nothing of ours. Knows greedy completions of
an exact length, because that is all the benchmark sends. Every step of the engine becomes one chunk for each request that got tokens
in it, so what a client sees of the pace is the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import web
from tokenizers import Tokenizer  # type: ignore[import-untyped, unused-ignore]  # typed or not, by environment

MODEL_NAME = "bench"


class EngineFailed(Exception):
    """The engine gave a request up; the message says why."""


Deliver = Callable[[list[int] | EngineFailed], None]  # called on the event loop's thread


class Engine(Protocol):
    """What the server needs: generate exactly `max_tokens` greedy tokens, and say so step by step."""

    def submit(self, prompt_ids: list[int], max_tokens: int, deliver: Deliver) -> Callable[[], None]:
        """Start a request; `deliver` gets the new ids of each step. Return what cancels it. Called on the event loop's thread."""
        ...


class Text:
    """Turns ids into text as they come, and holds back what is not yet a whole character.

    Decoding starts a few tokens back, because a token's text depends on its neighbours (a leading space, half a character).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # tokens before here need not be decoded again
        self._shown = 0  # tokens before here are in the text handed out

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete; empty while a character is incomplete."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._context : self._shown], skip_special_tokens=False)
        now = self._tokenizer.decode(self._ids[self._context :], skip_special_tokens=False)
        if now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return str(now[len(before) :])


class Front:
    """The routes of the server."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def app(self) -> web.Application:
        """Return the application: completions, the list of models, and a path that answers when ready."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, _request: web.Request) -> web.Response:
        """Say that the server answers; the engine is ready before the server starts."""
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        """List the only model."""
        return web.json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Stream one completion."""
        body: dict[str, Any] = await request.json()
        if not (body.get("stream") and body.get("ignore_eos") and body.get("temperature") == 0):
            return web.json_response({"error": {"message": "only streamed, greedy, ignore_eos"}}, status=400)
        prompt_ids = self._tokenizer.encode(body["prompt"]).ids
        max_tokens = body["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        steps: asyncio.Queue[list[int] | EngineFailed] = asyncio.Queue()
        cancel = self._engine.submit(prompt_ids, max_tokens, steps.put_nowait)
        try:
            await self._stream(response, steps, max_tokens)
        except EngineFailed as error:
            await response.write(_event({"error": {"message": str(error)}}))
            return response
        finally:
            cancel()
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": max_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _stream(
        self, response: web.StreamResponse, steps: asyncio.Queue[list[int] | EngineFailed], max_tokens: int
    ) -> None:
        """Write a chunk for each step until there are `max_tokens`."""
        text, num_tokens = Text(self._tokenizer), 0
        while num_tokens < max_tokens:
            ids = await steps.get()
            if isinstance(ids, EngineFailed):
                raise ids
            num_tokens += len(ids)
            if num_tokens > max_tokens:
                raise EngineFailed(f"{num_tokens} tokens came, {max_tokens} were asked for")
            reason = "length" if num_tokens == max_tokens else None
            choice = {"index": 0, "text": text.add(ids), "finish_reason": reason}
            await response.write(_event({"object": "text_completion", "model": MODEL_NAME, "choices": [choice]}))


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every front is told."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", required=True)
    made.add_argument("--tokenizer", required=True, help="tokenizer.json")
    made.add_argument("--port", type=int, required=True)
    return made


def serve(engine: Engine, options: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> None:
    """Serve on the loop that the engine delivers to, until a signal ends it."""
    front = Front(engine, Tokenizer.from_file(options.tokenizer))
    web.run_app(front.app(), host="127.0.0.1", port=options.port, loop=loop, print=None, access_log=None)
    os._exit(0)  # an engine's thread may never end by itself, and nothing is left to be saved


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
