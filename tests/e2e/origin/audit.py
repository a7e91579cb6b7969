"""Compares the origin, every node and the sum of all answers: all must agree on what was accepted.

Nodes run in this process (`Fleet.node`) or in separate ones (`process.py`). All use a clock that is shifted to the
middle of a window, so that no window ends during a test.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self

from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.adapters.urls import open_origin
from tidegate.core.model import Component, subject_digest
from tidegate.errors import DependencyTimeout
from tidegate.ports import Origin
from tidegate.testing.limiters import make_async_limiter

REGION = "fra"
DURATION_MS = 86_400_000
LIMIT = Limit(10**9, duration_ms=DURATION_MS, namespace="audited")
DEADLINE_S = 40.0
POLL_S = 0.02

# Timeouts and pauses are shorter than in production; nothing that matters for correctness differs.
QUICK = {
    "fresh_ms": 100,
    "breaker_open_ms": 400,
    "backoff_first_ms": 20,
    "backoff_last_ms": 200,
    "pulse_interval_ms": 100,
    "anticipation": False,
}


# For tests in which no call may fail: on a busy machine, an answer may take longer than a request usually waits.
PATIENT: dict[str, Any] = {"read_timeout_ms": 10_000, "replay_timeout_ms": 10_000}


def offset_to_mid_window_ms() -> int:
    now_ms = time.time_ns() // 1_000_000
    return DURATION_MS // 2 - now_ms % DURATION_MS


class ShiftedClock:
    """The wall clock, a constant number of milliseconds off."""

    def __init__(self, offset_ms: int) -> None:
        self.offset_ms = offset_ms

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


class Witness(Protocol):
    """A node that can be asked for its counts."""

    async def seen(self, identifier: str) -> int: ...


class LocalNode:
    """A node in this process."""

    def __init__(self, url: str, clock: ShiftedClock, tuning: Tuning) -> None:
        self.origin: Origin = open_origin(url)
        self.limiter = make_async_limiter(region=REGION, origin=self.origin, clock=clock, tuning=tuning)
        self.accepted: Counter[str] = Counter()
        self.answered = 0

    async def accept(self, identifier: str, times: int = 1, cost: int = 1) -> None:
        for _ in range(times):
            decision = await self.limiter.limit(LIMIT, identifier, cost)
            self.answered += 1
            if decision:
                self.accepted[identifier] += cost

    async def seen(self, identifier: str) -> int:
        return (await self.limiter.peek(LIMIT, identifier)).effective

    async def delivered(self) -> None:
        await delivered(self.limiter)


async def delivered(limiter: AsyncLimiter) -> None:
    """Return when everything that a limiter has accepted so far has been acknowledged."""
    await until(lambda: limiter.statistics().origin_dirty_subjects == 0, "all counts to be acknowledged")
    await until(lambda: limiter.statistics().replay_lag_s == 0.0, "the last merge to be answered")


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Poll a condition that the test can see; a deadline ends the wait."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        found = condition()
        if not isinstance(found, bool):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline_s, f"gave up waiting for {what}"
        await asyncio.sleep(POLL_S)


class Fleet:
    """The nodes of one region, and the audit."""

    def __init__(self, url: str, **tuning: Any) -> None:
        self.url = url
        self.clock = ShiftedClock(offset_to_mid_window_ms())
        self.tuning = Tuning(**(QUICK | tuning))
        self.nodes: list[LocalNode] = []
        self._traffic: list[asyncio.Task[None]] = []
        self._pause = asyncio.Event()

    def node(self, url: str | None = None) -> LocalNode:
        node = LocalNode(url or self.url, self.clock, self.tuning)
        self.nodes.append(node)
        return node

    # -- traffic

    def start_traffic(self, identifiers: Sequence[str]) -> None:
        """Every node accepts, on every identifier in turn, until `stop_traffic`."""
        self._pause.clear()
        self._traffic = [asyncio.create_task(self._drive(node, identifiers)) for node in self.nodes]

    async def _drive(self, node: LocalNode, identifiers: Sequence[str]) -> None:
        turn = 0
        while not self._pause.is_set():
            await node.accept(identifiers[turn % len(identifiers)], 1, turn % 3 + 1)
            turn += 1
            if turn % 10 == 0:
                await asyncio.sleep(0.001)

    async def more_traffic(self, answers: int = 300) -> None:
        """Return when every node has answered this many more requests."""
        targets = [node.answered + answers for node in self.nodes]
        await until(
            lambda: all(node.answered >= target for node, target in zip(self.nodes, targets, strict=True)),
            "requests to be answered",
        )

    async def stop_traffic(self) -> None:
        self._pause.set()
        await asyncio.gather(*self._traffic)

    # -- the audit

    def accepted(self) -> Counter[str]:
        return sum((node.accepted for node in self.nodes), Counter())

    async def origin_total(self, identifier: str, url: str | None = None) -> int:
        """What the origin itself holds, asked by a node that counts nothing. On a busy machine a connection may take
        longer than an adapter allows: it asks again, as a node would."""
        digest = subject_digest(LIMIT.workspace, LIMIT.namespace, identifier, DURATION_MS)
        sequence = self.clock.now_ms() // DURATION_MS
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            origin = open_origin(url or self.url)
            try:
                (reply,) = await origin.read([Component(digest, sequence, "auditor", 0, 0)], timeout_s=5.0)
            except DependencyTimeout:
                if time.monotonic() >= deadline_s:
                    raise
            else:
                assert reply.component == 0
                return reply.total
            finally:
                await origin.close()

    async def agree(
        self, expected: Counter[str] | None = None, witnesses: Sequence[Witness] = (), url: str | None = None
    ) -> None:
        """Wait until every node and the origin hold exactly what was accepted; then check again.

        Counts only rise, so the second check finds a count that became too high.
        """
        expected = self.accepted() if expected is None else expected
        assert expected, "nothing was accepted: nothing would be proven"
        all_witnesses: list[Witness] = [*self.nodes, *witnesses]

        async def is_agreed() -> bool:
            for identifier, total in expected.items():
                if await self.origin_total(identifier, url) != total:
                    return False
                for witness in all_witnesses:
                    if await witness.seen(identifier) != total:
                        return False
            return True

        try:
            await until(is_agreed, "all to agree")
        except AssertionError as error:
            found = {
                name: [await self.origin_total(name, url), *[await one.seen(name) for one in all_witnesses]]
                for name in expected
            }
            raise AssertionError(f"accepted {dict(expected)}, origin and nodes say {found}") from error
        await asyncio.sleep(2 * self.tuning.fresh_ms / 1000)
        assert await is_agreed(), "agreement did not last"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pause.set()
        for task in self._traffic:
            task.cancel()
        await asyncio.gather(*self._traffic, return_exceptions=True)
        for node in self.nodes:
            await node.limiter.stop()
