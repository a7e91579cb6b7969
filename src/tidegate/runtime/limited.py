"""The decorator `limited`, without the call to the limiter: what it accepts, what it asks for, what it raises.

Pure, used by both drivers. A mistake in the arguments or in the kind of function is raised when the function is
decorated, not at the first call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tidegate.core.model import Decision, Limit, Request, checked_int, checked_name
from tidegate.core.quota import format_duration
from tidegate.errors import InvalidInput, LimitExceeded
from tidegate.runtime.waiting import checked_timeout

__all__ = ["ALL", "LimitedCall", "check_coroutine_function", "check_decisions", "check_plain_function"]

# The identifier of every call when there is no `key`: one counter for all.
ALL: Final = "all"

LIMITS_EXPECTED: Final = 'one or more limits, as in limited(Limit("100/minute", namespace="email.send"))'
KEY_EXPECTED: Final = (
    "a function that takes the arguments of the call and returns the identifier, or None for one counter"
)
IDENTIFIER_EXPECTED: Final = "a function that returns the identifier, a str of 1 to 512 characters"
COST_EXPECTED: Final = (
    "an int of at least 0, or a function that takes the arguments of the call and returns one"
)


class LimitedCall:
    """The arguments of `limited`, checked once, and what follows from them for each call."""

    def __init__(
        self,
        limits: Sequence[object],
        key: Callable[..., str] | None,
        cost: int | Callable[..., int],
        timeout: float | None,
    ) -> None:
        if not limits:
            raise InvalidInput("limits", limits, LIMITS_EXPECTED)
        self._limits: list[Limit] = []
        for limit in limits:
            if not isinstance(limit, Limit):
                raise InvalidInput("limits", limit, LIMITS_EXPECTED)
            self._limits.append(limit)
        if key is not None and not callable(key):
            raise InvalidInput("key", key, KEY_EXPECTED)
        if not callable(cost):
            if isinstance(cost, bool) or not isinstance(cost, int):
                raise InvalidInput("cost", cost, COST_EXPECTED)
            checked_int("cost", cost, 0)
        checked_timeout(timeout)
        self._key = key
        self._cost = cost
        self.timeout = timeout

    def requests(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Request]:
        """What one call asks of the limiter: all limits, for the same identifier and cost."""
        identifier = ALL
        if self._key is not None:
            found = self._key(*args, **kwargs)
            try:
                identifier = checked_name("key", found)
            except InvalidInput:
                raise InvalidInput("key", found, IDENTIFIER_EXPECTED) from None
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        return [Request(limit, identifier, cost) for limit in self._limits]


def check_decisions(requests: Sequence[Request], decisions: Sequence[Decision]) -> None:
    """Raise `LimitExceeded` unless everything was allowed."""
    if all(decisions):
        return
    exceeded = LimitExceeded("", decisions)
    denial = exceeded.decision
    request = requests[0]
    text = f"{request.identifier!r} is over {denial.limit} in {denial.limit.namespace!r}"
    if denial.retry_after_ms is None:
        text = f"{text}: a cost of {request.cost} never fits"
    else:
        text = f"{text}: retry in {format_duration(denial.retry_after_ms)}"
    raise LimitExceeded(text, decisions)


def _innermost(function: object) -> object:
    """The function that runs: inside functools.partial, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 - the method itself is wanted, not whether there is one


def _refuse_uncallable(function: object) -> object:
    """The innermost function, or a TypeError for what neither driver can decorate."""
    if not callable(function):
        if isinstance(function, classmethod):
            raise TypeError("limited: put @classmethod above the decorator, not below it")
        raise TypeError(f"limited: {function!r} is not a function")
    innermost = _innermost(function)
    if inspect.isclass(innermost):
        raise TypeError(
            f"limited: {innermost!r} is a class, and decorating it would make it a function; decorate a method of it"
        )
    if inspect.isgeneratorfunction(innermost) or inspect.isasyncgenfunction(innermost):
        raise TypeError(
            f"limited: {function!r} is a generator function, whose body does not run when it is called; "
            "call `limit` inside it"
        )
    return innermost


def check_plain_function(function: object) -> None:
    """Refuse, for a `Limiter`, what is not a plain function."""
    if inspect.iscoroutinefunction(_refuse_uncallable(function)):
        raise TypeError(f"limited: {function!r} is a coroutine function; decorate it with an AsyncLimiter")


def check_coroutine_function(function: object) -> None:
    """Refuse, for an `AsyncLimiter`, what is not a coroutine function."""
    if not inspect.iscoroutinefunction(_refuse_uncallable(function)):
        raise TypeError(
            f"limited: {function!r} is not a coroutine function (async def); decorate it with a Limiter"
        )
