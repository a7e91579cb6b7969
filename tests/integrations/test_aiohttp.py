from __future__ import annotations

import warnings
from typing import Any

import pytest
from aiohttp import WSMsgType, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from tidegate import AsyncLimiter, ConfigurationError, Limit
from tidegate.integrations import Rule, user
from tidegate.integrations.aiohttp import install, limited

pytestmark = pytest.mark.usefixtures("loop_guard")


@web.middleware
async def login(request: web.Request, handler: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # aiohttp prefers keys that are not strings
        request["user"] = request.headers.get("x-user", "nobody")
    return await handler(request)


@limited("2/minute", by=user)
async def mail(request: web.Request) -> web.Response:
    return web.Response(text="ok")


@limited("1/minute")
class Items(web.View):
    async def get(self) -> web.Response:
        return web.Response(text="ok")


async def free(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"ok")
    return response


def application(limiter: AsyncLimiter, *rules: Any, **options: Any) -> web.Application:
    app = web.Application(middlewares=[login])
    install(app, *rules, limiter=limiter, **options)
    app.add_routes(
        [
            web.get("/mail", mail),
            web.view("/items", Items),
            web.get("/free", free),
            web.get("/stream", stream),
        ]
    )
    return app


async def test_a_handler_answers_until_its_limit_is_used_up_and_then_429(limiter: AsyncLimiter) -> None:
    async with TestClient(TestServer(application(limiter))) as client:
        first = await client.get("/mail")
        assert first.status == 200 and first.headers["RateLimit"] == '"mail";r=1;t=60'
        assert (await client.get("/mail")).status == 200
        denied = await client.get("/mail")
        assert denied.status == 429 and denied.headers["Retry-After"] == "61"
        assert denied.content_type == "application/problem+json"
        assert (await client.get("/mail", headers={"x-user": "ann"})).status == 200
        assert [(await client.get("/items")).status for _ in range(2)] == [200, 429]
        assert "RateLimit" not in (await client.get("/free")).headers


async def test_limits_of_application_and_handler_are_one_batch_and_hold_for_unknown_urls(
    limiter: AsyncLimiter,
) -> None:
    async with TestClient(TestServer(application(limiter, Rule("4/minute", namespace="all")))) as client:
        assert [(await client.get("/mail")).status for _ in range(4)] == [200, 200, 429, 429]
        assert (await client.get("/stream")).headers["RateLimit"].startswith('"all";r=1')
        unknown = await client.get("/nowhere")
        assert unknown.status == 404 and unknown.headers["RateLimit"].startswith('"all";r=0')
        assert (await client.get("/nowhere")).status == 429
        assert (await client.get("/free")).status == 429


async def test_a_denial_of_the_librarys_own_decorator_anywhere_below_is_a_429(limiter: AsyncLimiter) -> None:
    @limiter.limited(Limit("1/minute", namespace="sending"), key=lambda request: "ann")
    async def send(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = application(limiter)
    app.router.add_get("/send", send)
    async with TestClient(TestServer(app)) as client:
        assert [(await client.get("/send")).status for _ in range(2)] == [200, 429]


async def test_a_decorator_without_install_says_what_to_do() -> None:
    seen: list[BaseException] = []

    @web.middleware
    async def watch(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except ConfigurationError as error:
            seen.append(error)
            return web.Response(status=500)

    app = web.Application(middlewares=[watch, login])
    app.router.add_get("/mail", mail)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/mail")).status == 500
    assert "install(app)" in str(seen[0])


async def test_the_limiter_starts_and_stops_with_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "gopher://host")
    app = web.Application()
    install(app, "1/minute")
    with pytest.raises(ConfigurationError):
        await TestServer(app).start_server()
    monkeypatch.setenv("TIDEGATE_ORIGIN", "memory://")
    app = web.Application()
    limits = install(app, "1/minute")
    async with TestClient(TestServer(app)) as client:
        assert [(await client.get("/")).status for _ in range(2)] == [404, 429]
        used = limits.limiter
    assert limits.limiter is not used


async def test_two_handlers_with_one_name_are_an_error_when_the_application_starts(
    limiter: AsyncLimiter,
) -> None:
    app = application(limiter)
    app.router.add_get("/other", limited("1/minute")(named_mail()))
    with pytest.raises(ConfigurationError, match="have the name 'mail'"):
        await TestServer(app).start_server()


def named_mail() -> Any:
    async def mail(request: web.Request) -> web.Response:
        return web.Response(text="another")

    return mail


async def echo(request: web.Request) -> web.WebSocketResponse:
    websocket = web.WebSocketResponse()
    await websocket.prepare(request)
    async for message in websocket:
        await websocket.send_str(message.data)
    return websocket


async def test_a_connection_beyond_the_limit_is_answered_with_a_429(limiter: AsyncLimiter) -> None:
    app = application(limiter, "1/minute")
    app.router.add_get("/echo", echo)
    async with TestClient(TestServer(app)) as client:
        async with client.ws_connect("/echo") as connection:
            await connection.send_str("hello")
            assert await connection.receive_str() == "hello"
        with pytest.raises(WSServerHandshakeError) as caught:
            await client.ws_connect("/echo")
    assert caught.value.status == 429


async def test_a_message_beyond_the_limit_closes_the_connection_and_never_arrives(
    limiter: AsyncLimiter,
) -> None:
    app = application(limiter, messages="2/minute")
    app.router.add_get("/echo", echo)
    async with TestClient(TestServer(app)) as client:
        async with client.ws_connect("/echo") as connection:
            for text in ("one", "two"):
                await connection.send_str(text)
                assert await connection.receive_str() == text
            await connection.ping()
            await connection.send_str("three")
            end = await connection.receive()
        assert (end.type, end.data) == (WSMsgType.CLOSE, 1008)
        assert end.extra == "The limit of 2 per minute is used up. Retry in 1 min 1 s."
        assert (await client.get("/free")).status == 200
