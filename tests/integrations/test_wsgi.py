from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from werkzeug.test import Client as WerkzeugClient
from werkzeug.test import TestResponse

from tests.integrations.kit import manual_clock, manual_limiter
from tidegate import Limit, Limiter, LimitExceeded
from tidegate.integrations import Proxies, Rule, header
from tidegate.integrations.wsgi import RateLimitMiddleware


def hello(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


class Client(WerkzeugClient):
    def open(self, *args: Any, **options: Any) -> TestResponse:
        return super().open(*args, environ_base={"REMOTE_ADDR": "203.0.113.7"}, **options)


@pytest.fixture
def limiter() -> Limiter:
    return manual_limiter(manual_clock())


def test_a_wsgi_application_answers_until_the_limit_is_used_up(limiter: Limiter) -> None:
    client = Client(RateLimitMiddleware(hello, "1/minute", limiter=limiter))
    first = client.get("/")
    assert (first.status_code, first.text) == (200, "hello")
    assert first.headers["RateLimit"] == '"application";r=0;t=60'
    denied = client.get("/")
    assert denied.status == "429 Too Many Requests"
    assert denied.headers["Retry-After"] == "61"
    assert denied.json is not None and denied.json["status"] == 429


def test_an_answer_to_head_has_no_body(limiter: Limiter) -> None:
    client = Client(RateLimitMiddleware(hello, Rule("1/minute", methods="GET"), limiter=limiter))
    client.get("/")
    denied = client.head("/")
    assert denied.status_code == 429 and denied.data == b""


def test_callers_behind_a_proxy_are_distinguished(limiter: Limiter) -> None:
    client = Client(RateLimitMiddleware(hello, "1/minute", limiter=limiter, proxies=Proxies(trusted_hops=1)))
    for caller in ("198.51.100.1", "198.51.100.2"):
        headers = {"X-Forwarded-For": f"1.1.1.1, {caller}"}
        assert client.get("/", headers=headers).status_code == 200
        assert client.get("/", headers={"X-Forwarded-For": f"2.2.2.2, {caller}"}).status_code == 429


def test_a_denial_below_becomes_a_429_unless_the_answer_has_begun(limiter: Limiter) -> None:
    denial = limiter.limit(Limit("1/minute", namespace="n"), "ann", 2)

    def refuses(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/late":
            start_response("200 OK", [])
        raise LimitExceeded("too much", [denial])

    client = Client(RateLimitMiddleware(refuses, limiter=limiter))
    assert client.get("/").status_code == 429
    with pytest.raises(LimitExceeded):
        client.get("/late")


def test_a_path_is_matched_as_text_and_with_the_prefix_of_its_mount(limiter: Limiter) -> None:
    client = Client(
        RateLimitMiddleware(hello, Rule("1/minute", path="/shop/käse", by=header("x-user")), limiter=limiter)
    )
    for code in (200, 429):
        answer = client.get("/käse", "http://localhost/shop", headers={"x-user": "ann"})
        assert answer.status_code == code
