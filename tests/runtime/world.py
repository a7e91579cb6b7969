"""Shared by the tests of the drivers: virtual time, a region of nodes around one origin, regions around one ledger."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, ParamSpec, TypeVar, cast

from tidegate import Limit, Tuning
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.ports import Ledger, Origin
from tidegate.sim.virtual_time import VirtualClock, VirtualLoop
from tidegate.testing.faults import FailingLedger, FailingOrigin, TrackingLedger, TrackingOrigin
from tidegate.testing.limiters import make_async_limiter

P = ParamSpec("P")
R = TypeVar("R")

# The middle of a minute, an hour and a day: no window ends by chance.
EPOCH_MS = 1_700_051_430_000

HUNDRED_A_MINUTE = Limit("100/minute", namespace="tests")
MILLION_AN_HOUR = Limit("1000000/hour", namespace="tests")


def on_virtual_time(test: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Run a coroutine function to its end on a loop of its own, where an hour takes no time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(test(*args, **kwargs))

    return run


def clock() -> VirtualClock:
    """The wall clock of the running virtual loop."""
    return VirtualClock(cast("VirtualLoop", asyncio.get_running_loop()), EPOCH_MS)


async def turns(count: int = 20) -> None:
    """Let everything happen that needs no time."""
    for _ in range(count):
        await asyncio.sleep(0)


class Region:
    """Nodes around one origin in memory; each node's calls to it can be watched and made to fail separately."""

    def __init__(self, name: str = "fra", *, ledger: MemoryLedger | None = None, **tuning: Any) -> None:
        self.name = name
        self.clock = clock()
        # Most of these tests are about the rules of freshness, which decide without credit.
        self.tuning = Tuning(**({"credit": False} | tuning))
        self.store = MemoryOrigin(clock=self.clock)
        self.ledger = ledger
        self.nodes: list[Member] = []

    def node(self, *, with_origin: bool = True, region: str | None = None) -> Member:
        member = Member(self, region or self.name, with_origin=with_origin)
        self.nodes.append(member)
        return member

    async def stop(self) -> None:
        for member in self.nodes:
            await member.limiter.stop()


class Member:
    """One node: the limiter, and the wrappers in front of what it shares."""

    def __init__(self, region: Region, name: str, *, with_origin: bool) -> None:
        self.failing = FailingOrigin(region.store.another())
        self.origin = TrackingOrigin(self.failing)
        self.failing_ledger: FailingLedger | None = None
        self.ledger: TrackingLedger | None = None
        if region.ledger is not None:
            self.failing_ledger = FailingLedger(region.ledger)
            self.ledger = TrackingLedger(self.failing_ledger)
        origin: Origin | None = self.origin if with_origin else None
        ledger: Ledger | None = self.ledger
        self.limiter = make_async_limiter(
            region=name,
            origin=origin,
            ledger=ledger,
            clock=region.clock,
            tuning=region.tuning,
            random=Random(len(region.nodes)),
        )

    @property
    def faults(self) -> Any:
        return self.failing.faults

    async def accept(self, identifier: str, times: int = 1, limit: Limit = MILLION_AN_HOUR) -> int:
        """Send this many requests; returns how many passed."""
        return sum([bool(await self.limiter.limit(limit, identifier)) for _ in range(times)])

    async def seen(self, identifier: str, limit: Limit = MILLION_AN_HOUR) -> int:
        """How much was accepted, according to this node."""
        return (await self.limiter.peek(limit, identifier)).effective
