"""The door to the engine: arguments checked, one caller at a time, the time filled in.

Compiled with the rest of the core because it is on every caller's path. It owns no clock and no lock: both are
given, as callables. `acquire` and `release` must be those of a reentrant lock, or absent where one thread owns the
engine. A signal handler or a finalizer that calls in the middle of a decision, on the thread that is making it, is
refused: waiting would deadlock, and going on would let check and commit be seen apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from tidegate.core.engine import Engine, Need
from tidegate.core.model import LOCAL, Decision, Limit, Request, checked_int, checked_name
from tidegate.errors import Closed, InvalidInput, ReentrantCall

__all__ = ["Gate"]

LIMIT_EXPECTED: Final = 'a Limit, such as Limit("100/minute", namespace="email.send")'


REQUESTS_EXPECTED: Final = "Request(limit, identifier, cost) items"


def no_lock() -> bool:
    return True


def checked_request(item: object) -> Request:
    """`item` as a request that can be trusted, or an `InvalidInput`."""
    if not isinstance(item, Request):
        raise InvalidInput("requests", item, REQUESTS_EXPECTED)
    # Fields of a tuple of objects: compiled, those of a Request would be converted before they are looked at.
    fields: tuple[object, ...] = item
    limit, identifier, cost = fields
    if not isinstance(limit, Limit):
        raise InvalidInput("limit", limit, LIMIT_EXPECTED)
    name = checked_name("identifier", identifier)
    amount = checked_int("cost", cost, 0)
    return item if name is identifier and amount is cost else Request(limit, name, amount)


@final
class Gate:
    """One engine's door.

    `now_ns` gives Unix nanoseconds. `wake` is called, outside the lock, when a decision has left work for the
    background loops; `settle` when a read must come first: it reads, and returns the decision.
    """

    __slots__ = (
        "_acquire",
        "_busy",
        "_engine",
        "_locked",
        "_now_ns",
        "_release",
        "_settle",
        "_shut",
        "_wake",
    )

    def __init__(
        self,
        engine: Engine,
        now_ns: Callable[[], int],
        wake: Callable[[], object],
        settle: Callable[[Limit, str, int, int, Need], Decision],
        acquire: Callable[[], bool] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._engine: Final[Engine] = engine
        self._now_ns: Final[Callable[[], int]] = now_ns
        self._wake: Final[Callable[[], object]] = wake
        self._settle: Final[Callable[[Limit, str, int, int, Need], Decision]] = settle
        self._locked: Final[bool] = acquire is not None
        self._acquire: Final[Callable[[], object]] = acquire or no_lock
        self._release: Final[Callable[[], object]] = release or no_lock
        # True while a decision is being made, and for ever once it is shut. Read and written with the lock held.
        self._busy: bool = False
        self._shut: bool = False

    def reopened(self, acquire: Callable[[], bool], release: Callable[[], None]) -> Gate:
        """The same door with another lock: in a forked child, the old one may be held by a thread that is gone."""
        gate = Gate(self._engine, self._now_ns, self._wake, self._settle, acquire, release)
        gate._busy = gate._shut = self._shut
        return gate

    def shut(self) -> None:
        """No more decisions: call it inside `with gate`. What was decided before is all there will ever be."""
        self._shut = True

    def now_ms(self) -> int:
        """The time that a request without its own gets."""
        return self._now_ns() // 1_000_000

    def __enter__(self) -> None:
        """Keep everybody else out; every loop that touches the engine does so too."""
        if self._locked:
            self._acquire()
        if self._busy:
            self._refuse()
        self._busy = True

    def _refuse(self) -> None:
        if self._locked:
            self._release()
        if self._shut:
            raise Closed("this limiter was stopped; make a new one")
        raise ReentrantCall(
            "a decision was asked for in the middle of another one, by a signal handler or a finalizer"
        )

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        self._busy = self._shut
        if self._locked:
            self._release()

    def limit(self, limit: object, identifier: object, cost: object = 1, now_ms: object = None) -> Decision:
        """A decision, after reading the origin if that must come first."""
        if not isinstance(limit, Limit):
            raise InvalidInput("limit", limit, LIMIT_EXPECTED)
        if not isinstance(identifier, str):
            raise InvalidInput("identifier", identifier, "a str")
        amount = cost if type(cost) is int and cost >= 0 else checked_int("cost", cost, 0)
        at_ms = self._now_ns() // 1_000_000 if now_ms is None else checked_int("now_ms", now_ms, 0)
        if self._locked:
            self._acquire()
        if self._busy:
            self._refuse()
        self._busy = True
        try:
            answer = self._engine.decide(limit, identifier, amount, at_ms)
        finally:
            self._busy = False
            if self._locked:
                self._release()
        if self._engine.pending.is_urgent:
            self._wake()
        if isinstance(answer, Decision):
            return answer
        return self._settle(limit, identifier, amount, at_ms, answer)

    def ask(self, limit: object, identifier: object, cost: object, now_ms: object) -> Decision | Need:
        """A decision, or what must be read first."""
        if not isinstance(limit, Limit):
            raise InvalidInput("limit", limit, LIMIT_EXPECTED)
        if not isinstance(identifier, str):
            raise InvalidInput("identifier", identifier, "a str")
        amount = cost if type(cost) is int and cost >= 0 else checked_int("cost", cost, 0)
        at_ms = self._now_ns() // 1_000_000 if now_ms is None else checked_int("now_ms", now_ms, 0)
        return self.decide(limit, identifier, amount, at_ms, LOCAL)

    def attempt(self, limit: object, identifier: object, cost: object, now_ms: object) -> Decision | None:
        """A decision from memory; None when something must be read first."""
        answer = self.ask(limit, identifier, cost, now_ms)
        return answer if isinstance(answer, Decision) else None

    def decide(self, limit: Limit, identifier: str, cost: int, now_ms: int, source: int) -> Decision | Need:
        """The engine's answer to arguments that were checked before: the second try of a driver."""
        with self:
            answer = self._engine.decide(limit, identifier, cost, now_ms, source)
        if self._engine.pending.is_urgent:
            self._wake()
        return answer

    def decide_many(
        self, requests: Iterable[object], now_ms: object = None, source: int = LOCAL
    ) -> tuple[list[Decision] | None, list[Need]]:
        """Decisions for a batch, all or nothing; or None, and what must be read first."""
        if not isinstance(requests, Iterable):
            raise InvalidInput("requests", requests, REQUESTS_EXPECTED)
        checked = [checked_request(item) for item in requests]
        at_ms = self._now_ns() // 1_000_000 if now_ms is None else checked_int("now_ms", now_ms, 0)
        return self._decide_many(checked, at_ms, source)

    def attempt_many(self, requests: list[tuple[Limit, str, int]], now_ms: int) -> list[Decision] | None:
        """Decisions for a batch from memory; None when something must be read first.

        The caller has checked the requests, which may be tuples of its own making: the server's schema does.
        """
        decisions, _ = self._decide_many(requests, now_ms, LOCAL)
        return decisions

    def _decide_many(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, source: int
    ) -> tuple[list[Decision] | None, list[Need]]:
        with self:
            answers = self._engine.decide_many(requests, now_ms, source)
        if self._engine.pending.is_urgent:
            self._wake()
        return answers
