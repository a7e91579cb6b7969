"""The entry to the engine: checks arguments, lets in one caller at a time, fills in the time.

Compiled with the rest of the core because every decision passes through it. It owns no clock and no lock: both are
given, as callables. `acquire` and `release` must belong to a reentrant lock; they are absent where one thread owns the
engine. The usual decision of an embedded limiter takes no lock where `is_one_step` says that it needs none. A signal
handler or a finalizer that asks for a decision in the middle of another one, on the same thread, is refused: waiting
would deadlock, and going on would let check and commit be seen apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.model import LOCAL, Decision, Limit, Request, checked_int, checked_name
from tidegate.core.pending import Pending
from tidegate.core.tickets import Ticket
from tidegate.errors import Closed, InvalidInput, ReentrantCall

__all__ = [
    "CLOSED",
    "DECIDING",
    "IDLE",
    "NOT_STARTED",
    "Gate",
    "LimitMethod",
    "checked_requests",
]

# The states of a gate. A request enters at once in IDLE only, so that the usual case costs one comparison.
IDLE: Final = 0
DECIDING: Final = 1
NOT_STARTED: Final = (
    2  # background loops may enter; a request calls `begin` first, or is refused by `attempt`
)
CLOSED: Final = 3

LIMIT_EXPECTED: Final = 'a Limit, such as Limit("100/minute", namespace="email.send")'
REQUESTS_EXPECTED: Final = "Request(limit, identifier, cost) items"


def no_lock() -> bool:
    return True


def no_clock() -> int:
    return 0


def cannot_begin() -> None:
    raise AssertionError("this gate was made without a `begin`")


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


def checked_requests(requests: object) -> list[Request]:
    """`requests` as a batch that can be trusted, or an `InvalidInput`."""
    if not isinstance(requests, Iterable):
        raise InvalidInput("requests", requests, REQUESTS_EXPECTED)
    return [checked_request(item) for item in requests]


def has_shadow(requests: Sequence[tuple[Limit, str, int]]) -> bool:
    """Whether a limit of a batch is in shadow mode."""
    for request in requests:  # noqa: SIM110 # compiled, a loop is faster than a generator
        if request[0].shadow:
            return True
    return False


@final
class Gate:
    """One engine's gate.

    `now_ns` gives Unix nanoseconds, `clock_ns` those of a clock that never steps back, which only credit needs. These
    are called outside the lock: `wake` when a decision has left work for the background loops; `settle` when the origin
    must be asked first: it does that, and returns the decision; `begin` when a request meets NOT_STARTED: it starts
    what must be started and opens the gate, or raises. `is_one_step`: nothing can come between the beginning and the
    end of `Engine.decide_known`, which is so for compiled code under a GIL.
    """

    __slots__ = (
        "_acquire",
        "_begin",
        "_clock_ns",
        "_engine",
        "_has_credit",
        "_is_one_step",
        "_locked",
        "_now_ns",
        "_pending",
        "_release",
        "_settle",
        "_state",
        "_wake",
        "resting",
    )

    def __init__(
        self,
        engine: Engine,
        now_ns: Callable[[], int],
        wake: Callable[[], object],
        settle: Callable[[Limit, str, int, int, Need | Ticket], Decision],
        acquire: Callable[[], bool] | None = None,
        release: Callable[[], None] | None = None,
        begin: Callable[[], object] = cannot_begin,
        state: int = IDLE,
        clock_ns: Callable[[], int] = no_clock,
        is_one_step: bool = False,
    ) -> None:
        self._engine: Final[Engine] = engine
        self._has_credit: Final[bool] = engine.has_credit
        self._clock_ns: Final[Callable[[], int]] = clock_ns
        self._pending: Final[Pending] = engine.pending
        self._now_ns: Final[Callable[[], int]] = now_ns
        self._wake: Final[Callable[[], object]] = wake
        self._settle: Final[Callable[[Limit, str, int, int, Need | Ticket], Decision]] = settle
        self._locked: Final[bool] = acquire is not None
        self._acquire: Final[Callable[[], object]] = acquire or no_lock
        self._release: Final[Callable[[], object]] = release or no_lock
        self._begin: Final[Callable[[], object]] = begin
        self._is_one_step: Final[bool] = is_one_step and engine.is_embedded
        # Read and written with the lock held.
        self._state: int = state
        # The state that `with gate` leaves behind: assign it inside. IDLE, NOT_STARTED or CLOSED.
        self.resting: int = state

    def with_lock(self, acquire: Callable[[], bool], release: Callable[[], None]) -> Gate:
        """The same gate with another lock: in a forked child, the old one may be held by a thread that does not exist
        there."""
        return Gate(
            self._engine,
            self._now_ns,
            self._wake,
            self._settle,
            acquire,
            release,
            self._begin,
            self.resting,
            self._clock_ns,
            self._is_one_step,
        )

    @property
    def is_open(self) -> bool:
        """Whether requests may enter."""
        return self.resting == IDLE

    def now_ms(self) -> int:
        """The time that a request without its own gets."""
        return self._now_ns() // 1_000_000

    def clock_ms(self) -> int:
        """The clock by which credit expires."""
        return self._clock_ns() // 1_000_000

    def __enter__(self) -> None:
        """Keep every other caller out; every loop that touches the engine does so too."""
        if self._locked:
            self._acquire()
        if self._state not in (IDLE, NOT_STARTED):
            self._refuse()
        self._state = DECIDING

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        self._state = self.resting
        if self._locked:
            self._release()

    def _refuse(self) -> None:
        """Raise why the gate cannot be entered. Called with the lock held, which is released."""
        state = self._state
        if self._locked:
            self._release()
        if state == CLOSED:
            raise Closed("this limiter was stopped; make a new one")
        raise ReentrantCall(
            "a signal handler or a finalizer asked for a decision in the middle of another one, on the same thread; "
            "ask again after it"
        )

    def _wait_until_idle(self) -> None:
        """For a request that did not find IDLE: start what must be started, or raise. The lock is held before and
        after it, and released when it raises."""
        while self._state == NOT_STARTED:
            if self._locked:
                self._release()
            self._begin()
            if self._locked:
                self._acquire()
        if self._state != IDLE:
            self._refuse()

    def limit(self, limit: object, identifier: object, cost: object = 1, now_ms: object = None) -> Decision:
        """A decision, after reading the origin if that must come first."""
        if not isinstance(limit, Limit):
            raise InvalidInput("limit", limit, LIMIT_EXPECTED)
        if not isinstance(identifier, str):
            raise InvalidInput("identifier", identifier, "a str")
        amount = cost if type(cost) is int and cost >= 0 else checked_int("cost", cost, 0)
        at_ms = self._now_ns() // 1_000_000 if now_ms is None else checked_int("now_ms", now_ms, 0)
        if self._is_one_step and self._state == IDLE and type(identifier) is str:
            # IDLE: no other thread was switched away from in the middle of a decision.
            known = self._engine.decide_known(limit, identifier, amount, at_ms)
            if known is not None:
                return known
        if self._locked:
            self._acquire()
        if self._state != IDLE:
            self._wait_until_idle()
        self._state = DECIDING
        try:
            clock_ms = self._clock_ns() // 1_000_000 if self._has_credit else 0
            wall_ms = at_ms if now_ms is None else self._now_ns() // 1_000_000
            answer = self._engine.decide(limit, identifier, amount, at_ms, LOCAL, clock_ms, wall_ms)
        finally:
            self._state = IDLE
            if self._locked:
                self._release()
        if self._pending.is_urgent:
            self._wake()
        if isinstance(answer, Decision):
            return answer
        return self._settle(limit, identifier, amount, at_ms, answer)

    def ask(
        self, limit: object, identifier: object, cost: object, now_ms: object
    ) -> Decision | Need | Ticket:
        """A decision, or what must come first."""
        if not isinstance(limit, Limit):
            raise InvalidInput("limit", limit, LIMIT_EXPECTED)
        if not isinstance(identifier, str):
            raise InvalidInput("identifier", identifier, "a str")
        amount = cost if type(cost) is int and cost >= 0 else checked_int("cost", cost, 0)
        at_ms = self._now_ns() // 1_000_000 if now_ms is None else checked_int("now_ms", now_ms, 0)
        return self.decide(limit, identifier, amount, at_ms, LOCAL)

    def attempt(self, limit: object, identifier: object, cost: object, now_ms: object) -> Decision | None:
        """A decision from memory; None when something must be read or started first, and after the end."""
        if not self.is_open:
            return None
        answer = self.ask(limit, identifier, cost, now_ms)
        return answer if isinstance(answer, Decision) else None

    def decide(
        self, limit: Limit, identifier: str, cost: int, now_ms: int, source: int
    ) -> Decision | Need | Ticket:
        """The engine's answer to arguments that were checked before: the second try of a driver."""
        clock_ms = self._clock_ns() // 1_000_000 if self._has_credit else 0
        with self:
            answer = self._engine.decide(limit, identifier, cost, now_ms, source, clock_ms, self.now_ms())
        if self._pending.is_urgent:
            self._wake()
        return answer

    def decide_many(
        self, requests: Iterable[object], now_ms: object = None, source: int = LOCAL
    ) -> tuple[list[Decision] | None, list[Need]]:
        """Decisions for a batch, all or nothing; or None, and what must be read first. None without anything to read
        if a limit is in shadow mode: the driver decides those apart from the others."""
        items = checked_requests(requests)
        if has_shadow(items):
            return None, []
        return self._decide_many(items, now_ms, source, True)

    def ask_many(self, requests: Iterable[object], now_ms: object) -> list[Decision] | Ticket | None:
        """With credit: decisions for a batch, all or nothing; or what waits for the origin; None as `decide_many`."""
        items = checked_requests(requests)
        return None if has_shadow(items) else self._decide_all(items, now_ms)

    def attempt_many(
        self, requests: list[tuple[Limit, str, int]], now_ms: int | None
    ) -> list[Decision] | None:
        """Decisions for a batch from memory; None when something must be read or started first, and after the end.

        None, too, with limits in shadow mode, which the driver decides apart from the batch. The caller has checked the
        requests, which may be plain tuples: the server's schema has checked them.
        """
        if not self.is_open or has_shadow(requests):
            return None
        if self._has_credit:
            answer = self._decide_all(requests, now_ms)
            return None if isinstance(answer, Ticket) else answer
        decisions, _ = self._decide_many(requests, now_ms, LOCAL, False)
        return decisions

    def _decide_all(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: object
    ) -> list[Decision] | Ticket:
        wall_ms = self.now_ms()
        at_ms = wall_ms if now_ms is None else checked_int("now_ms", now_ms, 0)
        clock_ms = self.clock_ms()
        with self:
            answer = self._engine.decide_all(requests, at_ms, clock_ms, wall_ms)
        if self._pending.is_urgent:
            self._wake()
        return answer

    def _decide_many(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: object, source: int, wants_needs: bool
    ) -> tuple[list[Decision] | None, list[Need]]:
        wall_ms = self.now_ms()
        at_ms = wall_ms if now_ms is None else checked_int("now_ms", now_ms, 0)
        with self:
            answers = self._engine.decide_many(requests, at_ms, source, wall_ms, wants_needs)
        if self._pending.is_urgent:
            self._wake()
        return answers


@mypyc_attr(allow_interpreted_subclasses=True)
class LimitMethod:
    """A base class with the method `limit`: compiled, so that a call costs no Python frame before the engine.

    Typed as Any because the gate checks the arguments; compiled code would refuse wrong ones with errors of its own.
    """

    _gate: Gate

    def limit(self, limit: Any, identifier: Any, cost: Any = 1, *, now_ms: Any = None) -> Decision:
        """Decide, and consume `cost` if it fits. Cost 0 checks without consuming."""
        return self._gate.limit(limit, identifier, cost, now_ms)
