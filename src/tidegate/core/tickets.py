"""Requests that wait for an answer of Redis (the origin): what the engine keeps of them until they are decided.

A `Ticket` is one call of a limiter: a request, or a batch, which is decided as a whole. For every subject that it lacks
credit on it has a `Part`, which waits in that subject's `Credit`. The engine makes tickets, `CreditSync` serves them,
and a driver waits for `decisions`. A part leaves its queue when it is decided, so that no cycle of references stays.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.cells import Subject
from tidegate.core.credit import ASK_AGAIN, Waiter
from tidegate.core.grants import CreditReply
from tidegate.core.model import Decision, Limit

__all__ = ["Part", "Ticket"]


@final
class Ticket:
    """A request or a batch that waits. All items have the same instant."""

    __slots__ = (
        "decisions",
        "is_cancelled",
        "items",
        "now_ms",
        "owner",
        "parts",
        "since_ms",
        "subjects",
        "wall_ms",
    )

    def __init__(
        self,
        items: list[tuple[Limit, str, int]],
        subjects: list[Subject],
        now_ms: int,
        since_ms: int,
        wall_ms: int,
    ) -> None:
        self.items: Final[list[tuple[Limit, str, int]]] = items
        # The subject of each item.
        self.subjects: Final[list[Subject]] = subjects
        self.now_ms: Final[int] = now_ms
        # Since when it waits, by the clock of the driver.
        self.since_ms: Final[int] = since_ms
        # What the clock of the node showed when it came. `now_ms` may be a time of its own.
        self.wall_ms: Final[int] = wall_ms
        # What waits in a queue at the moment. Written by `CreditSync`.
        self.parts: list[Part] = []
        # The answer. Written once.
        self.decisions: list[Decision] | None = None
        # The caller disconnected: nothing is counted for it.
        self.is_cancelled: bool = False
        # What the driver waits with. The core does not look at it.
        self.owner: object = None


@final
@mypyc_attr(acyclic=True)
class Part(Waiter):
    """What a ticket needs of one subject."""

    __slots__ = ("is_ready", "reply", "subject", "ticket", "verdict")

    def __init__(self, ticket: Ticket, subject: Subject, cost: int, quota: int) -> None:
        super().__init__(ticket.now_ms, cost, quota, ticket.since_ms, len(ticket.subjects) > 1)
        self.ticket: Final[Ticket] = ticket
        self.subject: Final[Subject] = subject
        # The last answer covers it. The ticket is decided when that holds for all its parts.
        self.is_ready: bool = False
        # Of a part of a batch: the last verdict on it, and the answer that it was about.
        self.verdict: int = ASK_AGAIN
        self.reply: CreditReply | None = None
