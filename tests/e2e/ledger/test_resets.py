from __future__ import annotations

import pytest

from tests.e2e.ledger.world import HUNDRED_A_DAY, World, accept, seen, until, until_all_see
from tidegate import AsyncLimiter
from tidegate.testing.servers import RedisServer

pytestmark = pytest.mark.server


async def begins_again(nodes: list[AsyncLimiter], who: str) -> None:
    """Every node counts zero."""
    for node in nodes:

        async def is_zero(node: AsyncLimiter = node) -> bool:
            return await seen(node, who) == 0

        await until(is_zero, f"{node!r} has applied the reset")


async def test_a_reset_reaches_every_node_of_every_region_and_old_counts_do_not_return(
    server_world: World,
) -> None:
    world = server_world
    with RedisServer() as one, RedisServer() as two:
        nodes = await world.grid_on(fra=one.url, iad=two.url)
        while await accept(nodes[0], "ada"):
            pass
        await until_all_see(nodes, {"ada": 100})
        await nodes[3].reset(HUNDRED_A_DAY, "ada")
        await begins_again(nodes, "ada")
        # All of the quota again, from every node, and then none: the counts after the reset are exact.
        for node in nodes:
            assert await accept(node, "ada", 25) == 25
        await until_all_see(nodes, {"ada": 100})
        for node in nodes:
            assert not await node.limit(HUNDRED_A_DAY, "ada")
        # A Redis that lost everything, and a region whose nodes must put the reset back.
        one.flush()
        newcomer = await world.regions["fra"].start(world.database.url)
        await until_all_see([newcomer], {"ada": 100})
        await world.stack.aclose()
