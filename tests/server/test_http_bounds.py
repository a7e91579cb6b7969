"""Clients that are slow, silent, greedy or too many; and a server that stops."""

from __future__ import annotations

import re
import select
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually
from tests.server.raw import LIVENESS, Client, limit_body, post
from tidegate.testing.servers.redis import create_certificate

HURRIED = {
    "TIDEGATE_HTTP_HEADER_TIMEOUT_S": "0.5",
    "TIDEGATE_HTTP_REQUEST_TIMEOUT_S": "1",
    "TIDEGATE_HTTP_IDLE_TIMEOUT_S": "0.7",
    "TIDEGATE_HTTP_CONNECTIONS_MAX": "20",
    "TIDEGATE_HTTP_STOP_TIMEOUT_S": "4",
}


@pytest.fixture(scope="module")
def short_timeouts() -> Iterator[TidegateServer]:
    with TidegateServer(env=HURRIED) as server:
        yield server


def test_a_client_that_sends_nothing_is_disconnected(short_timeouts: TidegateServer) -> None:
    with short_timeouts.socket() as connection:
        assert Client(connection).is_closed()


def test_an_idle_connection_is_closed_without_an_answer(short_timeouts: TidegateServer) -> None:
    with short_timeouts.socket() as connection:
        client = Client(connection)
        client.send(LIVENESS)
        assert client.answer()[0] == 200
        assert client.is_closed()


def test_headers_that_do_not_come_are_a_408(short_timeouts: TidegateServer) -> None:
    with short_timeouts.socket() as connection:
        client = Client(connection)
        client.send(LIVENESS[:-5])
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert b"user/bad_request/request_timeout" in body
        assert client.is_closed()


def test_slowloris_gets_no_more_time_for_each_byte(short_timeouts: TidegateServer) -> None:
    with ExitStack() as stack:
        dripping = [stack.enter_context(short_timeouts.socket()) for _ in range(10)]
        started = time.monotonic()
        for each in dripping:
            each.sendall(b"GET /v2/liveness HTTP/1.1\r\nHost: x\r\n")
        answered: list[socket.socket] = []
        while dripping:
            assert time.monotonic() - started < TIMEOUT_S
            ready, _, _ = select.select(dripping, [], [], 0.05)
            for each in ready:
                dripping.remove(each)
                answered.append(each)
            for each in dripping:
                each.sendall(b"X: y\r\n")
        assert [Client(each).answer()[0] for each in answered] == [408] * 10
    assert short_timeouts.get("/livez").status == 200


def test_a_body_that_does_not_come_is_a_408(short_timeouts: TidegateServer) -> None:
    workspace = short_timeouts.workspace()
    with short_timeouts.socket() as connection:
        client = Client(connection)
        client.send(post(workspace, limit_body("x"))[:-5])
        status, _, body = client.answer()
        assert status == 408
        assert b'"title":"Request Timeout"' in body
        assert client.is_closed()


def test_a_client_that_does_not_read_is_not_read_from_and_then_disconnected(
    short_timeouts: TidegateServer,
) -> None:
    with short_timeouts.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.setblocking(False)
        # Each request of 40 bytes is answered with 15 kB. If the server read on, it would hold gigabytes.
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000
        assert send_until_reset(connection, requests) < 20_000_000
    assert short_timeouts.get("/livez").status == 200
    assert memory_mb(short_timeouts.pid) < 200


def send_until_reset(connection: socket.socket, data: bytes) -> int:
    """How many bytes were sent before the connection was reset."""
    sent = 0
    while True:
        _, writable, _ = select.select([], [connection], [], TIMEOUT_S)
        assert writable, "it is neither read from nor disconnected"
        try:
            sent += connection.send(data)
        except ConnectionError:
            return sent


def memory_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1_000


def test_a_request_sets_no_time_of_its_own_unless_the_server_is_in_test_mode(
    short_timeouts: TidegateServer,
) -> None:
    workspace = short_timeouts.workspace()
    reply = workspace.limit(duration=60_000, at_ms=4_102_444_830_000)
    assert reply.data["reset"] < 4_102_444_800_000
    assert workspace.call("limit", limit_body("x"), X_Test_Time="yesterday").status == 200


def test_connections_above_the_bound_wait_until_there_is_room(short_timeouts: TidegateServer) -> None:
    with ExitStack() as stack:
        clients = [Client(stack.enter_context(short_timeouts.socket())) for _ in range(40)]
        for each in clients:
            each.send(LIVENESS.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert [each.answer()[0] for each in clients] == [200] * 40


def test_bodies_that_are_being_received_have_a_bound_together(server: TidegateServer) -> None:
    # Eight of the largest fit; sending a body needs no key.
    body = b" " * 10_000_000
    head = b"POST /v2/ratelimit.limit HTTP/1.1\r\nHost: x\r\nContent-Length: 10485760\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(server.socket()) for _ in range(12)]
        answered: list[int] = []
        for connection in connections:
            connection.sendall(head + body)
        ready, _, _ = select.select(connections, [], [], TIMEOUT_S)
        answered += [Client(each).answer()[0] for each in ready]
        assert answered
        assert set(answered) == {503}
        assert memory_mb(server.pid) < 300
    eventually(lambda: server.metrics()["tidegate_http_connections"] <= 2, "they are gone")
    assert server.request("POST", "/v2/ratelimit.limit", body).status == 400, "and there is room again"


# Stopping.


def test_sigterm_finishes_what_is_under_way_and_exits_0() -> None:
    with TidegateServer(env=HURRIED | {"TIDEGATE_HTTP_IDLE_TIMEOUT_S": "30"}) as server:
        workspace = server.workspace()
        with server.socket() as idle, server.socket() as busy:
            idler, worker = Client(idle), Client(busy)
            for each in (idler, worker):
                each.send(LIVENESS)
                assert each.answer()[0] == 200
            request = post(workspace, limit_body("last"))
            worker.send(request[:-10])
            server.signal(signal.SIGTERM)
            assert idler.is_closed()
            worker.send(request[-10:])
            status, headers, _ = worker.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert worker.is_closed()
        assert server.process is not None
        assert server.process.wait(TIMEOUT_S) == 0
        with pytest.raises(OSError, match="refused"):
            server.socket()


def test_a_client_that_never_finishes_does_not_hold_up_the_stop() -> None:
    # Nothing but the deadline of the stop ends this connection before the test gives up.
    patient = {"TIDEGATE_HTTP_STOP_TIMEOUT_S": "3", "TIDEGATE_HTTP_HEADER_TIMEOUT_S": "3600"}
    with TidegateServer(env=patient) as server, server.socket() as connection:
        client = Client(connection)
        client.send(LIVENESS[:-3])
        eventually(lambda: server.metrics()["tidegate_http_connections"] >= 2, "it is connected")
        assert server.stop() == 0
        assert client.is_closed()


def test_a_node_that_is_stopping_is_not_ready() -> None:
    with TidegateServer(env={"TIDEGATE_HTTP_STOP_TIMEOUT_S": "5"}) as server, server.socket() as connection:
        client = Client(connection)
        client.send(LIVENESS)
        client.answer()
        client.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n")
        eventually(lambda: server.metrics()["tidegate_http_connections"] >= 2, "it is connected")
        server.signal(signal.SIGTERM)
        eventually(lambda: "stopping" in server.log, "it is stopping")
        client.send(b"\r\n")
        status, _, body = client.answer()
        assert status == 503
        assert body.startswith(b"not ready")


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    create_certificate(cert, key)
    return cert, key


def test_tls_serves_the_same_api_and_survives_clients_without_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with TidegateServer("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        workspace = server.workspace()
        context = ssl.create_default_context(cafile=cert)
        with server.socket() as plain:
            plain.sendall(LIVENESS)
            received = b""
            while data := plain.recv(4_096):
                received += data
            assert b"HTTP/1.1" not in received
        with server.socket() as raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            client = Client(secure)
            for _ in range(3):
                client.send(post(workspace, limit_body("tls")))
                assert client.answer()[0] == 200
            client.send(post(workspace, limit_body("first")) + LIVENESS)
            assert [client.answer()[0], client.answer()[0]] == [200, 200]
            client.send(
                post(workspace, b"").replace(b"Content-Length: 0", b"Content-Length: 10485761")
                + b" " * 100_000
            )
            assert client.answer()[0] == 413
        assert server.stop() == 0


def test_the_log_of_a_server_has_no_secret(server: TidegateServer, workspace: Workspace) -> None:
    workspace.limit()
    server.call("limit", b"{", workspace.key.secret)
    server.call("limit", {"namespace": "x"}, "tg_" + "s" * 32)
    assert workspace.key.secret not in server.log
    assert "s" * 32 not in server.log
    assert re.search(r"tg_[A-Za-z0-9]{20}", server.log) is None
