"""Network faults between an origin and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.model import OriginReply
from tidegate.errors import DependencyError, DependencyTimeout, DependencyUnavailable
from tidegate.testing import FaultProxy, Faults, RedisServer
from tidegate.testing.contracts.origin import REGION, TIMEOUT_S, check_cancelled_calls, component, new_digest
from tidegate.testing.contracts.origin_remote import RemoteOriginContract
from tidegate.testing.fixtures import StartProxy

recovered = RemoteOriginContract.recovered


@pytest.fixture
def proxy(fresh_redis: RedisServer, fault_proxy: StartProxy) -> FaultProxy:
    return fault_proxy(fresh_redis.port, seed=7)


@pytest.fixture
async def origin(proxy: FaultProxy, fresh_redis: RedisServer) -> AsyncIterator[RedisOrigin]:
    origin = RedisOrigin(proxy.through(fresh_redis.url))
    await origin.open(REGION, timeout_s=TIMEOUT_S)
    yield origin
    await origin.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_cancelling_on_a_slow_network_never_yields_a_wrong_answer(
    origin: RedisOrigin, proxy: FaultProxy, seed: int
) -> None:
    proxy.apply(Faults(latency_ms=0.5, jitter_ms=5))
    await check_cancelled_calls(origin, seed=seed, rounds=10)
    assert origin.statistics()["connections_opened"] == 1, "cancelling is no reason to connect anew"


@pytest.mark.parametrize("reply_bytes", [0, 1, 4, 17, 100, 301])
async def test_a_reset_in_the_middle_of_a_reply_counts_nothing_twice(
    origin: RedisOrigin, proxy: FaultProxy, reply_bytes: int
) -> None:
    cells = [component(new_digest(), own) for own in range(1, 101)]
    proxy.apply(Faults(reset_after_reply_bytes=reply_bytes))
    with pytest.raises(DependencyUnavailable):
        await origin.merge(cells, timeout_s=TIMEOUT_S)
    proxy.heal()
    answers = await origin.merge(cells, timeout_s=TIMEOUT_S)
    assert [reply.total for reply in answers] == [cell.own for cell in cells]
    assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
        OriginReply(cell.own, cell.own) for cell in cells
    ]


async def test_a_merge_that_was_applied_but_not_answered_is_not_counted_twice(
    origin: RedisOrigin, proxy: FaultProxy, fresh_redis: RedisServer
) -> None:
    cell = component(new_digest(), 5)
    proxy.apply(Faults(stall_replies=True))
    with pytest.raises(DependencyTimeout):
        await origin.merge([cell], timeout_s=0.1)
    direct = RedisOrigin(fresh_redis.url)
    async with asyncio.timeout(TIMEOUT_S):
        while await direct.read([cell], timeout_s=TIMEOUT_S) != [OriginReply(5, 5)]:
            pass  # the server has it already, or is about to
    await direct.close()
    proxy.heal()
    assert await origin.merge([cell._replace(own=6)], timeout_s=TIMEOUT_S) == [OriginReply(6, 5)]


async def test_answers_that_come_too_late_are_dropped_and_the_connection_is_kept(
    origin: RedisOrigin, proxy: FaultProxy
) -> None:
    cells = [component(new_digest(), own) for own in range(1, 11)]
    await origin.merge(cells, timeout_s=TIMEOUT_S)
    proxy.apply(Faults(stall_replies=True))
    for cell in cells:
        with pytest.raises(DependencyTimeout):
            await origin.read([cell], timeout_s=0.02)
    proxy.heal()
    for cell in reversed(cells):
        assert await origin.read([cell], timeout_s=TIMEOUT_S) == [OriginReply(cell.own, cell.own)]
    assert origin.statistics()["connections_opened"] == 1
    assert origin.statistics()["timeouts"] == 10


async def test_reads_with_a_short_timeout_do_not_starve_a_merge_with_a_long_one(
    origin: RedisOrigin, proxy: FaultProxy
) -> None:
    cells = [component(new_digest(), own) for own in range(1, 4)]
    proxy.apply(Faults(latency_ms=150))

    async def impatient() -> None:
        for _ in range(4):
            with pytest.raises(DependencyTimeout):
                await origin.read(cells, timeout_s=0.1)

    merged, _ = await asyncio.gather(origin.merge(cells, timeout_s=TIMEOUT_S), impatient())
    assert merged == [OriginReply(cell.own, 0) for cell in cells]
    assert origin.statistics()["connections_opened"] == 1


async def test_a_connection_that_never_answers_is_replaced(origin: RedisOrigin, proxy: FaultProxy) -> None:
    cell = component(new_digest(), 5)
    proxy.apply(Faults(stall_requests=True, stall_replies=True))
    async with asyncio.timeout(TIMEOUT_S):
        while proxy.statistics().connections_accepted < 2:
            with pytest.raises(DependencyTimeout):
                await origin.merge([cell], timeout_s=0.2)
    proxy.heal()
    await recovered(origin, cell)
    assert await origin.read([cell], timeout_s=TIMEOUT_S) == [OriginReply(5, 5)]


async def test_connections_that_are_reset_under_load_lose_and_double_nothing(
    origin: RedisOrigin, proxy: FaultProxy
) -> None:
    proxy.apply(Faults(jitter_ms=2))
    digests = [new_digest() for _ in range(10)]

    async def count(digest: bytes) -> None:
        own = 1
        while own <= 20:
            try:
                (reply,) = await origin.merge([component(digest, own)], timeout_s=TIMEOUT_S)
            except DependencyError:
                continue
            assert reply.total == own
            own += 1

    async def hurt(counting: asyncio.Future[list[None]]) -> None:
        while not counting.done():
            await asyncio.to_thread(proxy.reset_connections)
            await asyncio.wait([counting], timeout=0.02)

    counting = asyncio.ensure_future(asyncio.gather(*map(count, digests)))
    async with asyncio.timeout(60):
        await hurt(counting)
        await counting
    wanted = [component(digest) for digest in digests]
    proxy.heal()
    await recovered(origin, component(new_digest(), 1))
    assert await origin.read(wanted, timeout_s=TIMEOUT_S) == [OriginReply(20, 20)] * 10
    assert proxy.statistics().connections_reset > 0


async def test_an_answer_in_small_pieces_is_put_together(origin: RedisOrigin, proxy: FaultProxy) -> None:
    cells = [component(new_digest(), 10**12 + own) for own in range(1, 101)]
    proxy.apply(Faults(bytes_per_s=20_000))
    assert await origin.merge(cells, timeout_s=TIMEOUT_S) == [OriginReply(cell.own, 0) for cell in cells]
    assert await origin.read(cells, timeout_s=TIMEOUT_S) == [
        OriginReply(cell.own, cell.own) for cell in cells
    ]


async def test_a_refused_connection_is_unavailable_and_found_again(
    origin: RedisOrigin, proxy: FaultProxy
) -> None:
    cell = component(new_digest(), 2)
    proxy.apply(Faults(refuse=True))
    proxy.reset_connections()
    for _ in range(3):
        with pytest.raises(DependencyUnavailable):
            await origin.merge([cell], timeout_s=TIMEOUT_S)
    proxy.heal()
    await recovered(origin, cell)


@pytest.mark.parametrize(
    "gibberish", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n", b"\x00" * 64]
)
async def test_a_server_that_is_not_redis_is_refused_within_the_time_limit(gibberish: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(gibberish)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    origin = RedisOrigin(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(DependencyError):
        await origin.merge([component(new_digest(), 1)], timeout_s=1.0)
    await origin.close()
    server.close()
