from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, SimpleUser
from starlette.endpoints import HTTPEndpoint
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from tests.integrations.kit import consumed
from tidegate import AsyncLimiter, ConfigurationError, InvalidInput
from tidegate.integrations import Rule, header, session, user
from tidegate.integrations.starlette import install, limited

pytestmark = pytest.mark.usefixtures("loop_guard")


@limited("2/minute")
async def asynchronous(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


@limited("2/minute")
def synchronous(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def free(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def application(limiter: AsyncLimiter, *rules: Any, **options: Any) -> Starlette:
    routes = [
        Route("/asynchronous", asynchronous),
        Route("/synchronous", synchronous, name="sync"),
        Route("/free", free),
        Mount("/below", routes=[Route("/asynchronous", asynchronous, name="below"), Route("/free", free)]),
    ]
    app = Starlette(routes=routes)
    install(app, *rules, limiter=limiter, **options)
    return app


@pytest.mark.parametrize(
    ("path", "name"),
    [("/asynchronous", "asynchronous"), ("/synchronous", "sync"), ("/below/asynchronous", "below")],
)
def test_a_decorated_endpoint_has_its_limit_under_the_name_of_its_route(
    path: str, name: str, limiter: AsyncLimiter
) -> None:
    with TestClient(application(limiter)) as client:
        first = client.get(path)
        assert first.status_code == 200 and first.headers["ratelimit"] == f'"{name}";r=1;t=60'
        assert [client.get(path).status_code for _ in range(2)] == [200, 429]
        assert "ratelimit" not in client.get("/free").headers


def test_limits_of_application_and_route_are_one_batch(limiter: AsyncLimiter) -> None:
    with TestClient(application(limiter, Rule("5/minute", namespace="all"))) as client:
        for path in ("/synchronous", "/below/asynchronous"):
            assert [client.get(path).status_code for _ in range(3)] == [200, 200, 429]
        assert consumed(limiter, "5/minute", "all", "testclient") == 4
        assert client.get("/below/free").status_code == 200
        assert client.get("/free").status_code == 429
        assert client.get("/nowhere").status_code == 429


def test_a_second_decorator_adds_its_limits_to_the_batch(limiter: AsyncLimiter) -> None:
    @limited("2/minute", by=header("x-user"), namespace="user")
    @limited("3/minute", namespace="address")
    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    app = Starlette(routes=[Route("/", endpoint)])
    install(app, limiter=limiter)
    with TestClient(app) as client:
        codes = [client.get("/", headers={"x-user": "ann"}).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert consumed(limiter, "3/minute", "address", "testclient") == 2
        codes = [client.get("/", headers={"x-user": "bob"}).status_code for _ in range(2)]
        assert codes == [200, 429]
        assert consumed(limiter, "2/minute", "user", "bob") == 1


def test_the_user_of_starlettes_authentication_is_a_key(limiter: AsyncLimiter) -> None:
    class Backend:
        async def authenticate(self, connection: Any) -> Any:
            return AuthCredentials(), SimpleUser(connection.headers["x-user"])

    app = application(limiter, Rule("1/minute", by=user))
    app.add_middleware(AuthenticationMiddleware, backend=Backend())  # type: ignore[arg-type]
    with TestClient(app) as client:
        for name, code in (("ann", 200), ("ann", 429), ("bob", 200)):
            assert client.get("/free", headers={"x-user": name}).status_code == code


def test_a_session_cookie_is_a_key(limiter: AsyncLimiter) -> None:
    app = application(limiter, Rule("1/minute", by=session("sid")))
    with TestClient(app) as client:
        for value, code in (("one", 200), ("one", 429), ("two", 200)):
            assert client.get("/free", headers={"cookie": f"sid={value}"}).status_code == code


def test_a_decorator_without_install_says_what_to_do() -> None:
    app = Starlette(routes=[Route("/", synchronous)])
    with TestClient(app) as client, pytest.raises(ConfigurationError, match=r"call install\(app\)"):
        client.get("/")


def test_a_class_cannot_be_decorated_and_says_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="with a Rule for its path"):
        limited("1/minute")(HTTPEndpoint)
