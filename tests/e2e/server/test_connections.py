from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.e2e.server.wire import Client, body, post, used
from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually
from tidegate.testing import Faults, RedisServer
from tidegate.testing.fixtures import StartProxy


def test_one_connection_serves_many_requests(server: TidegateServer, workspace: Workspace) -> None:
    key = workspace.key.secret
    with Client(server) as client:
        for number in range(1, 501):
            data = client.ask(post(key, body("loyal", limit=1_000))).data
            assert (data["success"], data["remaining"]) == (True, 1_000 - number)


def test_pipelined_requests_are_answered_in_their_order(server: TidegateServer, workspace: Workspace) -> None:
    key = workspace.key.secret
    wanted: list[int | None] = []
    parts = []
    for number in range(1, 301):
        if number % 50 == 0:
            parts.append(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wanted.append(None)
        elif number % 7 == 0:
            # A new namespace: this request has to wait for the database, and the others wait for it.
            parts.append(post(key, body("piped", namespace=f"new_{number}", limit=number)))
            wanted.append(number)
        else:
            parts.append(post(key, body(f"piped_{number}", limit=number)))
            wanted.append(number)
    with Client(server) as client:
        client.send(b"".join(parts))
        found = []
        for limit in wanted:
            reply = client.reply()
            found.append(reply.data["limit"] if limit is not None else None)
        assert found == wanted


def test_requests_in_arbitrary_pieces_are_read_like_whole_ones(
    server: TidegateServer, workspace: Workspace
) -> None:
    key = workspace.key.secret
    both = post(key, body("pieces", limit=7)) + post(key, body("pieces", limit=8))
    with Client(server) as client:
        for size in (1, 2, 3, 17, 101):
            for first in range(0, len(both), size):
                client.send(both[first : first + size])
            assert [client.reply().data["limit"], client.reply().data["limit"]] == [7, 8]


def test_an_answer_that_waits_for_the_origin_keeps_its_place(
    fresh_redis: RedisServer, fault_proxy: StartProxy
) -> None:
    proxy = fault_proxy(fresh_redis.port)
    with TidegateServer("--origin", proxy.through(fresh_redis.url)) as server, Client(server) as client:
        workspace = server.workspace()
        key = workspace.key.secret
        assert client.ask(post(key, body("warm", limit=1_000))).data["success"]
        proxy.apply(Faults(latency_ms=50))
        limits = []
        for number in range(10):
            client.send(post(key, body(f"cold_{number}", limit=100 + number)))
            client.send(post(key, body("warm", limit=1_000)))
            limits += [100 + number, 1_000]
        assert [client.reply().data["limit"] for _ in limits] == limits
        asked = [value for name, value in server.metrics().items() if "origin_operations_total" in name]
        assert sum(asked) >= 1, "the origin was asked"


def test_a_thousand_connections_at_once_are_counted_exactly(
    server: TidegateServer, workspace: Workspace, many_files: None
) -> None:
    request = post(workspace.key.secret, body("crowd", limit=600))
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server)) for _ in range(1_000)]
        eventually(lambda: server.metrics()["tidegate_http_connections"] >= 1_000, "all are connected")
        for client in clients:
            client.send(request)
        passed = sum(client.reply().data["success"] for client in clients)
        assert passed == 600
        # And again on the same connections: none was dropped.
        assert all(not client.ask(request).data["success"] for client in clients)


def test_above_the_bound_of_connections_one_that_was_idle_makes_room_and_the_others_are_served() -> None:
    with TidegateServer("--http-connections-max", "5") as server, ExitStack() as stack:
        request = post(server.workspace().key.secret, body())
        clients = [stack.enter_context(Client(server)) for _ in range(5)]
        assert all(client.ask(request).data["success"] for client in clients)
        late = stack.enter_context(Client(server))
        assert late.ask(request).data["success"], "at the latest when another was idle for a tick"
        ended, _, _ = select.select([client.socket for client in clients], [], [], 0)
        assert len(ended) == 1
        others = [client for client in clients if client.socket not in ended]
        assert all(client.ask(request).data["success"] for client in others)


def slow_start(key: str, kind: str) -> bytes:
    whole = post(key, body(), length=1_000_000)
    return whole.split(b"\r\n\r\n")[0] + b"\r\nX-Slow: " if kind == "headers" else whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["headers", "body"])
def test_clients_that_send_too_slowly_are_closed_and_others_are_served_meanwhile(kind: str) -> None:
    with (
        TidegateServer("--http-header-timeout-s", "1", "--http-request-timeout-s", "1.5") as server,
        ExitStack() as stack,
    ):
        key = server.workspace().key.secret
        slow = [stack.enter_context(Client(server)) for _ in range(100)]
        for client in slow:
            client.send(slow_start(key, kind))
        honest = stack.enter_context(Client(server))
        served = 0
        deadline = time.monotonic() + TIMEOUT_S
        open_ones = {client.socket: client for client in slow}
        while open_ones:
            assert time.monotonic() < deadline, f"{len(open_ones)} slow clients are still connected"
            ended, _, _ = select.select(list(open_ones), [], [], 0)
            for each in ended:
                client = open_ones.pop(each)
                assert client.reply().status == 408
                assert client.is_at_end()
            for each in open_ones:
                each.send(b"a")
            assert honest.ask(post(key, body("honest"))).data["success"]
            served += 1
        assert served >= 10
        assert used(server, key, "user") == 0, "nothing was counted for those that never finished"


@pytest.mark.slow
def test_a_client_that_reads_no_answers_is_disconnected_and_costs_bounded_memory() -> None:
    with TidegateServer("--http-request-timeout-s", "1") as server, Client(server) as deaf:
        key = server.workspace().key.secret
        request = post(key, body("deaf")) * 200
        sent = 0
        with suppress(ConnectionError):
            while sent < 50_000_000:
                sent += deaf.socket.send(request)
        assert sent < 50_000_000, "it stops being read"
        eventually(
            lambda: server.metrics()["tidegate_http_connections"] == 1,
            "the client that does not read is disconnected",
        )


def test_a_body_one_byte_too_large_is_a_413_whether_it_says_so_or_not(
    server: TidegateServer, workspace: Workspace
) -> None:
    size = 10 * 1024 * 1024 + 1
    key = workspace.key.secret
    with Client(server) as client:
        client.send(post(key, b" " * size))
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert client.is_at_end()
    with Client(server) as client:
        head = post(key, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        client.send(head)
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        for _ in range(size // 65_536):
            client.send(chunk)
        client.send(b"1\r\n \r\n0\r\n\r\n")
        assert client.reply().status == 413
        assert client.is_at_end()


def test_a_body_of_exactly_ten_mebibytes_is_read(server: TidegateServer, workspace: Workspace) -> None:
    content = body("large").ljust(10 * 1024 * 1024)
    with Client(server) as client:
        assert client.ask(post(workspace.key.secret, content)).data["success"]
        assert client.ask(post(workspace.key.secret, body("large"))).data["success"], (
            "the connection stays open"
        )


def test_large_bodies_do_not_add_up_in_memory_and_exclude_no_other_client() -> None:
    with TidegateServer("--http-body-bytes-max", "1048576") as server, ExitStack() as stack:
        key = server.workspace().key.secret
        with Client(server) as honest:
            assert honest.ask(post(key, body("honest"))).data["success"]
        before = resident_mb(server.pid)
        clients = [stack.enter_context(Client(server)) for _ in range(200)]
        for client in clients:
            # All but the last byte of the largest body: none is complete.
            client.send(post(key, b" " * 1_048_575, length=1_048_576))
        sockets = {client.socket: client for client in clients}

        def refused() -> list[Client]:
            return [sockets[each] for each in select.select(list(sockets), [], [], 0)[0]]

        # 64 MiB of unfinished bodies are kept, for all clients together.
        eventually(lambda: len(refused()) >= 200 - 64, "what is too much is refused")
        assert {client.reply().status for client in refused()} == {503}
        assert resident_mb(server.pid) - before < 150
        with Client(server) as honest:
            assert honest.ask(post(key, body("honest"))).data["success"]


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
