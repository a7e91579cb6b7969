"""Every example application answers, refuses and says so. They run as they are, with limiters of their own."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import httpx
import pytest
from aiohttp.test_utils import TestClient as AiohttpClient
from aiohttp.test_utils import TestServer
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tests import midday
from tests.integrations.test_clients import Counting

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def embedded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("REGION", "ORIGIN", "LEDGER"):
        monkeypatch.delenv(f"TIDEGATE_{name}", raising=False)
    with midday.begins_now():
        yield


def example(name: str) -> Any:
    sys.modules.pop(f"examples.{name}", None)
    return importlib.import_module(f"examples.{name}")


def test_every_example_is_in_the_list_and_in_this_file() -> None:
    files = {file.stem for file in (ROOT / "examples").glob("*.py")}
    listed = set(re.findall(r"\[(\w+)\.py\]", (ROOT / "examples" / "README.md").read_text()))
    tested = set(re.findall(r'["\.](\w+_(?:app|server|clients))"', Path(__file__).read_text()))
    assert files == listed == tested


@pytest.mark.parametrize("name", ["starlette_app", "litestar_app", "asgi_app", "quart_app"])
async def test_an_asgi_example_answers_twice_and_then_429(name: str) -> None:
    transport = httpx.ASGITransport(example(name).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answers = [await client.get("/emails") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["ratelimit"].partition(";")[2].startswith("r=1")


@pytest.mark.parametrize("name", ["flask_app", "wsgi_app"])
def test_a_wsgi_example_answers_twice_and_then_429(name: str) -> None:
    transport = httpx.WSGITransport(example(name).app)
    with httpx.Client(transport=transport, base_url="http://test") as client:
        assert [client.get("/emails").status_code for _ in range(3)] == [200, 200, 429]


def test_the_fastapi_example_limits_by_user_and_by_plan() -> None:
    with TestClient(example("fastapi_app").app) as client:
        ann, bob = {"x-user": "ann"}, {"x-user": "bob", "x-plan": "paid"}
        assert [client.get("/reports", headers=ann).status_code for _ in range(3)] == [200, 200, 429]
        assert [client.get("/reports", headers=bob).status_code for _ in range(3)] == [200, 200, 200]
        assert client.get("/emails", headers=ann).headers["ratelimit"].startswith('"emails";r=')
        assert "429" in client.get("/openapi.json").json()["paths"]["/emails"]["get"]["responses"]


def test_the_websocket_example_closes_after_too_many_messages() -> None:
    with TestClient(example("websocket_app").app) as client, client.websocket_connect("/echo") as connection:
        for text in ("one", "two"):
            connection.send_text(text)
            assert connection.receive_text() == text
        connection.send_text("three")
        with pytest.raises(WebSocketDisconnect):
            connection.receive_text()


def test_the_django_example_runs_under_wsgi_and_asgi() -> None:
    # In a process of its own: Django's settings are one per process.
    program = """
import asyncio, httpx, importlib
from tests import midday
noon = midday.begins_now()
noon.__enter__()
site = importlib.import_module("examples.django_app")
with httpx.Client(transport=httpx.WSGITransport(site.app), base_url="http://test") as client:
    print([client.get(f"/{name}").status_code for name in ("emails", "reports") for _ in range(3)])
async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site.asgi_app), base_url="http://test") as client:
        print([(await client.get(f"/{name}")).status_code for name in ("emails", "reports") for _ in range(3)])
asyncio.run(main())
"""
    run = [sys.executable, "-c", program]
    paths = ":".join(filter(None, [str(ROOT), *sys.path]))
    done = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env={"PYTHONPATH": paths}
    )
    assert done.stdout.splitlines() == ["[200, 200, 429, 200, 200, 429]"] * 2, done.stderr


async def test_the_aiohttp_example_answers_twice_and_then_429() -> None:
    async with AiohttpClient(TestServer(example("aiohttp_app").main())) as client:
        assert [(await client.get("/emails")).status for _ in range(3)] == [200, 200, 429]


def test_the_grpc_example_answers_twice_and_then_refuses() -> None:
    server, port = example("grpc_server").make_server("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            send = channel.unary_unary("/mail.Mailer/Send")
            assert [send(b"mail") for _ in range(2)] == [b"sent mail"] * 2
            with pytest.raises(grpc.RpcError) as caught:
                send(b"mail")
    finally:
        server.stop(None).wait()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Counting) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_clients_of_the_example_keep_within_their_quota(url: str) -> None:
    clients = example("http_clients")
    assert clients.fetch(url, times=5) == 2
    with clients.patient_session() as session:
        assert type(session.get_adapter("https://example.com")).__name__ == "RateLimitAdapter"
