"""When memory may decide without credit, and what must be read from Redis (the origin) first.

A read comes first if the origin has not answered for the cell yet, if its answer is too old, or if the subject was
denied within the last duration. With credit (docs/adr/0015-credit.md) none of this decides.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.cells import Cell, Subject
from tidegate.core.evaluation import Evaluation
from tidegate.core.model import DEGRADED, LOCAL, ORIGIN, Component, Tuning

__all__ = ["COLD", "STALE", "STRICT", "Freshness", "Need"]

# Why a read is needed.
COLD: Final = "cold"  # the origin has not answered for this cell yet
STALE: Final = "stale"  # its last answer is too old
STRICT: Final = "strict"  # denied recently, so that the latest counts of other nodes matter


@final
@mypyc_attr(acyclic=True)
class Need:
    """What must be read before a decision: one or two cells of one subject, in one round trip."""

    __slots__ = ("_key", "_wanted", "_writer", "acked", "cells", "reason", "subject")

    def __init__(
        self, reason: str, subject: Subject, cells: list[Cell], key: tuple[str, str, int], writer: str
    ) -> None:
        self.reason: Final[str] = reason
        self.subject: Final[Subject] = subject
        self.cells: Final[list[Cell]] = cells
        self._key: Final[tuple[str, str, int]] = key
        self._writer: Final[str] = writer
        self._wanted: list[Component] | None = None
        # What the origin had acknowledged of each cell when it was asked. An answer with less shows a loss.
        self.acked: Final[list[int]] = [0 if cell.origin is None else cell.origin.acked for cell in cells]

    @property
    def wanted(self) -> list[Component]:
        """What the origin is asked. Made when it is sent, because many needs never are: another try decides, or joins a
        read that is in flight."""
        if self._wanted is None:
            self._wanted = [self.subject.component(cell, self._key, self._writer) for cell in self.cells]
        return self._wanted


@final
class Freshness:
    """The rules of one node."""

    __slots__ = ("_fresh_ms", "_has_credit", "_retry_ms")

    def __init__(self, tuning: Tuning, *, has_credit: bool) -> None:
        self._fresh_ms: Final[int] = tuning.fresh_ms
        self._retry_ms: Final[int] = tuning.read_retry_ms
        self._has_credit: Final[bool] = has_credit

    def must_read(self, subject: Subject, cell: Cell, now_ms: int, wall_ms: int) -> bool:
        """Whether the origin must be read before a request is allowed, if that was not tried before."""
        origin = cell.origin
        if origin is None or self._has_credit:
            return False
        is_strict = now_ms < subject.strict_until_ms
        return (
            is_strict or origin.is_stale(wall_ms, self._fresh_ms, self._retry_ms)
        ) and not origin.is_paused(wall_ms, self._retry_ms)

    def source_of(self, item: Evaluation) -> int:
        """How a request that may fit is decided. Without an origin there are no outages: LOCAL.

        DEGRADED if the origin should be read, but the last read has just failed and is not repeated yet. Memory is good
        enough if the origin has answered since that failure, for both cells, but not in strict mode. An answer in the
        future is from before the clock stepped back.
        """
        origin = item.cell.origin
        if origin is None:
            return LOCAL
        if item.source != LOCAL or not origin.is_paused(item.wall_ms, self._retry_ms):
            return item.source
        is_answered = (
            item.wall_ms >= origin.answered_at_ms >= origin.failed_until_ms - self._retry_ms
            and origin.previous_until_ms > origin.failed_until_ms
        )
        return LOCAL if is_answered and item.now_ms >= item.subject.strict_until_ms else DEGRADED

    def source_after_read(self, cell: Cell, wall_ms: int) -> int:
        """The source of a decision after the origin was read.

        DEGRADED if it has not answered about this cell or the one before: the subject was evicted during the read or
        after it, came back without what the answer said, and another read would be one too many. With credit the
        decision is made in the step that merges the answer.
        """
        origin = cell.origin
        if self._has_credit or origin is None:
            return ORIGIN
        is_known = (
            origin.answered_at_ms >= 0
            and wall_ms < origin.fresh_until_ms
            and origin.previous_until_ms > origin.failed_until_ms
        )
        return ORIGIN if is_known else DEGRADED

    def reason_for(self, item: Evaluation) -> str:
        """Why a request that must wait for a read does."""
        origin = item.cell.origin
        assert origin is not None
        if not origin.is_stale(item.wall_ms, self._fresh_ms, self._retry_ms):
            return STRICT
        return COLD if origin.answered_at_ms < 0 else STALE
