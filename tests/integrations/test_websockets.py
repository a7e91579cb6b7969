"""Websockets over every ASGI framework: on connect, and per message."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from litestar import Litestar, websocket_listener
from litestar.testing import TestClient as LitestarClient
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from tests.integrations.kit import consumed
from tidegate import AsyncLimiter
from tidegate.integrations import Rule
from tidegate.integrations.asgi import RateLimitMiddleware
from tidegate.integrations.fastapi import install
from tidegate.integrations.litestar import RateLimitPlugin

pytestmark = pytest.mark.usefixtures("loop_guard")


def application(limiter: AsyncLimiter, *rules: Any, **options: Any) -> FastAPI:
    app = FastAPI()
    install(app, *rules, limiter=limiter, **options)
    app.state.ended = []

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                await websocket.send_text(await websocket.receive_text())
        except WebSocketDisconnect as end:
            app.state.ended.append(end.code)

    return app


def test_a_connection_beyond_the_limit_is_answered_with_a_429(limiter: AsyncLimiter) -> None:
    with TestClient(application(limiter, "1/minute")) as client:
        with client.websocket_connect("/echo") as connection:
            connection.send_text("hello")
            assert connection.receive_text() == "hello"
        with pytest.raises(WebSocketDenialResponse) as caught, client.websocket_connect("/echo"):
            pass
    assert caught.value.status_code == 429
    assert caught.value.headers["retry-after"] == "61"


async def test_a_server_without_the_extension_closes_the_connection(limiter: AsyncLimiter) -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("denied before the application")

    app = RateLimitMiddleware(never, Rule("1/minute", cost=2), limiter=limiter)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": [], "client": ("203.0.113.7", 1)}
    await app(scope, receive, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


def test_a_message_beyond_the_limit_closes_the_connection_and_never_arrives(limiter: AsyncLimiter) -> None:
    app = application(limiter, messages="2/minute")
    with TestClient(app) as client, client.websocket_connect("/echo") as connection:
        for text in ("one", "two"):
            connection.send_text(text)
            assert connection.receive_text() == text
        connection.send_text("three")
        with pytest.raises(WebSocketDisconnect) as caught:
            connection.receive_text()
    assert caught.value.code == 1008
    assert caught.value.reason == "The limit of 2 per minute is used up. Retry in 1 min 1 s."
    assert app.state.ended == [1008]
    assert consumed(limiter, "2/minute", "messages", "testclient") == 2


def test_messages_and_connections_have_limits_of_their_own(limiter: AsyncLimiter) -> None:
    app = application(limiter, "3/minute", messages=[Rule("1/minute", namespace="said")])
    with TestClient(app) as client:
        with client.websocket_connect("/echo") as connection:
            connection.send_text("one")
            connection.receive_text()
        assert consumed(limiter, "3/minute", "application", "testclient") == 1
        with client.websocket_connect("/echo") as connection:
            connection.send_text("two")
            with pytest.raises(WebSocketDisconnect):
                connection.receive_text()


def test_litestar_websockets_are_limited_by_message(limiter: AsyncLimiter) -> None:
    @websocket_listener("/echo")
    async def echo(data: str) -> str:
        return data

    plugin = RateLimitPlugin(limiter=limiter, messages="1/minute")
    app = Litestar([echo], plugins=[plugin], openapi_config=None)
    with LitestarClient(app) as client, client.websocket_connect("/echo") as connection:
        connection.send_text("one")
        assert connection.receive_text() == "one"
        connection.send_text("two")
        with pytest.raises(Exception, match=r"1008|used up") as caught:
            connection.receive_text()
    assert getattr(caught.value, "code", 1008) == 1008
