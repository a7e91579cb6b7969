from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.integrations.kit import lifespan
from tidegate import AsyncLimiter, ConfigurationError, Limit, LimitExceeded
from tidegate.adapters.memory import MemoryOrigin
from tidegate.integrations import Proxies, Rule
from tidegate.integrations.asgi import RateLimitMiddleware
from tidegate.testing import FailingOrigin

pytestmark = pytest.mark.usefixtures("loop_guard")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello"})


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_an_asgi_application_answers_until_the_limit_is_used_up(limiter: AsyncLimiter) -> None:
    async with client(RateLimitMiddleware(hello, "1/minute", limiter=limiter)) as http:
        first = await http.get("/")
        assert (first.status_code, first.text) == (200, "hello")
        assert first.headers["ratelimit"] == '"application";r=0;t=60'
        denied = await http.get("/")
        assert denied.status_code == 429
        assert denied.headers["retry-after"] == "61"
        assert denied.json()["title"] == "Too Many Requests"
        assert (await http.head("/")).content == b""


async def test_rules_see_the_framework_free_scope(limiter: AsyncLimiter) -> None:
    def who(scope: Any) -> str:
        return str(dict(scope["headers"])[b"x-user"].decode())

    app = RateLimitMiddleware(hello, Rule("1/minute", by=who, path="/api/*"), limiter=limiter)
    async with client(app) as http:
        for name, code in (("ann", 200), ("ann", 429), ("bob", 200)):
            assert (await http.get("/api/x", headers={"x-user": name})).status_code == code
        assert (await http.get("/other")).status_code == 200


async def test_repeated_headers_are_read_as_one(limiter: AsyncLimiter) -> None:
    app = RateLimitMiddleware(hello, "1/minute", limiter=limiter, proxies=Proxies(trusted_hops=1))
    async with client(app) as http:
        for caller in ("198.51.100.1", "198.51.100.2"):
            for code in (200, 429):
                headers = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", caller)]
                assert (await http.get("/", headers=headers)).status_code == code


async def test_a_denial_below_becomes_a_429_unless_the_answer_has_begun(limiter: AsyncLimiter) -> None:
    denial = await limiter.limit(Limit("1/minute", namespace="n"), "ann", 2)

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LimitExceeded("too much", [denial])

    async with client(RateLimitMiddleware(refuses, limiter=limiter)) as http:
        assert (await http.get("/")).status_code == 429
        with pytest.raises(LimitExceeded):
            await http.get("/late")


async def test_a_request_that_waits_for_the_origin_does_not_hold_up_the_loop() -> None:
    origin = FailingOrigin(MemoryOrigin())
    limiter = AsyncLimiter(region="fra", origin=origin)
    async with limiter, client(RateLimitMiddleware(hello, "5/minute", limiter=limiter)) as http:
        origin.faults.hang("exchange")
        waiting = asyncio.create_task(http.get("/"))
        turns = 0
        while not origin.faults.fired["exchange"]:
            await asyncio.sleep(0)
            turns += 1
        assert not waiting.done() and turns
        origin.faults.heal("exchange")
        assert (await waiting).status_code == 200


async def test_a_limit_that_denies_during_an_outage_says_that_it_is_one() -> None:
    origin = FailingOrigin(MemoryOrigin())
    limiter = AsyncLimiter(region="fra", origin=origin)
    rule = Rule("5/minute", path="/safe", on_outage="deny")
    app = RateLimitMiddleware(hello, rule, Rule("5/minute", path="/other"), limiter=limiter)
    async with limiter, client(app) as http:
        origin.faults.fail("exchange")
        assert (await http.get("/other")).status_code == 200
        denied = await http.get("/safe")
    assert denied.status_code == 429 and int(denied.headers["retry-after"]) >= 1
    assert denied.json()["detail"].startswith(
        "What was used of 5 per minute is not known at the moment. Retry in"
    )


# -- start and stop of the limiter


async def with_lifespan(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "lifespan":
        await hello(scope, receive, send)
        return
    for kind in ("startup", "shutdown"):
        assert (await receive())["type"] == f"lifespan.{kind}"
        await send({"type": f"lifespan.{kind}.complete"})


async def test_the_limiter_starts_and_stops_with_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "memory://")
    app = RateLimitMiddleware(with_lifespan, "5/minute")
    tell, answers = await lifespan(app)
    tell("lifespan.startup")
    assert await anext(answers) == "lifespan.startup.complete"
    limiter = app.rate_limits.limiter
    async with client(app) as http:
        assert (await http.get("/")).status_code == 200
    tell("lifespan.shutdown")
    assert await anext(answers) == "lifespan.shutdown.complete"
    assert app.rate_limits.limiter is not limiter


async def test_a_wrong_origin_is_an_error_when_the_application_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "gopher://host")
    tell, answers = await lifespan(RateLimitMiddleware(with_lifespan, "5/minute"))
    tell("lifespan.startup")
    assert ConfigurationError.__name__ in await anext(answers)


async def test_a_server_that_sends_no_lifespan_gets_its_limiter_at_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TIDEGATE_ORIGIN", raising=False)
    app = RateLimitMiddleware(hello, "1/minute")
    async with client(app) as http:
        assert [(await http.get("/")).status_code for _ in range(2)] == [200, 429]
    await app.rate_limits.stop()
