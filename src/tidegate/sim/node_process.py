"""One process of a node, from its start to a stop or a crash. A restarted node is a new `NodeProcess`.

It observes the messages that the node sends and receives, and reports them to the auditor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from tidegate.core.credit_sync import Served
from tidegate.core.engine import Engine
from tidegate.core.grants import CreditRequest
from tidegate.core.model import Component, Decision, LedgerRow, OriginReply
from tidegate.core.tickets import Ticket
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.exchange import Exchanges
from tidegate.runtime.fleet import Parts
from tidegate.runtime.node import Node
from tidegate.runtime.stalls import StallMonitor
from tidegate.sim.auditor import Answer, Auditor
from tidegate.sim.network import Link
from tidegate.sim.reset_check import PROBES_WORKSPACE
from tidegate.sim.virtual_time import VirtualClock, VirtualLoop, owned_context

__all__ = ["NodeProcess", "QuietStalls", "parts_of"]

# True in the tasks that serve a request, and in the tasks that they start.
_IN_REQUEST: ContextVar[bool] = ContextVar("in_request", default=False)


def parts_of(limiter: AsyncLimiter) -> Parts:
    """The engine, the gate and the node of a limiter. Only the simulator reads them."""
    return limiter._parts  # noqa: SLF001 - the simulator checks internal state; no public name offers it


class QuietStalls(StallMonitor):
    """A monitor that does nothing: a virtual loop cannot stall, and the monitor would only add events."""

    async def run(self) -> None:
        """Nothing to monitor."""


class NodeProcess:
    """A running node, and what the auditor must know about it."""

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
        self.started_s = loop.time()
        self.is_running = True
        self.crashed_s = float("-inf")
        self.is_paused = False
        # Loop time at which the last pause ended, and whether the clock was ever changed: both allow a late answer.
        self.resumed_s = -1.0
        self.has_stepped = False
        # Loop time of the last step of its clock, and the size of the step.
        self.stepped_s = -1.0
        self.stepped_ms = 0
        # (digest, sequence) -> the count of this node that the origin acknowledged.
        self.acknowledged: dict[tuple[bytes, int], int] = {}
        # Accepted requests: (loop time, digest, sequence, cost).
        self.accepted: list[tuple[float, bytes, int, int]] = []
        # Decisions that were reported when they were made, by id. The reference keeps the id from being reused.
        self.reported: dict[int, Decision] = {}
        self.origin_link: Link
        self.ledger_link: Link
        self._loop = loop
        self._auditor = auditor
        self._limiter: AsyncLimiter | None = None

    def bind(self, limiter: AsyncLimiter) -> None:
        self._limiter = limiter
        self.node.stalls = QuietStalls()
        if self.node.exchanges is not None:
            self._watch(self.node.exchanges)

    def _watch(self, exchanges: Exchanges) -> None:
        """Report decisions in the step that makes them: with credit, callers get them one turn of the loop later."""
        finish, give_up = exchanges._finish, exchanges.give_up  # noqa: SLF001 - as above

        def finished(served: Served) -> None:
            self._settled(served.settled)
            finish(served)

        def given_up(ticket: Ticket) -> None:
            give_up(ticket)
            self._settled([ticket])

        exchanges._finish = finished  # type: ignore[method-assign]  # noqa: SLF001
        exchanges.give_up = given_up  # type: ignore[method-assign]

    def _settled(self, tickets: Sequence[Ticket]) -> None:
        answers: list[Answer] = []
        for ticket in tickets:
            assert ticket.decisions is not None
            if ticket.items[0][0].workspace == PROBES_WORKSPACE:
                continue
            if id(ticket.decisions[0]) not in self.reported:
                self.reported[id(ticket.decisions[0])] = ticket.decisions[0]
                answers.append(Answer(ticket.items, ticket.decisions, ticket.now_ms))
        self._auditor.all_decided(self, answers, have_waited=True)

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

    # -- observer of the ports

    def _judged(self, components: Sequence[Component]) -> list[Component]:
        """Those of counters that are not probes."""
        return [one for one in components if one.digest not in self._auditor.probes]

    def on_merge_sent(self, components: Sequence[Component]) -> None:
        self._auditor.sent(self, self._judged(components))

    def on_exchange(self, request: CreditRequest) -> None:
        if request.digest not in self._auditor.probes:
            self._auditor.truth_check.repeated(self, request)

    def on_merge_applied(
        self, components: Sequence[Component], before: Sequence[OriginReply], after: Sequence[OriginReply]
    ) -> None:
        indexes = [i for i, one in enumerate(components) if one.digest not in self._auditor.probes]
        self._auditor.merged(
            self,
            [components[i] for i in indexes],
            [before[i] for i in indexes],
            [after[i] for i in indexes],
        )

    def on_reply(self, components: Sequence[Component], merged: bool, asked_s: float) -> None:
        components = self._judged(components)
        self._auditor.replied(self, components, merged, asked_s)
        for one in components:
            place = (one.digest, one.sequence)
            if merged and one.own > self.acknowledged.get(place, 0):
                self.acknowledged[place] = one.own

    def on_publish(self, rows: Sequence[LedgerRow]) -> None:
        self._auditor.published(self, [row for row in rows if row.workspace != PROBES_WORKSPACE])

    def on_ledger_call(self) -> None:
        if _IN_REQUEST.get():
            self._auditor.fail(1, f"{self.node_id}: a request waited for the ledger")

    def on_origin_call(self, cells: int) -> None:
        """Not audited."""
