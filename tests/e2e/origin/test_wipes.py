"""What a Redis server forgets comes back: from nodes that knew of it, and from the region's row in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.origin.audit import DURATION_MS, REGION, ShiftedClock, offset_to_mid_window_ms, until
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.adapters.migrations import migrate
from tidegate.testing import RedisServer
from tidegate.testing.limiters import make_async_limiter

pytestmark = pytest.mark.server

QUOTA = 100
LIMIT = Limit(QUOTA, duration_ms=DURATION_MS, namespace="wipes")
PATIENT: dict[str, Any] = {"read_timeout_ms": 10_000}


@pytest.fixture
def server(fresh_redis: RedisServer) -> RedisServer:
    return fresh_redis


def node(server: RedisServer, **options: Any) -> AsyncLimiter:
    clock = ShiftedClock(offset_to_mid_window_ms())
    return make_async_limiter(
        region=REGION, origin=server.url, clock=clock, tuning=Tuning(**PATIENT), **options
    )


def has_imported(limiter: AsyncLimiter) -> bool:
    """This node has imported, or knows that another one has for their region."""
    statistics = limiter.statistics()
    return statistics.import_rows > 0 or (not statistics.is_importer and statistics.import_age_s is not None)


async def accept(limiter: AsyncLimiter, wanted: int) -> int:
    """How many of the requests pass; one denied because of credit of others is repeated after its retry time."""
    accepted = 0
    for _ in range(wanted):
        decision = await limiter.limit(LIMIT, "x")
        while not decision and decision.retry_after is not None and decision.retry_after < 10:
            await asyncio.sleep(decision.retry_after)
            decision = await limiter.limit(LIMIT, "x")
        accepted += decision.allowed
    return accepted


async def until_all_count(nodes: Sequence[AsyncLimiter], count: int) -> None:
    async def do() -> bool:
        found = [(await one.limit(LIMIT, "x", 0)).effective for one in nodes]
        return found == [count] * len(nodes)

    await until(do, f"all nodes to count {count}")


async def test_what_a_node_counted_that_has_left_survives_a_wipe(server: RedisServer) -> None:
    gone, *stay = nodes = [node(server) for _ in range(3)]
    for one in nodes:
        await one.start()
    assert await accept(gone, 50) == 50
    await gone.stop()
    await until_all_count(stay, 50)
    await asyncio.to_thread(server.flush)
    accepted = sum([await accept(one, 60) for one in stay])
    assert accepted == 50
    await until_all_count(stay, QUOTA)
    for one in stay:
        await one.stop()


async def test_the_row_in_the_database_survives_a_restart_of_all_nodes_and_a_wipe(
    server: RedisServer, tmp_path: Path
) -> None:
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    await migrate(ledger)
    first = node(server, ledger=ledger)
    await first.start()
    assert await accept(first, 60) == 60
    await first.stop()
    await asyncio.to_thread(server.flush)
    nodes = [node(server, ledger=ledger) for _ in range(3)]
    for one in nodes:
        await one.start()
        await until(partial(has_imported, one), "an import")
    assert sum([await accept(one, 50) for one in nodes]) == 40
    await until_all_count(nodes, QUOTA)
    for one in nodes:
        await one.stop()
