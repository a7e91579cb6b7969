"""Nodes in processes of their own: at the same time, killed, forked; on Redis and on a SQLite file."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.origin.audit import DEADLINE_S, LIMIT, POLL_S, QUICK, Fleet
from tests.e2e.origin.process import NodeProcess
from tests.runtime.test_forks import in_child
from tidegate import Limiter
from tidegate.testing import RedisServer


class Processes:
    """Nodes that end with the test."""

    def __init__(self) -> None:
        self.nodes: list[NodeProcess] = []

    async def start(self, fleet: Fleet, count: int = 1) -> list[NodeProcess]:
        started = [NodeProcess.start(fleet.url, fleet.clock, dict(QUICK)) for _ in range(count)]
        new = list(await asyncio.gather(*started))
        self.nodes += new
        return new


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    found = Processes()
    yield found
    for node in found.nodes:
        await node.kill()


@pytest.fixture(
    params=[*(pytest.param(kind, marks=pytest.mark.server) for kind in ("redis", "valkey")), "sqlite"]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/counts.db"
    server: RedisServer = request.getfixturevalue(f"fresh_{request.param}")
    return server.url


async def test_two_processes_with_the_same_subject_at_the_same_time(url: str, processes: Processes) -> None:
    async with Fleet(url) as fleet:
        nodes = await processes.start(fleet, 2)
        await asyncio.gather(*(node.accept("x", 3_000, threads=4) for node in nodes))
        expected = Counter(x=sum(node.accepted["x"] for node in nodes))
        assert expected["x"] == 6_000
        fleet.node()
        await fleet.agree(expected, nodes)
        for node in nodes:
            await node.stop()


async def test_the_last_counts_of_a_process_that_stops_gracefully_arrive(
    url: str, processes: Processes
) -> None:
    async with Fleet(url) as fleet:
        (node,) = await processes.start(fleet)
        await node.accept("x", 500)
        await node.stop()
        fleet.node()
        await fleet.agree(Counter(x=500))


async def test_a_node_that_crashes_comes_back_with_a_new_id_and_nothing_is_counted_twice(
    url: str, processes: Processes
) -> None:
    async with Fleet(url) as fleet:
        crashing, steady = await processes.start(fleet, 2)
        await asyncio.gather(crashing.accept("x", 400), steady.accept("x", 300))
        await crashing.delivered()
        await crashing.kill()
        (reborn,) = await processes.start(fleet)
        assert reborn.node_id != crashing.node_id
        assert await reborn.accept("x", 50) == 50
        await fleet.agree(Counter(x=750), [steady, reborn])


async def test_a_crash_loses_at_most_what_was_not_acknowledged(url: str, processes: Processes) -> None:
    async with Fleet(url) as fleet:
        crashing, steady = await processes.start(fleet, 2)
        await crashing.accept("x", 400)
        await crashing.delivered()
        lost_at_most = await crashing.accept("x", 100)
        await crashing.kill()
        await steady.accept("x", 10)
        await steady.delivered()
        total = await fleet.origin_total("x")
        assert 410 <= total <= 410 + lost_at_most
        await fleet.agree(Counter(x=total), [steady])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_children_have_their_own_connections_and_the_parent_keeps_its_own(
    server: RedisServer,
) -> None:
    limiter = Limiter(region="fra", origin=server.url)
    assert limiter.limit(LIMIT, "x", 5).source == "origin"

    def ids() -> set[str]:
        listed = str(server.command("CLIENT", "LIST"))
        return {line.split()[0] for line in listed.splitlines() if "name=tidegate" in line}

    # One for messages, and one on which recalls arrive, which a request does not wait for.
    deadline_s = time.monotonic() + DEADLINE_S
    while len(parents := ids()) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(POLL_S)
    assert len(parents) == 2

    def work() -> list[Any]:
        decision = limiter.limit(LIMIT, "x", 3)
        now = ids()
        limiter.stop()
        return [decision.source, sorted(now), limiter.statistics().node_id, os.getpid()]

    children = [in_child(work) for _ in range(3)]
    node_ids = {node_id for _, _, node_id, _ in children} | {limiter.statistics().node_id}
    assert len(node_ids) == 4
    for source, connections, _, _ in children:
        assert source == "origin"
        assert parents < set(connections), "one more than the parent's, which is still open"
    assert limiter.limit(LIMIT, "x", 2)
    assert ids() == parents, "the parent kept its connection"
    limiter.stop()
    with Limiter(region="fra", origin=server.url) as auditor:
        assert auditor.peek(LIMIT, "x").effective == 5 + 3 * 3 + 2
