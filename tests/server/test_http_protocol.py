from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.server.harness import TidegateServer, Workspace
from tests.server.raw import LIVENESS, Client, limit_body, post


@pytest.fixture
def client(server: TidegateServer) -> Iterator[Client]:
    with server.socket() as connection:
        yield Client(connection)


# Keep-alive and pipelining.


def test_a_connection_serves_many_requests(client: Client, workspace: Workspace) -> None:
    for number in range(20):
        client.send(post(workspace, limit_body("same", 1_000)))
        status, headers, body = client.answer()
        assert status == 200
        assert "connection" not in headers
        assert re.search(rb'"remaining":(\d+)', body)[1] == b"%d" % (999 - number)  # type: ignore[index] # it must match
        client.send(LIVENESS)
        assert client.answer()[0] == 200


def test_every_answer_has_a_date_and_a_length(client: Client) -> None:
    client.send(LIVENESS)
    _, headers, body = client.answer()
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["date"])
    assert headers["content-length"] == str(len(body))


def test_pipelined_requests_are_answered_in_order_also_when_one_must_wait(
    client: Client, workspace: Workspace
) -> None:
    # A new identifier waits for the origin, a new namespace for the database; liveness waits for nothing.
    parts = []
    for number in range(30):
        parts += [post(workspace, limit_body(f"user_{number}", 100 + number)), LIVENESS]
    client.send(b"".join(parts))
    for number in range(30):
        status, _, body = client.answer()
        assert status == 200
        assert b'"limit":%d,' % (100 + number) in body
        assert b'"message"' in client.answer()[2]


def test_thousands_of_pipelined_requests_in_one_write_are_all_answered(
    client: Client, workspace: Workspace
) -> None:
    count = 5_000
    sender = threading.Thread(target=client.send, args=(post(workspace, limit_body("x", count)) * count,))
    sender.start()
    remaining = []
    for _ in range(count):
        _, _, body = client.answer()
        match = re.search(rb'"remaining":(\d+)', body)
        assert match is not None
        remaining.append(int(match[1]))
    sender.join()
    assert remaining == list(range(count - 1, -1, -1))


def test_a_request_that_comes_byte_by_byte_is_the_same_request(client: Client, workspace: Workspace) -> None:
    client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in post(workspace, limit_body("slow")):
        client.send(bytes([byte]))
    assert client.answer()[0] == 200


def test_a_client_that_stops_sending_still_gets_its_answers(client: Client, workspace: Workspace) -> None:
    client.send(post(workspace, limit_body("one")) + post(workspace, limit_body("two")))
    client.connection.shutdown(socket.SHUT_WR)
    assert [client.answer()[0], client.answer()[0]] == [200, 200]
    assert client.is_closed()


@pytest.mark.parametrize(
    ("request_line", "header", "kept"),
    [
        (b"GET /v2/liveness HTTP/1.1", b"Host: x", True),
        (b"GET /v2/liveness HTTP/1.1", b"Host: x\r\nConnection: close", False),
        (b"GET /v2/liveness HTTP/1.0", b"X: y", False),
        (b"GET /v2/liveness HTTP/1.0", b"Connection: keep-alive", True),
    ],
)
def test_the_connection_is_kept_as_the_client_asks(
    client: Client, request_line: bytes, header: bytes, kept: bool
) -> None:
    client.send(request_line + b"\r\n" + header + b"\r\n\r\n")
    status, headers, _ = client.answer()
    assert status == 200
    if not kept:
        assert headers["connection"] == "close"
        assert client.is_closed()
    else:
        if request_line.endswith(b"1.0"):
            assert headers["connection"] == "keep-alive"
        client.send(LIVENESS)
        assert client.answer()[0] == 200


def test_what_follows_a_last_request_is_ignored(client: Client) -> None:
    client.send(LIVENESS.replace(b"Host: x", b"Host: x\r\nConnection: close") + LIVENESS + b"garbage")
    assert client.answer()[0] == 200
    assert client.is_closed()


# Paths and methods.


@pytest.mark.parametrize(
    "target",
    [b"/v2/liveness?x=1", b"http://example.com/v2/liveness", b"/v2/%6civeness", b"HTTP://h:1/v2/liveness?a"],
)
def test_a_target_is_found_in_all_its_forms(client: Client, target: bytes) -> None:
    client.send(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.answer()[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/ratelimit.limit/",
        "/v2/ratelimit.LIMIT",
        "/v1/ratelimit.limit",
        "/%00",
        "/../etc/passwd",
    ],
)
def test_an_unknown_path_is_404_in_the_envelope(server: TidegateServer, path: str) -> None:
    reply = server.request("POST", path, b"{}")
    assert reply.status == 404
    assert reply.error["title"] == "Not Found"
    assert reply.json["meta"]["requestId"].startswith("req_")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_a_wrong_method_is_405_with_the_right_ones(server: TidegateServer, method: str) -> None:
    reply = server.request(method, "/v2/ratelimit.limit")
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    assert reply.error["title"] == "Method Not Allowed"


def test_head_is_get_without_the_body(client: Client) -> None:
    for _ in range(2):
        client.send(b"HEAD /v2/liveness HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = client.answer(to_head=True)
        assert status == 200
        assert int(headers["content-length"]) > 0
    client.send(LIVENESS)
    assert b"message" in client.answer()[2]
    client.send(b"HEAD /v2/ratelimit.limit HTTP/1.1\r\nHost: x\r\n\r\n")
    status, headers, _ = client.answer(to_head=True)
    assert (status, headers["allow"]) == (405, "POST")
    client.send(LIVENESS)
    assert client.answer()[0] == 200


# Bodies.


def test_a_body_in_chunks_is_put_together(client: Client, workspace: Workspace) -> None:
    body = limit_body("chunked")
    chunks = b"".join(b"%x;ext=1\r\n%c\r\n" % (1, byte) for byte in body) + b"0\r\nTrailer: x\r\n\r\n"
    head = post(workspace, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    for _ in range(2):
        client.send(head + chunks)
        assert client.answer()[0] == 200
    client.send(LIVENESS)
    assert client.answer()[0] == 200


def test_expect_100_continue_is_answered_before_the_body(client: Client, workspace: Workspace) -> None:
    request = post(workspace, limit_body("expecting"), b"Expect: 100-continue")
    head, separator, body = request.partition(b"\r\n\r\n")
    for _ in range(2):
        client.send(head + separator)
        assert client.answer()[0] == 100
        client.send(body)
        assert client.answer()[0] == 200
    # Behind a request that has to wait, the 100 comes after its answer.
    client.send(post(workspace, limit_body("waits first")) + head + separator)
    assert [client.answer()[0], client.answer()[0]] == [200, 100]
    client.send(body)
    assert client.answer()[0] == 200


def test_another_expectation_is_417(client: Client) -> None:
    client.send(
        b"POST /v2/ratelimit.limit HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 1\r\n\r\n"
    )
    assert client.answer()[0] == 417
    assert client.is_closed()


def test_a_length_above_the_bound_is_refused_before_the_body_is_sent(
    client: Client, workspace: Workspace
) -> None:
    head = post(workspace, b"").replace(b"Content-Length: 0", b"Content-Length: 10485761")
    client.send(head.replace(b"Host: x", b"Host: x\r\nExpect: 100-continue"))
    status, headers, body = client.answer()
    assert status == 413
    assert headers["connection"] == "close"
    assert b"request_body_too_large" in body


def test_chunks_above_the_bound_are_refused_and_the_client_can_read_why(
    client: Client, workspace: Workspace
) -> None:
    client.send(post(workspace, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
    chunk = b"%x\r\n" % 1_048_576 + b" " * 1_048_576 + b"\r\n"
    for _ in range(12):
        client.send(chunk)
    assert client.answer()[0] == 413


@pytest.mark.parametrize("filler", [b"1;" + b"x" * 1_000 + b"\r\n \r\n", b"1\r\n \r\n" * 200])
def test_chunk_extensions_and_tiny_chunks_are_bounded_too(
    client: Client, workspace: Workspace, filler: bytes
) -> None:
    client.send(post(workspace, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
    block = filler * (1_048_576 // len(filler))
    for _ in range(12):
        client.send(block)
    assert client.answer()[0] == 413


# Hostile heads.


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 33_000 + b"\r\n\r\n", 431),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n"
            + b"".join(b"A%d: %s\r\n" % (n, b"b" * 1_000) for n in range(40))
            + b"\r\n",
            431,
        ),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 200_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"b" * 200_000, 431),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\x00\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
    ],
)
def test_bytes_that_are_not_a_request_are_refused_once_and_the_connection_ends(
    client: Client, data: bytes, status: int
) -> None:
    client.send(data)
    got, headers, body = client.answer()
    assert got == status
    assert headers["connection"] == "close"
    assert b'"requestId":"req_' in body
    assert client.is_closed()


def test_a_refusal_comes_after_the_answers_to_earlier_requests(client: Client, workspace: Workspace) -> None:
    client.send(post(workspace, limit_body("first and waits")) + LIVENESS + b"garbage\r\n\r\n")
    assert [client.answer()[0] for _ in range(3)] == [200, 200, 400]
    assert client.is_closed()


def test_a_request_to_upgrade_is_answered_as_if_it_had_not_asked(
    client: Client, workspace: Workspace
) -> None:
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"
    )
    asking = LIVENESS.replace(b"Host: x", b"Host: x\r\n" + upgrade)
    client.send(asking + LIVENESS + asking)
    assert [client.answer()[0] for _ in range(3)] == [200] * 3
    client.send(post(workspace, limit_body("upgrade"), upgrade) + LIVENESS)
    assert [client.answer()[0] for _ in range(2)] == [200] * 2
    whole = post(workspace, limit_body("upgrade"), upgrade)
    client.send(whole[:-7])
    client.send(whole[-7:])
    assert client.answer()[0] == 200
    client.send(asking)
    assert client.answer()[0] == 200
    client.send(whole.replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: "))
    assert client.answer()[0] == 400


def test_the_same_head_with_another_body_length_is_never_confused(
    client: Client, workspace: Workspace
) -> None:
    bodies = [limit_body("a" * length) for length in (1, 30, 1, 200, 30)]
    for body in bodies * 3:
        client.send(post(workspace, body))
        assert client.answer()[0] == 200
    # A body that looks like a request is a body.
    inner = post(workspace, limit_body("inner"))
    client.send(post(workspace, inner))
    assert client.answer()[0] == 400
    # A known head whose body comes later, and with the next request behind it.
    whole = post(workspace, bodies[0])
    cut = len(whole) - 5
    client.send(whole[:cut])
    client.send(whole[cut:] + whole + whole[:cut])
    assert [client.answer()[0], client.answer()[0]] == [200, 200]
    client.send(whole[cut:])
    assert client.answer()[0] == 200


def test_another_key_on_the_same_connection_is_another_caller(
    client: Client, server: TidegateServer, workspace: Workspace
) -> None:
    other = server.workspace()
    for each, remaining in ((workspace, 9), (other, 9), (workspace, 8), (other, 8)):
        client.send(post(each, limit_body("shared")))
        assert b'"remaining":%d' % remaining in client.answer()[2]
    client.send(post(workspace, limit_body("x")).replace(workspace.key.secret.encode(), b"tg_wrong"))
    assert client.answer()[0] == 401
    client.send(post(workspace, limit_body("shared")))
    assert b'"remaining":7' in client.answer()[2]


# Many clients.


def test_a_thousand_connections_are_served_at_once(server: TidegateServer, workspace: Workspace) -> None:
    with ExitStack() as stack:
        clients = [Client(stack.enter_context(server.socket())) for _ in range(1_000)]
        for number, each in enumerate(clients):
            each.send(post(workspace, limit_body(f"user_{number}")))
        assert {each.answer()[0] for each in clients} == {200}
        for each in clients:
            each.send(post(workspace, limit_body("shared", 1_000)))
        assert {each.answer()[0] for each in clients} == {200}
        assert server.metrics()["tidegate_http_connections"] >= 1_000
    assert workspace.limit(identifier="shared", limit=1_001, cost=0).data["remaining"] in {1, 1_001}


@pytest.mark.slow
def test_a_hundred_thousand_identifiers_are_served(server: TidegateServer, workspace: Workspace) -> None:
    with ExitStack() as stack:
        clients = [Client(stack.enter_context(server.socket())) for _ in range(20)]
        before = server.metrics()['tidegate_cells_created_total{by="traffic"}']
        for index, each in enumerate(clients):
            data = b"".join(post(workspace, limit_body(f"{index}_{number}")) for number in range(5_000))
            threading.Thread(target=each.send, args=(data,), daemon=True).start()
        for each in clients:
            for _ in range(5_000):
                assert each.answer()[0] == 200
        assert server.metrics()['tidegate_cells_created_total{by="traffic"}'] >= before + 100_000
