"""One life of a node: from a start to a stop or a crash. The next start of the same node is another life.

It is the witness of what the node sends and hears, and passes that on to the auditor with the node's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from tidegate.core.engine import Engine
from tidegate.core.model import Component, LedgerRow, OriginReply
from tidegate.runtime.limiter import AsyncLimiter
from tidegate.runtime.node import Node
from tidegate.runtime.stalls import StallMonitor
from tidegate.sim.auditor import Auditor
from tidegate.sim.inside import parts_of
from tidegate.sim.network import Link
from tidegate.sim.virtual_time import VirtualClock, VirtualLoop, owned_context

__all__ = ["Life", "QuietStalls"]

# True in the tasks that serve a request, and in whatever they start.
_IN_REQUEST: ContextVar[bool] = ContextVar("in_request", default=False)


class QuietStalls(StallMonitor):
    """On a virtual loop nothing can stall: the monitor would only cost events."""

    async def run(self) -> None:
        """Nothing to watch."""


class Life:
    """A process."""

    def __init__(
        self, name: str, region: str, number: int, loop: VirtualLoop, clock: VirtualClock, auditor: Auditor
    ) -> None:
        self.name = name
        self.region = region
        self.node_id = f"{name}.{number}"
        self.number = number
        self.clock = clock
        self.context = owned_context(self.node_id)
        self.request_context = owned_context(self.node_id)
        self.request_context.run(_IN_REQUEST.set, True)
        self.born_s = loop.time()
        self.is_running = True
        self.is_paused = False
        # Loop time of the last pause's end, and whether the clock ever stepped: both excuse a late answer.
        self.resumed_s = -1.0
        self.has_stepped = False
        # (digest, sequence) -> when the origin was last heard, and what it acknowledged of ours.
        self.heard_ms: dict[tuple[bytes, int], int] = {}
        self.acknowledged: dict[tuple[bytes, int], int] = {}
        # Subject -> when it was last denied for sure.
        self.denied_ms: dict[tuple[tuple[str, str, int], str], int] = {}
        # What was accepted lately: (loop time, digest, sequence, cost).
        self.accepted: list[tuple[float, bytes, int, int]] = []
        self.origin_link: Link
        self.ledger_link: Link
        self._loop = loop
        self._auditor = auditor
        self._limiter: AsyncLimiter | None = None

    def bind(self, limiter: AsyncLimiter) -> None:
        self._limiter = limiter
        self.node.stalls = QuietStalls()

    @property
    def limiter(self) -> AsyncLimiter:
        assert self._limiter is not None
        return self._limiter

    @property
    def engine(self) -> Engine:
        return parts_of(self.limiter).engine

    @property
    def node(self) -> Node:
        node = parts_of(self.limiter).node
        assert node is not None
        return node

    @property
    def evictions(self) -> int:
        subjects = self.engine.subjects
        return subjects.evicted_blocked + subjects.evicted_clean + subjects.evicted_unreplayed

    # -- the witness

    def sending(self, components: Sequence[Component]) -> None:
        self._auditor.sent(self, components)

    def merged(
        self, components: Sequence[Component], before: Sequence[OriginReply], after: Sequence[OriginReply]
    ) -> None:
        self._auditor.merged(self, components, before, after)

    def heard(self, components: Sequence[Component], merged: bool) -> None:
        now_ms = self.clock.now_ms()
        for one in components:
            place = (one.digest, one.sequence)
            self.heard_ms[place] = now_ms
            if merged and one.own > self.acknowledged.get(place, 0):
                self.acknowledged[place] = one.own

    def publishing(self, rows: Sequence[LedgerRow]) -> None:
        self._auditor.published(self, rows)

    def touching_ledger(self) -> None:
        if _IN_REQUEST.get():
            self._auditor.fail(1, f"{self.node_id}: a request called the ledger")
