"""Health, metrics, the page, and the shape of every error."""

from __future__ import annotations

import socket
import zlib
from typing import Any

import pytest
import structlog

from service.config import Config, ServerConfig
from service.errors import LooseleafError, StartupError, error_classes
from service.messages import Health
from service.transports.http import HttpServer, create_app, error_response
from tests.transports.conftest import PAGE, Running, serving, strict
from tests.transports.fake_engine import MODEL, FakeEngine

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("health", "healthz", "readyz"),
    [
        (Health(is_alive=True, is_ready=True), 200, 200),
        (Health(is_alive=True, is_ready=False, reason="warming up"), 200, 503),
        (Health(is_alive=False, is_ready=False, reason="poisoned context"), 503, 503),
    ],
)
async def test_health_and_readiness_follow_the_engine(
    running: Running, health: Health, healthz: int, readyz: int
) -> None:
    running.engine.health_now = health
    for path, expected in (("/healthz", healthz), ("/readyz", readyz)):
        async with running.http.get(path) as response:
            assert response.status == expected
            assert (await response.json())["reason"] == health.reason


async def test_metrics_are_prometheus_text(running: Running) -> None:
    async with running.http.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.text() == "looseleaf_up 1\n"


async def test_stats_tell_the_pool_for_the_page(running: Running) -> None:
    async with running.http.get("/api/stats") as response:
        stats = await response.json()
    assert stats["model"] == MODEL
    counts = {"total": 63, "used": 3, "cached": 10, "free": 50, "shared": 1, "quarantined": 0}
    assert stats["pool"] == {**counts, "block_size": 16}


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/chat.js", "text/javascript"), ("/chat.css", "text/css")]
)
async def test_the_page_is_served_with_a_policy_that_keeps_foreign_code_out(
    running: Running, path: str, kind: str
) -> None:
    async with running.http.get(path) as response:
        assert response.status == 200
        assert response.content_type == kind
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/nothing", "/__init__.py", "/../config.py", "/%2e%2e/config.py", "/v1/other", "/v1/"]
)
async def test_an_unknown_path_is_a_404_in_the_common_shape(running: Running, path: str) -> None:
    async with running.http.get(path) as response:
        assert response.status == 404
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_the_wrong_method_is_a_405_that_names_the_right_one(running: Running) -> None:
    """API-10."""
    async with running.http.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/json; charset=latin-1"],
)
async def test_a_body_that_is_not_declared_as_json_is_a_415(running: Running, kind: str) -> None:
    """API-10; it also keeps a foreign page's simple requests out."""
    headers = {"Content-Type": kind}
    async with running.http.post("/v1/completions", data=b'{"prompt": "x"}', headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413), (100_000, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_above_the_limit_is_a_413(size: int, status: int, is_chunked: bool) -> None:
    """API-09: also when its length is not announced."""
    head, tail = b'{"prompt": "', b'"}'
    body = head + b"x" * (size - len(head) - len(tail)) + tail

    async def pieces() -> Any:
        yield body[:100]
        yield body[100:]

    async with serving(max_body_bytes=1000) as running:
        data = pieces() if is_chunked else body
        async with running.http.post("/v1/completions", data=data, headers=JSON) as response:
            assert response.status == status
            if status == 413:
                assert (await response.json())["error"]["code"] == "message_too_large"


async def test_a_compressed_body_is_refused_unread(running: Running) -> None:
    for body in (b"garbage", zlib.compress(b'{"prompt": "' + b"x" * 1_000_000 + b'"}')):
        headers = {**JSON, "Content-Encoding": "deflate"}
        async with running.http.post("/v1/completions", data=body, headers=headers) as response:
            assert response.status == 415
            assert "compressed" in (await response.json())["error"]["message"]
    assert (await running.post("/v1/completions", {"prompt": "x"}))[0] == 200


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ("abc-1.2_3:x", "abc-1.2_3:x"),
        ("a b\tc<script>", "abcscript"),
        ("é\u2028x", "x"),
        ("x" * 1000, "x" * 128),
    ],
)
async def test_a_request_id_is_cleaned_and_echoed(running: Running, sent: str, echoed: str) -> None:
    """API-08, API-11."""
    headers = {"X-Request-Id": sent}
    async with running.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        assert response.headers["X-Request-Id"] == echoed
    assert running.engine.requests[-1].request_id == echoed


async def test_without_a_request_id_each_request_gets_its_own(running: Running) -> None:
    ids = []
    for _ in range(2):
        async with running.http.get("/nothing") as response:
            ids.append(response.headers["X-Request-Id"])
    assert len(set(ids)) == 2


async def test_an_api_key_guards_the_api_but_not_health(running: Running) -> None:
    async with serving(api_key="sesame") as guarded:
        for headers in (
            {},
            {"Authorization": "Bearer guess"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "Bearer é"},
        ):
            async with guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer sesame"}
        async with guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
            assert response.status == 200
        assert (await guarded.http.get("/v1/models")).status == 401
        for path in ("/healthz", "/readyz", "/metrics", "/"):
            assert (await guarded.http.get(path)).status == 200


async def test_a_bug_is_a_500_without_a_traceback_and_is_logged_once() -> None:
    class Broken(FakeEngine):
        def stats(self) -> Any:
            raise RuntimeError("secret detail")

    with structlog.testing.capture_logs() as lines:
        async with serving(Broken()) as running, running.http.get("/v1/models") as response:
            assert response.status == 500
            text = await response.text()
    assert strict(text)["error"]["code"] == "internal_error"
    assert "secret" not in text
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["request.failed"]


@pytest.mark.parametrize("cls", error_classes().values())
def test_every_error_of_the_tree_maps_to_a_response_by_its_attributes(cls: type[LooseleafError]) -> None:
    response = error_response(cls("what \ud83d happened", param="field"))
    assert response.status == cls.http_status
    assert isinstance(response.body, bytes)
    error = strict(response.body)["error"]
    assert error["code"] == cls.code
    assert error["param"] == "field"
    assert (error["type"] == "server_error") == (cls.http_status >= 500)
    assert ("Retry-After" in response.headers) == cls.retryable


def test_a_port_in_use_is_known_before_anything_is_started() -> None:
    """OPS-06."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = Config(server=ServerConfig(port=other.getsockname()[1]))
        app = create_app(FakeEngine(), config, metrics_text=bytes, page=PAGE)
        with pytest.raises(StartupError, match="in use"):
            HttpServer(app, config.server).bind()


def test_a_host_that_does_not_exist_is_a_start_up_error() -> None:
    config = Config(server=ServerConfig(host="no.such.host.invalid"))
    app = create_app(FakeEngine(), config, metrics_text=bytes, page=PAGE)
    with pytest.raises(StartupError, match=r"no\.such\.host"):
        HttpServer(app, config.server).bind()
