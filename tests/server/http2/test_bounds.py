"""What a hostile client can cost: every test attacks one bound."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.http2.peer import ECHO, Served, message, serving, until
from tidegate.server.http2 import frames as h2
from tidegate.server.http2.budget import BUDGET_MAX, Budget
from tidegate.server.http2.grpc import Method
from tidegate.server.http2.listener import Http2Options

CALM = h2.ErrorCode.ENHANCE_YOUR_CALM


def flood_frame(kind: str, peer_block: bytes, stream_id: int) -> bytes:
    head = h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer_block)
    return {
        "ping": h2.frame(h2.PING, 0, 0, b"12345678"),
        "ping ack": h2.frame(h2.PING, h2.ACK, 0, b"12345678"),
        "settings": h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 65_535}),
        "priority": h2.frame(h2.PRIORITY, 0, stream_id, b"\0\0\0\0\x10"),
        "window update": h2.window_frame(0, 1),
        "unknown": h2.frame(0xEE, 0, 0, b""),
        "rapid reset": head + h2.reset_frame(stream_id, h2.ErrorCode.CANCEL),
        "data on closed streams": head
        + h2.reset_frame(stream_id, h2.ErrorCode.CANCEL)
        + h2.frame(h2.DATA, 0, stream_id, b"late"),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "ping",
        "ping ack",
        "settings",
        "priority",
        "window update",
        "unknown",
        "rapid reset",
        "data on closed streams",
    ],
)
async def test_a_flood_of_frames_that_are_not_calls_ends_the_connection(kind: str) -> None:
    async with serving() as served:
        peer = await served.peer()
        for _ in range(BUDGET_MAX + 1):
            peer.send(flood_frame(kind, peer.block(), peer.next_id()))
        assert await peer.goaway() == CALM
        assert served.server.statistics().connections_failed == 1


async def test_a_flood_of_empty_data_ends_the_connection() -> None:
    async with serving() as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()))
        peer.send(h2.frame(h2.DATA, 0, stream_id) * (BUDGET_MAX + 1))
        assert await peer.goaway() == CALM


async def test_control_frames_in_proportion_to_calls_are_fine() -> None:
    async with serving() as served:
        peer = await served.peer()
        for _ in range(BUDGET_MAX):
            stream_id = peer.next_id()
            peer.send(
                peer.call_frames(stream_id, b"x"), h2.window_frame(0, 6), h2.frame(h2.PING, 0, 0, bytes(8))
            )
            await peer.reply(stream_id)


def test_a_budget_grows_with_time_and_with_calls_up_to_its_bound() -> None:
    budget = Budget(1)
    assert all(budget.spend(1, 0) for _ in range(BUDGET_MAX))
    assert not budget.spend(1, 0)
    assert budget.spend(2, 0)
    assert sum(budget.spend(1_000_000, 1_000_000) for _ in range(3 * BUDGET_MAX)) <= BUDGET_MAX + 30


async def test_a_header_block_without_end_ends_the_connection() -> None:
    async with serving() as served:
        for part, count in ((b"", 40), (b"x" * 8_000, 3)):
            peer = await served.peer()
            peer.send(h2.frame(h2.HEADERS, 0, 1, b""))
            peer.send(h2.frame(h2.CONTINUATION, 0, 1, part) * count)
            assert await peer.goaway() == CALM


async def test_a_header_list_that_is_large_only_when_decoded_ends_the_connection() -> None:
    async with serving() as served:
        peer = await served.peer()
        bomb = peer.encoder.encode([("x-large", "y" * 3_000)]) + b"\xbe" * 1_000
        peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, bomb))
        assert await peer.goaway() == CALM


async def test_calls_above_the_number_of_streams_are_refused_and_may_be_tried_again() -> None:
    release = asyncio.Event()

    async def slow(data: bytes) -> bytes:
        await release.wait()
        return data

    async with serving([Method("/test.Test/Slow", slow)], Http2Options(streams_max=4)) as served:
        peer = await served.peer()
        ids = [peer.next_id() for _ in range(6)]
        peer.send(*[peer.call_frames(stream_id, b"s", path="/test.Test/Slow") for stream_id in ids])
        for refused in ids[4:]:
            frame = await peer.frame_of(h2.RST_STREAM)
            assert (frame.stream_id, frame.error_code) == (refused, h2.ErrorCode.REFUSED_STREAM)
        release.set()
        for stream_id in ids[:4]:
            assert (await peer.reply(stream_id)).body == message(b"s")
        await peer.echo(b"again")


async def test_calls_whose_answers_have_not_left_count_as_open() -> None:
    async with serving(options=Http2Options(streams_max=4)) as served:
        peer = await served.peer()
        await peer.echo(b"")
        ids = [peer.next_id() for _ in range(6)]
        connection = next(iter(served.server.connections))
        connection.data_received(b"".join([peer.call_frames(stream_id, b"s") for stream_id in ids]))
        for stream_id in ids[:4]:
            assert (await peer.reply(stream_id)).body == message(b"s")
        frame = await peer.frame_of(h2.RST_STREAM)
        assert frame.error_code == h2.ErrorCode.REFUSED_STREAM


async def test_at_the_bound_the_connection_that_is_idle_the_longest_makes_room() -> None:
    async with serving(options=Http2Options(connections_max=2)) as served:
        first, second = await served.peer(), await served.peer()
        await second.echo(b"everything before it has arrived")
        served.pass_time(1.0)
        await first.echo(b"1")
        third = await served.raw()
        third.send(h2.PREFACE, h2.settings_frame({}))
        served.pass_time(0.0)
        await second.closed()
        await third.frame_of(h2.SETTINGS)
        await first.echo(b"2")
        assert served.server.statistics().connections_evicted == 1


async def test_a_connection_with_a_call_in_progress_is_not_closed_for_another_one() -> None:
    release = asyncio.Event()

    async def slow(data: bytes) -> bytes:
        await release.wait()
        return data

    async with serving([Method("/test.Test/Slow", slow)], Http2Options(connections_max=1)) as served:
        busy = await served.peer()
        await busy.echo(b"")
        stream_id = busy.next_id()
        busy.send(busy.call_frames(stream_id, b"s", path="/test.Test/Slow"))
        await until(lambda: any(each._streams for each in served.server.connections))
        waiting = await served.raw()
        waiting.send(h2.PREFACE, h2.settings_frame({}))
        served.pass_time(1.0)
        assert served.server.statistics().connections == 1
        release.set()
        assert (await busy.reply(stream_id)).body == message(b"s")
        served.pass_time(1.0)
        await waiting.frame_of(h2.SETTINGS)


async def test_a_peer_cannot_make_the_server_hold_more_than_the_window() -> None:
    async with serving(options=Http2Options(window_bytes=65_535)) as served:
        peer = await served.peer()
        ids = [peer.next_id() for _ in range(3)]
        for stream_id in ids:
            peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()))
            peer.send(h2.frame(h2.DATA, 0, stream_id, b"\0\0\0\xff\xff" + b"h" * 16_000))
        peer.send(h2.frame(h2.PING, 0, 0, b"12345678"))
        # Nothing is given back while the bytes are held.
        assert (await peer.frame()).kind == h2.PING
        peer.send(h2.frame(h2.DATA, 0, ids[0], b"h" * 16_000), h2.frame(h2.DATA, 0, ids[1], b"h" * 16_000))
        assert await peer.goaway() == h2.ErrorCode.FLOW_CONTROL_ERROR


async def test_bytes_of_a_stream_that_is_reset_are_given_back() -> None:
    async with serving(options=Http2Options(window_bytes=65_535)) as served:
        peer = await served.peer()
        for _ in range(3):
            stream_id = peer.next_id()
            peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()))
            peer.send(h2.frame(h2.DATA, 0, stream_id, b"\0\0\0\xff\xff" + b"h" * 16_000))
        peer.send(*[h2.reset_frame(stream_id, h2.ErrorCode.CANCEL) for stream_id in (1, 3, 5)])
        frame = await peer.frame_of(h2.WINDOW_UPDATE)
        assert int.from_bytes(frame.payload, "big") == 3 * 16_005


async def check_deadline(served: Served, data: bytes, seconds: float) -> None:
    peer = await served.raw()
    peer.send(data)
    assert (await peer.frame()).kind == h2.SETTINGS
    served.pass_time(seconds)
    await peer.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        h2.PREFACE[:10],
        h2.PREFACE,
        h2.PREFACE + h2.settings_frame({})[:5],
    ],
)
async def test_a_connection_whose_preface_does_not_arrive_is_closed(data: bytes) -> None:
    async with serving(options=Http2Options(header_timeout_s=3)) as served:
        await check_deadline(served, data, 4)


@pytest.mark.parametrize(
    "rest", [b"\0\0\x10", h2.frame(h2.HEADERS, 0, 1, b""), h2.frame(h2.HEADERS, 4, 1, b"x" * 9)[:-1]]
)
async def test_a_frame_or_header_block_that_does_not_end_is_not_waited_for(rest: bytes) -> None:
    async with serving(options=Http2Options(header_timeout_s=3)) as served:
        peer = await served.peer()
        await peer.echo(b"fine")
        peer.send(rest, b"")
        connection = next(iter(served.server.connections))
        await until(lambda: bool(connection._partial_since))
        served.pass_time(4)
        assert await peer.goaway() == CALM


async def test_a_request_that_does_not_end_is_reset_and_the_connection_goes_on() -> None:
    async with serving(options=Http2Options(request_timeout_s=5)) as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()))
        await peer.echo(b"fine")
        served.pass_time(6)
        frame = await peer.frame_of(h2.RST_STREAM)
        assert (frame.stream_id, frame.error_code) == (stream_id, h2.ErrorCode.CANCEL)
        await peer.echo(b"still fine")


async def test_an_answer_whose_window_is_never_opened_is_dropped() -> None:
    async with serving(options=Http2Options(request_timeout_s=5)) as served:
        peer = await served.peer({h2.Setting.INITIAL_WINDOW_SIZE: 0})
        stream_id = peer.next_id()
        peer.send(peer.call_frames(stream_id, b"stalled"))
        await peer.frame_of(h2.HEADERS)
        served.pass_time(6)
        frame = await peer.frame_of(h2.RST_STREAM)
        assert (frame.stream_id, frame.error_code) == (stream_id, h2.ErrorCode.CANCEL)
        connection = next(iter(served.server.connections))
        assert not connection._streams
        assert not connection._sender.blocked


async def test_a_client_that_reads_nothing_is_not_served_for_ever() -> None:
    options = Http2Options(request_timeout_s=5, write_bytes_max=10_000)
    async with serving(options=options) as served:
        peer = await served.peer({h2.Setting.INITIAL_WINDOW_SIZE: 1 << 30})
        peer.send(h2.window_frame(0, 1 << 30))
        connection = next(iter(served.server.connections))
        peer._reader._transport.pause_reading()  # type: ignore[attr-defined]
        while not connection._is_write_paused:
            peer.send(peer.call_frames(peer.next_id(), b"r" * 16_000))
            await asyncio.sleep(0)
        served.pass_time(6)
        await until(lambda: not served.server.connections)


async def test_an_idle_connection_is_closed_without_an_error() -> None:
    async with serving(options=Http2Options(idle_timeout_s=60)) as served:
        peer = await served.peer()
        await peer.echo(b"x")
        served.pass_time(61)
        assert await peer.goaway() == h2.ErrorCode.NO_ERROR


async def test_text_that_is_not_http2_ends_the_connection() -> None:
    async with serving() as served:
        peer = await served.raw()
        peer.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await peer.goaway() == h2.ErrorCode.PROTOCOL_ERROR


async def test_more_than_one_message_size_of_a_request_that_is_not_a_call_is_not_read() -> None:
    async with serving() as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block(path="/nothing")))
        for _ in range(4):
            peer.send(h2.frame(h2.DATA, 0, stream_id, b"n" * 16_384))
        peer.send(h2.frame(h2.DATA, 0, stream_id, b"n"))
        assert (await peer.reply(stream_id)).status == "12"
        frame = await peer.frame_of(h2.RST_STREAM)
        assert frame.error_code == h2.ErrorCode.NO_ERROR
        assert ECHO in served.server.statistics().calls
