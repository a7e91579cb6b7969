from __future__ import annotations

from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tests.integrations.kit import consumed, manual_async_limiter
from tidegate import AsyncLimiter, ConfigurationError, Limit
from tidegate.integrations import Answers, Rule, header
from tidegate.integrations.fastapi import install, limited
from tidegate.testing import ManualClock

tenant = header("x-tenant")
user = header("x-user")


async def current_user(request: Request) -> str:
    request.state.user = request.headers["x-user"]
    return str(request.state.user)


CurrentUser = Annotated[str, Depends(current_user)]


pytestmark = pytest.mark.usefixtures("loop_guard")


def application(limiter: AsyncLimiter, *rules: Any, **options: Any) -> FastAPI:
    app = FastAPI()
    install(app, *rules, limiter=limiter, **options)

    @app.get("/asynchronous", dependencies=[Depends(limited("2/minute"))])
    async def asynchronous() -> str:
        return "ok"

    @app.get("/synchronous", dependencies=[Depends(limited("2/minute"))])
    def synchronous() -> str:
        return "ok"

    @app.get("/free")
    def free() -> str:
        return "ok"

    return app


@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_an_endpoint_answers_until_its_limit_is_used_up_and_then_429(
    name: str, limiter: AsyncLimiter
) -> None:
    with TestClient(application(limiter)) as client:
        first = client.get(f"/{name}")
        assert first.status_code == 200 and first.json() == "ok"
        assert first.headers["ratelimit"] == f'"{name}";r=1;t=60'
        assert first.headers["ratelimit-policy"] == f'"{name}";q=2;w=60'
        assert "retry-after" not in first.headers
        assert client.get(f"/{name}").status_code == 200
        denied = client.get(f"/{name}")
    assert denied.status_code == 429
    # A millisecond into the next cell there is room for one again.
    assert denied.headers["retry-after"] == "61"
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.json() == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "The limit of 2 per minute is used up. Retry in 1 min 1 s.",
        "violated-policies": [name],
        "retry_after_ms": 60_001,
    }


def test_a_denied_request_fits_when_its_retry_after_has_passed(
    limiter: AsyncLimiter, clock: ManualClock
) -> None:
    with TestClient(application(limiter)) as client:
        for _ in range(2):
            client.get("/synchronous")
        clock.advance(1000 * int(client.get("/synchronous").headers["retry-after"]))
        assert client.get("/synchronous").status_code == 200


def test_endpoints_without_limits_have_no_header_fields(limiter: AsyncLimiter) -> None:
    with TestClient(application(limiter)) as client:
        assert "ratelimit" not in client.get("/free").headers


def test_the_openapi_document_shows_the_429_where_there_is_a_limit(limiter: AsyncLimiter) -> None:
    router = APIRouter(prefix="/shop", dependencies=[Depends(limited("10/minute", namespace="shop"))])

    @router.post("/items/{item}")
    def buy(item: int) -> int:
        return item

    app = application(limiter)
    app.include_router(router)
    paths = app.openapi()["paths"]
    assert "429" in paths["/asynchronous"]["get"]["responses"]
    assert "application/problem+json" in paths["/synchronous"]["get"]["responses"]["429"]["content"]
    assert "429" in paths["/shop/items/{item}"]["post"]["responses"]
    assert "429" not in paths["/free"]["get"]["responses"]


def test_limits_of_application_router_and_endpoint_are_one_batch(limiter: AsyncLimiter) -> None:
    app = FastAPI()
    install(app, Rule("5/minute", namespace="all"), limiter=limiter)
    router = APIRouter(dependencies=[Depends(limited("4/minute", by=tenant, namespace="tenant"))])

    @router.get("/items", dependencies=[Depends(limited("2/minute", by=user))])
    def items() -> str:
        return "ok"

    app.include_router(router)
    with TestClient(app) as client:
        mine = {"x-tenant": "acme", "x-user": "ann"}
        codes = [client.get("/items", headers=mine).status_code for _ in range(5)]
        assert codes == [200, 200, 429, 429, 429]
        # What was refused has spent nothing anywhere.
        assert consumed(limiter, "5/minute", "all", "testclient") == 2
        assert consumed(limiter, "4/minute", "tenant", "acme") == 2
        codes = [client.get("/items", headers=mine | {"x-user": "bob"}).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        # Now it is the tenant's limit that refuses, and the header fields say so.
        denied = client.get("/items", headers=mine | {"x-user": "cid"})
        assert denied.status_code == 429
        assert denied.json()["violated-policies"] == ["tenant"]
        assert denied.headers["ratelimit"].startswith('"tenant";r=0')
        assert consumed(limiter, "2/minute", "items", "cid") == 0
        assert consumed(limiter, "5/minute", "all", "testclient") == 4


def test_the_limits_of_the_application_hold_for_endpoints_without_their_own_and_for_unknown_paths(
    limiter: AsyncLimiter,
) -> None:
    with TestClient(application(limiter, Rule("2/minute", namespace="all"))) as client:
        assert client.get("/free").status_code == 200
        unknown = client.get("/nowhere")
        assert unknown.status_code == 404
        assert unknown.headers["ratelimit"].startswith('"all";r=0')
        assert client.get("/free").status_code == 429
        assert client.get("/nowhere").status_code == 429


def test_a_failed_login_counts_for_the_application_and_not_for_the_endpoint(limiter: AsyncLimiter) -> None:
    calls = []
    app = FastAPI()
    install(app, Rule("3/minute", namespace="all"), limiter=limiter)

    def login(request: Request) -> str:
        calls.append(request)
        if request.headers.get("authorization") != "right":
            raise HTTPException(401)
        request.state.user = "ann"
        return "ann"

    def logged_in(request: Request) -> str:
        return str(request.state.user)

    @app.get("/mail", dependencies=[Depends(login), Depends(limited("5/minute", by=logged_in))])
    def mail() -> str:
        return "ok"

    with TestClient(app) as client:
        assert [client.get("/mail").status_code for _ in range(4)] == [401, 401, 401, 429]
        assert consumed(limiter, "5/minute", "mail", "ann") == 0
        assert consumed(limiter, "3/minute", "all", "testclient") == 3
    assert calls


def test_a_key_may_use_what_an_earlier_dependency_has_found_out(limiter: AsyncLimiter) -> None:
    app = FastAPI()
    install(app, limiter=limiter)

    async def by_user(request: Request) -> str:
        return str(request.state.user)

    @app.get("/mail", dependencies=[Depends(current_user), Depends(limited("1/minute", by=by_user))])
    async def mail(user: CurrentUser) -> str:
        return user

    with TestClient(app) as client:
        assert client.get("/mail", headers={"x-user": "ann"}).json() == "ann"
        assert client.get("/mail", headers={"x-user": "ann"}).status_code == 429
        assert client.get("/mail", headers={"x-user": "bob"}).json() == "bob"


def test_a_denial_of_the_librarys_own_decorator_anywhere_below_is_a_429(limiter: AsyncLimiter) -> None:
    app = FastAPI()
    install(app, limiter=limiter)
    sending = Limit("1/minute", namespace="sending")

    @limiter.limited(sending, key=lambda to: to)
    async def send(to: str) -> str:
        return to

    @app.get("/send")
    async def endpoint() -> str:
        return await send("ann")

    with TestClient(app) as client:
        assert client.get("/send").status_code == 200
        denied = client.get("/send")
    assert denied.status_code == 429
    assert denied.headers["retry-after"] == "61"
    assert denied.json()["violated-policies"] == ["sending"]


def test_two_routes_with_one_name_are_an_error_when_the_application_starts(limiter: AsyncLimiter) -> None:
    app = FastAPI()
    install(app, limiter=limiter)
    for path in ("/a", "/b"):

        @app.get(path, dependencies=[Depends(limited("2/minute"))])
        def same() -> str:
            return "ok"

    with pytest.raises(ConfigurationError, match="have the name 'same'"), TestClient(app):
        pass


def test_a_limit_without_install_says_what_to_do(limiter: AsyncLimiter) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(limited("2/minute"))])
    def endpoint() -> str:
        return "ok"

    with TestClient(app) as client, pytest.raises(ConfigurationError, match=r"call install\(app\)"):
        client.get("/")


def test_a_test_can_replace_a_limit_or_the_limiter(limiter: AsyncLimiter, clock: ManualClock) -> None:
    app = FastAPI()
    limits = install(app, limiter=limiter)
    one_a_minute = limited("1/minute")

    @app.get("/", dependencies=[Depends(one_a_minute), Depends(limited("2/minute", namespace="other"))])
    def endpoint() -> str:
        return "ok"

    with TestClient(app) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 429]
        with limits.override(manual_async_limiter(clock)):
            assert client.get("/").status_code == 200
        assert client.get("/").status_code == 429
        app.dependency_overrides[one_a_minute] = lambda: None
        assert [client.get("/").status_code for _ in range(2)] == [200, 429]


def test_answers_can_be_changed(limiter: AsyncLimiter) -> None:
    answers = Answers(
        status=503, x_ratelimit=True, body=lambda denial: ("text/plain", denial.detail.encode())
    )
    app = application(limiter, answers=answers)
    with TestClient(app) as client:
        first = client.get("/synchronous")
        assert first.headers["x-ratelimit-limit"] == "2"
        assert first.headers["x-ratelimit-remaining"] == "1"
        assert first.headers["x-ratelimit-reset"] == "1800057660"
        client.get("/synchronous")
        denied = client.get("/synchronous")
    assert denied.status_code == 503
    assert denied.text == "The limit of 2 per minute is used up. Retry in 1 min 1 s."
    assert "503" in app.openapi()["paths"]["/synchronous"]["get"]["responses"]


def test_a_websocket_route_may_have_limits(limiter: AsyncLimiter) -> None:
    app = FastAPI()
    install(app, limiter=limiter)

    @app.websocket("/chat", dependencies=[Depends(limited("1/minute"))])
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    with TestClient(app) as client:
        with client.websocket_connect("/chat") as connection:
            assert connection.receive_text() == "hello"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/chat"):
            pass


def test_a_router_that_is_included_twice_is_two_routes_of_one_name(limiter: AsyncLimiter) -> None:
    router = APIRouter()

    @router.get("/items", dependencies=[Depends(limited("2/minute"))])
    def items() -> str:
        return "ok"

    app = FastAPI()
    install(app, limiter=limiter)
    app.include_router(router, prefix="/v1")
    app.include_router(router, prefix="/v2", dependencies=[Depends(limited("1/minute", namespace="v2"))])
    with TestClient(app) as client:
        assert [client.get("/v2/items").status_code for _ in range(2)] == [200, 429]
        assert [client.get("/v1/items").status_code for _ in range(2)] == [200, 429]
