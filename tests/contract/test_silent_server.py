"""A server that takes connections and never answers: a caller that gives up leaves nothing behind.

Otherwise the server would have to keep the socket, and Python would warn when it collects it. No program accepts from
this listener: connections wait in the kernel's backlog and are never read.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidegate.adapters.lane import Lane
from tidegate.adapters.mysql.connection import MySQLConnection
from tidegate.adapters.postgres.connection import PostgresConnection
from tidegate.errors import DependencyTimeout

# Twice the number of turns of the event loop until a local connection is made and its greeting is awaited.
TURNS = 30

Connect = Callable[[], Lane[Any, Any]]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture(params=["mysql", "mysql+tls", "postgres"])
def connect(request: pytest.FixtureRequest, listener: socket.socket) -> Connect:
    address = f"user:password@127.0.0.1:{listener.getsockname()[1]}/database"
    if request.param == "postgres":
        return lambda: PostgresConnection(f"postgres://{address}")
    tls = "?ssl=require" if request.param == "mysql+tls" else ""
    return lambda: MySQLConnection(f"mysql://{address}{tls}")


@pytest.fixture(autouse=True)
def complaints() -> Iterator[list[str]]:
    """The warnings of Python about sockets and transports that were never closed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        found: list[str] = []
        yield found
        gc.collect()
        found += [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)]
    assert found == []


def hung_up(listener: socket.socket) -> int:
    """How many connections were made; each of them has been closed by its client."""
    listener.setblocking(False)
    count = 0
    while True:
        try:
            taken, _ = listener.accept()
        except BlockingIOError:
            return count
        count += 1
        with taken:
            taken.settimeout(10)
            try:
                while taken.recv(4_096):
                    pass
            except ConnectionResetError:
                pass  # a reset counts as closed too


def test_a_connection_that_was_not_answered_in_time_is_closed(
    connect: Connect, listener: socket.socket
) -> None:
    async def work() -> None:
        lane = connect()
        for _ in range(3):
            with pytest.raises(DependencyTimeout):
                await lane.fetch("SELECT 1", timeout_s=0.05)
        await lane.close()

    asyncio.run(work())
    assert hung_up(listener) == 3


def test_a_caller_cancelled_at_any_moment_leaves_no_connection(
    connect: Connect, listener: socket.socket
) -> None:
    async def work() -> None:
        lane = connect()
        for turns in range(TURNS):
            task = asyncio.ensure_future(lane.fetch("SELECT 1", timeout_s=10))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await lane.close()

    asyncio.run(work())
    assert hung_up(listener) > TURNS // 2, "most of them had connected before they were cancelled"


def test_an_event_loop_that_ends_at_any_moment_leaves_no_connection(
    connect: Connect, listener: socket.socket
) -> None:
    async def work(lane: Lane[Any, Any], turns: int) -> None:
        task = asyncio.ensure_future(lane.fetch("SELECT 1", timeout_s=10))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not task.done()

    for turns in range(TURNS):
        asyncio.run(work(connect(), turns))
    assert hung_up(listener) > TURNS // 2
