"""The commands for operators, next to running limiters; `tests/cli` has the rest."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.e2e.ledger.world import DAY_MS, World, accept, until_all_see
from tidegate import Limit
from tidegate.adapters.clock import WallClock

pytestmark = pytest.mark.server

# The commands use the real time, which cannot be shifted to noon: so a window that does not end during the test.
DECADE = Limit(100, duration_ms=3650 * DAY_MS, namespace="tests")


async def tidegate(*words: str) -> Any:
    """The output of a command, as data."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidegate.cli", *words, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return json.loads(printed)


async def test_ledger_shows_the_regions_that_run_and_cleanup_spares_what_is_live(world: World) -> None:
    world.clock = WallClock()
    fra, iad = await world.grid("fra", "iad", nodes=1)
    await accept(fra, "ada", 30, DECADE)
    await until_all_see([iad], {"ada": 30}, DECADE)
    await accept(iad, "ada", 12, DECADE)
    await until_all_see([fra], {"ada": 42}, DECADE)
    shown = await tidegate("ledger", "--ledger", world.database.url)
    assert {one["region"]: one["rows"] for one in shown["regions"]} == {"fra": 1, "iad": 1}
    assert all(one["lag_ms"] < 60_000 for one in shown["regions"])
    assert [(row["identifier"], row["region"], row["regional"]) for row in shown["hottest"]] == [
        ("ada", "fra", 30),
        ("ada", "iad", 12),
    ]
    assert (await tidegate("cleanup", "--ledger", world.database.url))["deleted"] == 0
    assert len(world.database.counts()) == 2


async def test_migrate_beside_running_limiters_changes_nothing(world: World) -> None:
    fra, iad = await world.grid("fra", "iad", nodes=1)
    await accept(fra, "ada", 30)
    await until_all_see([iad], {"ada": 30})
    both = await asyncio.gather(*(tidegate("migrate", "--ledger", world.database.url) for _ in range(2)))
    assert [answer["statements"] for answer in both] == [[], []]
    await accept(fra, "ada", 30)
    await until_all_see([iad], {"ada": 60})
