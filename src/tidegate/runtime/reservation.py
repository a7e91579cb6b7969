"""`Reservation` for threads and `AsyncReservation` for tasks: cost that is kept until it is known what was used.

Neither takes or counts anything itself: the limiter that made it does, when its block begins and ends. What both share
is here, and needs no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from tidegate.core.gate import checked_requests
from tidegate.core.model import Decision, Limit, Request, checked_int
from tidegate.errors import InvalidInput, TooManyReservations
from tidegate.runtime.limited import check_decisions

__all__ = ["AsyncReservation", "Item", "Reservation", "Taken", "checked_life_ms", "merged"]

Item = tuple[Limit, str, int]

# What a crashed process had reserved is blocked for this long at most.
LIFE_S_MAX: Final = 86_400.0
LIFE_EXPECTED: Final = "seconds, more than 0 and at most 86400 (a day), or None for the shortest window"


class Taken(NamedTuple):
    """A reservation, or its refusal."""

    name: str
    """Names its hold at the origin. Empty if it was refused."""
    items: list[Item]
    """One for each counter: limits with the same counter are one item."""
    decisions: list[Decision]
    """In the order of the requests. None of items that there are: the workspace may hold no more reservations."""
    until_ms: int

    def check_room(self) -> None:
        """Raise `TooManyReservations` if that is why it was refused."""
        if self.items and not self.decisions:
            raise TooManyReservations(self.items[0][0].workspace)

    def for_requests(self, requests: Sequence[Request], shadows: Iterable[Decision]) -> Taken:
        """The same with a decision for each request: that of its counter, or of `shadows`."""
        found = {(item[0].key, item[1]): each for item, each in zip(self.items, self.decisions, strict=True)}
        enforced = [found[limit.key, identifier] for limit, identifier, _ in requests if not limit.shadow]
        return self._replace(decisions=in_order(requests, enforced, shadows))


def in_order(
    requests: Sequence[Request], enforced: Iterable[Decision], shadows: Iterable[Decision]
) -> list[Decision]:
    """Decisions about limits that are enforced, and about those in shadow mode, in the order of the requests."""
    left, watched = iter(enforced), iter(shadows)
    return [next(watched if request.limit.shadow else left) for request in requests]


class Ending(NamedTuple):
    """The result of ending a reservation."""

    is_known: bool
    """False: there is no such reservation any more, and nothing was counted."""
    is_repeated: bool
    """It had ended before: nothing was counted now."""


def checked_life_ms(life: object, requests: Sequence[Request]) -> int:
    """How long a reservation lasts: as given, or the shortest window of its limits."""
    if life is None:
        return min(int(LIFE_S_MAX * 1000), *(request.limit.duration_ms for request in requests))
    if isinstance(life, bool) or not isinstance(life, (int, float)) or not 0 < life <= LIFE_S_MAX:
        raise InvalidInput("life", life, LIFE_EXPECTED)
    return max(1, int(life * 1000))


def merged(requests: Sequence[Item]) -> list[Item]:
    """One item for each counter, with the lowest quota and all costs together."""
    found: dict[tuple[object, str], Item] = {}
    for limit, identifier, cost in requests:
        place = (limit.key, identifier)
        held = found.get(place)
        if held is None:
            found[place] = (limit, identifier, cost)
        else:
            lowest = held[0] if held[0].quota <= limit.quota else limit
            found[place] = (lowest, identifier, held[2] + cost)
    return list(found.values())


TakingT = TypeVar("TakingT")
EndingT = TypeVar("EndingT")


class _Block(Generic[TakingT, EndingT]):
    """The state of a block with a reservation, which `take` and `end` take and end: at once, or as coroutines."""

    def __init__(
        self,
        requests: Sequence[object],
        life: object,
        take: Callable[[list[Request], int], TakingT],
        end: Callable[[Taken, list[Item]], EndingT],
    ) -> None:
        self._requests = checked_requests(requests)
        if not self._requests:
            raise InvalidInput("requests", requests, "at least one Request(limit, identifier, estimate)")
        self._life_ms = checked_life_ms(life, self._requests)
        self._take_now = take
        self._end_now = end
        self._taken: Taken | None = None
        # What was used, for each request; None until it is known.
        self._actual: list[int] | None = None

    @property
    def decisions(self) -> list[Decision]:
        """One decision for each limit, as of the beginning of the block."""
        return [] if self._taken is None else list(self._taken.decisions)

    def settle(self, *actual: int) -> None:
        """Count this at the end of the block: one number for all limits, or one for each, in their order.

        Less than the estimate frees the rest; more counts beyond the limit, because it is spent. The last call counts.
        """
        if len(actual) not in (1, len(self._requests)):
            expected = f"one number, or one for each of {len(self._requests)} limits"
            raise InvalidInput("actual", actual, expected)
        costs = [checked_int("actual", each, 0) for each in actual]
        self._actual = costs * len(self._requests) if len(costs) == 1 else costs

    def release(self) -> None:
        """Count nothing at the end of the block."""
        self.settle(0)

    def _begin(self, taken: Taken) -> None:
        check_decisions(self._requests, taken.decisions)
        self._taken = taken

    def _end(self, error: BaseException | None) -> tuple[Taken, list[Item]]:
        assert self._taken is not None
        if self._actual is None:
            # A block that raised releases it; one that ended without `settle` counts its estimate.
            self._actual = [0 if error is not None else request.cost for request in self._requests]
        items = [
            (request.limit, request.identifier, actual)
            for request, actual in zip(self._requests, self._actual, strict=True)
            if not request.limit.shadow
        ]
        return self._taken, merged(items)


class Reservation(_Block[Taken, object]):
    """A block of a thread that holds a reservation: `with limiter.reserve(limit, identifier, estimate) as r`."""

    def __enter__(self) -> Self:
        self._begin(self._take_now(self._requests, self._life_ms))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_now(*self._end(error))


class AsyncReservation(_Block[Coroutine[Any, Any, Taken], Coroutine[Any, Any, object]]):
    """A block of a task that holds a reservation: `async with limiter.reserve(limit, identifier, estimate) as r`."""

    async def __aenter__(self) -> Self:
        self._begin(await self._take_now(self._requests, self._life_ms))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_now(*self._end(error))
