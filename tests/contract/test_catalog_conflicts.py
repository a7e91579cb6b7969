"""After a lock conflict the catalog tries again, with growing pauses, and gives up while there is time to say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.runtime.world import on_virtual_time
from tidegate.adapters.catalog_lane import LaneCatalog
from tidegate.adapters.deadline import loop_time
from tidegate.adapters.lane import Lane, LockConflict


class Contended:
    """A lane on which every transaction meets a deadlock."""

    def __init__(self) -> None:
        self.tries_s: list[float] = []

    @asynccontextmanager
    async def session(self, *, timeout_s: float) -> AsyncIterator[Any]:
        self.tries_s.append(loop_time())
        if self.tries_s:
            raise LockConflict("deadlock")
        yield


@on_virtual_time
async def test_lock_conflicts_back_off_and_the_last_one_is_raised_before_the_time_is_up() -> None:
    lanes: list[Contended] = []

    def connect() -> Lane[Any, Any]:
        lanes.append(Contended())
        return cast("Lane[Any, Any]", lanes[-1])

    catalog = LaneCatalog(connect, lambda sql: sql)
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(LockConflict):
        await catalog.purge(0, timeout_s=4.0)
    (tries_s,) = [lane.tries_s for lane in lanes if lane.tries_s]
    pauses_s = [later - earlier for earlier, later in pairwise(tries_s)]
    assert tries_s[-1] - started_s <= 3.0, "a quarter of the time is left for the transaction"
    assert 5 <= len(pauses_s) <= 20, "neither a tight loop nor a single try"
    assert pauses_s[0] <= 0.01
    assert max(pauses_s) > 0.2
