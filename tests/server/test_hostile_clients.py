"""Attacks that once worked, scaled down: how much memory a client can cost a node, and which clients it can exclude."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.http2.peer import bound_socket
from tests.server.test_outbox import Transport, turn
from tidegate.core.model import DURATION_MS_MAX
from tidegate.errors import DependencyTimeout, DependencyUnavailable
from tidegate.ports import NamespaceRow, OverrideRow, WorkspaceRow
from tidegate.server.api import pages, schema
from tidegate.server.api.problems import ACCEPT_ITEMS_MAX, SERVICE_UNAVAILABLE, accepts_problem_json, refuser
from tidegate.server.api.turns import TurnBudget
from tidegate.server.catalog import sync
from tidegate.server.catalog.overrides import OverrideMatcher
from tidegate.server.catalog.view import Callers, CatalogView, NamespaceView, WorkspaceView
from tidegate.server.http1.bounds import HttpConfig, Intake, Rejection
from tidegate.server.http1.connection import FEED_BYTES, LINGER_S, HttpConnection
from tidegate.server.http1.listener import HttpServer
from tidegate.server.http1.reader import RequestReader
from tidegate.server.http1.repeats import RequestHead
from tidegate.server.messages import Answer, Head, Route, Router, Stream
from tidegate.server.process.config_load import load
from tidegate.server.process.first_start import prepare
from tidegate.server.process.service import Service
from tidegate.telemetry.prometheus import render
from tidegate.testing.servers.redis import create_certificate

PAGE_BYTES = 15_000
TIMEOUT_S = 20.0


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


class Unread(Transport):
    """The client reads nothing until `read` is called; what was written and not read is `held`."""

    connection: HttpConnection

    def __init__(self, high: int) -> None:
        super().__init__()
        self.high = high
        self.held = 0
        self.held_most = 0
        self.is_paused = False
        self.is_reading = True

    def write(self, data: bytes) -> None:
        super().write(data)
        self.held += len(data)
        self.held_most = max(self.held_most, self.held)
        if self.held > self.high and not self.is_paused:
            self.is_paused = True
            self.connection.pause_writing()

    def read(self) -> None:
        self.held = 0
        if self.is_paused:
            self.is_paused = False
            self.connection.resume_writing()

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def can_write_eof(self) -> bool:
        return True


class Place:
    """A server that is not listening, and connections to it without sockets."""

    def __init__(self, config: HttpConfig | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.served = 0
        self.release = asyncio.Event()
        refuse = refuser(lambda: "x")
        routes = [
            Route("GET", "/page", "page", self._page),
            Route("GET", "/slow", "slow", self._slow),
            Route("GET", "/livez", "livez", lambda _head, _body: (200, b"", b"ok"), is_probe=True),
        ]
        self.server = HttpServer(
            Router(routes, refuse),
            config or HttpConfig(),
            refuse,
            lambda: "x",
            tls=tls,
            wall_time=lambda: 1.7e9,
        )

    def _page(self, _head: Head, _body: bytes) -> Answer:
        self.served += 1
        return 200, b"", b"%d:" % self.served + b"." * PAGE_BYTES

    def _slow(self, _head: Head, _body: bytes) -> Coroutine[Any, Any, Answer]:
        async def work() -> Answer:
            await self.release.wait()
            return 200, b"", b"slow"

        return work()

    def connect(self, *, is_spare: bool = False) -> tuple[HttpConnection, Unread]:
        connection = HttpConnection(self.server, is_spare=is_spare)
        transport = Unread(self.server.write_bytes_max)
        transport.connection = connection
        connection.connection_made(cast("asyncio.Transport", transport))
        return connection, transport


# Answers that are not read.


async def test_a_client_that_reads_nothing_makes_the_server_hold_one_answer_beyond_the_bound() -> None:
    place = Place()
    connection, transport = place.connect()
    connection.data_received(get("/page") * 800)
    for _ in range(100):
        await turn()
    bound = place.server.write_bytes_max
    assert transport.held_most <= bound + PAGE_BYTES + 200
    assert place.served <= bound // PAGE_BYTES + 1
    assert not transport.is_reading
    assert len(connection._queue) <= FEED_BYTES // len(get("/page")) + 1, "and few requests are parsed"


@given(st.integers(1, 60), st.lists(st.integers(1, 2_000), max_size=12), st.integers(0, 6))
def test_every_pipelined_request_is_answered_in_order_however_slowly_it_is_read(
    requests: int, cuts: list[int], reads_after: int
) -> None:
    async def main() -> None:
        place = Place()
        connection, transport = place.connect()
        data = get("/page") * requests
        pieces = [data]
        for cut in cuts:
            pieces[-1:] = [pieces[-1][:cut], pieces[-1][cut:]]
        for piece in filter(None, pieces):
            connection.data_received(piece)
            await turn()
        for number in range(20 * requests + 20):
            before = place.served
            await turn()
            assert (place.served - before) * PAGE_BYTES <= place.server.write_bytes_max + PAGE_BYTES
            if number % (reads_after + 1) == 0:
                transport.read()
        numbers = [int(found) for found in re.findall(rb"(\d+):\.", transport.sent)]
        assert numbers == list(range(1, requests + 1))

    asyncio.run(main())


# Connections that are held.


async def test_a_client_that_never_reads_the_last_bytes_loses_its_connection_after_the_linger() -> None:
    place = Place()
    connection, transport = place.connect()
    connection.data_received(get("/page"))
    await turn()
    connection.on_deadline()
    assert transport.done[-1] == "close"
    for _ in range(place.server.wheel.ticks(LINGER_S)):
        assert "abort" not in transport.done
        place.server.run_once()
    assert transport.done[-1] == "abort"


@contextlib.asynccontextmanager
async def listening(
    connections_max: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Place, int]]:
    place = Place(HttpConfig(connections_max=connections_max), tls)
    bound = bound_socket()
    place.server.start(bound)
    # Ticks come from the test only, however slow the machine is.
    assert place.server._tick_timer is not None
    place.server._tick_timer.cancel()
    try:
        yield place, bound.getsockname()[1]
    finally:
        place.release.set()
        for connection in list(place.server.connections):
            connection.abort()
        await place.server.drain(5.0)


class Caller:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None = None) -> Caller:
        async with asyncio.timeout(TIMEOUT_S):
            return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def status(self) -> int:
        """The status of the next answer, which is read completely."""
        async with asyncio.timeout(TIMEOUT_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await self._reader.readexactly(int(length[1]))
        return int(head.split(b" ")[1])

    async def closed(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                assert await self._reader.read() == b""

    async def ended(self) -> None:
        """Like `closed`, whatever the server sends before."""
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):
                await self._reader.read()

    def close(self) -> None:
        self._writer.close()


async def until_connected(place: Place, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while len(place.server.connections) != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [b"", get("/livez")[:-2]], ids=["silent", "half a request"])
async def test_at_the_bound_the_longest_idle_connection_makes_room(sent: bytes) -> None:
    async with listening(3) as (place, port):
        held = []
        for count in (1, 2, 3):
            held.append(await Caller.connect(port))
            held[-1].send(sent)
            await until_connected(place, count)
            place.server.run_once()
        for _ in range(10):  # what was sent is read
            await asyncio.sleep(0)
        prober = await Caller.connect(port)
        prober.send(get("/livez"))
        place.server.run_once()
        assert await prober.status() == 200
        await held[0].closed()
        assert place.server.connections_evicted == 1
        assert len(place.server.connections) == 3
        for each in (*held, prober):
            each.close()


async def test_when_every_connection_waits_probes_are_still_answered_and_others_get_a_503() -> None:
    async with listening(2) as (place, port):
        busy = [await Caller.connect(port) for _ in range(2)]
        for each in busy:
            each.send(get("/slow"))
        async with asyncio.timeout(TIMEOUT_S):
            while sum(each.idle_since() is None for each in place.server.connections) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        prober, other = await Caller.connect(port), await Caller.connect(port)
        prober.send(get("/livez"))
        other.send(get("/page"))
        for _ in range(3):
            place.server.run_once()
            await asyncio.sleep(0)
        assert await prober.status() == 200
        assert await other.status() == 503
        assert place.server.connections_evicted == 0
        place.release.set()
        assert [await each.status() for each in busy] == [200, 200]
        for each in (*busy, prober, other):
            each.close()


async def test_clients_that_never_finish_their_tls_handshake_do_not_exclude_others(tmp_path: Path) -> None:
    create_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    client = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    client.check_hostname = False
    async with listening(4, server) as (place, port):
        silent = []
        for count in range(1, 5):
            silent.append(await Caller.connect(port))
            async with asyncio.timeout(TIMEOUT_S):
                while len(place.server._handshakes) < count:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0)
        prober = await Caller.connect(port, client)
        prober.send(get("/livez"))
        assert await prober.status() == 200
        await silent[0].closed()
        assert place.server.connections_evicted >= 1
        for each in (*silent, prober):
            each.close()


async def test_a_client_that_does_not_speak_tls_is_disconnected(tmp_path: Path) -> None:
    create_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with listening(1, server) as (place, port):
        plain = await Caller.connect(port)
        plain.send(get("/livez"))
        await plain.ended()
        async with asyncio.timeout(TIMEOUT_S):
            while place.server._handshakes:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        assert not place.server.connections
        plain.close()


async def test_a_new_connection_is_not_closed_for_another_one_within_a_tick() -> None:
    async with listening(1) as (place, port):
        first = await Caller.connect(port)
        await until_connected(place, 1)
        second = await Caller.connect(port)
        second.send(get("/livez"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert place.server.connections_evicted == 0
        first.send(get("/livez"))
        assert await first.status() == 200
        place.server.run_once()
        place.server.run_once()
        assert await second.status() == 200
        await first.closed()
        for each in (first, second):
            each.close()


# Bodies.


class Sink:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.rejections: list[Rejection] = []

    def peer(self) -> str:
        return ""

    def on_begin(self) -> None: ...

    def on_continue(self) -> None: ...

    def on_request(self, head: RequestHead, body: bytes) -> None:
        self.bodies.append(body)

    def on_rejected(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)


def reading() -> tuple[RequestReader, Sink, Intake]:
    sink, intake = Sink(), Intake(HttpConfig())
    refuse = refuser(lambda: "x")
    router = Router([Route("POST", "/", "take", lambda _head, _body: (200, b"", b""))], refuse)
    return RequestReader(intake, router, sink), sink, intake


def test_a_body_in_small_chunks_takes_no_more_memory_than_its_bytes() -> None:
    reader, sink, intake = reading()
    reader.feed(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunks = b"2\r\nab\r\n" * 1_000
    tracemalloc.start()
    try:
        for _ in range(30):
            reader.feed(chunks)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert intake.buffered_bytes == 60_000
    assert held < 2 * 60_000
    reader.feed(b"0\r\n\r\n")
    assert sink.bodies == [b"ab" * 30_000]
    assert intake.buffered_bytes == 0


@pytest.mark.parametrize(
    "lines",
    [
        "HTTP/1.0\r\nTransfer-Encoding: chunked",
        "HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked",
        "HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        "HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked",
    ],
)
def test_a_transfer_encoding_that_others_read_differently_is_refused(lines: str) -> None:
    reader, sink, _ = reading()
    reader.feed(f"POST / {lines}\r\n\r\n0\r\n\r\n".encode())
    assert sink.bodies == []
    assert [rejection.status for rejection in sink.rejections] == [400]


# What refusing costs.


class Counted:
    """How often the slow parser is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.documents = 0
        self.numbers = 0
        loads, number = json.loads, schema._number

        def counted_loads(*args: Any, **options: Any) -> Any:
            self.documents += 1
            return loads(*args, **options)

        def counted_number(text: str) -> int | float:
            self.numbers += 1
            return number(text)

        monkeypatch.setattr("tidegate.server.api.schema.json.loads", counted_loads)
        monkeypatch.setattr(schema, "_number", counted_number)


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Service, str]]:
    """A service without sockets, and a key of it."""
    config = load(arguments={"data_dir": str(folder)}).config
    first = await prepare(config)
    assert first is not None
    service = Service(config)
    await service.start()
    try:
        yield service, first.key
    finally:
        await service.stop(5.0)


async def answer_of(service: Service, operation: str, body: bytes, key: str | None) -> tuple[int, Any]:
    head = Head(None if key is None else b"Bearer " + key.encode(), b"application/json")
    handler = service.router.find(b"POST", b"/v2/ratelimit." + operation.encode()).handler
    answer = handler(head, body)
    assert not isinstance(answer, Stream)
    status, _, data = answer if isinstance(answer, tuple) else await answer
    return status, json.JSONDecoder().decode(data.decode())


MANY_NUMBERS = b"[" + b"1e1," * 16_000 + b"1e1]"
MANY_OBJECTS = b"[" + b"{}," * 21_000 + b"{}]"
QUOTED = b'{"namespace":"a\\"b","identifier":"x","limit":1.0,"duration":60000}'


async def test_a_body_of_a_caller_who_is_not_known_is_never_parsed_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (service, _):
        counted = Counted(monkeypatch)
        for body in (MANY_NUMBERS, MANY_OBJECTS, QUOTED, QUOTED.replace(b"1.0", b"1"), b"{", b"[]"):
            for key in (None, "tg_unknown"):
                for operation in ("limit", "multiLimit", "setOverride"):
                    status, document = await answer_of(service, operation, body, key)
                    assert status in {400, 401}, document
                    assert status == 401 or document["error"]["errors"]
        assert counted.documents == 0
        status, document = await answer_of(service, "limit", QUOTED.replace(b"1.0", b"1"), "tg_unknown")
        assert status == 401, "what is valid as far as it was read is refused for its key"


async def test_the_second_parse_of_a_body_ends_after_a_few_hundred_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (service, key):
        counted = Counted(monkeypatch)
        for body in (MANY_NUMBERS, MANY_OBJECTS):
            assert (await answer_of(service, "multiLimit", body, key))[0] == 400
        assert counted.numbers <= schema.REPARSED_PARTS_MAX
        whole = QUOTED.replace(b"60000", b"6e4")
        batch = b"[" + b",".join([whole] * 100) + b"]"
        assert (await answer_of(service, "multiLimit", batch, key))[0] == 200, "a full batch is taken"


def test_the_types_that_a_client_accepts_are_read_up_to_a_bound() -> None:
    assert accepts_problem_json(b"text/html, application/problem+json")
    assert not accepts_problem_json(b"a/b," * ACCEPT_ITEMS_MAX + b"*/*")
    assert not accepts_problem_json(b"," * 32_000)
    assert accepts_problem_json(b"*/*" + b";a=b" * 8_000)


async def test_a_page_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0
    real = pages._error_lines

    def counted(*args: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return real(*args)

    monkeypatch.setattr(pages, "_error_lines", counted)
    async with serving(tmp_path) as (service, _):
        for path in (b"/docs/errors", b"/docs/errors/unkey/application/invalid_input"):
            rendered = 0
            handler = service.router.find(b"GET", path).handler
            assert handler(Head(), b"") == handler(Head(), b"")
            assert rendered == 1


async def test_scrapes_that_come_together_are_answered_with_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = 0

    def counted(*args: Any, **options: Any) -> bytes:
        nonlocal rendered
        rendered += 1
        return render(*args, **options)

    monkeypatch.setattr(pages, "render", counted)
    async with serving(tmp_path) as (service, _):
        handler = service.router.find(b"GET", b"/metrics").handler

        async def scrape() -> Answer:
            answer = handler(Head(), b"")
            assert not isinstance(answer, (tuple, Stream))
            return await answer

        await scrape()
        tasks = [asyncio.create_task(scrape()) for _ in range(500)]
        await turn()
        tasks[0].cancel()  # the others get the same page
        answers = await asyncio.gather(*tasks[1:])
        assert {status for status, _, _ in answers} == {200}
        assert rendered == 2
        await asyncio.gather(scrape(), scrape())
        assert rendered == 3


async def test_a_caller_is_not_cached_under_a_long_form_of_its_key(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, key):
        view = CatalogView()
        view.apply(service._sync.view.export())
        callers = Callers(view)
        for spaces in (0, 10, 30_000):
            credentials = b"Bearer " + b" " * spaces + key.encode()
            assert callers.find(credentials, key.encode()) is not None
            assert (callers.recall(credentials) is not None) == (spaces < 100)


async def test_wrong_keys_never_reach_the_database_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"namespace":"n","identifier":"x","limit":1,"duration":60000}'
    async with serving(tmp_path) as (service, _):
        waits, polls = 0, 0
        confirm, run_once = service._sync.confirm, service._sync.run_once

        async def counted_confirm() -> bool:
            nonlocal waits
            waits += 1
            return await confirm()

        async def counted_run_once() -> None:
            nonlocal polls
            polls += 1
            await run_once()

        monkeypatch.setattr(service._sync, "confirm", counted_confirm)
        monkeypatch.setattr(service._sync, "run_once", counted_run_once)
        keys = [f"tg_{number:032}" for number in range(50)]
        # A wrong key is looked up once more in the database, because it may be new; all requests share this query.
        answers = await asyncio.gather(*[answer_of(service, "limit", body, key) for key in keys * 3])
        assert [status for status, _ in answers] == [401] * 150
        assert waits == 150
        assert polls < 10
        for key in keys:
            assert (await answer_of(service, "limit", body, key))[0] == 401
        assert waits == 150, "cached as unknown: no waiting"


async def test_a_key_that_the_database_was_too_slow_to_confirm_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"namespace":"n","identifier":"x","limit":1,"duration":60000}'
    async with serving(tmp_path) as (service, key):
        async with asyncio.timeout(TIMEOUT_S):
            await service._sync.refresh()
        view = service._sync.view
        digest = next(row.digest for row in view._keys.values())
        held = view._by_digest.pop(digest)  # as if it had been created a moment ago
        view.epoch += 1

        async def slow() -> None:
            raise DependencyTimeout("no answer within 2.0 s")

        with monkeypatch.context() as patched:
            patched.setattr(service._sync, "run_once", slow)
            status, document = await answer_of(service, "limit", body, key)
        assert "does not answer" in document["error"]["detail"]
        assert status == SERVICE_UNAVAILABLE.status
        view._by_digest[digest] = held
        assert (await answer_of(service, "limit", body, key))[0] == 200, "and not cached as unknown"


async def test_a_reload_that_a_stop_interrupts_is_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (service, _):
        closed = asyncio.Event()

        async def slow() -> None:
            await closed.wait()
            raise DependencyUnavailable("closed")

        monkeypatch.setattr(service._sync, "reload", slow)
        reloading = asyncio.create_task(service.reload())
        await turn()
    closed.set()
    await reloading


# Overrides.


async def test_the_patterns_of_a_namespace_that_must_be_tried_one_by_one_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "SCANNED_MAX", 5)

    def body(pattern: str) -> bytes:
        fields = {"namespace": "n", "identifier": pattern, "limit": 1, "duration": 60_000}
        return json.dumps(fields).encode()

    async with serving(tmp_path) as (service, key):
        assert (await answer_of(service, "limit", body("first"), key))[0] == 200
        calls = [answer_of(service, "setOverride", body(f"*a*{number}*"), key) for number in range(20)]
        statuses = [status for status, _ in await asyncio.gather(*calls)]
        assert statuses.count(200) == 5, "also when they are set at the same time"
        status, document = await answer_of(service, "setOverride", body("*a*21*"), key)
        assert status == 403
        assert "bound of 5 patterns" in document["error"]["detail"]
        for pattern in ("*a*0*", "prefix*", "*suffix", "*", "literal"):
            assert (await answer_of(service, "setOverride", body(pattern), key))[0] == 200
        status, document = await answer_of(service, "setOverride", body("*a*b*c*d*e*"), key)
        assert status == 400
        assert "at most 4" in document["error"]["errors"][0]["message"]


class Lookups:
    """The costs of all look-ups among patterns in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        self._is_counting = False
        find = OverrideMatcher.find

        def counted(matcher: OverrideMatcher, identifier: str) -> Any:
            if not self._is_counting:
                self._is_counting = True
                self.turns.append(0)
                asyncio.get_running_loop().call_soon(self._next)
            self.turns[-1] += matcher.cost
            return find(matcher, identifier)

        monkeypatch.setattr(OverrideMatcher, "find", counted)

    def _next(self) -> None:
        self._is_counting = False


async def test_patterns_that_almost_match_cost_a_bounded_part_of_each_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(**fields: object) -> bytes:
        return json.dumps({"namespace": "n", "limit": 1_000, "duration": 60_000, **fields}).encode()

    async with serving(tmp_path) as (service, key):
        assert (await answer_of(service, "limit", body(identifier="first"), key))[0] == 200
        for number in range(40):
            pattern = f"*{'a' * 100}b{number}{'a' * 100}*"
            assert (await answer_of(service, "setOverride", body(identifier=pattern), key))[0] == 200
        cost = 40 * (16 + 204)
        monkeypatch.setattr(service._limits._admission._lookups, "_cost_max", 3 * cost)
        lookups = Lookups(monkeypatch)
        names = [f"{'a' * 500}{number}" for number in range(100)]
        items = [{"namespace": "n", "limit": 9, "duration": 60_000, "identifier": name} for name in names]
        reads = [json.dumps({"namespace": "n", "identifier": f"r{name}"}).encode() for name in names[:20]]
        answers = await asyncio.gather(
            answer_of(service, "multiLimit", json.dumps(items).encode(), key),
            *[answer_of(service, "limit", body(identifier=f"l{name}"), key) for name in names],
            *[answer_of(service, "getOverride", read, key) for read in reads],
        )
        assert {status for status, _ in answers} == {200, 404}
        assert sum(lookups.turns) >= 220 * 0.99 * cost
        # A turn may run what the previous turn has allowed, and its own.
        assert max(lookups.turns) <= 2 * 3 * 1.01 * cost


async def test_a_workspace_that_waits_for_its_turn_makes_no_other_wait() -> None:
    budget = TurnBudget(10)
    assert budget.take("hostile", 11)
    order: list[str] = []

    async def waiting(name: str, cost: int) -> None:
        await budget.wait("hostile", cost)
        order.append(name)

    tasks = [
        asyncio.create_task(waiting(name, cost)) for name, cost in (("a", 4), ("b", 8), ("c", 1), ("d", 1))
    ]
    await turn()
    assert not budget.take("hostile", 1), "no request overtakes those that wait"
    assert budget.take("honest", 1)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert order == ["a", "b", "d"]
    for _ in range(3):
        await turn()
    assert budget.take("hostile", 1)
    for _ in range(3):
        await turn()
    assert not budget._left and not budget._waiting and not budget._is_scheduled, (
        "an idle budget costs nothing"
    )


async def test_the_duration_of_an_override_ends_where_its_counts_would_not_fit_into_the_database(
    tmp_path: Path,
) -> None:
    def body(duration_ms: int) -> bytes:
        fields = {"namespace": "n", "identifier": "x", "limit": 1, "duration": duration_ms}
        return json.dumps(fields).encode()

    async with serving(tmp_path) as (service, key):
        assert (await answer_of(service, "limit", body(60_000), key))[0] == 200
        assert (await answer_of(service, "setOverride", body(DURATION_MS_MAX), key))[0] == 200
        assert (await answer_of(service, "limit", body(60_000), key))[1]["data"]["success"] is True
        for duration_ms in (DURATION_MS_MAX + 1, 2**63 - 1):
            status, document = await answer_of(service, "setOverride", body(duration_ms), key)
            assert status == 400
            assert document["error"]["errors"][0]["location"] == "/properties/duration/maximum"


def test_a_duration_from_an_older_database_is_shortened_to_the_bound() -> None:
    namespace = NamespaceView(NamespaceRow("rlns_1", "ws_1", "n", 0, None))
    namespace.put(OverrideRow("rlor_1", "rlns_1", "x", 1, 2**63 - 1, None))
    found = namespace.matcher.find("x")
    assert found is not None
    assert found.duration_ms == DURATION_MS_MAX
    workspace = WorkspaceView(WorkspaceRow("ws_1", "ws_1", True, 5, 2**63 - 1))
    assert workspace.quota is not None
    assert workspace.quota.duration_ms == DURATION_MS_MAX
