"""Nodes with credit around one origin in memory, in virtual time, with a network between them and a reference
counter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.core.credit_world import Judge
from tests.runtime.world import EPOCH_MS, clock
from tidegate import Decision, Limit, Request, Tuning
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import DependencyTimeout
from tidegate.ports import Pulse
from tidegate.sim.node_process import parts_of
from tidegate.testing.limiters import make_async_limiter

HOUR_MS = 3_600_000


class FarOrigin:
    """A memory origin behind a network: messages, answers and recalls take time, and can be lost."""

    def __init__(self, inner: MemoryOrigin, random: Random, latency_s: tuple[float, float]) -> None:
        self.inner = inner
        self.random = random
        self.latency_s = latency_s
        self.is_down = False
        self.loses_answers = False
        self.loses_recalls = False
        self.messages: list[CreditRequest] = []
        self.commands = 0

    async def _travel(self) -> None:
        await asyncio.sleep(self.random.uniform(*self.latency_s))

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        self.messages += requests
        self.commands += 1
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        replies = await self.inner.exchange(requests, timeout_s=timeout_s)
        await self._travel()
        if self.loses_answers:
            raise DependencyTimeout("the answer was lost")
        return replies

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        return await self.inner.share(shares, timeout_s=timeout_s)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        return self.inner.lease_nowait(node_id, life_ms, state, has_lost=has_lost)

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        return self.inner.usage_nowait(digest, sequence)

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        replies = await self.inner.claim(claims, timeout_s=timeout_s)
        await self._travel()
        if self.loses_answers:
            raise DependencyTimeout("the answer was lost")
        return replies

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        await self._travel()
        if self.is_down:
            raise DependencyTimeout("down")
        return await self.inner.resets(known, since=since, timeout_s=timeout_s)

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        loop = asyncio.get_running_loop()

        def later(digest: bytes, writer: str) -> None:
            if not self.loses_recalls:
                loop.call_later(self.random.uniform(*self.latency_s), on_recall, digest, writer)

        await self.inner.listen(node_id, later)

    @property
    def can_be_recalled(self) -> bool:
        return self.inner.can_be_recalled

    @property
    def rules(self) -> GrantRules:
        return self.inner.rules

    async def open(self, region: str, *, timeout_s: float) -> None:
        await self.inner.open(region, timeout_s=timeout_s)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        raise AssertionError("a limiter with credit does not read")

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        raise AssertionError("a limiter with credit does not merge")

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        if self.is_down:
            raise DependencyTimeout("down")
        return await self.inner.pulse(region, timeout_s=timeout_s)

    async def close(self) -> None:
        await self.inner.close()

    def statistics(self) -> dict[str, int]:
        return dict(self.inner.statistics())


class CreditFleet:
    """`nodes` limiters. Every decision is checked against a single counter that sees them in order."""

    def __init__(
        self,
        nodes: int,
        *,
        duration_ms: int = HOUR_MS,
        seed: object = 1,
        latency_ms: tuple[float, float] = (0.1, 1.0),
        behind_ms: int = 0,
        **tuning: Any,
    ) -> None:
        """`behind_ms`: by how much the clocks of the nodes are behind that of the origin."""
        self.clock = clock()
        self.clock.offset_ms = -behind_ms
        self.duration_ms = duration_ms
        self.random = Random(f"fleet {seed}")
        self.store = MemoryOrigin(clock=clock())
        self.latency_s = (latency_ms[0] / 1000, latency_ms[1] / 1000)
        self.tuning = Tuning(**tuning)
        self.origins: list[FarOrigin] = []
        self.limiters = [self._limiter() for _ in range(nodes)]
        self.judges: dict[str, Judge] = {}
        self.decisions: list[Decision] = []
        self.crashed: list[Any] = []

    def _limiter(self) -> Any:
        origin = FarOrigin(self.store.another(), self.random, self.latency_s)
        self.origins.append(origin)
        loop = asyncio.get_running_loop()
        return make_async_limiter(
            region="fra",
            origin=origin,
            clock=self.clock,
            tuning=self.tuning,
            random=Random(f"node {len(self.origins)}"),
            monotonic_ns=lambda: int(loop.time() * 1e9),
        )

    def limit_of(self, quota: int, **options: Any) -> Limit:
        return Limit(quota, duration_ms=self.duration_ms, namespace="tests", **options)

    def judge(self, identifier: str = "x") -> Judge:
        return self.judges.setdefault(identifier, Judge(self.duration_ms))

    def accepted(self, identifier: str = "x") -> int:
        return self.judge(identifier).units

    @property
    def over(self) -> int:
        """Requests that a single counter would have refused."""
        return sum(judge.over for judge in self.judges.values())

    async def start(self) -> None:
        await asyncio.gather(*(limiter.start() for limiter in self.limiters))

    async def stop(self) -> None:
        for limiter in [*self.limiters, *self.crashed]:
            await limiter.stop(0)

    async def ask(
        self, node: int, quota: int, cost: int = 1, identifier: str = "x", **options: Any
    ) -> Decision:
        at_ms = self.clock.now_ms()
        limit = self.limit_of(quota, **options)
        decision: Decision = await self.limiters[node].limit(limit, identifier, cost, now_ms=at_ms)
        self.note(decision, at_ms, cost, identifier)
        return decision

    async def ask_batch(self, node: int, items: Sequence[tuple[int, str, int]]) -> list[Decision]:
        """(quota, identifier, cost) of each item."""
        at_ms = self.clock.now_ms()
        requests = [Request(self.limit_of(quota), name, cost) for quota, name, cost in items]
        decisions: list[Decision] = await self.limiters[node].limit_many(requests, now_ms=at_ms)
        if all(decisions):
            for decision, (_, name, cost) in zip(decisions, items, strict=True):
                self.note(decision, at_ms, cost, name)
        return decisions

    def note(self, decision: Decision, at_ms: int, cost: int, identifier: str) -> None:
        self.decisions.append(decision)
        if decision:
            self.judge(identifier).accept(at_ms, self.clock.now_ms(), cost, decision.limit.quota)

    async def round_robin(self, quota: int, gap_ms: float, count: int) -> None:
        for index in range(count):
            await self.ask(index % len(self.limiters), quota)
            await asyncio.sleep(gap_ms / 1000)

    async def all_at_once(self, quota: int, each: int) -> None:
        await asyncio.gather(
            *(self.ask(node, quota) for _ in range(each) for node in range(len(self.limiters)))
        )

    def spare(self, node: int, identifier: str = "x") -> int:
        """Unspent credit of a node."""
        engine = parts_of(self.limiters[node]).engine
        subject = engine.subjects.find(self.limit_of(1).key, identifier)
        return 0 if subject is None or subject.credit is None else subject.credit.spare

    def held(self) -> int:
        """Unspent credit, as the origin sees it."""
        records = self.store.snapshot().records.values()
        now_ms = self.clock.now_ms()
        return sum(
            hold.spare for record in records for hold in record.holds.values() if hold.expires_at_ms > now_ms
        )

    def evict(self, is_evicted: Callable[[], bool]) -> None:
        """The origin is out of memory: it drops the keys that the function selects."""
        store = self.store._store
        for digest in [one for one in store.records if is_evicted()]:
            del store.records[digest]
        if is_evicted():
            store.region = None

    def crash(self, node: int) -> None:
        """The process ends, with its credit and what it has not reported. A new one replaces it."""
        origin = self.origins[node]
        origin.is_down = True
        self.crashed.append(self.limiters[node])
        replacement = self._limiter()
        self.origins[node] = self.origins.pop()
        self.limiters[node] = replacement


__all__ = ["EPOCH_MS", "HOUR_MS", "CreditFleet", "FarOrigin"]
