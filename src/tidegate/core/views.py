"""What a node knows about the counts of other nodes and other regions.

`OriginView` and `LedgerView` belong to one cell: what Redis (the origin) and the database (the ledger) hold of it, as
last seen. A cell has a view only if the limiter has that layer, and short windows have no `LedgerView`, because they
are never published. `GlobalView` belongs to the node. These objects are passive: `OriginSync` and `LedgerSync` write
them, decisions read them.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.model import Tuning

__all__ = ["GlobalView", "Growth", "LedgerView", "OriginView"]


@final
@mypyc_attr(acyclic=True)
class OriginView:
    """What the origin holds of a cell, and how long a decision may rely on that."""

    __slots__ = (
        "acked",
        "answered_at_ms",
        "failed_until_ms",
        "fresh_until_ms",
        "id",
        "is_lost",
        "previous_until_ms",
        "published",
        "sent",
        "total",
    )

    def __init__(self) -> None:
        # No read is needed before this instant. Written by reads, replays, failed reads and rollover.
        self.fresh_until_ms: int = 0
        # The same for the previous cell, which weighs in every decision too. It is here because an empty previous cell
        # is not kept. Written with `fresh_until_ms` of that cell.
        self.previous_until_ms: int = 0
        # A read failed, and the next one waits for this. Never later than `fresh_until_ms`. Written by failed reads.
        self.failed_until_ms: int = 0
        # When the origin last answered, -1 for never. Written by reads, replays and rollover.
        self.answered_at_ms: int = -1
        # `own` as the origin last acknowledged it. Falls to 0 when the origin is found to have lost it.
        self.acked: int = 0
        # The most of `own` that was sent to the origin, and that went into a row of the ledger: others may know
        # of it, acknowledged or not.
        self.sent: int = 0
        self.published: int = 0
        # The name of the origin's record, as of its last answer, and the highest total that it had; 0 before the first.
        # Only with credit.
        self.id: int = 0
        self.total: int = 0
        # The origin may have lost the cell: report it again. Written by sweeps, cleared by the next answer.
        self.is_lost: bool = False

    def is_stale(self, clock_ms: int, fresh_ms: int, retry_ms: int) -> bool:
        """A read of both cells is needed. Also if a deadline lies further ahead than an answer or a failed read sets
        it: the clock has stepped back since, and how old that answer is cannot be known. A smaller step can make it
        last twice as long."""
        return (
            clock_ms >= self.fresh_until_ms
            or clock_ms >= self.previous_until_ms
            or self.fresh_until_ms > clock_ms + 2 * fresh_ms
            or self.failed_until_ms > clock_ms + retry_ms
        )

    def is_paused(self, clock_ms: int, retry_ms: int) -> bool:
        """A read failed less than `retry_ms` ago. A later deadline is from before the clock stepped back."""
        return clock_ms < self.failed_until_ms <= clock_ms + retry_ms

    def answer(self, clock_ms: int, fresh_ms: int) -> None:
        """The origin answered. After a clock stepped back, what was set before it no longer counts."""
        if self.fresh_until_ms > clock_ms + 2 * fresh_ms:
            self.answered_at_ms = 0
            self.fresh_until_ms = 0
            self.previous_until_ms = 0
            self.failed_until_ms = 0
        if self.answered_at_ms < clock_ms:
            self.answered_at_ms = clock_ms
        if self.fresh_until_ms < clock_ms + fresh_ms:
            self.fresh_until_ms = clock_ms + fresh_ms

    def answer_previous(self, clock_ms: int, fresh_ms: int) -> None:
        """The origin answered for the previous cell. That one has ended and grows only by what arrives late: its
        answers last twice as long."""
        if self.previous_until_ms < clock_ms + 2 * fresh_ms:
            self.previous_until_ms = clock_ms + 2 * fresh_ms

    def record(self, id_: int, total: int) -> None:
        """The origin answered about the record of this name."""
        if id_ != self.id:
            self.id = id_
            self.total = total
        elif total > self.total:
            self.total = total

    def fail(self, until_ms: int) -> None:
        """A read failed: decisions use memory until then."""
        if self.failed_until_ms < until_ms:
            self.failed_until_ms = until_ms
        if self.fresh_until_ms < until_ms:
            self.fresh_until_ms = until_ms
        if self.previous_until_ms < until_ms:
            self.previous_until_ms = until_ms

    def age_ms(self, now_ms: int) -> int:
        """How old the last answer is, -1 if there was none."""
        if self.answered_at_ms < 0:
            return -1
        age_ms = now_ms - self.answered_at_ms
        return age_ms if age_ms > 0 else 0

    def follow(
        self, earlier: OriginView, start_ms: int, duration_ms: int, fresh_ms: int, grace_ms: int
    ) -> None:
        """Start the view of the cell that follows the cell of `earlier`.

        If that one was fresh when this one began, this one was empty then: both are fresh for `grace_ms`. Only an
        answer from within the earlier cell counts; if a cell that is only in its grace could pass it on, windows as
        short as it would never be read. The pause after a failed read continues.
        """
        answered_at_ms = earlier.answered_at_ms
        if answered_at_ms + fresh_ms > start_ms and answered_at_ms > start_ms - duration_ms:
            self.fresh_until_ms = start_ms + grace_ms
            self.previous_until_ms = start_ms + grace_ms
            self.answered_at_ms = start_ms
        if self.previous_until_ms < earlier.fresh_until_ms:
            self.previous_until_ms = earlier.fresh_until_ms
        if earlier.failed_until_ms > start_ms:
            self.fail(earlier.failed_until_ms)


@final
@mypyc_attr(acyclic=True)
class Growth:
    """How fast the counts of other regions grow in a cell, as the last two imports that saw a change measured it."""

    __slots__ = ("amount", "asked_at_ms", "lag", "measured_at_ms", "over_ms")

    def __init__(self, now_ms: int) -> None:
        # When the last import that saw a change began.
        self.measured_at_ms: int = now_ms
        # By how much the counts grew, and in what time: 0 when there is no earlier import to compare with.
        self.amount: int = 0
        self.over_ms: int = 0
        # `amount` weighted with how old, in ms, the rows were when that import read them.
        self.lag: int = 0
        # When the origin was last asked because of a denial that only this caused. Written by `Engine`.
        self.asked_at_ms: int = -1

    def start(self, now_ms: int, over_ms_max: int) -> None:
        """A change was seen by the import that began at `now_ms`. Too long after the one before gives no rate."""
        if self.measured_at_ms == now_ms:
            return
        over_ms = now_ms - self.measured_at_ms
        self.over_ms = over_ms if 0 < over_ms <= over_ms_max else 0
        self.measured_at_ms = now_ms
        self.amount = 0
        self.lag = 0

    def stop(self, now_ms: int, shortest_ms: int, longest_ms: int) -> None:
        """No change was seen at `now_ms`. They have stopped growing when the last one is twice as long ago as it came
        after the one before: an interval between these two."""
        interval_ms = self.over_ms if self.over_ms > shortest_ms else shortest_ms
        if interval_ms > longest_ms:
            interval_ms = longest_ms
        if now_ms - self.measured_at_ms > 2 * interval_ms:
            self.amount = 0
            self.lag = 0

    def expected(self, now_ms: int, age_ms_max: int, since_ms: int) -> int:
        """What the counts have probably grown by since their rows were written.

        0 when the last import, which began at `since_ms`, saw no growth.
        """
        if self.amount == 0 or self.over_ms == 0 or self.measured_at_ms < since_ms:
            return 0
        age_ms = now_ms - self.measured_at_ms
        if age_ms < 0:
            return 0
        age_ms += self.lag // self.amount
        if age_ms > age_ms_max:
            age_ms = age_ms_max
        return self.amount * age_ms // self.over_ms


@final
@mypyc_attr(acyclic=True)
class LedgerView:
    """What the ledger holds of a cell, and whether this region's row is due."""

    __slots__ = (
        "components",
        "due",
        "growth",
        "imported",
        "is_changed",
        "is_pressed",
        "learned",
        "pressure_at",
        "published",
        "quota_min",
        "regions",
        "seen",
        "set_aside",
        "set_aside_until_ms",
    )

    def __init__(self) -> None:
        # The highest regional count known to be in the ledger, and the number of the full import that last saw it.
        self.published: int = 0
        self.seen: int = 0
        # The lowest quota that a request for this cell had, 0 for none yet. Gives the publish threshold.
        self.quota_min: int = 0
        # True while the cell waits for the next publish: on the tick, and under pressure.
        self.is_changed: bool = False
        self.is_pressed: bool = False
        # The regional count from which on a publish should not wait for the tick.
        self.pressure_at: int = 0
        # How often in a row the ledger rejected this cell's row, and when it is tried again.
        self.set_aside: int = 0
        self.set_aside_until_ms: int = 0
        # The counts of other regions, and when each last rose; None until one has published. `growth` comes with the
        # first.
        self.components: dict[str, int] | None = None
        self.learned: dict[str, int] | None = None
        # Their sum. What the origin knows of other regions may be more, and is not known by region: only how many.
        self.imported: int = 0
        self.regions: int = 0
        # Whether this node has to publish the cell, as the origin said (`tidegate.core.sharing`).
        self.due: int = 0
        self.growth: Growth | None = None


@final
class GlobalView:
    """What the ledger says about all regions together. Written by `LedgerSync`."""

    __slots__ = (
        "_anticipates",
        "anticipation_ms_max",
        "full_imports",
        "growth_since_ms",
        "import_lag_ms",
        "imported_at_ms",
        "is_full_import_wanted",
        "next_import_ms",
        "regions",
    )

    def __init__(self, tuning: Tuning) -> None:
        self._anticipates: Final[bool] = tuning.anticipation
        # Live regions in the ledger, this one included.
        self.regions: int = 1
        # When the ledger was last imported, -1 for never, and when that import began.
        self.imported_at_ms: int = -1
        self.growth_since_ms: int = 0
        # Full imports begun so far.
        self.full_imports: int = 0
        # A request came for a subject whose foreign counts may have been evicted. Written by `Engine` too.
        self.is_full_import_wanted: bool = False
        # How far ahead anticipation reaches: two import intervals, as long as they are at the moment.
        self.anticipation_ms_max: int = 2 * tuning.import_interval_ms
        # How old counts of other regions are when an answer of the origin brings them, as the node that imports has
        # measured it; half an import interval at least.
        self.import_lag_ms: int = tuning.import_hot_interval_ms // 2
        # When the next import begins; in the past while one is under way.
        self.next_import_ms: int = 0

    def probable(self, ledger: LedgerView, wall_ms: int) -> int:
        """What other regions have probably accepted in a cell since the last import."""
        if ledger.growth is None or not self._anticipates:
            return 0
        return ledger.growth.expected(wall_ms, self.anticipation_ms_max, self.growth_since_ms)

    def until_import_ms(self, clock_ms: int) -> int:
        """How long until more is known about other regions: never 0, and never longer than an import interval."""
        interval_ms = self.anticipation_ms_max // 2
        until_ms = self.next_import_ms - clock_ms
        if until_ms <= 0 or until_ms > 2 * interval_ms:
            # An import is late, or the clock stepped back.
            until_ms = interval_ms
        return until_ms if until_ms > 0 else 1

    def age_ms(self, now_ms: int) -> int:
        """How old the last import is, -1 if there was none."""
        if self.imported_at_ms < 0:
            return -1
        age_ms = now_ms - self.imported_at_ms
        return age_ms if age_ms > 0 else 0
