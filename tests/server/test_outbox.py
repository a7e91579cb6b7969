from __future__ import annotations

import asyncio
import re
from typing import cast

import pytest

from tidegate.server.api.problems import refuser
from tidegate.server.catalog.keys import IdSource
from tidegate.server.http1.bounds import HttpConfig
from tidegate.server.http1.connection import HttpConnection
from tidegate.server.http1.listener import HttpServer
from tidegate.server.messages import Answer, Head, Route, Router
from tidegate.server.schedule import WAITING_MAX, Outbox

REQUEST = b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_REQUEST = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
NO_REQUEST = b"no request\r\n\r\n"


class Sender:
    def __init__(self) -> None:
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1


class Transport:
    """Records its calls."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sent = b""

    def write(self, data: bytes) -> None:
        assert not self.is_closing()
        self.done.append("write")
        self.sent += data

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")

    def write_eof(self) -> None:
        self.done.append("eof")

    def is_closing(self) -> bool:
        return "close" in self.done or "abort" in self.done

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def answers(self) -> int:
        return self.sent.count(b"HTTP/1.1 200 OK")


def echo(_head: Head, body: bytes) -> Answer:
    return 200, b"content-type: text/plain\r\n", body


def http_server() -> HttpServer:
    new_id = IdSource().take
    refuse = refuser(new_id)
    router = Router([Route("GET", "/echo", "echo", echo)], refuse)
    return HttpServer(router, HttpConfig(), refuse, new_id, wall_time=lambda: 1.7e9)


def connected(server: HttpServer) -> tuple[HttpConnection, Transport]:
    connection = HttpConnection(server)
    transport = Transport()
    connection.connection_made(cast("asyncio.Transport", transport))
    return connection, transport


async def turn() -> None:
    await asyncio.sleep(0)


async def test_what_was_added_is_flushed_once_in_the_same_turn() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    senders = [Sender() for _ in range(WAITING_MAX - 1)]
    for sender in senders:
        outbox.add(sender)
    assert [sender.flushed for sender in senders] == [0] * len(senders)
    await turn()
    assert [sender.flushed for sender in senders] == [1] * len(senders)
    await turn()
    assert [sender.flushed for sender in senders] == [1] * len(senders)


async def test_no_answer_waits_for_more_than_a_few_others() -> None:
    outbox = Outbox(asyncio.get_running_loop())
    senders = [Sender() for _ in range(3 * WAITING_MAX + 1)]
    for sender in senders:
        outbox.add(sender)
    assert [sender.flushed for sender in senders] == [1] * (3 * WAITING_MAX) + [0]
    await turn()
    assert [sender.flushed for sender in senders] == [1] * len(senders)


async def test_answers_of_one_turn_are_sent_in_one_write() -> None:
    connection, transport = connected(http_server())
    for data in (REQUEST, REQUEST, 3 * REQUEST):  # parsed, recognised by its head, pipelined
        connection.data_received(data)
    assert transport.done == []
    await turn()
    assert transport.done == ["write"]
    assert transport.answers == 5


@pytest.mark.parametrize("count", [1, WAITING_MAX - 1, WAITING_MAX, 5 * WAITING_MAX + 3])
async def test_every_connection_of_a_turn_gets_its_answer(count: int) -> None:
    server = http_server()
    connections = [connected(server) for _ in range(count)]
    for number in (1, 2, 3):
        for connection, _ in connections:
            connection.data_received(REQUEST)
        await turn()
        assert [transport.answers for _, transport in connections] == [number] * count


async def test_a_client_that_ends_in_the_same_turn_still_gets_its_answer() -> None:
    # With TLS the last data and the end come in one record.
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    await turn()
    connection.data_received(REQUEST)
    assert not connection.eof_received()
    assert transport.answers == 2


async def test_waiting_answers_are_sent_before_the_connection_is_closed() -> None:
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    connection.data_received(LAST_REQUEST)
    assert transport.done == ["write", "close"]
    assert transport.answers == 2


async def test_waiting_answers_are_sent_before_a_refusal() -> None:
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    connection.data_received(NO_REQUEST)
    assert transport.done == ["write"]
    assert re.findall(rb"HTTP/1.1 (\d+) .*\r\n", transport.sent) == [b"200", b"400"]


async def test_an_idle_connection_that_is_drained_has_its_answer() -> None:
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    connection.drain()
    assert transport.done == ["write", "close"]
    assert transport.answers == 1


async def test_nothing_is_written_to_a_connection_that_was_aborted() -> None:
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    connection.abort()
    await turn()
    assert transport.done == ["abort"]


async def test_nothing_is_written_to_a_connection_that_is_lost() -> None:
    connection, transport = connected(http_server())
    connection.data_received(REQUEST)
    connection.connection_lost(None)
    await turn()
    assert transport.done == []
