"""A request while it is judged: what counts for it, the verdict on it, and when it fits after a denial."""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.cells import Cell, Subject
from tidegate.core.model import Limit
from tidegate.core.views import GlobalView
from tidegate.core.windows import earliest_fit, wait_ms

__all__ = ["DENIED", "FITS", "HELD", "UNKNOWN", "UNLIKELY", "UNREAD", "Evaluation"]

# Verdicts on a request. The highest one among the items of a batch decides about the batch.
FITS: Final = 0
UNLIKELY: Final = 1  # does not fit, if other regions went on as the last imports saw them
HELD: Final = 2  # does not fit beside what other nodes hold credit for
UNKNOWN: Final = 3  # may fit, but the origin did not answer when it should have, and the limit denies then
UNREAD: Final = 4  # may fit, but the origin must be read first
DENIED: Final = 5  # does not fit; cells only grow, so no read could change that


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """One request while it is judged, alone or as an item of a batch."""

    __slots__ = (
        "before",
        "beside",
        "cell",
        "cost",
        "demand",
        "following",
        "limit",
        "now_ms",
        "retry_ms",
        "source",
        "subject",
        "used",
        "verdict",
        "wall_ms",
    )

    def __init__(
        self,
        limit: Limit,
        cost: int,
        now_ms: int,
        wall_ms: int,
        source: int,
        subject: Subject,
        cell: Cell,
        before: int,
        used: int,
    ) -> None:
        self.limit: Final[Limit] = limit
        self.cost: Final[int] = cost
        self.now_ms: Final[int] = now_ms
        self.wall_ms: Final[int] = wall_ms
        # What the driver has tried before: LOCAL for nothing.
        self.source: Final[int] = source
        self.subject: Final[Subject] = subject
        self.cell: Final[Cell] = cell
        # The count of the previous cell, and what counts in the sliding window without this request.
        self.before: Final[int] = before
        self.used: Final[int] = used
        # What must fit beside `used`: the cost, and in a batch the costs of earlier items for the same subject.
        self.demand: int = cost
        self.verdict: int = FITS
        # Of a HELD one: what waiting requests of other nodes were granted, what counts in the next cell already, and
        # when more is known; -1 when that is found from the counts.
        self.beside: int = 0
        self.following: int = 0
        self.retry_ms: int = -1

    def used_before(self, following: int) -> int:
        """`used`, or what counts at the start of the next cell, where `following` counts already, if that is more."""
        then = self.cell.total() + self.subject.reserved + following
        return then if following > 0 and then > self.used else self.used

    def hold(self, firm: int, following: int, retry_ms: int) -> None:
        """The origin refused it, although it fits by what this node knows.

        `retry_ms` is when more is known, unless what waiting requests of others were granted (`firm`) explains it, or
        what counts in the next cell already.
        """
        self.verdict = HELD
        # What this node has reserved is part of both.
        self.beside = firm - self.subject.reserved if firm > self.subject.reserved else 0
        self.following = following
        if self.used_before(following) + self.demand + self.beside <= self.limit.quota:
            self.retry_ms = retry_ms

    def retry_after_ms(self, view: GlobalView, read_retry_ms: int) -> int:
        """How long until a denied request fits if no other one comes, -1 if it never does."""
        room = self.limit.quota - self.demand
        if room < 0:
            return -1
        if self.retry_ms >= 0:
            return self.retry_ms
        cell = self.cell
        if self.verdict == UNKNOWN:
            # More is known after the next read.
            next_read_ms = 0 if cell.origin is None else cell.origin.failed_until_ms - self.wall_ms
            return next_read_ms if next_read_ms > 0 else read_retry_ms
        duration_ms = self.limit.duration_ms
        elapsed_ms = self.now_ms - cell.sequence * duration_ms
        # What is reserved may be settled now.
        current = cell.total() + self.beside + self.subject.reserved
        if self.verdict == UNLIKELY and cell.ledger is not None:
            # More is known after the next import, which may show that the others went no further.
            current += view.probable(cell.ledger, self.wall_ms)
            until_import_ms = view.until_import_ms(self.wall_ms)
            until_fit_ms = wait_ms(current, self.before, room, elapsed_ms, duration_ms)
            # 0: this item would fit, but not with the rest of its batch.
            return until_fit_ms if 0 < until_fit_ms < until_import_ms else until_import_ms
        if self.subject.sequence == cell.sequence and self.following == 0:
            return wait_ms(current, self.before, room, elapsed_ms, duration_ms)
        return self._wait_beyond(current, room, elapsed_ms)

    def _wait_beyond(self, current: int, room: int, elapsed_ms: int) -> int:
        """Later cells have counts already, because clocks differ: try cell after cell."""
        duration_ms = self.limit.duration_ms
        previous = self.before
        sequence = self.cell.sequence
        following = self.following
        while True:
            if current + following <= room:
                earliest_ms = earliest_fit(current, previous, room, elapsed_ms, duration_ms)
                if earliest_ms < duration_ms:
                    return sequence * duration_ms + earliest_ms - self.now_ms
            sequence += 1
            elapsed_ms = 0
            previous = current
            later = self.subject.cell(sequence)
            current = 0 if later is None else later.total()
            if following > current:
                current = following
            following = 0
