"""A warm `limit` or `multiLimit`: what it needs is in memory, and one call answers it.

Compiled with the core where that is possible (setup.py), and the same source without that. It knows neither msgspec nor
connections: what it calls is given. The checks are those of `LimitOperations.limit` and `multi_limit`, which have the
whole operations with their waits and refusals. A request that differs from the usual one in any way is left to them,
before anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.model import Decision, Limit
from tidegate.server.api.plans import Plan, Plans, Skips
from tidegate.server.catalog.view import Caller, Callers, NamespaceView
from tidegate.server.messages import JSON_LINE, Answer, Handler, Head, Stream
from tidegate.telemetry.topk import Thinning

if TYPE_CHECKING:
    from tidegate.server.api.activity import Activity, Sample
    from tidegate.server.api.recording import Followed

# Two names of 512 characters of four bytes fit. A larger body is refused or rare.
BODY_BYTES_MAX: Final = 5_120
# The same for a batch.
BATCH_BYTES_MAX: Final = 65_536
# Quotation marks of a body, or of an item of a batch, in which no property comes twice and no name holds one: without
# and with a cost.
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

    def __init__(
        self,
        decode: Callable[[bytes], Any],
        decode_batch: Callable[[bytes], list[Any]],
        fields_of: Callable[[Any], tuple[str, str, int, int, Any]],
        unset: object,
        *,
        kept_max: int = BODIES_MAX,
    ) -> None:
        """`decode` gives a `LimitBody`, `decode_batch` a list of them, or they raise; `unset` is the cost of one
        without."""
        self._decode: Final[Callable[[bytes], Any]] = decode
        self._decode_batch: Final[Callable[[bytes], list[Any]]] = decode_batch
        self.fields_of: Final[Callable[[Any], tuple[str, str, int, int, Any]]] = fields_of
        self.unset: Final[object] = unset
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
            namespace, identifier, quota, duration_ms, cost = self.fields_of(self._decode(body))
        except Exception:  # noqa: BLE001 - the whole operation decodes again, and says what is wrong
            return None
        is_one = cost is self.unset
        # A property that comes twice is refused: parsers differ in which one they use (`schema`).
        if body.count(b'"') != (MARKS if is_one else MARKS_WITH_COST):
            return None
        return Asked(namespace, identifier, quota, duration_ms, 1 if is_one else cost)

    def read_batch(self, body: bytes) -> list[Any] | None:
        """The items of a batch, with names that need no escaping in the answer; None if it is not a usual one. Batches
        are not remembered: what that saves in decoding, it costs in memory that is not in the cache."""
        if len(body) > BATCH_BYTES_MAX or body.find(b"\\") >= 0:
            return None
        try:
            return self._decode_batch(body)
        except Exception:  # noqa: BLE001 - the same
            return None


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
        attempt_many: Callable[[list[tuple[Limit, str, int]], int | None], list[Decision] | None],
        activity: Activity,
        thinning: Thinning,
        record_denial: Callable[[Plan, str, Decision, int, int, int], None],
        wait: Callable[[Head, str, Plan, str, int, Sample | None], Answer | Coroutine[Any, Any, Answer]],
        wait_batch: Callable[
            [Head, str, list[Any], list[Plan], list[tuple[Limit, str, int]], Sample | None],
            Answer | Coroutine[Any, Any, Answer],
        ],
        whole: Handler,
        whole_batch: Handler,
        test_mode: bool,
    ) -> None:
        """`wait` and `wait_batch` continue when memory cannot decide; `whole` and `whole_batch` are the whole
        operations; `test_mode`: a request may set its own time."""
        self._bodies: Final[Bodies] = bodies
        self._callers: Final[Callers] = callers
        self._plans: Final[Plans] = plans
        self._new_id: Final[Callable[[], str]] = new_id
        self._attempt: Final[Callable[[Limit, str, int, int | None], Decision | None]] = attempt
        self._attempt_many: Final[
            Callable[[list[tuple[Limit, str, int]], int | None], list[Decision] | None]
        ] = attempt_many
        self._activity: Final[Activity] = activity
        self._skips: Final[Skips] = activity.skips
        self._followed: Final[dict[str, Followed]] = activity.recording.followed
        self._thinning: Final[Thinning] = thinning
        self._record_denial: Final[Callable[[Plan, str, Decision, int, int, int], None]] = record_denial
        self._wait: Final[
            Callable[[Head, str, Plan, str, int, Sample | None], Answer | Coroutine[Any, Any, Answer]]
        ] = wait
        self._wait_batch: Final[
            Callable[
                [Head, str, list[Any], list[Plan], list[tuple[Limit, str, int]], Sample | None],
                Answer | Coroutine[Any, Any, Answer],
            ]
        ] = wait_batch
        self._whole: Final[Handler] = whole
        self._whole_batch: Final[Handler] = whole_batch
        self._test_mode: Final[bool] = test_mode

    def handle(self, head: Head, body: bytes) -> Answer | Stream | Coroutine[Any, Any, Answer]:
        """The handler of `limit`."""
        has_own_time = self._test_mode and head.test_time is not None
        answer = None if has_own_time else self.answer(head, body)
        return self._whole(head, body) if answer is None else answer

    def handle_batch(self, head: Head, body: bytes) -> Answer | Stream | Coroutine[Any, Any, Answer]:
        """The handler of `multiLimit`."""
        has_own_time = self._test_mode and head.test_time is not None
        answer = None if has_own_time else self.answer_batch(head, body)
        return self._whole_batch(head, body) if answer is None else answer

    def answer(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer] | None:
        """The answer, at once or after a wait; None if this is not the usual request."""
        caller = self._callers.recall(head.authorization)
        if caller is None or caller.is_metered:
            return None
        asked = self._bodies.find(body)
        if asked is None:
            return None
        namespace = self._namespace(caller, asked.namespace)
        if namespace is None:
            return None
        identifier = asked.identifier
        plan = self._plan(caller, namespace, identifier, asked.quota, asked.duration_ms)
        if plan is None:
            return None
        cost = asked.cost
        sample = self._sample()
        decision = self._attempt(plan.limit, identifier, cost, None)
        request_id = self._new_id()
        if decision is None:
            return self._wait(head, request_id, plan, identifier, cost, sample)
        now_ms = decision.decided_at_ms
        if not head.metrics_off:
            self.record(plan, identifier, cost, decision, now_ms, sample)
        return plan.answer(request_id, decision, now_ms, b"")

    def answer_batch(self, head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer] | None:
        """`answer`, for a batch."""
        caller = self._callers.recall(head.authorization)
        items = None if caller is None or caller.is_metered else self._bodies.read_batch(body)
        if caller is None or items is None:
            return None
        plans: list[Plan] = []
        requests: list[tuple[Limit, str, int]] = []
        begins: list[str] = []
        fields_of = self._bodies.fields_of
        unset = self._bodies.unset
        marks = 0
        namespace: NamespaceView | None = None
        last = ""
        begin = ""
        for item in items:
            name, identifier, quota, duration_ms, cost = fields_of(item)
            is_one = cost is unset
            marks += MARKS if is_one else MARKS_WITH_COST
            if namespace is None or name != last:
                namespace = self._namespace(caller, name)
                if namespace is None:
                    return None
                last = name
                begin = f'{{"namespace":"{name}","identifier":"'
            plan = self._plan(caller, namespace, identifier, quota, duration_ms)
            if plan is None:
                return None
            plans.append(plan)
            requests.append((plan.limit, identifier, 1 if is_one else cost))
            begins.append(begin)
        if body.count(b'"') != marks:  # as in `Bodies`: a property that comes twice
            return None
        sample = self._sample()
        decisions = self._attempt_many(requests, None)
        request_id = self._new_id()
        if decisions is None:
            return self._wait_batch(head, request_id, items, plans, requests, sample)
        passed = True
        texts: list[str] = []
        for i, decision in enumerate(decisions):
            passed = passed and decision.allowed
            texts.append(plans[i].item(begins[i], requests[i][1], decision))
        if not head.metrics_off:
            self.record_batch(requests, plans, decisions, passed, sample)
        meta = f'{{"meta":{{"requestId":"req_{request_id}"}},"data":{{"passed":'
        text = f'{meta}{"true" if passed else "false"},"limits":[{",".join(texts)}]}}}}'
        return 200, JSON_LINE, text.encode()

    def _sample(self) -> Sample | None:
        skips = self._skips
        if skips.left:
            skips.left -= 1
            return None
        return self._activity.begin()

    def _namespace(self, caller: Caller, name: str) -> NamespaceView | None:
        """A namespace that the caller may limit in; None if there is more to check."""
        namespace = caller.workspace.namespaces.get(name)
        if namespace is None or namespace.is_deleted:
            return None
        return namespace if caller.can_limit or caller.may("limit", namespace.id) else None

    def _plan(
        self, caller: Caller, namespace: NamespaceView, identifier: str, quota: int, duration_ms: int
    ) -> Plan | None:
        """The plan of what is asked for; None if there is more to find out."""
        if namespace.has_overrides and self._plans.cost(namespace, identifier):
            return None
        return self._plans.find(caller.workspace.id, namespace, identifier, quota, duration_ms)

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
        sample: Sample | None,
    ) -> None:
        """`record` for the items of a batch."""
        now_ms = decisions[0].decided_at_ms
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
