"""The HTTP server: health, metrics and the page, around the OpenAI routes and the WebSocket.

Every error leaves as OpenAI's `{"error": {"message", "type", "param", "code"}}`, whatever raised it; no traceback does. The caller's
`X-Request-Id` is cleaned, echoed and logged, and names nothing inside. Invariant: a handler that ends, ends its request in the engine too,
since the runner cancels handlers whose client went away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mimetypes
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from service.config import Config, ServerConfig
from service.errors import (
    InvalidRequest,
    LooseleafError,
    MessageTooLarge,
    MethodNotAllowed,
    Unauthorized,
    UnknownRoute,
)
from service.messages import EngineClient
from service.transports.answers import CUT_TIMEOUT_S, RunningAnswers
from service.transports.chat_ws import ChatSockets
from service.transports.decoding import MessageDecoder
from service.transports.keys import is_key, request_key
from service.transports.openai import OpenAIRoutes
from service.transports.openai_types import ErrorBody, encode
from service.transports.request_id import REQUEST_ID, clean_request_id
from service.transports.server import listen_tcp
from service.transports.strict_json import quoted

RETRY_AFTER_S = "1"
SHUTDOWN_TIMEOUT_S = 0.5  # for the last bytes of responses whose answer has ended
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANSWERS: web.AppKey[RunningAnswers] = web.AppKey("answers", RunningAnswers)
BUSY: web.AppKey[set[web.RequestHandler]] = web.AppKey("busy", set)
SOCKETS: web.AppKey[ChatSockets] = web.AppKey("sockets", ChatSockets)

log = structlog.get_logger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """Tell aiohttp's reports of its own faults from those of clients that break HTTP, which are no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, web.RequestPayloadError | web.PayloadAccessError | HttpProcessingError)


_server_log = logging.getLogger(f"{__name__}.server")
_server_log.addFilter(_is_ours)


def create_app(
    engine: EngineClient,
    config: Config,
    *,
    metrics_text: Callable[[], bytes],
    page: Mapping[str, bytes] | None = None,
) -> web.Application:
    """Build the application. `metrics_text` renders Prometheus' text format; `page` maps file names to contents, by default `service.web`."""
    server = config.server
    answers = RunningAnswers()
    busy: set[web.RequestHandler] = set()
    decoder = MessageDecoder()
    sockets = ChatSockets(engine, server, answers, decoder)
    app = web.Application(
        client_max_size=server.max_body_bytes, middlewares=[_errors, _connections(answers, busy), _api_key(server)]
    )
    app[ANSWERS] = answers
    app[BUSY] = busy
    app[SOCKETS] = sockets
    app.on_response_prepare.append(_add_headers)
    app.on_cleanup.append(lambda _: _close(decoder))
    app.add_routes(OpenAIRoutes(engine, server, answers, decoder).routes())
    app.router.add_get("/ws", sockets.handle)
    app.add_routes(_operations(engine, answers, metrics_text))
    app.add_routes(_pages(page if page is not None else load_page()))
    return app


class HttpServer:
    """The application on its port. Run `bind` before anything slow, so that a port in use is known at once."""

    def __init__(self, app: web.Application, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._listener: socket.socket | None = None
        self._site: web.SockSite | None = None
        # Without handler_cancellation a handler that waits for the engine never learns that its client went away.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            auto_decompress=False,  # compressed bodies are refused, and with them bombs
            logger=_server_log,
        )

    @property
    def url(self) -> str:
        """Where the server listens, with the port that was really taken."""
        assert self._listener is not None, "call bind first"
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def bind(self) -> None:
        """Take the port; raises `StartupError`."""
        if self._listener is None:
            self._listener = listen_tcp(self._config.host, self._config.port)

    async def start(self) -> None:
        """Accept connections."""
        self.bind()
        assert self._listener is not None
        await self._runner.setup()
        self._site = web.SockSite(self._runner, self._listener)
        await self._site.start()

    async def drain(self, limit_s: float) -> None:
        """Stop accepting, close what is idle, let answers end until `limit_s`, then end them with an error event."""
        answers, sockets = self._app[ANSWERS], self._app[SOCKETS]
        answers.is_draining = True
        if self._site is not None:
            await self._site.stop()
            self._site = None
        if self._runner.server is not None:
            for connection in self._runner.server.connections:
                # Busy ones close after their response. The runner's own way would stop reading from WebSockets as well,
                # whose answers still have to be cancellable.
                if connection not in self._app[BUSY]:
                    connection.close()
        with contextlib.suppress(TimeoutError):  # a socket whose peer does not read is left to `stop`
            async with asyncio.timeout(limit_s + CUT_TIMEOUT_S), asyncio.TaskGroup() as group:
                group.create_task(answers.drain(limit_s))
                group.create_task(sockets.drain())

    async def stop(self) -> None:
        """Close every connection at once; answers still running end in an error event if their client reads."""
        await self._app[ANSWERS].drain(0)
        await self._app[SOCKETS].close()
        await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()


def load_page() -> dict[str, bytes]:
    """Read the page's files from the package."""
    files = resources.files("service.web").iterdir()
    return {
        file.name: file.read_bytes() for file in files if file.is_file() and not file.name.endswith((".py", ".pyc"))
    }


def error_response(error: LooseleafError) -> web.Response:
    """Map an error to a response by its class attributes."""
    response = web.Response(body=encode(ErrorBody.of(error)), status=error.http_status, content_type="application/json")
    if error.retryable:
        response.headers["Retry-After"] = RETRY_AFTER_S
    return response


async def _close(decoder: MessageDecoder) -> None:
    decoder.close()


def _operations(engine: EngineClient, answers: RunningAnswers, metrics_text: Callable[[], bytes]) -> list[web.RouteDef]:
    async def healthz(_: web.Request) -> web.Response:
        health = engine.health()
        return _status(health.is_alive, health.reason)

    async def readyz(_: web.Request) -> web.Response:
        health = engine.health()
        if answers.is_draining:
            return _status(False, "draining")
        return _status(health.is_alive and health.is_ready, health.reason)

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics_text(), headers=headers)

    async def stats(_: web.Request) -> web.Response:
        return web.Response(body=encode(engine.stats()), content_type="application/json")

    return [
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics),
        web.get("/api/stats", stats),
    ]


def _status(is_good: bool, reason: str) -> web.Response:
    body = {"status": "ok" if is_good else "unavailable", "reason": reason}
    return web.Response(body=msgspec.json.encode(body), status=200 if is_good else 503, content_type="application/json")


def _pages(files: Mapping[str, bytes]) -> list[web.RouteDef]:
    def serve(name: str) -> web.RouteDef:
        content, kind = files[name], mimetypes.guess_type(name)[0] or "application/octet-stream"
        charset = "utf-8" if kind.startswith("text/") or kind.endswith("javascript") else None

        async def handler(_: web.Request) -> web.Response:
            headers = {"Cache-Control": "no-cache", "Content-Security-Policy": CONTENT_SECURITY_POLICY}
            return web.Response(body=content, content_type=kind, charset=charset, headers=headers)

        return web.get("/" if name == "index.html" else f"/{name}", handler)

    return [serve(name) for name in sorted(files)]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[REQUEST_ID] = clean_request_id(request.headers.get("X-Request-Id"))
    try:
        return await handler(request)
    except LooseleafError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _foreign(request, error)
    except web.RequestPayloadError:
        return error_response(InvalidRequest("the body breaks HTTP: a chunk that is none, or an end too early"))
    except ConnectionError:
        log.info("request.dropped", request_id=request[REQUEST_ID], path=request.path)
        return web.Response()
    except Exception:
        log.exception("request.failed", request_id=request[REQUEST_ID], path=request.path)
        return error_response(LooseleafError("internal error"))


def _foreign(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """Give aiohttp's own errors the shape of ours."""
    if error.status == web.HTTPNotFound.status_code:
        return error_response(UnknownRoute(f"there is no {quoted(request.path)}"))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(MethodNotAllowed(f"{request.path} takes {allowed}, not {quoted(error.method)}"))
        response.headers["Allow"] = allowed
        return response
    if error.status == web.HTTPRequestEntityTooLarge.status_code:
        return error_response(MessageTooLarge(f"the body is above the limit of {request.client_max_size} bytes"))
    if error.status < 400:
        raise error
    response = error_response(InvalidRequest(error.reason))
    response.set_status(error.status)
    return response


def _connections(answers: RunningAnswers, busy: set[web.RequestHandler]) -> Middleware:
    @web.middleware
    async def track(request: web.Request, handler: Handler) -> web.StreamResponse:
        busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            busy.discard(request.protocol)
            if answers.is_draining:
                request.protocol.close()  # once the response is out, instead of waiting for another request

    return track


def _api_key(config: ServerConfig) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_guarded = config.api_key is not None and request.path.startswith("/v1/")
        if is_guarded and not is_key(request_key(request), config.api_key or ""):
            raise Unauthorized("the API key is missing or wrong; send 'Authorization: Bearer KEY'")
        return await handler(request)

    return check


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Content-Type-Options"] = "nosniff"
    if request.app[ANSWERS].is_draining and not isinstance(response, web.WebSocketResponse):
        response.headers["Connection"] = "close"
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
