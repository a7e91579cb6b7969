"""A warm `limit`: what it needs is in memory, and one call answers it.

Compiled with the core where that is possible (setup.py), and the same source without that. It knows neither msgspec nor
connections: what it calls is given. The checks are those of `LimitOperations.limit`, which has the whole operation with
its waits and refusals. A request that differs from the usual one in any way is left to it, before anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.model import Decision, Limit
from tidegate.server.api.plans import Plan, Plans, Skips
from tidegate.server.catalog.view import Callers
from tidegate.server.messages import Answer, Handler, Head, Stream
from tidegate.telemetry.topk import Thinning

if TYPE_CHECKING:
    from tidegate.server.api.activity import Activity, Sample
    from tidegate.server.api.recording import Followed

# Two names of 512 characters of four bytes fit. A larger body is refused or rare.
BODY_BYTES_MAX: Final = 5_120
# Quotation marks of a body in which no property comes twice and no name holds one, without and with a cost.
MARKS: Final = 12
MARKS_WITH_COST: Final = 14
# Bodies that are remembered, in two generations of this many, and the longest of them: 12 MB with names of usual
# length, 32 MB at most.
BODIES_MAX: Final = 16_384
KEPT_BYTES_MAX: Final = 384
# Of bodies that are not remembered one in so many is. Those that come again are soon among them; those that do not
# cost little.
KEPT_OF: Final = 4


@final
@mypyc_attr(acyclic=True)
class Asked:
    """What a body asks for."""

    __slots__ = ("cost", "duration_ms", "identifier", "namespace", "quota")

    def __init__(self, namespace: str, identifier: str, quota: int, duration_ms: int, cost: int) -> None:
        self.namespace: Final[str] = namespace
        self.identifier: Final[str] = identifier
        self.quota: Final[int] = quota
        self.duration_ms: Final[int] = duration_ms
        self.cost: Final[int] = cost


@final
class Bodies:
    """What bodies ask for. Clients repeat them: one that asks for the same identifier sends the same bytes."""

    def __init__(self, decode: Callable[[bytes], Any], unset: object, *, kept_max: int = BODIES_MAX) -> None:
        """`decode` gives a `LimitBody`, whose cost may be `unset`, or raises."""
        self._decode: Final[Callable[[bytes], Any]] = decode
        self._unset: Final[object] = unset
        self._kept_max: Final[int] = kept_max
        self._recent: dict[bytes, Asked] = {}
        self._before: dict[bytes, Asked] = {}
        # How many were not remembered.
        self._new: int = 0

    def find(self, body: bytes) -> Asked | None:
        """What a body asks for; None if it is not a usual one."""
        asked = self._recent.get(body)
        if asked is not None:
            return asked
        asked = self._before.get(body)
        if asked is None:
            asked = self._read(body)
            self._new += 1
            if asked is None or self._new % KEPT_OF != 0 or len(body) > KEPT_BYTES_MAX:
                return asked
        if len(self._recent) >= self._kept_max:
            self._before = self._recent
            self._recent = {}
        self._recent[body] = asked
        return asked

    def _read(self, body: bytes) -> Asked | None:
        if len(body) > BODY_BYTES_MAX:
            return None
        try:
            item = self._decode(body)
        except Exception:  # noqa: BLE001 - the whole operation decodes again, and says what is wrong
            return None
        cost = item.cost
        is_one = cost is self._unset
        # A property that comes twice is refused: parsers differ in which one they use (`schema`).
        if body.count(b'"') != (MARKS if is_one else MARKS_WITH_COST):
            return None
        return Asked(item.namespace, item.identifier, item.limit, item.duration, 1 if is_one else cost)


@final
class WarmLimit:
    """One per server; used by the loop's thread only."""

    def __init__(
        self,
        bodies: Bodies,
        callers: Callers,
        plans: Plans,
        new_id: Callable[[], str],
        attempt: Callable[[Limit, str, int, int | None], Decision | None],
        activity: Activity,
        thinning: Thinning,
        record_denial: Callable[[Plan, str, Decision, int, int, int], None],
        wait: Callable[[Head, str, Plan, str, int, Sample | None], Answer | Coroutine[Any, Any, Answer]],
        whole: Handler,
        test_mode: bool,
    ) -> None:
        """`wait` continues when memory cannot decide; `whole` is the whole operation; `test_mode`: a request may set
        its own time."""
        self._bodies: Final[Bodies] = bodies
        self._callers: Final[Callers] = callers
        self._plans: Final[Plans] = plans
        self._new_id: Final[Callable[[], str]] = new_id
        self._attempt: Final[Callable[[Limit, str, int, int | None], Decision | None]] = attempt
        self._activity: Final[Activity] = activity
        self._skips: Final[Skips] = activity.skips
        self._followed: Final[dict[str, Followed]] = activity.recording.followed
        self._thinning: Final[Thinning] = thinning
        self._record_denial: Final[Callable[[Plan, str, Decision, int, int, int], None]] = record_denial
        self._wait: Final[
            Callable[[Head, str, Plan, str, int, Sample | None], Answer | Coroutine[Any, Any, Answer]]
        ] = wait
        self._whole: Final[Handler] = whole
        self._test_mode: Final[bool] = test_mode

    def handle(self, head: Head, body: bytes) -> Answer | Stream | Coroutine[Any, Any, Answer]:
        """The handler of `limit`."""
        has_own_time = self._test_mode and head.test_time is not None
        answer = None if has_own_time else self.answer(head, body)
        return self._whole(head, body) if answer is None else answer

    def answer(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer] | None:
        """The answer, at once or after a wait; None if this is not the usual request."""
        caller = self._callers.recall(head.authorization)
        if caller is None or caller.is_metered:
            return None
        asked = self._bodies.find(body)
        if asked is None:
            return None
        workspace = caller.workspace
        namespace = workspace.namespaces.get(asked.namespace)
        if (
            namespace is None
            or namespace.is_deleted
            or not (caller.can_limit or caller.may("limit", namespace.id))
        ):
            return None
        identifier = asked.identifier
        cost = asked.cost
        plans = self._plans
        if namespace.has_overrides and plans.cost(namespace, identifier):
            return None
        plan = plans.find(workspace.id, namespace, identifier, asked.quota, asked.duration_ms)
        skips = self._skips
        sample: Sample | None = None
        if skips.left:
            skips.left -= 1
        else:
            sample = self._activity.begin()
        decision = self._attempt(plan.limit, identifier, cost, None)
        request_id = self._new_id()
        if decision is None:
            return self._wait(head, request_id, plan, identifier, cost, sample)
        now_ms = decision.decided_at_ms
        if not head.metrics_off:
            self.record(plan, identifier, cost, decision, now_ms, sample)
        return plan.answer(request_id, decision, now_ms, b"")

    def record(
        self, plan: Plan, identifier: str, cost: int, decision: Decision, now_ms: int, sample: Sample | None
    ) -> None:
        """Count a decision of `limit`, and keep what the console shows of it."""
        if decision.exceeded:
            self.count(plan, identifier, decision, cost, now_ms)
        else:
            plan.counts.allowed += 1
        self._keep(plan, identifier, cost, not decision.exceeded, now_ms, sample)

    def record_batch(
        self,
        requests: list[tuple[Limit, str, int]],
        plans: list[Plan],
        decisions: list[Decision],
        passed: bool,
        now_ms: int,
        sample: Sample | None,
    ) -> None:
        """`record` for the items of a batch."""
        for i, decision in enumerate(decisions):
            plan = plans[i]
            _, identifier, cost = requests[i]
            self.count(plan, identifier, decision, cost, now_ms)
            # An item that fits, of a batch that does not, consumed nothing and was not denied by its own limit.
            if passed or not decision.allowed:
                self._keep(plan, identifier, cost, passed, now_ms, sample)
            elif sample is not None:
                self._activity.end(sample, (plan.limit.workspace, plan.namespace.name, identifier))

    def _keep(
        self, plan: Plan, identifier: str, cost: int, allowed: bool, now_ms: int, sample: Sample | None
    ) -> None:
        """Keep what the console shows of a decision."""
        followed = self._followed.get(identifier)
        if followed is None and sample is not None:
            followed = self._activity.follow(identifier)
        if followed is not None:
            followed.add(plan.limit, cost, allowed, now_ms)
        if sample is not None:
            self._activity.end(sample, (plan.limit.workspace, plan.namespace.name, identifier))

    def count(self, plan: Plan, identifier: str, decision: Decision, cost: int, now_ms: int) -> None:
        """Count one decision. What a limit in shadow mode would have denied counts as allowed."""
        if decision.allowed:
            plan.counts.allowed += 1
        else:
            plan.counts.denied += 1
        if decision.exceeded:
            weight = self._thinning.weight(now_ms // 1000)
            if weight:
                self._record_denial(plan, identifier, decision, cost, now_ms, weight)
