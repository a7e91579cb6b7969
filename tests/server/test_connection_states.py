"""The states of a connection: the table in the code, the one in its documentation, and what really happens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_outbox import NO_REQUEST, REQUEST, Transport, turn
from tidegate.server.api.problems import refuser
from tidegate.server.http1 import connection as module
from tidegate.server.http1.bounds import HttpConfig
from tidegate.server.http1.connection import TRANSITIONS, HttpConnection, State, TransitionError
from tidegate.server.http1.listener import HttpServer
from tidegate.server.messages import Answer, Head, Route, Router, Stream, Subscriber

IDLE, READING, WAITING, BLOCKED, STREAMING, LINGERING, CLOSING, CLOSED = State
PAGE = Path(__file__).parents[2] / "docs" / "architecture" / "request-path.md"
SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = REQUEST[:10]
LAST = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


def test_the_table_in_the_docstring_and_in_the_documentation_is_the_table_of_the_code() -> None:
    for text in (module.__doc__ or "", PAGE.read_text(encoding="utf-8")):
        rows = re.findall(r"^ *([A-Z]+) +->((?: [A-Z]+)*)$", text, re.MULTILINE)
        assert {State[name]: {State[each] for each in to.split()} for name, to in rows} == TRANSITIONS
        assert len(rows) == len(State)


class Scene:
    """A connection without a socket; `enter` keeps every transition that it makes."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.subscribers: list[Subscriber] = []
        refuse = refuser(lambda: "x")
        routes = [
            Route("GET", "/echo", "echo", lambda _head, _body: (200, b"", b"")),
            Route("GET", "/slow", "slow", self._slow),
            Route("GET", "/stream", "stream", lambda _head, _body: Stream(b"", self._subscribe)),
        ]
        self.server = HttpServer(
            Router(routes, refuse), HttpConfig(), refuse, lambda: "x", wall_time=lambda: 1.7e9
        )
        self.transport = Transport()
        self.made: list[tuple[State, State]] = []
        self.connection = HttpConnection(self.server)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]  # it has the methods that are used

    def _slow(self, _head: Head, _body: bytes) -> Coroutine[Any, Any, Answer]:
        async def work() -> Answer:
            await self.release.wait()
            return 200, b"", b"slow"

        return work()

    def _subscribe(self, subscriber: Subscriber) -> Callable[[], object]:
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    async def end(self) -> None:
        self.subscribers[0].end()

    async def play(self, *steps: str | bytes) -> State:
        for step in steps:
            if isinstance(step, bytes):
                self.connection.data_received(step)
            else:
                await getattr(self, step)()
        return self.connection.state

    async def answer(self) -> None:
        self.release.set()
        while self.connection.state is WAITING or self.connection._task is not None:
            await turn()
        self.release.clear()

    async def block(self) -> None:
        self.connection.pause_writing()

    async def unblock(self) -> None:
        self.connection.resume_writing()

    async def deadline(self) -> None:
        self.connection.on_deadline()

    async def drain(self) -> None:
        self.connection.drain()

    async def eof(self) -> None:
        self.connection.eof_received()

    async def lost(self) -> None:
        self.connection.connection_lost(None)


# For each transition of the table: what happens before it, and the event that causes it.
SCENES: dict[tuple[State, State], tuple[str | bytes, ...]] = {
    (IDLE, READING): (HALF,),
    (IDLE, WAITING): (SLOW, "answer", SLOW),
    (IDLE, BLOCKED): ("block",),
    (IDLE, CLOSING): ("deadline",),
    (IDLE, CLOSED): ("lost",),
    (READING, IDLE): (HALF, REQUEST[10:]),
    (READING, WAITING): (SLOW[:10], SLOW[10:]),
    (READING, BLOCKED): (HALF, "block"),
    (READING, LINGERING): (HALF, "deadline"),
    (READING, CLOSING): (LAST,),
    (READING, CLOSED): (HALF, "lost"),
    (WAITING, READING): (SLOW + HALF, "answer"),
    (WAITING, BLOCKED): (SLOW, "block"),
    (WAITING, LINGERING): (SLOW, "deadline"),
    (WAITING, CLOSING): (SLOW, "eof", "deadline"),
    (WAITING, CLOSED): (SLOW, "lost"),
    (BLOCKED, READING): (HALF, "block", "unblock"),
    (BLOCKED, WAITING): (SLOW, "block", "unblock"),
    (BLOCKED, CLOSED): ("block", "lost"),
    (READING, STREAMING): (STREAM,),
    (STREAMING, CLOSING): (STREAM, "end"),
    (STREAMING, CLOSED): (STREAM, "lost"),
    (LINGERING, CLOSED): (NO_REQUEST, "lost"),
    (CLOSING, CLOSED): (LAST, "lost"),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[State, State]]:
    transitions: list[tuple[State, State]] = []
    enter: Callable[[HttpConnection, State], None] = HttpConnection._enter

    def recorded(connection: HttpConnection, state: State) -> None:
        transitions.append((connection.state, state))
        enter(connection, state)

    monkeypatch.setattr(HttpConnection, "_enter", recorded)
    return transitions


@pytest.mark.parametrize("wanted", SCENES, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
async def test_every_transition_of_the_table_happens(
    wanted: tuple[State, State], made: list[tuple[State, State]]
) -> None:
    scene = Scene()
    await scene.play(*SCENES[wanted])
    assert wanted in made
    if scene.connection.state is not CLOSED:
        await scene.play("lost")
    await turn()
    assert scene.connection.state is CLOSED
    assert len(scene.server.wheel) == 0
    assert not scene.server.connections


class Greedy(Transport):
    """Its buffer is full after the first write."""

    connection: HttpConnection

    def write(self, data: bytes) -> None:
        super().write(data)
        self.connection.pause_writing()


@pytest.mark.parametrize(("before", "to"), [((), LINGERING), (("eof",), CLOSING)])
async def test_a_client_that_does_not_read_is_rejected_within_the_same_bytes(
    before: tuple[str, ...], to: State, made: list[tuple[State, State]]
) -> None:
    """Sixteen connections fill the outbox; the last one is blocked by its own answer, and sends no HTTP after it."""
    scene = Scene()
    scene.connection._transport = transport = Greedy()
    transport.connection = scene.connection
    await scene.play(*before)
    for _ in range(15):
        scene.server.outbox.add(scene.connection)
    await scene.play(REQUEST + NO_REQUEST)
    assert (BLOCKED, to) in made
    await scene.play("lost")


async def test_a_stream_behind_answers_that_are_not_read_begins_when_they_are() -> None:
    scene = Scene()
    scene.connection._transport = transport = Greedy()
    transport.connection = scene.connection
    for _ in range(15):
        scene.server.outbox.add(scene.connection)
    await scene.play(REQUEST + STREAM)
    assert scene.connection.state is BLOCKED and not scene.subscribers
    await scene.play("unblock")
    await turn()
    assert len(scene.subscribers) == 1
    await scene.play("lost")
    assert not scene.subscribers


async def test_a_client_that_stops_reading_its_stream_loses_it() -> None:
    scene = Scene()
    await scene.play(STREAM, "block", "deadline")
    assert "abort" in scene.transport.done
    await scene.play("lost")
    assert not scene.subscribers


async def test_a_stream_is_sent_part_by_part_and_nothing_is_queued_for_a_client_that_does_not_read() -> None:
    scene = Scene()
    await scene.play(STREAM)
    (subscriber,) = scene.subscribers
    assert subscriber.push(b"one")
    await turn()
    assert scene.transport.sent.endswith(b"\r\nconnection: close\r\n\r\none")
    await scene.play("block")
    assert not subscriber.push(b"two")
    await scene.play("unblock")
    assert subscriber.push(b"three")
    await turn()
    assert scene.transport.sent.endswith(b"onethree")
    assert scene.connection.expires == 0, "a client that reads stays connected"
    await scene.play("lost")
    assert not scene.subscribers and not subscriber.push(b"four")


async def test_what_the_client_of_a_stream_sends_is_dropped_up_to_a_bound() -> None:
    scene = Scene()
    await scene.play(STREAM + REQUEST + NO_REQUEST)
    await turn()
    assert scene.transport.sent.count(b"HTTP/1.1") == 1, "no request behind a stream is answered"
    for _ in range(module.LINGER_BYTES // 1_000_000 + 1):
        scene.connection.data_received(bytes(1_000_000))
    assert "abort" in scene.transport.done


def test_every_transition_of_the_table_is_tested() -> None:
    table = {(state, to) for state, targets in TRANSITIONS.items() for to in targets}
    assert table - SCENES.keys() == {(BLOCKED, LINGERING), (BLOCKED, CLOSING)}  # in the test above
    assert SCENES.keys() <= table


@pytest.mark.parametrize("state", State)
async def test_a_transition_that_is_not_in_the_table_is_refused(state: State) -> None:
    connection = Scene().connection
    for to in State:
        connection.state = state
        if to in TRANSITIONS[state]:
            connection._enter(to)
            assert connection.state is to
        else:
            with pytest.raises(TransitionError, match=f"from {state.name} to {to.name}"):
                connection._enter(to)
            assert connection.state is state


async def test_a_connection_that_is_drained_in_each_state_ends(made: list[tuple[State, State]]) -> None:
    for steps, ends in {
        (): CLOSING,
        (HALF,): READING,
        (SLOW,): WAITING,
        (STREAM,): CLOSING,
        (NO_REQUEST,): LINGERING,
    }.items():
        scene = Scene()
        assert await scene.play(*steps, "drain") is ends
        await scene.play("lost")
