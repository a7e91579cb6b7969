"""The API as an ASGI application gives the same answers in another server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.server.harness import HOSTED_BODY_BYTES_MAX as BODY_BYTES_MAX
from tests.server.harness import Hosted, TidegateServer
from tidegate import AsyncLimiter, Limit
from tidegate.errors import ConfigurationError
from tidegate.server.asgi import Application, create_app

BODY: dict[str, Any] = {"namespace": "api", "identifier": "user", "limit": 3, "duration": 2_592_000_000}


def client_of(hosted: Hosted, app: Any = None, prefix: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app or hosted.app)
    headers = {"Authorization": f"Bearer {hosted.key}"}
    return httpx.AsyncClient(transport=transport, base_url=f"http://host{prefix}", headers=headers)


async def test_operations_answer_as_they_do_in_the_server(hosted: Hosted) -> None:
    async with hosted.app, client_of(hosted) as client:
        first = await client.post("/v2/ratelimit.limit", json=BODY)
        assert (first.status_code, first.json()["data"]["remaining"]) == (200, 2)
        assert first.headers["ratelimit"].startswith('"api";r=2;t=')
        batch = await client.post("/v2/ratelimit.multiLimit", json=[BODY, {**BODY, "cost": 2}])
        assert batch.json()["data"]["passed"] is False
        override = {name: BODY[name] for name in ("namespace", "identifier", "duration")} | {"limit": 0}
        assert (await client.post("/v2/ratelimit.setOverride", json=override)).status_code == 200
        assert (await client.post("/v2/ratelimit.limit", json=BODY)).json()["data"]["success"] is False
        ready = await client.get("/readyz")
        assert ready.text.startswith("ready: tidegate")
        metrics = (await client.get("/metrics")).text
        assert 'tidegate_http_requests_total{operation="limit",status="200"} 2' in metrics


async def test_every_answer_is_that_of_the_server(hosted: Hosted, server: TidegateServer) -> None:
    """Status, body and header fields, except for ids and what each host adds."""
    calls: list[tuple[str, str, bytes | None, dict[str, str]]] = [
        ("GET", "/v2/liveness", None, {}),
        ("HEAD", "/v2/liveness", None, {}),
        ("GET", "/livez", None, {}),
        ("HEAD", "/docs", None, {}),
        ("GET", "/docs/errors", None, {}),
        ("GET", "/openapi.json", None, {}),
        ("GET", "/nowhere", None, {}),
        ("GET", "/v2/ratelimit.limit", None, {}),
        ("DELETE", "/docs", None, {"accept": "application/problem+json"}),
        ("POST", "/v2/ratelimit.limit", b"{", {}),
        ("POST", "/v2/ratelimit.limit", b"{}", {}),
        ("POST", "/v2/ratelimit.limit?x=1", json.dumps(BODY).encode(), {"authorization": "Bearer nobody"}),
        ("POST", "/v2/ratelimit%2Elimit", json.dumps(BODY).encode(), {"authorization": "Basic x"}),
        ("POST", "/v2/ratelimit%252Elimit", json.dumps(BODY).encode(), {}),
    ]
    async with hosted.app, client_of(hosted) as client:
        del client.headers["authorization"]
        for method, path, content, headers in calls:
            ours = await client.request(method, path, content=content, headers=headers)
            theirs = await asyncio.to_thread(
                httpx.request, method, server.url + path, content=content, headers=headers, trust_env=False
            )
            assert ours.status_code == theirs.status_code, (method, path)
            hidden = {"date", "connection"}
            assert {k: v for k, v in ours.headers.items() if k not in hidden} == {
                k: v for k, v in theirs.headers.items() if k not in hidden
            }, (method, path)
            if ours.headers["content-type"].startswith("application/") and method != "HEAD":
                assert {**ours.json(), "meta": 0} == {**theirs.json(), "meta": 0}
            else:
                assert ours.content == theirs.content


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_above_the_bound_is_413_and_is_not_read_to_its_end(
    hosted: Hosted, declared: bool
) -> None:
    asked = 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b" " * 1_024, "more_body": True}

    headers = [(b"content-length", b"1000000")] if declared else []
    async with hosted.app:
        status, body = await call(hosted.app, scope("/v2/ratelimit.limit", headers=headers), receive)
    assert status == 413
    assert json.loads(body)["error"]["detail"] == f"The body of a request may have {BODY_BYTES_MAX} bytes."
    assert asked == (0 if declared else 5)
    assert hosted.app._intake.buffered_bytes == 0


async def test_a_body_in_chunks_is_put_together(hosted: Hosted) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for byte in json.dumps(BODY).encode():
            yield bytes([byte])

    async with hosted.app, client_of(hosted) as client:
        answer = await client.post("/v2/ratelimit.limit", content=chunks())
        assert answer.json()["data"]["remaining"] == 2


async def test_a_client_that_disconnects_within_its_body_is_not_counted(hosted: Hosted) -> None:
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop(0)

    authorization = (b"authorization", b"Bearer " + hosted.key.encode())
    async with hosted.app, client_of(hosted) as client:
        assert await call(hosted.app, scope("/v2/ratelimit.limit", headers=[authorization]), receive) is None
        assert hosted.app._intake.buffered_bytes == 0
        looked = await client.post("/v2/ratelimit.limit", json={**BODY, "cost": 0})
        assert looked.json()["data"]["remaining"] == 3


async def test_a_client_that_disconnects_while_its_operation_waits_ends_the_operation(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.Event()
    ended = asyncio.Event()

    async def confirm() -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    messages = [{"type": "http.request", "body": json.dumps(BODY).encode()}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await waiting.wait()
        return {"type": "http.disconnect"}

    async with hosted.app:
        assert hosted.app._service is not None
        monkeypatch.setattr(hosted.app._service._sync, "confirm", confirm)
        unknown = (b"authorization", b"Bearer tg_unknown")
        assert await call(hosted.app, scope("/v2/ratelimit.limit", headers=[unknown]), receive) is None
        await ended.wait()


async def test_a_request_that_never_arrives_is_408(tmp_path: Path) -> None:
    app = create_app(data_dir=str(tmp_path), http={"request_timeout_s": 0.01})

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async with app:
        answer = await call(app, scope("/v2/ratelimit.limit"), receive)
    assert answer is not None
    assert answer[0] == 408


async def test_a_header_field_that_comes_twice_is_400(hosted: Hosted) -> None:
    async with hosted.app:
        twice = [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")]
        answer = await call(hosted.app, scope("/v2/ratelimit.limit", headers=twice), whole(b"{}"))
    assert answer is not None
    assert answer[0] == 400


async def test_an_operation_that_fails_is_500_and_the_log_has_the_reason(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError("a fault")

    async with hosted.app:
        assert hosted.app._service is not None
        operation = hosted.app._service.router.find(b"GET", b"/livez")
        monkeypatch.setattr(operation, "handler", broken)
        with caplog.at_level(logging.ERROR):
            answer = await call(hosted.app, scope("/livez", method="GET"), whole(b""))
    assert answer is not None
    assert answer[0] == 500
    assert "a fault" in caplog.text
    assert b"a fault" not in answer[1]


@pytest.mark.parametrize("prefix", ["/limits", "/a/b"])
async def test_it_is_mounted_under_a_prefix(hosted: Hosted, prefix: str) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with hosted.app:
            yield

    outer = Starlette(routes=[Mount(prefix, app=hosted.app)], lifespan=lifespan)
    async with outer.router.lifespan_context(outer), client_of(hosted, outer, prefix) as client:
        assert (await client.post("/v2/ratelimit.limit", json=BODY)).json()["data"]["remaining"] == 2
        assert (await client.get("/nowhere")).json()["error"]["detail"].startswith("There is nothing")
        page = await client.get("/docs/errors/unkey/data/ratelimit_namespace_gone")
        link = str(page.url.join(httpx.URL(href(page.text, "all errors"))))
        assert link == f"http://host{prefix}/docs/errors"
        assert (await client.get("/docs")).status_code == 200
    assert hosted.app._service is None


def href(page: str, text: str) -> str:
    return page.partition(f'">{text}</a>')[0].rpartition('href="')[2]


@pytest.mark.parametrize(
    ("root", "path"), [("/p", "/p/livez"), ("/p", "/livez"), ("/p/", "/p/livez"), ("", "/livez")]
)
async def test_the_path_may_include_the_root_path_or_not(hosted: Hosted, root: str, path: str) -> None:
    async with hosted.app:
        answer = await call(hosted.app, {**scope(path, method="GET"), "root_path": root}, whole(b""))
    assert answer == (200, b"ok\n")


async def test_counts_are_written_when_the_lifespan_ends(hosted: Hosted, tmp_path: Path) -> None:
    for remaining in (2, 1):
        async with lifespan_of(hosted.app), client_of(hosted) as client:
            answer = await client.post("/v2/ratelimit.limit", json=BODY)
            assert answer.json()["data"]["remaining"] == remaining


async def test_a_start_that_fails_is_reported_to_the_host(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    app = create_app(data_dir=str(tmp_path / "file"))
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "data_dir" in sent[0]["message"]


async def test_without_a_start_the_error_says_what_is_missing(hosted: Hosted) -> None:
    with pytest.raises(RuntimeError, match="async with app"):
        await call(hosted.app, scope("/livez", method="GET"), whole(b""))


async def test_websockets_are_refused(hosted: Hosted) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async with hosted.app:
        await hosted.app({"type": "websocket", "path": "/"}, whole(b""), send)
    assert sent == [{"type": "websocket.close", "code": 1000}]


async def test_it_counts_with_a_limiter_of_its_host(hosted: Hosted, tmp_path: Path) -> None:
    limiter = AsyncLimiter()
    app = create_app(data_dir=str(tmp_path), limiter=limiter)
    async with app, client_of(hosted, app) as client:
        assert (await client.post("/v2/ratelimit.limit", json=BODY)).json()["data"]["remaining"] == 2
    assert await limiter.limit(Limit("1/minute", namespace="still"), "usable"), (
        "it is not stopped by the application"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_dri": "x"}, "did you mean data_dir"),
        ({"http": {"body_bytes_max": 1}}, "http.body_bytes_max: got 1 from argument http.body_bytes_max"),
        ({"listen": "127.0.0.1:1"}, "listen: an application has no such setting"),
        ({"ledger": "mysql://u@h/d"}, "region"),
        ({"limiter": AsyncLimiter(), "origin": "memory://"}, "origin: it is a setting of the limiter"),
    ],
)
def test_wrong_settings_are_refused_when_the_application_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_app(**settings)


# Under a real server.


class Uvicorn:
    """uvicorn in this loop, on a free port."""

    def __init__(self, app: Any, **options: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, lifespan="on", ws="none", **options)
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.port: int = self._socket.getsockname()[1]

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            assert not self._serving.done()
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        self._server.should_exit = True
        await self._serving
        self._socket.close()


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_it_runs_under_uvicorn(hosted: Hosted, http: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"namespace":"api",', b'"identifier":"user","limit":3,', b'"duration":2592000000}'):
            yield part

    headers = {"Authorization": f"Bearer {hosted.key}"}
    async with (
        Uvicorn(hosted.app, http=http, root_path="/behind") as host,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{host.port}", headers=headers, trust_env=False
        ) as client,
    ):
        for _ in range(2):
            assert (await client.post("/v2/ratelimit.limit", json=BODY)).status_code == 200
        chunked = await client.post("/v2/ratelimit.limit", content=chunks())
        assert chunked.json()["data"]["remaining"] == 0
        head = await client.head("/v2/liveness")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert (await client.get("/nowhere")).status_code == 404
        large = await client.post("/v2/ratelimit.limit", content=b" " * (BODY_BYTES_MAX + 1))
        assert large.status_code == 413
        # A client that disconnects in the middle of its body.
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(b"POST /v2/ratelimit.limit HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        assert (await client.get("/livez")).text == "ok\n"
    assert hosted.app._service is None, "stopped by the lifespan"


# Plain ASGI.


def scope(
    path: str, *, method: str = "POST", headers: list[tuple[bytes, bytes]] | None = None
) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": headers or []}


def whole(body: bytes) -> Callable[[], Any]:
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


async def call(app: Application, scope: Any, receive: Any) -> Any:
    """(status, body) of the answer; None if nothing was sent."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return (sent[0]["status"], sent[1]["body"]) if sent else None


@contextlib.asynccontextmanager
async def lifespan_of(app: Application) -> AsyncIterator[None]:
    """Call the application as a server does."""
    to_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan"}, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert await from_app.get() == {"type": "lifespan.startup.complete"}
    yield
    await to_app.put({"type": "lifespan.shutdown"})
    assert await from_app.get() == {"type": "lifespan.shutdown.complete"}
    await running
