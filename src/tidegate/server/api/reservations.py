"""`reserve`, `settle` and `release`: cost that is kept until it is known what was used.

The id of a reservation names its hold and its counters, so that every node can end it, also after a restart of the one
that took it. It is not a secret: an id that a client makes up can only name counters of its own workspace, in
namespaces that its key may limit in.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.core.model import DURATION_MS_MAX, NAME_LENGTH_MAX, Limit, Request, make_limit
from tidegate.errors import DependencyError, TooManyReservations
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.reservation import Ending, Item, Taken, merged
from tidegate.server.api import problems
from tidegate.server.api.admission import Admission, Call, Steps, answer, wait
from tidegate.server.api.operations import LimitOperations, MultiLimitItem, item_answers
from tidegate.server.api.plans import Plan
from tidegate.server.api.problems import Refusal, invalid
from tidegate.server.api.schema import (
    LIFE_MS_MAX,
    RESERVED_MAX,
    decode_release,
    decode_reserve,
    decode_settle,
)
from tidegate.server.messages import Route

PREFIX: Final = "rlrs_"
# The writer of a hold: a node and a number. A name without the number would be the credit of a node.
NAME: Final = re.compile(r"[^+]{1,128}\+[0-9]{1,19}")


class ReserveData(msgspec.Struct, rename="camel"):
    """The answer to `reserve`. One that does not fit is not an error: `passed` is false."""

    passed: bool
    limits: list[MultiLimitItem]
    reservation_id: str | UnsetType = UNSET
    expires: int | UnsetType = UNSET


class SettleData(msgspec.Struct):
    """The answer to `settle` and `release`. `repeated`: it had ended before, and nothing was counted now."""

    repeated: bool


class Counter(msgspec.Struct, array_like=True):
    """One limit of a reservation, in its id."""

    namespace_id: str
    identifier: str
    duration_ms: int
    quota: int
    is_shadow: bool


class Named(msgspec.Struct, array_like=True):
    """What an id says."""

    name: str
    counters: list[Counter]


class ReservationOperations:
    """The operations on reservations."""

    def __init__(self, limiter: AsyncLimiter, limits: LimitOperations, admission: Admission) -> None:
        self._limiter = limiter
        self._limits = limits
        self._admission = admission

    def routes(self) -> list[Route]:
        return self._admission.routes(
            {"reserve": self.reserve, "settle": self.settle, "release": self.release}
        )

    def reserve(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_reserve, body)
        caller = yield from self._admission.admit(call, len(wanted.limits))
        namespaces = yield from self._limits.namespaces(caller, wanted.limits)
        plans: list[Plan] = []
        requests: list[Request] = []
        for item in wanted.limits:
            namespace = namespaces[item.namespace]
            plan = self._limits.plans.find(
                caller.workspace.id, namespace, item.identifier, item.limit, item.duration
            )
            plans.append(plan)
            requests.append(Request(plan.limit, item.identifier, 1 if item.cost is UNSET else item.cost))
        life_ms = wanted.life
        if life_ms is UNSET:
            life_ms = min(LIFE_MS_MAX, *(plan.limit.duration_ms for plan in plans))
        taken = yield from wait(self._take_now, requests, life_ms)
        limits = item_answers(wanted.limits, plans, taken.decisions)
        data = ReserveData(all(taken.decisions), limits)
        if data.passed:
            data.reservation_id = _encoded(taken.name, requests)
            data.expires = taken.until_ms
        answer(call, data)

    def settle(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_settle, body)
        yield from self._end(call, wanted.reservation_id, wanted.costs)

    def release(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_release, body)
        yield from self._end(call, wanted.reservation_id, [0])

    def _end(self, call: Call, reservation_id: str, costs: list[int]) -> Steps[None]:
        named = _decoded(reservation_id)
        if named is None:
            yield from self._admission.admit(call, 1)
            raise Refusal(problems.RESERVATION_NOT_FOUND, "This is not an id that `reserve` has returned.")
        if len(costs) not in (1, len(named.counters)):
            problem = f"must have one item, or {len(named.counters)}: one for each limit"
            raise invalid("/properties/costs", f"'costs' {problem}", f"costs {problem}")
        caller = yield from self._admission.admit(call, len(named.counters))
        items: list[Item] = []
        for index, counter in enumerate(named.counters):
            namespace = yield from self._admission.namespace(caller, counter.namespace_id, "limit")
            if not counter.is_shadow:
                limit: Limit = make_limit(
                    counter.quota, counter.duration_ms, namespace.id, caller.workspace.id
                )
                items.append((limit, counter.identifier, costs[index if len(costs) > 1 else 0]))
        ending = Ending(True, False)
        if items:
            ending = yield from wait(self._end_now, named.name, merged(items))
        if not ending.is_known:
            detail = "There is no such reservation any more. Nothing was counted."
            raise Refusal(problems.RESERVATION_NOT_FOUND, detail)
        answer(call, SettleData(ending.is_repeated))

    async def _take_now(self, requests: list[Request], life_ms: int) -> Taken:
        try:
            return await self._limiter.take(requests, life_ms)
        except TooManyReservations as error:
            detail = (
                "The workspace holds as many live reservations as it may: settle or release some of them."
            )
            raise Refusal(problems.TOO_MANY_RESERVATIONS, detail, headers=b"retry-after: 1\r\n") from error

    async def _end_now(self, name: str, items: list[Item]) -> Ending:
        try:
            return await self._limiter.end(name, items)
        except DependencyError as error:
            detail = "The origin (Redis) does not answer. Try again: nothing is counted twice."
            raise Refusal(problems.SERVICE_UNAVAILABLE, detail) from error


def _encoded(name: str, requests: list[Request]) -> str:
    counters = [
        Counter(limit.namespace, identifier, limit.duration_ms, limit.quota, limit.shadow)
        for limit, identifier, _ in requests
    ]
    packed = msgspec.msgpack.encode(Named(name or "none+0", counters))
    return PREFIX + urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def _decoded(text: str) -> Named | None:
    """What an id says; None for one that a client has made up."""
    try:
        packed = text.removeprefix(PREFIX).encode("ascii")
        named = msgspec.msgpack.decode(urlsafe_b64decode(packed + b"=" * (-len(packed) % 4)), type=Named)
    except (ValueError, msgspec.MsgspecError):
        return None
    is_ours = (
        text.startswith(PREFIX)
        and NAME.fullmatch(named.name) is not None
        and 1 <= len(named.counters) <= RESERVED_MAX
        and all(map(_is_counter, named.counters))
    )
    return named if is_ours else None


def _is_counter(counter: Counter) -> bool:
    return (
        1 <= len(counter.namespace_id) <= NAME_LENGTH_MAX
        and 1 <= len(counter.identifier) <= NAME_LENGTH_MAX
        and 1_000 <= counter.duration_ms <= DURATION_MS_MAX
        and 0 <= counter.quota < 2**63
    )
