"""Quart and Sanic have no module of their own: the ASGI middleware is enough."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integrations.kit import lifespan, manual_async_limiter, manual_clock, no_blocking
from tidegate.integrations.asgi import RateLimitMiddleware


def quart_application() -> Any:
    quart = pytest.importorskip("quart")
    app = quart.Quart(__name__)

    @app.get("/")
    async def index() -> str:
        return "ok"

    app.asgi_app = RateLimitMiddleware(app.asgi_app, "1/minute", limiter=manual_async_limiter(manual_clock()))
    return app


def sanic_application() -> Any:
    sanic = pytest.importorskip("sanic")
    sanic.Sanic.test_mode = True
    app = sanic.Sanic(f"over_asgi_{id(object())}", configure_logging=False)

    @app.get("/")
    async def index(request: Any) -> Any:
        return sanic.response.text("ok")

    return RateLimitMiddleware(app, "1/minute", limiter=manual_async_limiter(manual_clock()))


@pytest.mark.parametrize("make", [quart_application, sanic_application])
async def test_an_application_over_asgi_answers_until_the_limit_is_used_up(make: Any) -> None:
    app = make()
    with no_blocking():
        tell, answers = await lifespan(app)
        tell("lifespan.startup")
        assert await anext(answers) == "lifespan.startup.complete"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            first = await client.get("/")
            assert (first.status_code, first.text) == (200, "ok")
            assert first.headers["ratelimit"] == '"application";r=0;t=60'
            assert (await client.get("/")).status_code == 429
        tell("lifespan.shutdown")
        assert await anext(answers) == "lifespan.shutdown.complete"
