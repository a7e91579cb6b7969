from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from secrets import token_bytes

import pytest

from tests.contract.credit_nodes import TIMEOUT_S, RealWorld, check_the_quota_passes_exactly
from tests.contract.origin_places import ClusterPlace, RedisPlace
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.grants import CellPart, CreditRequest
from tidegate.errors import ConfigurationError
from tidegate.testing import RedisCluster, RedisSentinel, RedisServer

pytestmark = pytest.mark.server


@pytest.fixture
async def nodes(fresh_redis: RedisServer) -> AsyncIterator[list[RedisOrigin]]:
    origins = [RedisOrigin(fresh_redis.url) for _ in range(8)]
    yield origins
    for origin in origins:
        await origin.close()


async def listening(*origins: RedisOrigin, expected: bool = True) -> None:
    """Until every node can be recalled, or none."""
    async with asyncio.timeout(TIMEOUT_S):
        while any(origin.can_be_recalled != expected for origin in origins):  # noqa: ASYNC110 - another's state
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 8])
async def test_exactly_the_quota_passes_on_redis(nodes: list[RedisOrigin], count: int) -> None:
    await check_the_quota_passes_exactly(nodes[:count])


async def test_exactly_the_quota_passes_on_a_cluster(fresh_redis_cluster: RedisCluster) -> None:
    place = ClusterPlace(fresh_redis_cluster)
    origins = [RedisOrigin(place.url) for _ in range(4)]
    await check_the_quota_passes_exactly(origins)
    for origin in origins:
        await origin.close()


async def test_exactly_the_quota_passes_behind_sentinels(fresh_redis_sentinel: RedisSentinel) -> None:
    origins = [RedisOrigin(fresh_redis_sentinel.url) for _ in range(3)]
    await check_the_quota_passes_exactly(origins)
    for origin in origins:
        await origin.close()


async def test_a_recall_brings_back_what_another_node_holds(nodes: list[RedisOrigin]) -> None:
    world = RealWorld(nodes[:2], quota=100)
    await listening(*nodes[:2])
    await world.ask_together(10)  # both hold credit for more than that now
    await world.ask(0, 80)
    await world.close()
    assert world.judge.units == 100


async def test_the_loss_of_the_recall_connection_is_noticed_and_repaired(fresh_redis: RedisServer) -> None:
    origin = RedisOrigin(fresh_redis.url)
    world = RealWorld([origin], quota=10)
    await listening(origin)
    fresh_redis.kill()
    await listening(origin, expected=False)
    fresh_redis.start()
    await listening(origin)
    await world.close()
    await origin.close()
    assert not origin.can_be_recalled


async def test_scripts_that_the_server_forgot_are_loaded_again(
    nodes: list[RedisOrigin], fresh_redis: RedisServer
) -> None:
    request = new_request()
    await nodes[0].exchange([request], timeout_s=TIMEOUT_S)
    fresh_redis.command("SCRIPT", "FLUSH")
    (reply,) = await nodes[0].exchange([request._replace(number=2, want=7)], timeout_s=TIMEOUT_S)
    assert reply.granted == 7


async def test_more_messages_than_one_command_carries_are_answered_in_order(nodes: list[RedisOrigin]) -> None:
    requests = [new_request()._replace(want=1 + index % 9) for index in range(250)]
    replies = await nodes[0].exchange(requests, timeout_s=TIMEOUT_S)
    assert [reply.granted for reply in replies] == [request.want for request in requests]


async def test_a_format_that_this_version_does_not_know_is_refused(fresh_redis: RedisServer) -> None:
    place = RedisPlace(fresh_redis)
    origin = RedisOrigin(place.url)
    await origin.open("fra", timeout_s=TIMEOUT_S)
    fresh_redis.command("SET", "tg:{53t}:format", 2)
    with pytest.raises(ConfigurationError, match=r"record format 2; this one knows 1.*update this node"):
        await origin.open("fra", timeout_s=TIMEOUT_S)
    await origin.close()


def new_request() -> CreditRequest:
    cells = (CellPart(28_000_000, 0), CellPart(27_999_999, 0))
    return CreditRequest(token_bytes(16), "a", 1, 60_000, cells, 10, 28_000_000 * 60_000, (), 0, 0, 5_000)
