from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.http2.peer import ECHO, HEADERS, message, serving
from tidegate.server.http2 import frames as h2
from tidegate.server.http2.grpc import GrpcError, Method, Status
from tidegate.server.http2.listener import Http2Options


async def test_a_call_is_answered_again_and_again() -> None:
    async with serving() as served:
        peer = await served.peer()
        for number in range(50):
            await peer.echo(b"x" * number)
        assert served.server.statistics().calls[ECHO] == {0: 50}


async def test_many_calls_in_one_read_are_answered_in_order() -> None:
    async with serving() as served:
        peer = await served.peer()
        await peer.echo(b"first")
        ids = [peer.next_id() for _ in range(100)]
        peer.send(*[peer.call_frames(stream_id, str(stream_id).encode()) for stream_id in ids])
        for stream_id in ids:
            assert (await peer.reply(stream_id)).body == message(str(stream_id).encode())


async def test_calls_whose_headers_come_before_all_messages_are_answered() -> None:
    async with serving() as served:
        peer = await served.peer()
        await peer.echo(b"first")
        ids = [peer.next_id() for _ in range(32)]
        peer.send(*[h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()) for stream_id in ids])
        peer.send(*[h2.frame(h2.DATA, h2.END_STREAM, i, message(str(i).encode())) for i in reversed(ids)])
        for stream_id in reversed(ids):
            assert (await peer.reply(stream_id)).body == message(str(stream_id).encode())


@given(
    cuts=st.lists(st.integers(1, 400), max_size=12),
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=4),
)
def test_it_does_not_matter_where_reads_cut_the_bytes(cuts: list[int], sizes: list[int]) -> None:
    async def play() -> None:
        async with serving() as served:
            peer = await served.peer()
            ids = [peer.next_id() for _ in sizes]
            data = b"".join(
                peer.call_frames(stream_id, b"y" * size) for stream_id, size in zip(ids, sizes, strict=True)
            )
            connection = next(iter(served.server.connections))
            # Straight into the protocol: the kernel would join what is sent in pieces.
            start = 0
            for cut in sorted(cuts):
                connection.data_received(data[start:cut])
                start = max(start, min(cut, len(data)))
            connection.data_received(data[start:])
            for stream_id, size in zip(ids, sizes, strict=True):
                assert (await peer.reply(stream_id)).body == message(b"y" * size)

    asyncio.run(play())


async def test_a_message_may_come_in_many_padded_frames_between_other_frames() -> None:
    async with serving() as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        block = peer.block()
        priority = b"\0\0\0\0\x10"
        padded = b"\x07" + priority + block[:10] + b"\0" * 7
        peer.send(h2.frame(h2.HEADERS, h2.PADDED | h2.PRIORITY_FLAG, stream_id, padded))
        peer.send(h2.frame(h2.CONTINUATION, 0, stream_id, block[10:11]))
        peer.send(h2.frame(h2.CONTINUATION, h2.END_HEADERS, stream_id, block[11:]))
        data = b"abc" * 5000
        body = message(data)
        for start in range(0, len(body), 1000):
            part = body[start : start + 1000]
            flags = h2.PADDED | (h2.END_STREAM if start + 1000 >= len(body) else 0)
            peer.send(h2.frame(h2.DATA, flags, stream_id, b"\x04" + part + b"\0" * 4))
            peer.send(h2.frame(h2.PING, 0, 0, b"12345678"))
            peer.send(h2.frame(h2.PRIORITY, 0, stream_id, priority))
            peer.send(h2.frame(0xEE, 0, stream_id, b"of a later protocol"))
        assert (await peer.reply(stream_id)).body == body


async def test_request_trailers_end_a_call() -> None:
    async with serving() as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        peer.send(
            h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()),
            h2.frame(h2.DATA, 0, stream_id, message(b"data")),
            h2.frame(
                h2.HEADERS,
                h2.END_HEADERS | h2.END_STREAM,
                stream_id,
                peer.encoder.encode([("x-checksum", "1")]),
            ),
        )
        assert (await peer.reply(stream_id)).body == message(b"data")


@pytest.mark.parametrize("length", [0, 1, 10, 16_379, 16_380, 40_000, 65_536])
async def test_an_answer_of_any_size_comes_back_whole_through_small_windows(length: int) -> None:
    async with serving() as served:
        peer = await served.peer({h2.Setting.INITIAL_WINDOW_SIZE: 7})
        await peer.echo(b"")
        stream_id = peer.next_id()
        body = message(b"z" * length)
        head = h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block())
        parts = [body[i : i + 16_384] for i in range(0, len(body), 16_384)]
        flags = [0] * (len(parts) - 1) + [h2.END_STREAM]
        peer.send(
            head, *[h2.frame(h2.DATA, f, stream_id, part) for f, part in zip(flags, parts, strict=True)]
        )
        received = b""
        assert (await peer.frame_of(h2.HEADERS)).stream_id == stream_id
        while received != body:
            frame = await peer.frame_of(h2.DATA)
            assert len(frame.payload) <= 16_384
            received += frame.payload
            if received != body and frame.stream_id:
                peer.send(h2.window_frame(stream_id, 30_000), h2.window_frame(0, len(frame.payload)))
        trailers = await peer.frame_of(h2.HEADERS)
        assert trailers.flags & h2.END_STREAM


async def test_a_smaller_initial_window_holds_answers_back_and_a_larger_one_lets_them_go() -> None:
    async with serving() as served:
        peer = await served.peer()
        await peer.echo(b"")
        peer.send(h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 0}))
        await peer.frame_of(h2.SETTINGS)
        stream_id = peer.next_id()
        peer.send(peer.call_frames(stream_id, b"held"))
        assert (await peer.frame_of(h2.HEADERS, h2.DATA)).kind == h2.HEADERS
        peer.send(h2.frame(h2.PING, 0, 0, b"12345678"))
        assert (await peer.frame()).kind == h2.PING
        peer.send(h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 4}))
        assert (await peer.frame_of(h2.DATA)).payload == message(b"held")[:4]
        peer.send(h2.window_frame(stream_id, 100))
        assert (await peer.frame_of(h2.DATA)).payload == message(b"held")[4:]
        assert (await peer.frame_of(h2.HEADERS)).flags & h2.END_STREAM


async def test_the_connections_window_is_refilled_for_ever() -> None:
    options = Http2Options(window_bytes=65_535)
    async with serving(options=options) as served:
        peer = await served.peer()
        window = 65_535
        for _ in range(40):
            stream_id = peer.next_id()
            peer.send(peer.call_frames(stream_id, b"w" * 10_000))
            window -= 10_005
            body = b""
            while True:
                frame = await peer.frame()
                assert frame.kind in {h2.HEADERS, h2.DATA, h2.WINDOW_UPDATE}
                if frame.kind == h2.WINDOW_UPDATE:
                    window += int.from_bytes(frame.payload, "big")
                    assert window <= 65_535
                body += frame.payload if frame.kind == h2.DATA else b""
                if frame.flags & h2.END_STREAM:
                    break
            assert body == message(b"w" * 10_000)
            peer.send(h2.window_frame(0, len(body)))
        assert window > 65_535 // 2 - 10_005


async def test_an_asynchronous_method_answers_when_it_is_done_and_others_do_not_wait() -> None:
    release = asyncio.Event()

    async def slow(data: bytes) -> bytes:
        await release.wait()
        return data

    async with serving([Method("/test.Test/Slow", slow)]) as served:
        peer = await served.peer()
        slow_id = peer.next_id()
        peer.send(peer.call_frames(slow_id, b"late", path="/test.Test/Slow"))
        await peer.echo(b"early")
        release.set()
        assert (await peer.reply(slow_id)).body == message(b"late")


async def test_a_call_that_its_client_resets_is_cancelled() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(data: bytes) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return data

    async with serving([Method("/test.Test/Endless", endless)]) as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        peer.send(peer.call_frames(stream_id, b"", path="/test.Test/Endless"))
        await started.wait()
        peer.send(h2.reset_frame(stream_id, h2.ErrorCode.CANCEL))
        await cancelled.wait()
        await peer.echo(b"still here")


async def test_a_deadline_of_the_client_ends_the_call() -> None:
    async def endless(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    async with serving([Method("/test.Test/Endless", endless)]) as served:
        peer = await served.peer()
        reply = await peer.call(b"", ("grpc-timeout", "1m"), path="/test.Test/Endless")
        assert reply.status == str(int(Status.DEADLINE_EXCEEDED))


async def test_faults_of_a_call_have_a_grpc_status_and_the_connection_goes_on() -> None:
    def refuse(_data: bytes) -> bytes:
        raise GrpcError(Status.INVALID_ARGUMENT, "domain: got '', expected a name of 100 % ü")

    def break_down(_data: bytes) -> bytes:
        raise ValueError("a secret")

    methods = [Method("/test.Test/Refuse", refuse), Method("/test.Test/Break", break_down)]
    async with serving(methods) as served:
        peer = await served.peer()
        for _ in range(3):
            reply = await peer.call(b"", path="/test.Test/Refuse")
            assert reply.status == "3"
            assert reply.headers["grpc-message"] == "domain: got '', expected a name of 100 %25 %C3%BC"
            reply = await peer.call(b"", path="/test.Test/Break")
            assert reply.status == "13"
            assert "secret" not in reply.headers["grpc-message"]
            assert (await peer.call(b"", path="/test.Test/Unknown")).status == "12"
            assert (await peer.call(b"", ("grpc-timeout", "soon"))).status == "13"
        await peer.echo(b"fine")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "13"),
        (b"\0\0\0", "13"),
        (message(b"abc") + b"d", "13"),
        (message(b"abc")[:-1], "13"),
        (message(b"abc", compressed=1), "12"),
        (b"\0\xff\xff\xff\xff", "8"),
        (message(b"a" * 65_537), "8"),
    ],
)
async def test_a_body_that_is_not_one_message_is_refused(body: bytes, status: str) -> None:
    async with serving() as served:
        peer = await served.peer()
        for _ in range(2):
            stream_id = peer.next_id()
            parts = [body[i : i + 16_384] for i in range(0, len(body), 16_384)] or [b""]
            flags = [0] * (len(parts) - 1) + [h2.END_STREAM]
            peer.send(
                h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, peer.block()),
                *[h2.frame(h2.DATA, f, stream_id, part) for f, part in zip(flags, parts, strict=True)],
            )
            assert (await peer.reply(stream_id)).status == status
        await peer.echo(b"fine")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({":method": "GET"}, "405"),
        ({"content-type": "application/json"}, "415"),
        ({":method": "CONNECT"}, "501"),
    ],
)
async def test_a_request_that_is_not_a_call_gets_an_http_status(change: dict[str, str], status: str) -> None:
    async with serving() as served:
        peer = await served.peer()
        stream_id = peer.next_id()
        base = [(name, change.get(name, value)) for name, value in HEADERS]
        peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream_id, peer.block(base=base)))
        reply = await peer.reply(stream_id)
        assert reply.headers[":status"] == status
        assert b"gRPC" in reply.body


async def test_a_drain_serves_what_is_on_its_way_and_then_closes() -> None:
    release = asyncio.Event()

    async def slow(data: bytes) -> bytes:
        await release.wait()
        return data

    async with serving([Method("/test.Test/Slow", slow)]) as served:
        peer = await served.peer()
        slow_id = peer.next_id()
        peer.send(peer.call_frames(slow_id, b"late", path="/test.Test/Slow"))
        await peer.echo(b"before")
        draining = asyncio.create_task(served.server.drain(20.0))
        first = await peer.frame_of(h2.GOAWAY)
        assert int.from_bytes(first.payload[:4], "big") == h2.STREAM_ID_MAX
        await peer.echo(b"sent before the client knew")
        last = await peer.frame_of(h2.GOAWAY)
        assert int.from_bytes(last.payload[:4], "big") == peer._next_id - 2
        late_id = peer.next_id()
        peer.send(peer.call_frames(late_id, b"after the last one"), h2.frame(h2.PING, 0, 0, b"12345678"))
        assert (await peer.frame()).kind == h2.PING, "a call that came too late is not answered, nor reset"
        release.set()
        assert (await peer.reply(slow_id)).body == message(b"late")
        assert await peer.goaway() == h2.ErrorCode.NO_ERROR
        peer.close()
        assert await draining
