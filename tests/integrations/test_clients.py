from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
import requests

from tests.integrations.kit import consumed, manual_async_limiter, manual_limiter, no_blocking
from tidegate import InvalidInput, LimitExceeded
from tidegate.integrations.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.integrations.requests import RateLimitAdapter
from tidegate.testing import ManualClock


class Counting(BaseHTTPRequestHandler):
    count = 0

    def do_GET(self) -> None:
        Counting.count += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Counting) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class Slept:
    """A sleep that moves the manual clock instead of waiting."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.clock.advance(round(seconds * 1000))

    async def later(self, seconds: float) -> None:
        self(seconds)


def client(kind: str, clock: ManualClock, slept: Slept, limits: str, **options: Any) -> Any:
    limiter = manual_limiter(clock)
    if kind == "httpx":
        transport = RateLimitTransport(limits, limiter=limiter, **options)
        transport._outgoing._sleep = slept
        return httpx.Client(transport=transport)
    session = requests.Session()
    adapter = RateLimitAdapter(limits, limiter=limiter, **options)
    adapter._outgoing._sleep = slept
    session.mount("http://", adapter)
    return session


@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_client_waits_until_all_of_its_quotas_have_room(kind: str, clock: ManualClock, url: str) -> None:
    slept = Slept(clock)
    with client(kind, clock, slept, "2/second; 3/minute") as http:
        for _ in range(4):
            assert http.get(url).status_code == 200
    # The third waits for the next second, the fourth for the next minute.
    assert len(slept.seconds) == 2
    assert slept.seconds[0] == pytest.approx(1.001) and 58 < slept.seconds[1] < 61


@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_client_raises_when_it_would_wait_too_long_and_sends_and_counts_nothing(
    kind: str, clock: ManualClock, url: str
) -> None:
    slept = Slept(clock)
    with client(kind, clock, slept, "1/second; 9/minute", timeout=0) as http:
        http.get(url)
        sent = Counting.count
        with pytest.raises(LimitExceeded) as caught:
            http.get(url)
        assert Counting.count == sent
        assert caught.value.decision.retry_after_ms == 1001
    assert slept.seconds == []


async def test_an_asynchronous_client_waits_without_blocking(clock: ManualClock) -> None:
    slept = Slept(clock)
    limiter = manual_async_limiter(clock)
    transport = AsyncRateLimitTransport(
        "1/second", limiter=limiter, transport=httpx.MockTransport(lambda _: httpx.Response(204))
    )
    transport._outgoing._sleep = slept.later
    with no_blocking():
        async with httpx.AsyncClient(transport=transport) as http:
            for _ in range(3):
                assert (await http.get("http://api.example.com/")).status_code == 204
            assert len(slept.seconds) == 2
            # Another host has a quota of its own.
            await http.get("http://other.example.com/")
    assert len(slept.seconds) == 2


def test_key_cost_and_namespace_of_a_client_can_be_chosen(clock: ManualClock) -> None:
    limiter = manual_limiter(clock)
    transport = RateLimitTransport(
        "10/minute",
        limiter=limiter,
        by=lambda request: str(request.headers["x-account"]),
        cost=lambda request: len(request.content),
        namespace="upload",
        transport=httpx.MockTransport(lambda _: httpx.Response(204)),
        timeout=0,
    )
    with httpx.Client(transport=transport) as http:
        http.post("http://example.com", content=b"1234567", headers={"x-account": "ann"})
        with pytest.raises(LimitExceeded):
            http.post("http://example.com", content=b"1234", headers={"x-account": "ann"})
    assert consumed(limiter, "10/minute", "upload", "ann") == 7


def test_a_client_whose_key_finds_nothing_is_a_clear_error(clock: ManualClock) -> None:
    transport = RateLimitTransport("1/second", by=lambda _: "", limiter=manual_limiter(clock))
    with httpx.Client(transport=transport) as http, pytest.raises(InvalidInput, match=r"^by: "):
        http.get("http://example.com")
