from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django
import pytest
from django.conf import settings

from tests.integrations.kit import (
    consumed,
    lifespan,
    manual_async_limiter,
    manual_clock,
    manual_limiter,
    no_blocking,
)
from tidegate import AsyncLimiter, ConfigurationError, Limiter
from tidegate.integrations import Proxies, Rule, header, user

if not settings.configured:
    settings.configure(
        SECRET_KEY="test",
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["*"],
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        MIDDLEWARE=["tidegate.integrations.django.RateLimitMiddleware"],
    )
    django.setup()

from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from tidegate.integrations.django import get_asgi_application, limited


@limited("2/minute")
def synchronous(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


@limited("2/minute")
async def asynchronous(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


@method_decorator(limited("1/minute"), name="dispatch")
class Items(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ok")


@limited("1/minute", by=header("x-user"), namespace="user")
@limited("5/minute", namespace="address")
def both(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


def free(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


def send(request: HttpRequest) -> HttpResponse:
    from tidegate import Limit, LimitExceeded

    with Limiter() as limiter:
        raise LimitExceeded("too much", [limiter.limit(Limit("1/minute", namespace="sending"), "ann", 2)])


urlpatterns = [
    path("synchronous", synchronous, name="sync"),
    path("asynchronous", asynchronous, name="async"),
    path("items", Items.as_view(), name="items"),
    path("both", both),
    path("free", free),
    path("send", send),
]


@pytest.fixture
def limiter() -> Iterator[Limiter]:
    limiter = manual_limiter(manual_clock())
    with override_settings(TIDEGATE_LIMITER=limiter):
        yield limiter


@pytest.fixture
def async_limiter() -> Iterator[AsyncLimiter]:
    limiter = manual_async_limiter(manual_clock())
    with override_settings(TIDEGATE_LIMITER=limiter), no_blocking():
        yield limiter


@pytest.mark.parametrize(("url", "name"), [("/synchronous", "sync"), ("/asynchronous", "async")])
def test_under_wsgi_a_view_answers_until_its_limit_is_used_up_and_then_429(
    url: str, name: str, limiter: Limiter
) -> None:
    client = Client()
    first = client.get(url)
    assert first.status_code == 200 and first["RateLimit"] == f'"{name}";r=1;t=60'
    assert client.get(url).status_code == 200
    denied = client.get(url)
    assert denied.status_code == 429 and denied["Retry-After"] == "61"
    assert denied["Content-Type"] == "application/problem+json"
    assert "RateLimit" not in client.get("/free").headers


@pytest.mark.parametrize(("url", "name"), [("/synchronous", "sync"), ("/asynchronous", "async")])
async def test_under_asgi_a_view_answers_until_its_limit_is_used_up_and_then_429(
    url: str, name: str, async_limiter: AsyncLimiter
) -> None:
    client = AsyncClient()
    first = await client.get(url)
    assert first.status_code == 200 and first["RateLimit"] == f'"{name}";r=1;t=60'
    assert (await client.get(url)).status_code == 200
    denied = await client.get(url)
    assert denied.status_code == 429 and denied["Retry-After"] == "61"


def test_limits_of_site_and_view_are_one_batch_and_hold_for_unknown_urls(limiter: Limiter) -> None:
    with override_settings(TIDEGATE_RULES=[Rule("4/minute", namespace="all")]):
        client = Client()
        assert [client.get("/synchronous").status_code for _ in range(3)] == [200, 200, 429]
        assert consumed(limiter, "4/minute", "all", "127.0.0.1") == 2
        assert [client.get("/items").status_code for _ in range(2)] == [200, 429]
        unknown = client.get("/nowhere")
        assert unknown.status_code == 404 and unknown["RateLimit"].startswith('"all";r=0')
        assert client.get("/nowhere").status_code == 429
        assert client.get("/free").status_code == 429


async def test_under_asgi_the_limits_of_the_site_hold_for_unknown_urls(async_limiter: AsyncLimiter) -> None:
    with override_settings(TIDEGATE_RULES=["2/minute"]):
        client = AsyncClient()
        assert [(await client.get("/nowhere")).status_code for _ in range(3)] == [404, 404, 429]


def test_two_decorators_are_one_batch(limiter: Limiter) -> None:
    client = Client()
    codes = [client.get("/both", headers={"x-user": "ann"}).status_code for _ in range(3)]
    assert codes == [200, 429, 429]
    assert consumed(limiter, "5/minute", "address", "127.0.0.1") == 1


def test_a_denial_below_a_view_is_a_429(limiter: Limiter) -> None:
    assert Client().get("/send").status_code == 429


async def test_under_asgi_a_denial_below_a_view_is_a_429(async_limiter: AsyncLimiter) -> None:
    assert (await AsyncClient().get("/send")).status_code == 429


AUTHENTICATED = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "tidegate.integrations.django.RateLimitMiddleware",
]


class Ann:
    is_authenticated = True
    pk = 7


def get_user(request: Any) -> Any:
    return Ann()


async def aget_user(request: Any) -> Any:
    return Ann()


@override_settings(MIDDLEWARE=AUTHENTICATED, TIDEGATE_RULES=[Rule("1/minute", by=user, namespace="users")])
def test_the_user_of_the_request_is_a_key(limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.contrib.auth.middleware.get_user", get_user)
    client = Client()
    assert [client.get("/free").status_code for _ in range(2)] == [200, 429]
    assert consumed(limiter, "1/minute", "users", "7") == 1


@override_settings(MIDDLEWARE=AUTHENTICATED, TIDEGATE_RULES=[Rule("1/minute", by=user, namespace="users")])
async def test_under_asgi_the_user_is_awaited(
    async_limiter: AsyncLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django.contrib.auth.middleware.auth.aget_user", aget_user)
    client = AsyncClient()
    assert [(await client.get("/free")).status_code for _ in range(2)] == [200, 429]


def is_internal(request: HttpRequest) -> bool:
    return bool(request.headers.get("x-internal"))


@override_settings(
    TIDEGATE_RULES=["1/minute"],
    TIDEGATE_EXEMPT=f"{__name__}.is_internal",
    TIDEGATE_PROXIES=Proxies(trusted_hops=1),
)
def test_settings_are_the_arguments_and_functions_may_be_dotted_paths(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys.modules["__main__"]))
    client = Client()
    for caller in ("198.51.100.1", "198.51.100.2"):
        for code in (200, 429):
            assert client.get("/free", headers={"x-forwarded-for": caller}).status_code == code
    for _ in range(3):
        assert client.get("/free", headers={"x-internal": "1"}).status_code == 200


def test_wrong_settings_are_an_error_at_the_start() -> None:
    with (
        override_settings(TIDEGATE_RULES="1/minute"),
        pytest.raises(ConfigurationError, match="TIDEGATE_RULES"),
    ):
        Client().get("/free")


@override_settings(MIDDLEWARE=[])
def test_a_decorator_without_the_middleware_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="MIDDLEWARE"):
        Client().get("/synchronous")


@override_settings(TIDEGATE_RULES=["1/minute"], TIDEGATE_ORIGIN="memory://")
def test_the_settings_of_the_site_choose_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ORIGIN", "gopher://not-used")
    client = Client()
    assert [client.get("/free").status_code for _ in range(2)] == [200, 429]


@override_settings(TIDEGATE_RULES=["1/minute"], TIDEGATE_ORIGIN="gopher://host")
async def test_with_a_lifespan_a_setting_that_cannot_work_fails_the_start() -> None:
    tell, answers = await lifespan(get_asgi_application())
    tell("lifespan.startup")
    assert await anext(answers) == "lifespan.startup.failed"


@override_settings(TIDEGATE_RULES=["1/minute"], TIDEGATE_ORIGIN="memory://")
async def test_with_a_lifespan_the_limiter_starts_and_stops_with_the_server() -> None:
    tell, answers = await lifespan(get_asgi_application())
    tell("lifespan.startup")
    assert await anext(answers) == "lifespan.startup.complete"
    tell("lifespan.shutdown")
    assert await anext(answers) == "lifespan.shutdown.complete"
