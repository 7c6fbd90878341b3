"""The OpenAI API: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, as server-sent events or as one JSON body.

Decides nothing about generation: fields get their meaning in `fields`, events their shape in `openai_chunks`. Errors raised before the
first event become an HTTP status; later ones become the last event of the stream, `data: {"error": …}`, after which the stream ends without
`[DONE]`. `stream_options` without `stream` is refused.

Invariant: every stream ends in `[DONE]`, in one error event, or in a closed connection whose request was aborted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import structlog
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from service.config import ServerConfig
from service.errors import (
    InvalidRequest,
    LooseleafError,
    MessageTooLarge,
    SlowConsumer,
    UnknownModel,
    UnsupportedMediaType,
)
from service.messages import Delta, EngineClient, Event, GenerateRequest, Started, Usage, merge_deltas
from service.transports.answers import RunningAnswers, open_answers
from service.transports.decoding import MessageDecoder
from service.transports.fields import convert, take, take_model, take_requests, without_nulls
from service.transports.openai_chunks import ChatChoices, CompletionChoices, Wants
from service.transports.openai_types import Body, ErrorBody, Model, ModelList, UsageBody, encode
from service.transports.request_id import REQUEST_ID
from service.transports.strict_json import decode_object

MAX_PROMPTS = 64

log = structlog.get_logger(__name__)


class Plan(Struct, frozen=True, kw_only=True):
    """A validated call: the requests behind it and how the answer is to look."""

    id: str
    created: int
    model: str
    requests: list[GenerateRequest]
    choices: ChatChoices | CompletionChoices
    wants: Wants
    is_stream: bool
    include_usage: bool


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a request that only streams have."""

    include_usage: bool | None = None


class OpenAIRoutes:
    """The handlers of the API over one engine."""

    def __init__(
        self, engine: EngineClient, config: ServerConfig, answers: RunningAnswers, decoder: MessageDecoder
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._config = config
        self._answers = answers
        self._started_at = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Return the table to add to an application."""
        return [
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{model:.+}", self.show_model),
            web.post("/v1/completions", self.complete),
            web.post("/v1/chat/completions", self.chat),
        ]

    async def list_models(self, _: web.Request) -> web.Response:
        """List the one model that is served."""
        return json_response(ModelList(data=[self._model()]))

    async def show_model(self, request: web.Request) -> web.Response:
        """Describe the served model; another name is a 404."""
        model = self._model()
        name = request.match_info["model"]
        if name != model.id:
            raise UnknownModel(f"model {name!r} is not served here; this server has {model.id!r}", param="model")
        return json_response(model)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Continue one or several prompts."""
        return await self._answer(request, is_chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        return await self._answer(request, is_chat=True)

    def _model(self) -> Model:
        stats = self._engine.stats()
        return Model(id=stats.model, created=self._started_at, max_model_len=stats.max_model_len)

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        fields = without_nulls(await read_object(request, self._config.max_body_bytes, self._decoder))
        plan = plan_call(fields, request[REQUEST_ID], self._engine.stats().model, is_chat=is_chat)
        if plan.is_stream:
            return await self._stream(request, plan)
        with self._answers.begin():
            async with open_answers(self._engine, plan.requests) as events:
                return json_response(await collect(plan, events))

    async def _stream(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            try:
                with self._answers.begin():
                    async with open_answers(self._engine, plan.requests) as events:
                        async for frames in chunks(plan, events):
                            if response is None:
                                response = await _open_stream(request)
                            await self._write(response, frames)
            except (ConnectionError, SlowConsumer):
                raise
            except LooseleafError as error:
                if response is None:
                    raise
                await self._write(response, frame(ErrorBody.of(error)))
            except Exception:
                if response is None:
                    raise
                log.exception("stream.failed", request_id=request[REQUEST_ID])
                await self._write(response, frame(ErrorBody.of(LooseleafError("internal error"))))
            assert response is not None
            await response.write_eof()
        except (ConnectionError, SlowConsumer) as error:
            reason = error.code if isinstance(error, SlowConsumer) else "disconnected"
            log.info("stream.dropped", request_id=request[REQUEST_ID], reason=reason)
            if request.transport is not None:
                request.transport.abort()
        return response if response is not None else web.Response()

    async def _write(self, response: web.StreamResponse, frames: bytes) -> None:
        """Write and wait until the socket takes more; only this handler waits, the engine merges what comes meanwhile."""
        limit_s = self._config.slow_consumer_s
        try:
            async with asyncio.timeout(limit_s):
                await response.write(frames)
        except TimeoutError:
            raise SlowConsumer(f"the client read nothing for {limit_s:g} s") from None


def plan_call(fields: dict[str, Any], request_id: str, served: str, *, is_chat: bool) -> Plan:
    """Validate a body (without nulls); raises `InvalidRequest` or `UnknownModel`."""
    take_model(fields, served)
    is_stream = take(fields, "stream", bool, False)
    has_options = "stream_options" in fields
    options = convert(fields.pop("stream_options", {}), StreamOptions, "stream_options")
    if has_options and not is_stream:
        raise InvalidRequest("stream_options: needs 'stream': true", param="stream_options")
    token_ids = take(fields, "return_token_ids", bool, False)
    requests = take_requests(fields, request_id, is_chat=is_chat, max_prompts=MAX_PROMPTS)
    wants = Wants(token_ids=token_ids, echo=requests[0].echo_prompt)
    choices = ChatChoices(requests, wants) if is_chat else CompletionChoices(requests, wants)
    return Plan(
        id=f"{choices.id_prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=served,
        requests=requests,
        choices=choices,
        wants=wants,
        is_stream=is_stream,
        include_usage=bool(options.include_usage),
    )


async def chunks(plan: Plan, events: AsyncIterator[tuple[int, list[Event]]]) -> AsyncIterator[bytes]:
    """Turn events into frames, one piece of bytes for each time that the engine woke this stream."""
    usages: list[Usage] = []
    async for number, batch in events:
        frames = []
        for event in batch:
            if isinstance(event, Delta):
                choice = plan.choices.piece(number, event)
                if choice is not None:
                    frames.append(frame(_body(plan, plan.choices.chunk_object, [choice])))
            elif isinstance(event, Started):
                frames.extend(_opening(plan, number, event))
            else:
                usages.append(event.usage)
        if len(usages) == len(plan.requests):
            if plan.include_usage:
                frames.append(frame(_body(plan, plan.choices.chunk_object, [], UsageBody.of(usages))))
            frames.append(DONE)
        if frames:
            yield b"".join(frames)
    _check_finished(plan, usages)


async def collect(plan: Plan, events: AsyncIterator[tuple[int, list[Event]]]) -> Body:
    """Wait for the whole answer."""
    started: dict[int, Started] = {}
    deltas: dict[tuple[int, int], list[Delta]] = {}
    usages: list[Usage] = []
    async for number, batch in events:
        for event in batch:
            if isinstance(event, Delta):
                deltas.setdefault((number, event.index), []).append(event)
            elif isinstance(event, Started):
                started[number] = event
            else:
                usages.append(event.usage)
    _check_finished(plan, usages)
    choices: list[Any] = [
        plan.choices.whole(number, started[number], merge_deltas(pieces))
        for (number, _), pieces in sorted(deltas.items())
    ]
    body = _body(plan, plan.choices.whole_object, choices, UsageBody.of(usages))
    if plan.wants.token_ids and isinstance(plan.choices, ChatChoices):
        return msgspec.structs.replace(body, prompt_token_ids=started[0].prompt_token_ids)
    return body


def frame(body: Struct) -> bytes:
    """Encode one server-sent event; JSON has no raw newline, so that one line is enough."""
    return b"data: " + encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def json_response(body: Struct, status: int = 200) -> web.Response:
    """Answer with strict JSON."""
    return web.Response(body=encode(body), status=status, content_type="application/json")


async def read_object(request: web.Request, max_bytes: int, decoder: MessageDecoder) -> dict[str, Any]:
    """Read a JSON object; a body that announces more than `max_bytes` is refused unread, another as soon as it exceeds them."""
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in (
        "utf-8",
        "utf8",
    ):
        raise UnsupportedMediaType("the body must be sent as 'Content-Type: application/json', in UTF-8")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("the body must not be compressed")
    if request.content_length is not None and request.content_length > max_bytes:
        raise MessageTooLarge(f"the body has {request.content_length} bytes, above the limit of {max_bytes}")
    return await decoder.run(decode_object, await request.read())


def _opening(plan: Plan, number: int, started: Started) -> list[bytes]:
    is_chat = isinstance(plan.choices, ChatChoices)
    ids = started.prompt_token_ids if plan.wants.token_ids and is_chat else UNSET
    return [
        frame(_body(plan, plan.choices.chunk_object, [choice], prompt_token_ids=ids))
        for choice in plan.choices.opening(number, started)
    ]


def _body(
    plan: Plan,
    kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"],
    choices: list[Any],
    usage: UsageBody | UnsetType = UNSET,
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
) -> Body:
    return Body(
        id=plan.id,
        object=kind,
        created=plan.created,
        model=plan.model,
        choices=choices,
        usage=usage,
        prompt_token_ids=prompt_token_ids,
    )


def _check_finished(plan: Plan, usages: list[Usage]) -> None:
    if len(usages) != len(plan.requests):
        raise LooseleafError("the engine ended the answer without finishing it")


async def _open_stream(request: web.Request) -> web.StreamResponse:
    # Never compressed: aiohttp writes nothing until deflate emits, which would hold back every token.
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.headers["X-Accel-Buffering"] = "no"  # nginx would otherwise collect the stream
    await response.prepare(request)
    return response
