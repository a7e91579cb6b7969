from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tidegate.testing import FaultProxy, Faults, RedisServer, wait_until
from tidegate.testing.fixtures import StartProxy
from tidegate.testing.proxy import HELD_BYTES_MAX
from tidegate.testing.servers.resp import RespConnection

SHORT_S = 0.1  # how long a test watches that nothing comes
LONG_S = 20.0


@pytest.fixture
def proxy(fresh_redis: RedisServer, fault_proxy: StartProxy) -> FaultProxy:
    return fault_proxy(fresh_redis.port)


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[RespConnection]:
    with RespConnection(proxy.host, proxy.port, timeout_s=LONG_S) as connection:
        yield connection


@pytest.fixture
def raw(proxy: FaultProxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as connection:
        yield connection


def receive_all(connection: socket.socket) -> tuple[bytes, type[BaseException] | None]:
    """Everything until the end of the connection, and how it ended."""
    received = bytearray()
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except OSError as error:
        return bytes(received), type(error)
    return bytes(received), None


def expect_silence(connection: socket.socket) -> None:
    connection.settimeout(SHORT_S)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(LONG_S)


def test_without_faults_it_forwards_and_counts(proxy: FaultProxy, raw: socket.socket) -> None:
    raw.sendall(b"PING\r\n")
    assert raw.recv(100) == b"+PONG\r\n"
    seen = proxy.statistics()
    assert (seen.connections_accepted, seen.connections_open, seen.connections_reset) == (1, 1, 0)
    assert (seen.request_bytes, seen.reply_bytes) == (6, 7)


def test_a_url_leads_through_the_proxy_and_keeps_the_rest(proxy: FaultProxy) -> None:
    there = proxy.through("rediss://user:p%40ss@db.example:6379/3?timeout=1")
    assert there == f"rediss://user:p%40ss@127.0.0.1:{proxy.port}/3?timeout=1"
    assert proxy.through("mysql://root@127.0.0.1:1/x") == f"mysql://root@127.0.0.1:{proxy.port}/x"


def test_latency_delays_each_direction(proxy: FaultProxy, client: RespConnection) -> None:
    proxy.apply(Faults(latency_ms=30))
    began_s = time.monotonic()
    assert client.call("PING") == "PONG"
    assert time.monotonic() - began_s >= 0.06


def test_latency_delays_a_pipeline_once_and_not_each_command_of_it(
    proxy: FaultProxy, raw: socket.socket
) -> None:
    """Bytes in flight overlap, as on a long line: a hundred chunks are delayed by one latency, not by a hundred."""
    proxy.apply(Faults(latency_ms=3_600_000))
    for _ in range(100):
        raw.sendall(b"PING\r\n")
    expect_silence(raw)
    proxy.apply(Faults(latency_ms=1))
    received = b""
    while len(received) < 700:
        received += raw.recv(65536)
    assert received == b"+PONG\r\n" * 100


def test_healing_releases_at_once_what_a_long_latency_holds(proxy: FaultProxy, raw: socket.socket) -> None:
    proxy.apply(Faults(latency_ms=3_600_000))
    raw.sendall(b"PING\r\n")
    expect_silence(raw)
    proxy.heal()
    assert raw.recv(100) == b"+PONG\r\n"


def test_a_stalled_request_does_not_reach_the_server_until_the_stall_ends(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    proxy.apply(Faults(stall_requests=True))
    raw.sendall(b"INCR key\r\n")
    expect_silence(raw)
    assert fresh_redis.command("GET", "key") is None
    assert proxy.statistics().request_bytes == 0
    proxy.heal()
    assert raw.recv(100) == b":1\r\n"


def test_with_stalled_replies_a_request_is_applied_though_the_client_gets_no_answer(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    proxy.apply(Faults(stall_replies=True))
    raw.sendall(b"INCR key\r\n")
    wait_until(
        lambda: fresh_redis.command("GET", "key") == "1", timeout_s=LONG_S, what="the request to be applied"
    )
    expect_silence(raw)
    assert proxy.statistics().reply_bytes == 0
    proxy.heal()
    assert raw.recv(100) == b":1\r\n"


def test_a_stalled_connection_that_is_reset_loses_what_it_held(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    proxy.apply(Faults(stall_requests=True))
    raw.sendall(b"INCR key\r\n")
    proxy.reset_connections()
    proxy.heal()
    assert receive_all(raw) == (b"", ConnectionResetError)
    assert fresh_redis.command("GET", "key") is None


def test_a_request_that_stalls_while_its_client_disconnects_still_arrives_late(
    fresh_redis: RedisServer, proxy: FaultProxy
) -> None:
    proxy.apply(Faults(stall_requests=True))
    with socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as leaver:
        leaver.sendall(b"INCR key\r\n")
    proxy.heal()
    wait_until(lambda: fresh_redis.command("GET", "key") == "1", timeout_s=LONG_S, what="the late request")


def test_a_stall_holds_a_bounded_number_of_bytes_and_delivers_them_all_afterwards(
    fresh_redis: RedisServer, proxy: FaultProxy, client: RespConnection
) -> None:
    value = "0123456789abcdef" * (8 * HELD_BYTES_MAX // 16)
    proxy.apply(Faults(stall_requests=True))
    sender = threading.Thread(target=client.call, args=("SET", "key", value))
    sender.start()
    (link,) = proxy._board.links
    wait_until(
        lambda: link.requests._held_bytes > HELD_BYTES_MAX,
        timeout_s=LONG_S,
        what="the buffers of the proxy to be full",
    )
    sender.join(SHORT_S)
    assert sender.is_alive()
    assert link.requests._held_bytes < 2 * HELD_BYTES_MAX
    proxy.heal()
    sender.join(LONG_S)
    assert fresh_redis.command("GET", "key", timeout_s=LONG_S) == value
    assert client.call("GET", "key") == value


def test_resetting_breaks_existing_connections_and_leaves_new_ones_alone(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    raw.sendall(b"PING\r\n")
    assert raw.recv(100) == b"+PONG\r\n"
    proxy.reset_connections()
    assert receive_all(raw) == (b"", ConnectionResetError)
    with RespConnection(proxy.host, proxy.port, timeout_s=LONG_S) as another:
        assert another.call("PING") == "PONG"
    assert proxy.statistics().connections_reset == 1
    wait_until(
        lambda: proxy.statistics().connections_open == 0,
        timeout_s=LONG_S,
        what="both connections to be forgotten",
    )


@pytest.mark.parametrize("reply_bytes", [0, 1, 50_000, 2_000_000])
def test_a_reply_is_cut_after_exactly_so_many_bytes(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket, reply_bytes: int
) -> None:
    fresh_redis.command("SET", "key", "x" * 3_000_000)
    proxy.apply(Faults(reset_after_reply_bytes=reply_bytes))
    raw.sendall(b"GET key\r\n")
    received, end = receive_all(raw)
    assert len(received) == reply_bytes
    assert end is ConnectionResetError


def test_a_cut_counts_for_each_connection_from_the_moment_it_was_asked_for(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    raw.sendall(b"PING\r\n")
    assert raw.recv(100) == b"+PONG\r\n"
    proxy.apply(Faults(reset_after_reply_bytes=10))
    raw.sendall(b"PING\r\nPING\r\n")
    assert receive_all(raw) == (b"+PONG\r\n+PO", ConnectionResetError)
    with socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as another:
        another.sendall(b"PING\r\nPING\r\n")
        assert receive_all(another) == (b"+PONG\r\n+PO", ConnectionResetError)


def test_refusing_refuses_new_connections_at_the_same_port_until_healed(
    proxy: FaultProxy, client: RespConnection
) -> None:
    proxy.apply(Faults(refuse=True))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((proxy.host, proxy.port), timeout=LONG_S)
    assert client.call("PING") == "PONG"
    proxy.heal()
    with RespConnection(proxy.host, proxy.port, timeout_s=LONG_S) as another:
        assert another.call("PING") == "PONG"


def test_a_rate_holds_replies_back(
    fresh_redis: RedisServer, proxy: FaultProxy, client: RespConnection
) -> None:
    fresh_redis.command("SET", "key", "x" * 10_000)
    proxy.apply(Faults(bytes_per_s=100_000))
    began_s = time.monotonic()
    assert client.call("GET", "key") == "x" * 10_000
    assert time.monotonic() - began_s >= 0.08  # 0.1 s except for the first slices


def test_a_server_that_is_down_resets_and_is_found_again_when_it_is_back(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    raw.sendall(b"PING\r\n")
    assert raw.recv(100) == b"+PONG\r\n"
    fresh_redis.kill()
    assert receive_all(raw)[0] == b""
    # The reset may come as early as within connect.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as another,
    ):
        another.recv(1)
    fresh_redis.start()
    with RespConnection(proxy.host, proxy.port, timeout_s=LONG_S) as back:
        assert back.call("PING") == "PONG"


def test_a_connection_that_ends_gracefully_ends_gracefully_on_the_other_side(
    fresh_redis: RedisServer, proxy: FaultProxy, raw: socket.socket
) -> None:
    raw.sendall(b"PING\r\n")
    raw.shutdown(socket.SHUT_WR)
    assert receive_all(raw) == (b"+PONG\r\n", None)
    wait_until(
        lambda: proxy.statistics().connections_open == 0, timeout_s=LONG_S, what="the end on both sides"
    )
    assert proxy.statistics().connections_reset == 0


def test_closing_towards_a_side_that_has_just_sent_a_reset_raises_nothing(fault_proxy: StartProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = fault_proxy(listener.getsockname()[1])
        with socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as client:
            server, _ = listener.accept()
            proxy.apply(Faults(stall_requests=True))
            client.shutdown(socket.SHUT_WR)
            board = proxy._board
            wait_until(
                lambda: all(link.requests._queue for link in board.links),
                timeout_s=LONG_S,
                what="the held end",
            )

            async def reset_and_heal() -> None:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                server.close()
                await board.apply(Faults())  # in the same turn of the loop, which has not seen the reset yet

            proxy._call(reset_and_heal())
            assert receive_all(client) == (b"", ConnectionResetError)


def test_the_same_seed_draws_the_same_jitter_for_the_same_connection(fresh_redis: RedisServer) -> None:
    def draw(seed: int) -> list[float]:
        """The random numbers of two requests that are held back."""
        with (
            FaultProxy(fresh_redis.port, seed=seed) as proxy,
            socket.create_connection((proxy.host, proxy.port), timeout=LONG_S) as connection,
        ):
            proxy.apply(Faults(stall_requests=True, jitter_ms=1000))

            def held() -> list[tuple[float, float, object]]:
                return [chunk for link in proxy._board.links for chunk in link.requests._queue]

            connection.sendall(b"1")
            wait_until(lambda: len(held()) == 1, timeout_s=LONG_S, what="the first request to be held")
            connection.sendall(b"2")
            wait_until(lambda: len(held()) == 2, timeout_s=LONG_S, what="the second request to be held")
            return [chance for _, chance, _ in held()]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_invalid_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="latency_ms -1"):
        Faults(latency_ms=-1)
    with pytest.raises(ValueError, match="bytes_per_s 0 must be at least 1; to forward nothing, stall"):
        Faults(bytes_per_s=0)
    with pytest.raises(ValueError, match="reset_after_reply_bytes -5"):
        Faults(reset_after_reply_bytes=-5)


async def test_asynchronous_tests_use_it_from_inside_their_own_loop(
    fresh_redis: RedisServer, fault_proxy: StartProxy
) -> None:
    proxy = fault_proxy(fresh_redis.port)
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    proxy.apply(Faults(stall_replies=True))
    writer.write(b"PING\r\n")
    answer = asyncio.ensure_future(reader.readline())
    assert await asyncio.wait({answer}, timeout=SHORT_S) == (set(), {answer})
    proxy.heal()
    assert await asyncio.wait_for(answer, LONG_S) == b"+PONG\r\n"
    writer.close()
    await writer.wait_closed()


def test_closing_ends_its_thread_and_gives_the_port_back(fresh_redis: RedisServer) -> None:
    with FaultProxy(fresh_redis.port) as proxy:
        port = proxy.port
        held = socket.create_connection((proxy.host, port), timeout=LONG_S)
        name = f"tidegate-fault-proxy-{port}"
        assert name in {thread.name for thread in threading.enumerate()}
    assert receive_all(held) == (b"", ConnectionResetError)
    held.close()
    assert name not in {thread.name for thread in threading.enumerate()}
    proxy.close()
