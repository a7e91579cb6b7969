"""The nodes of `tests.core.credit_world` on a real origin: real time, real round trips, real recalls.

Nothing waits for time to pass: requests come as fast as they are decided. A machine that is busy makes answers late,
so timeouts are long here; what is proven is that exactly the quota passes, not how fast.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from secrets import token_bytes
from typing import Protocol

from tests.core.credit_world import Node, S, World
from tidegate.core.credit import DENY
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.errors import DependencyError

TIMEOUT_S = 10.0


class CreditOrigin(Protocol):
    """What an origin offers for credit."""

    @property
    def rules(self) -> GrantRules: ...

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]: ...

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None: ...


class RealWorld(World):
    """One subject, and one node for each origin; all origins use the same store."""

    def __init__(
        self,
        origins: Sequence[CreditOrigin],
        *,
        quota: int,
        duration_ms: int = 30 * 86_400_000,
        digest: bytes | None = None,
        writer: str | None = None,
    ) -> None:
        super().__init__(
            nodes=len(origins),
            quota=quota,
            duration_ms=duration_ms,
            rules=origins[0].rules,
            patience_us=5 * S,
        )
        self.origins = origins
        self.digest = digest or token_bytes(16)
        if writer is not None:
            self.nodes[0].writer = writer
        self.loop = asyncio.get_running_loop()
        # Early in the current window, so that the origin keeps the cells and none rolls over during the test.
        window_ms = time.time_ns() // 1_000_000 // duration_ms * duration_ms
        self.start_us = (window_ms + duration_ms // 4) * 1_000 - time.monotonic_ns() // 1_000
        self.tasks: set[asyncio.Task[None]] = set()
        self.settled = asyncio.Event()
        for node, origin in zip(self.nodes, origins, strict=True):
            self.spawn(origin.listen(node.writer, self.recaller(node)))

    def recaller(self, node: Node) -> Callable[[bytes, str], None]:
        def on_recall(digest: bytes, writer: str) -> None:
            assert (digest, writer) == (self.digest, node.writer)
            node.on_recall(self.now_us())

        return on_recall

    def now_us(self) -> int:
        return self.start_us + time.monotonic_ns() // 1_000

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # -- what the world of virtual time does with events

    def at(self, at_us: int, action: Callable[[int], None]) -> None:
        self.loop.call_later(max(0, at_us - self.now_us()) / 1e6, lambda: action(self.now_us()))

    def send(self, at_us: int, node: Node, request: CreditRequest) -> None:
        self.messages += 1
        self.spawn(self.exchange(node, request))

    async def exchange(self, node: Node, request: CreditRequest) -> None:
        try:
            (reply,) = await self.origins[node.index].exchange([request], timeout_s=TIMEOUT_S)
        except DependencyError:
            node.on_timeout(self.now_us(), request.number)
        else:
            node.on_answer(self.now_us(), request, reply)

    def note(self, waited_us: int) -> None:
        super().note(waited_us)
        self.settled.set()

    # -- requests

    async def ask(self, index: int, cost: int = 1, quota: int = 0) -> None:
        """One request, until it is decided."""
        decided = self.decided
        self.nodes[index].arrive(self.now_us(), cost, quota or self.quota)
        await self.wait_until(decided + 1)

    async def ask_together(self, each: int) -> None:
        """All nodes at once."""
        decided = self.decided
        for node in self.nodes:
            for _ in range(each):
                node.arrive(self.now_us(), 1, self.quota)
        await self.wait_until(decided + each * len(self.nodes))

    async def wait_until(self, decided: int) -> None:
        async with asyncio.timeout(20):
            while self.decided < decided:
                self.settled.clear()
                await self.settled.wait()

    async def exhaust(self) -> None:
        """Every node asks until the window itself is full: credit that others hold comes back sooner or later."""
        async with asyncio.timeout(20):
            for node in self.nodes:
                while True:
                    count = len(self.denials)
                    await self.ask(node.index)
                    if len(self.denials) > count and self.denials[-1].verdict == DENY:
                        break

    async def close(self) -> None:
        for node in self.nodes:
            node.is_dead = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def check_the_quota_passes_exactly(origins: Sequence[CreditOrigin]) -> None:
    """One after the other, and all at once, for small quotas and large ones."""
    for quota in (1, 5, 6, 20, 100):
        world = RealWorld(origins, quota=quota)
        for index in range(2 * quota + 2 * len(origins)):
            await world.ask(index % len(origins))
        await world.exhaust()
        await world.close()
        assert (world.judge.units, world.judge.over) == (quota, 0)
    for quota in (1, 5, 100, 1_000):
        world = RealWorld(origins, quota=quota)
        await world.ask_together(max(2, 2 * quota // len(origins)))
        await world.exhaust()
        await world.close()
        assert (world.judge.units, world.judge.over) == (quota, 0)
