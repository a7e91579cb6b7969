"""Real servers with real processes: uvicorn with workers, gunicorn with forks, reload, and a shared Redis."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import unix_connect

from tidegate.testing import RedisServer, wait_until
from tidegate.testing.servers.process import child_pids

pytestmark = pytest.mark.slow

FASTAPI = """
    import os
    from fastapi import Depends, FastAPI, WebSocket
    from tidegate.integrations import header
    from tidegate.integrations.fastapi import install, limited

    app = FastAPI()
    install(app)

    @app.get("/pid")
    def pid() -> int:
        return os.getpid()

    @app.get("/mail", dependencies=[Depends(limited("3/365d", by=header("x-user")))])
    async def mail() -> str:
        return "ok"

    @app.websocket("/chat", dependencies=[Depends(limited("1/365d", by=header("x-user")))])
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()
"""

FLASK = """
    import os
    from flask import Flask
    from tidegate.integrations import header
    from tidegate.integrations.flask import install, limited

    app = Flask(__name__)
    limits = install(app)
    limits.start()  # before gunicorn forks: each worker becomes a node of its own

    @app.get("/pid")
    def pid():
        return str(os.getpid())

    @app.get("/mail")
    @limited("3/365d", by=header("x-user"))
    def mail():
        return "ok"

    if __name__ == "__main__":
        # Not the reloader with watchdog: it also watches the checkout, where other tests write thousands of files.
        app.run(host=f"unix://{os.environ['SOCKET']}", debug=True, reloader_type="stat")
"""

DJANGO = """
    import os
    from django.conf import settings
    from django.http import HttpResponse
    from django.urls import path
    from tidegate.integrations import header
    from tidegate.integrations.django import get_asgi_application, limited

    settings.configure(
        ALLOWED_HOSTS=["*"],
        MIDDLEWARE=["tidegate.integrations.django.RateLimitMiddleware"],
        ROOT_URLCONF=__name__,
        SECRET_KEY="test",
    )

    def pid(request):
        return HttpResponse(str(os.getpid()))

    @limited("3/365d", by=header("x-user"), namespace="mail")
    async def mail(request):
        return HttpResponse("ok")

    urlpatterns = [path("pid", pid), path("mail", mail)]
    app = get_asgi_application()
"""


@contextmanager
def serving(directory: Path, source: str, *command: str, **environ: str) -> Iterator[httpx.Client]:
    """Run a server with the application in a file; stop it with SIGTERM, as an operator would."""
    (directory / "application.py").write_text(textwrap.dedent(source))
    paths = [str(directory), *filter(None, sys.path)]
    environment = os.environ | environ | {"PYTHONPATH": os.pathsep.join(paths)}
    path = directory / "server.sock"
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=directory, env=environment, stdout=log, stderr=log
        )

    def listens() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    transport = httpx.HTTPTransport(uds=str(path))
    try:
        wait_until(listens, timeout_s=120, what="the server to listen")
        with httpx.Client(transport=transport, base_url="http://test", timeout=120) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in (*child_pids(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            raise
        path.unlink(missing_ok=True)


def codes(client: httpx.Client, user: str, times: int) -> list[int]:
    return [client.get("/mail", headers={"x-user": user}).status_code for _ in range(times)]


def pids(client: httpx.Client, count: int) -> set[str]:
    """Send requests on new connections until `count` different workers have answered."""
    found: set[str] = set()

    def enough() -> bool:
        found.add(client.get("/pid", headers={"connection": "close"}).text)
        return len(found) >= count

    wait_until(enough, timeout_s=20, what=f"{count} workers to answer")
    return found


def uvicorn(directory: Path, *more: str) -> list[str]:
    return ["uvicorn", "application:app", "--uds", str(directory / "server.sock"), *more]


@pytest.mark.parametrize("source", [FASTAPI, DJANGO], ids=["fastapi", "django"])
def test_counts_survive_a_restart_of_uvicorn(tmp_path: Path, fresh_redis: RedisServer, source: str) -> None:
    origin = {"TIDEGATE_ORIGIN": fresh_redis.url}
    with serving(tmp_path, source, *uvicorn(tmp_path), **origin) as client:
        assert codes(client, "ann", 4) == [200, 200, 200, 429]
        assert codes(client, "bob", 2) == [200, 200]
    # The end of the lifespan has flushed the last counts; a new process reads them at its first request.
    with serving(tmp_path, source, *uvicorn(tmp_path), **origin) as client:
        assert codes(client, "ann", 1) == [429]
        assert codes(client, "bob", 2) == [200, 429]


def test_workers_of_uvicorn_share_their_counts_through_redis(
    tmp_path: Path, fresh_redis: RedisServer
) -> None:
    origin = {"TIDEGATE_ORIGIN": fresh_redis.url}
    with serving(tmp_path, FASTAPI, *uvicorn(tmp_path, "--workers", "2"), **origin) as client:
        pids(client, 2)
        # On a new connection each, so that both workers are asked.
        asked = [
            client.get("/mail", headers={"x-user": "ann", "connection": "close"}).status_code
            for _ in range(20)
        ]
        assert asked.count(200) == 3


def test_uvicorn_answers_a_denied_websocket_with_a_429(tmp_path: Path) -> None:
    with serving(tmp_path, FASTAPI, *uvicorn(tmp_path)) as _:

        def dial() -> Any:
            headers = {"x-user": "ann"}
            return unix_connect(str(tmp_path / "server.sock"), "ws://test/chat", additional_headers=headers)

        with dial():
            pass
        with pytest.raises(InvalidStatus) as caught, dial():
            pass
    assert caught.value.response.status_code == 429
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_counts_survive_a_restart_of_gunicorn_that_forks_after_the_limiter_was_started(
    tmp_path: Path, fresh_redis: RedisServer
) -> None:
    origin = {"TIDEGATE_ORIGIN": fresh_redis.url}
    bind = ["--bind", f"unix:{tmp_path / 'server.sock'}"]
    preload = ["gunicorn", "application:app", "--preload", "--workers", "2", *bind]
    with serving(tmp_path, FLASK, *preload, **origin) as client:
        pids(client, 2)

        def refused() -> bool:
            return set(codes(client, "ann", 8)) == {429}

        wait_until(refused, timeout_s=20, what="both workers to know that the limit is used up")
    one = ["gunicorn", "application:app", "--workers", "1", *bind]
    with serving(tmp_path, FLASK, *one, **origin) as client:
        assert codes(client, "ann", 1) == [429]
        assert codes(client, "bob", 1) == [200]
    # Flushed when the worker ended.
    with serving(tmp_path, FLASK, *one, **origin) as client:
        assert codes(client, "bob", 3) == [200, 200, 429]


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (FASTAPI, ["uvicorn", "application:app", "--uds", "{socket}", "--reload"]),
        (FLASK, ["application"]),
    ],
    ids=["uvicorn", "flask"],
)
def test_counts_survive_a_reload_in_development(
    tmp_path: Path, fresh_redis: RedisServer, source: str, command: list[str]
) -> None:
    path = str(tmp_path / "server.sock")
    places = [each.format(socket=path) for each in command]
    with serving(tmp_path, source, *places, TIDEGATE_ORIGIN=fresh_redis.url, SOCKET=path) as client:
        assert codes(client, "ann", 2) == [200, 200]
        before = client.get("/pid").text
        edit_at_s = time.monotonic()

        def is_reloaded() -> bool:
            nonlocal edit_at_s
            try:
                answer = client.get("/pid", headers={"connection": "close"}, timeout=1).text
            except httpx.TransportError:
                # The old process has ended, and the new one does not listen yet. A connection made in between is never
                # answered.
                return False
            if answer == before and time.monotonic() >= edit_at_s:
                # Again after some seconds: the reloader does not notice a change before its first check. Not while the
                # new process starts, because each change restarts it.
                edit_at_s += 5
                with (tmp_path / "application.py").open("a") as file:
                    file.write("\nCHANGED = True\n")
            return answer != before

        wait_until(is_reloaded, timeout_s=60, what="the server to reload")
        # Two of the three are used. On a busy machine, a new process may decide its first request without Redis.
        assert codes(client, "ann", 4)[1:].count(429) >= 2
