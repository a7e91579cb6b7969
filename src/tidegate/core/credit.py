"""Credit, the node's side: what a node may accept of a subject without asking, and the message that asks for more.

The laws (docs/adr/0015-credit.md):
- One message of a subject is in flight at a time. What comes meanwhile and cannot be decided joins the next one.
- Credit falls to what the message keeps (`held`) when the message leaves: the origin may give the rest to others from
  the moment that it reads it. Only the answer to the latest message raises it again.
- The life of credit counts from before the message was sent, by a clock that never steps back (`clock_ms`, not the time
  of requests), and ends at the origin a margin later. So a node never spends what the origin counts no more.
- Credit is spent only under a quota no lower than the one it was granted under, and at an instant no older. Nor further
  ahead than credit lives, which only a request with a time of its own can be: its cells were not read.

`judge` says what becomes of a waiting request; the engine knows the cells and does it. `windows.py` has the formula.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.grants import OUTDATED, CellPart, CreditReply, CreditRequest, GrantRules, Run

__all__ = [
    "ACCEPT",
    "ASK_AGAIN",
    "DENY",
    "DENY_HELD",
    "RUNS_MAX",
    "WAIT",
    "Credit",
    "Waiter",
    "retry_held_ms",
    "stuck_of",
]

# What becomes of a waiting request.
ACCEPT: Final = 0  # spend its cost
DENY: Final = 1  # the window is full, counting what others' waiting requests were granted
DENY_HELD: Final = 2  # it would fit, but others hold the room and did not give it back in time
WAIT: Final = 3  # others hold the room and were asked for it: ask again in a moment
ASK_AGAIN: Final = 4  # the message did not ask for this request: the next one does, at once

# Runs of one message. What waits beyond them waits for the next: a message has a bounded size and costs the origin a
# bounded time, however many instants and costs a caller sends.
RUNS_MAX: Final = 32

# Bursts are measured over this long: a subject that is busy needs about one message in that time, so that thousands of
# them cost a small part of a core. More would only hold back what others have to ask for.
BURST_MS: Final = 1_000
# With each such span the remembered burst loses one part in so many: half of it is left after two seconds.
FADE: Final = 4
# After so many spans nothing worth asking for is left of any burst.
FADED_SPANS: Final = 1_024
# Credit for three times the best burst: a busy subject reports every two seconds, and traffic may grow meanwhile.
GROWTH: Final = 3
# The next message leaves when less than one part in so many is left: many round trips before it is spent.
LOW: Final = 4
# Before its bursts are known a node asks for more than an average cost only if that is at most one part in so many of
# the limit: of a small one it leaves most.
SMALL: Final = 16


@mypyc_attr(acyclic=True)
class Waiter:
    """A request that waits for an answer of the origin. A cost of 0 waits for the counts only."""

    __slots__ = ("asked", "at_ms", "cost", "is_joint", "quota", "since_ms")

    def __init__(self, at_ms: int, cost: int, quota: int, since_ms: int, is_joint: bool = False) -> None:
        self.at_ms: Final[int] = at_ms
        self.cost: Final[int] = cost
        self.quota: Final[int] = quota
        # Since when it waits, by the clock of the driver.
        self.since_ms: Final[int] = since_ms
        # It is part of a batch that needs other subjects too.
        self.is_joint: Final[bool] = is_joint
        # The number of the last message that asked for it. Written by `plan_message`.
        self.asked: int = 0


@final
@mypyc_attr(acyclic=True)
class Credit:
    """What a node holds of one subject."""

    __slots__ = (
        "_average",
        "_burst",
        "_burst_at",
        "_burst_best",
        "_burst_count",
        "_burst_last",
        "_quota_min",
        "_sequence",
        "as_of_ms",
        "before_ms",
        "failed_until_ms",
        "in_flight",
        "is_dirty",
        "is_recalled",
        "number",
        "quota",
        "sent_at_ms",
        "sent_quota",
        "since_ms",
        "spare",
        "spent",
        "until_ms",
        "waiting",
        "wanted",
    )

    def __init__(self) -> None:
        # First what every decision compares: unspent credit, until when it lives, the lowest quota and the oldest
        # instant that it may be spent for, and the one that is too far ahead. Written by `spend`, `plan_message` and
        # `apply_reply`.
        self.spare: int = 0
        self.until_ms: int = -1
        self.quota: int = 0
        self.since_ms: int = 0
        self.before_ms: int = 0
        # Requests that wait, in order; None for none, and then credit may be spent at once.
        self.waiting: list[Waiter] | None = None

        # The number of the latest message; whether its answer is awaited, and what it said.
        self.number: int = 0
        self.in_flight: bool = False
        self.sent_at_ms: int = 0
        self.sent_quota: int = 0
        # The instant of the latest message that was answered: from then on, up to `before_ms`, a request of cost 0
        # needs none.
        self.as_of_ms: int = 0
        # Spent since it left: not reported by it, so part of what it is granted.
        self.spent: int = 0
        # What it wanted in advance. When little of that is left, the next one should leave.
        self.wanted: int = 0
        # A message got no answer: until then requests do not wait for another one.
        self.failed_until_ms: int = -1
        # Counts to report, or credit that the origin may still count and this node has no more.
        self.is_dirty: bool = False
        # The origin asked for what is not needed at once. Cleared by the message that answers.
        self.is_recalled: bool = False

        # Cost accepted in the running span of `BURST_MS`, in the one before, and the best one, fading.
        self._burst_at: int = 0
        self._burst: int = 0
        self._burst_count: int = 0
        self._burst_last: int = 0
        self._burst_best: int = 0
        # The average cost in the last span that had any.
        self._average: int = 1
        # The lowest quota that the cell of `_sequence` was asked for with: nothing is wanted above it in advance.
        self._sequence: int = -1
        self._quota_min: int = 0

    # -- the local path

    def can_spend(self, cost: int, quota: int, at_ms: int, clock_ms: int) -> bool:
        """Whether a request may be accepted at once. The caller has seen that it fits what is known."""
        return (
            self.spare >= cost
            and clock_ms < self.until_ms
            and quota >= self.quota
            and self.since_ms <= at_ms < self.before_ms
            and self.waiting is None
        )

    def covers(self, cost: int, quota: int, at_ms: int, clock_ms: int) -> bool:
        """`can_spend`; for a cost of 0, whether the origin has answered about this time within the life of credit."""
        if cost > 0:
            return self.can_spend(cost, quota, at_ms, clock_ms)
        return clock_ms < self.until_ms and self.as_of_ms <= at_ms < self.before_ms

    def spend(self, cost: int, clock_ms: int) -> None:
        """A request was accepted: its cost is a count now, and unspent credit no more."""
        self.spare -= cost
        self.spent += cost
        self.is_dirty = True
        if clock_ms - self._burst_at >= BURST_MS:
            self._turn(clock_ms)
        self._burst += cost
        self._burst_count += 1

    def count_without(self, cost: int, clock_ms: int) -> None:
        """A request was accepted without credit, because the origin does not answer: it is only to be reported."""
        self.spare += cost
        self.spent -= cost
        self.spend(cost, clock_ms)

    def _turn(self, clock_ms: int) -> None:
        """A new span begins: remember the best one, less what it has faded since."""
        spans = (clock_ms - self._burst_at) // BURST_MS
        best = self._burst if self._burst > self._burst_best else self._burst_best
        if spans >= FADED_SPANS:
            best = 0
        while spans > 0 and best > 0:
            spans -= 1
            best -= (best + FADE - 1) // FADE
        if self._burst_count > 0:
            self._average = (self._burst + self._burst_count - 1) // self._burst_count
        self._burst_last = self._burst if clock_ms - self._burst_at < 2 * BURST_MS else 0
        self._burst_best = best
        self._burst = 0
        self._burst_count = 0
        self._burst_at = clock_ms - clock_ms % BURST_MS

    def want(self, clock_ms: int, quota: int, advance: int) -> int:
        """How much credit is useful: `advance` average costs, one if the quota is small, or enough for three times the
        best recent span."""
        if clock_ms - self._burst_at >= BURST_MS:
            self._turn(clock_ms)
        average = self._average
        if self._burst_count > 0:
            average = (self._burst + self._burst_count - 1) // self._burst_count
        best = self._burst if self._burst > self._burst_last else self._burst_last
        if self._burst_best > best:
            best = self._burst_best
        least = advance * average
        if SMALL * least > quota:
            least = average
        return GROWTH * best if GROWTH * best > least else least

    # -- waiting

    def wait(self, waiter: Waiter) -> None:
        """Queue a request that cannot be decided yet."""
        if self.waiting is None:
            self.waiting = [waiter]
        else:
            self.waiting.append(waiter)

    def keep_waiting(self, kept: list[Waiter]) -> None:
        """The others were decided."""
        self.waiting = kept or None

    # -- messages

    def is_low(self) -> bool:
        """Whether a message should leave before the credit is spent: a small part of what is useful is left."""
        return LOW * self.spare < self.wanted and not self.in_flight

    def sequence_of(self, now_ms: int, duration_ms: int) -> int:
        """The cell that the next message is about: that of the first request that waits, or the running one."""
        return (now_ms if self.waiting is None else self.waiting[0].at_ms) // duration_ms

    def plan_message(
        self,
        digest: bytes,
        writer: str,
        number: int,
        duration_ms: int,
        cells: tuple[CellPart, ...],
        now_ms: int,
        clock_ms: int,
        rules: GrantRules,
        can_be_recalled: bool = True,
    ) -> CreditRequest:
        """The next message, which must leave after this call. `cells` begins with `sequence_of` and the one before.

        A node that cannot be reached by a recall at the moment asks for nothing in advance.
        """
        sequence = cells[0].sequence
        runs, need, joint, quota, as_of_ms = self._plan_runs(number, sequence, now_ms, duration_ms)
        if self._sequence != sequence:
            self._sequence = sequence
            self._quota_min = 0
        if quota == 0:
            quota = self._quota_min or self.quota
        if self._quota_min == 0 or quota < self._quota_min:
            self._quota_min = quota
        want = 0
        # In advance only in the running cell: in another one, which requests with their own time ask for, there may be
        # room that the running one does not have.
        is_running = sequence == now_ms // duration_ms
        if is_running and not self.is_recalled and can_be_recalled and quota <= self._quota_min:
            want = self.want(clock_ms, quota, rules.advance)
        held = self.spare if clock_ms < self.until_ms else 0
        if quota < self.quota or (need and as_of_ms < self.since_ms):
            held = 0  # what was granted under a higher quota, or for later instants, is worth nothing to what waits
        if self.is_recalled:
            held = self._needed_of(held)
        elif held > need + want:
            held = need + want
        self.spare = held
        if quota > self.quota:
            # From now on the origin lets others come up to this quota: a lower one may not be served from here.
            self.quota = quota
        self.number = number
        self.in_flight = True
        self.sent_at_ms = clock_ms
        self.sent_quota = quota
        self.spent = 0
        self.wanted = want
        self.is_dirty = False
        self.is_recalled = False
        return CreditRequest(
            digest,
            writer,
            number,
            duration_ms,
            cells,
            quota,
            as_of_ms,
            runs,
            want,
            held,
            rules.life_ms,
            0,
            0,
            0,
            joint,
        )

    def _plan_runs(
        self, number: int, sequence: int, now_ms: int, duration_ms: int
    ) -> tuple[tuple[Run, ...], int, int, int, int]:
        """What waits in this cell, as runs; their cost together, the part of it that belongs to batches, the lowest
        quota, the newest instant."""
        waiting = self.waiting
        if waiting is None:
            return (), 0, 0, 0, now_ms
        runs: list[Run] = []
        need = 0
        joint = 0
        quota = 0
        as_of_ms = waiting[0].at_ms
        at_ms = cost = count = 0
        for waiter in waiting:
            if waiter.at_ms // duration_ms != sequence or (need and need + waiter.cost > waiter.quota):
                break
            if waiter.cost == 0:
                waiter.asked = number
                continue
            if count and waiter.at_ms == at_ms and waiter.cost == cost:
                count += 1
            else:
                if count:
                    runs.append(Run(at_ms, cost, count))
                    if len(runs) == RUNS_MAX:
                        count = 0
                        break
                at_ms, cost, count = waiter.at_ms, waiter.cost, 1
            waiter.asked = number
            need += waiter.cost
            if waiter.is_joint:
                joint += waiter.cost
            if quota == 0 or waiter.quota < quota:
                quota = waiter.quota
            if at_ms > as_of_ms:
                as_of_ms = at_ms
        if count:
            runs.append(Run(at_ms, cost, count))
        return tuple(runs), need, joint, quota, as_of_ms

    def _needed_of(self, spare: int) -> int:
        """The part of `spare` that waiting requests can be accepted with.

        One that needs more than there is keeps nothing: two nodes with a part each would wait for each other.
        """
        needed = 0
        for waiter in self.waiting or ():
            if needed + waiter.cost <= spare:
                needed += waiter.cost
        return needed

    def apply_reply(self, request: CreditRequest, reply: CreditReply) -> bool:
        """The answer came. False when it is not the latest message's: then only its totals are worth something."""
        if request.number != self.number or not self.in_flight:
            return False
        self.in_flight = False
        if reply.granted != OUTDATED:
            left = reply.granted - self.spent
            self.spare = left if left > 0 else 0
            self.until_ms = self.sent_at_ms + request.life_ms
            self.quota = request.quota
            self.as_of_ms = request.as_of_ms
            self.before_ms = request.as_of_ms + request.life_ms
            if request.held == 0 or request.as_of_ms > self.since_ms:
                self.since_ms = request.as_of_ms
        return True

    def keep_no_more_than(self, held: int) -> None:
        """Of a grant for another cell than the running one, keep only what the node had before."""
        if self.spare > held:
            self.spare = held
            self.is_dirty = True

    def fail_message(self, number: int) -> bool:
        """It is not known whether it arrived. What the node kept is covered either way: by it or by the one before.

        False when a later message has left meanwhile.
        """
        if number != self.number or not self.in_flight:
            return False
        self.in_flight = False
        self.is_dirty = True
        return True

    def judge(
        self, waiter: Waiter, effective: int, reply: CreditReply, clock_ms: int, is_patient: bool, stuck: int
    ) -> int:
        """What becomes of a waiting request after `reply`; `effective` is what counts with it, by all that is known.

        `is_patient`: it may wait for others to give back what they hold, but for `stuck`, which is not given back.
        """
        if effective > waiter.quota:
            return DENY
        was_asked = waiter.asked == self.number
        # One that is older than the grant sees more of the previous cell: it must fit beside all that others hold.
        if (
            self.spare >= waiter.cost
            and clock_ms < self.until_ms
            and waiter.quota >= self.quota
            and waiter.at_ms < self.before_ms
            and (waiter.at_ms >= self.since_ms or (was_asked and effective + reply.spare <= waiter.quota))
        ):
            return ACCEPT
        if not was_asked or waiter.quota > self.sent_quota:
            return ASK_AGAIN
        if self.spare >= waiter.cost and clock_ms >= self.until_ms:
            return ASK_AGAIN  # this process did not run for so long that what it was granted has ended
        if effective + reply.firm > waiter.quota:
            return DENY
        if not is_patient or effective + reply.firm + stuck > waiter.quota:
            return DENY_HELD
        return WAIT

    # -- recall

    def recall(self) -> None:
        """The origin asks for what is not needed at once: the next message says what is. Send it now."""
        self.is_recalled = True


def stuck_of(reply: CreditReply, rules: GrantRules, patience_ms: int) -> int:
    """What holders of credit that do not answer are taken to keep until its life ends.

    Nothing where a round trip is so slow that requests wait longer than holders have to answer: these have needed that
    long to receive the recall and to reply.
    """
    return reply.stuck if patience_ms <= rules.unanswered_ms else 0


def retry_held_ms(reply: CreditReply, rules: GrantRules, patience_ms: int) -> int:
    """When to come back after `DENY_HELD`: when more is known.

    Holders that do not answer lose what they hold then; those that were just asked have answered by then, or are known
    not to.
    """
    if stuck_of(reply, rules, patience_ms) > 0:
        return reply.stuck_ms
    return rules.unanswered_ms if rules.unanswered_ms > patience_ms else patience_ms
