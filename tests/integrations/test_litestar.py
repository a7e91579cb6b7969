from __future__ import annotations

from typing import Any

import pytest
from litestar import Litestar, Request, Router, get
from litestar.exceptions import NotAuthorizedException
from litestar.testing import TestClient

from tests.integrations.kit import consumed
from tidegate import AsyncLimiter, ConfigurationError, Limit
from tidegate.integrations import Rule, header
from tidegate.integrations.litestar import RateLimitPlugin, limited

pytestmark = pytest.mark.usefixtures("loop_guard")


@get("/asynchronous", guards=[limited("2/minute")])
async def asynchronous() -> str:
    return "ok"


@get("/synchronous", guards=[limited("2/minute")], sync_to_thread=True)
def synchronous() -> str:
    return "ok"


@get("/free", sync_to_thread=False)
def free() -> str:
    return "ok"


def application(limiter: AsyncLimiter, *rules: Any, **options: Any) -> Litestar:
    plugin = RateLimitPlugin(*rules, limiter=limiter, **options)
    return Litestar([asynchronous, synchronous, free], plugins=[plugin], openapi_config=None)


@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_a_handler_answers_until_its_limit_is_used_up_and_then_429(name: str, limiter: AsyncLimiter) -> None:
    with TestClient(application(limiter)) as client:
        first = client.get(f"/{name}")
        assert first.status_code == 200 and first.headers["ratelimit"] == f'"{name}";r=1;t=60'
        assert client.get(f"/{name}").status_code == 200
        denied = client.get(f"/{name}")
        assert denied.status_code == 429 and denied.headers["retry-after"] == "61"
        assert denied.headers["content-type"] == "application/problem+json"
        assert denied.json()["violated-policies"] == [name]
        assert "ratelimit" not in client.get("/free").headers


def test_limits_of_application_layers_and_handler_are_one_batch(limiter: AsyncLimiter) -> None:
    @get("/items", guards=[limited("2/minute", by=header("x-user"))])
    async def items() -> str:
        return "ok"

    router = Router(
        "/shop",
        route_handlers=[items],
        guards=[limited("3/minute", by=header("x-tenant"), namespace="tenant")],
    )
    plugin = RateLimitPlugin(Rule("9/minute", namespace="all"), limiter=limiter)
    with TestClient(Litestar([router, free], plugins=[plugin], openapi_config=None)) as client:
        ann, bob = ({"x-tenant": "acme", "x-user": name} for name in ("ann", "bob"))
        assert [client.get("/shop/items", headers=ann).status_code for _ in range(3)] == [200, 200, 429]
        assert consumed(limiter, "3/minute", "tenant", "acme") == 2
        assert [client.get("/shop/items", headers=bob).status_code for _ in range(2)] == [200, 429]
        assert consumed(limiter, "2/minute", "items", "bob") == 1
        assert consumed(limiter, "9/minute", "all", "testclient") == 3
        assert client.get("/free").headers["ratelimit"].startswith('"all";r=5')


def test_a_guard_that_refuses_earlier_counts_for_the_application_only(limiter: AsyncLimiter) -> None:
    def login(connection: Any, handler: Any) -> None:
        raise NotAuthorizedException

    @get("/secret", guards=[login, limited("5/minute")])
    async def secret() -> str:
        return "ok"

    plugin = RateLimitPlugin(Rule("2/minute", namespace="all"), limiter=limiter)
    with TestClient(Litestar([secret], plugins=[plugin], openapi_config=None)) as client:
        assert [client.get("/secret").status_code for _ in range(3)] == [401, 401, 429]
        assert consumed(limiter, "5/minute", "secret", "testclient") == 0


def test_a_denial_of_the_librarys_own_decorator_anywhere_below_is_a_429(limiter: AsyncLimiter) -> None:
    @limiter.limited(Limit("1/minute", namespace="sending"), key=lambda to: to)
    async def send(to: str) -> str:
        return to

    @get("/send")
    async def handler(request: Request[Any, Any, Any]) -> str:
        return await send("ann")

    app = Litestar([handler], plugins=[RateLimitPlugin(limiter=limiter)], openapi_config=None)
    with TestClient(app) as client:
        assert [client.get("/send").status_code for _ in range(2)] == [200, 429]


def test_a_guard_without_the_plugin_says_what_to_do() -> None:
    app = Litestar([asynchronous], openapi_config=None, debug=True)
    with TestClient(app) as client:
        answer = client.get("/asynchronous")
    assert answer.status_code == 500 and ConfigurationError.__name__ in answer.text
    assert "plugins=[RateLimitPlugin()]" in answer.text


def test_two_handlers_with_one_name_are_an_error_when_the_application_starts(limiter: AsyncLimiter) -> None:
    def make(path: str) -> Any:
        @get(path, guards=[limited("1/minute")])
        async def same() -> str:
            return "ok"

        return same

    app = Litestar([make("/a"), make("/b")], plugins=[RateLimitPlugin(limiter=limiter)], openapi_config=None)
    refused = pytest.RaisesExc(ConfigurationError, match="have the name 'same'")
    with pytest.RaisesGroup(refused, flatten_subgroups=True), TestClient(app):
        pass
