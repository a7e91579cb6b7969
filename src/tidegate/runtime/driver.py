"""What `Limiter` and `AsyncLimiter` share: how they are made, their life cycle, and what they report.

    NEW ──▶ STARTING ──▶ RUNNING ──▶ STOPPED
     ▲         │  │         │
     └─────────┘  └▶ FAILED │    back to NEW: the start failed for a reason that may pass, or the event loop was closed
     └──────────────────────┘

An embedded limiter is RUNNING from the beginning. A limiter that was made before a fork is NEW in the child.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from enum import Enum
from operator import methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from tidegate.adapters.forks import follow_forks
from tidegate.core.gate import IDLE, NOT_STARTED, Gate
from tidegate.core.model import LOCAL, Decision, Limit, Request, Tuning, checked_name
from tidegate.core.resets import Reset
from tidegate.core.sharing import OriginUsage
from tidegate.errors import Closed, ConfigurationError, InvalidInput
from tidegate.ports import Ledger, Origin
from tidegate.runtime.environment import Environment
from tidegate.runtime.fleet import Fleet, Parts
from tidegate.runtime.inspection import Inspection
from tidegate.runtime.reservation import Ending, Item, Taken
from tidegate.runtime.states import StateMachine
from tidegate.runtime.statistics import Health, Statistics
from tidegate.runtime.usage import Usage, usage_of

if TYPE_CHECKING:
    from tidegate.runtime.reserving import Reserving

__all__ = ["Driver", "LimiterState", "checked_batch"]


class LimiterState(Enum):
    """The state of a limiter."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    """The start met a configuration that can never work. Every call raises that error again."""
    STOPPED = "stopped"


TRANSITIONS: Final = MappingProxyType(
    {
        LimiterState.NEW: {LimiterState.STARTING, LimiterState.FAILED, LimiterState.STOPPED},
        LimiterState.STARTING: {
            LimiterState.RUNNING,
            LimiterState.NEW,
            LimiterState.FAILED,
            LimiterState.STOPPED,
        },
        LimiterState.RUNNING: {LimiterState.NEW, LimiterState.STOPPED},
        LimiterState.FAILED: {LimiterState.STOPPED},
        LimiterState.STOPPED: set(),
    }
)


class Driver:
    """A limiter without its constructor and its methods that decide.

    Both classes have the constructor themselves, so that Python names them when it is called with wrong arguments.
    """

    _fleet: Fleet
    _parts: Parts
    _gate: Gate

    @classmethod
    def _in_environment(
        cls,
        environment: Environment,
        *,
        region: str | None,
        origin: str | Origin | None,
        ledger: str | Ledger | None,
        tuning: Tuning | None,
    ) -> Self:
        """A limiter with another clock, node id, randomness or sleep: for tests, and for the replay of a log."""
        limiter = cls.__new__(cls)
        Driver._set_up(limiter, Fleet(region, origin, ledger, tuning, environment))
        return limiter

    def _set_up(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._failure: ConfigurationError | None = None
        # Names of reservations given out so far.
        self._reservations = 0
        self._life = StateMachine(self._first_state(), TRANSITIONS)
        self._make()
        follow_forks(
            self,
            before=methodcaller("_before_fork"),
            in_parent=methodcaller("_after_fork_in_parent"),
            in_child=methodcaller("_after_fork_in_child"),
        )

    def _first_state(self) -> LimiterState:
        return LimiterState.NEW if self._fleet.shares else LimiterState.RUNNING

    def _make(self) -> None:
        """Set `_parts` and `_gate` to those of a new node."""
        raise NotImplementedError

    def _renew(self) -> None:
        """In a forked child: become a new node. What cannot work is raised by the next call."""
        if self._life.state is not LimiterState.STOPPED:
            self._life = StateMachine(self._first_state(), TRANSITIONS)
            self._failure = None
        try:
            self._fleet.reopen()
        except ConfigurationError as error:
            if self._life.state is LimiterState.NEW:
                self._fail(error)
        self._make()

    # -- changes of state; a Limiter holds its lock meanwhile

    def _raise_if_over(self) -> None:
        """Raise if this limiter will never decide again."""
        if self._life.state is LimiterState.STOPPED:
            raise Closed("this limiter was stopped; make a new one")
        if self._failure is not None:
            # A copy, because a raised exception collects the traceback of each caller.
            raise copy(self._failure)

    def _fail(self, error: ConfigurationError) -> None:
        self._life.move(LimiterState.FAILED)
        self._failure = error

    def _start_ended(self, error: BaseException | None) -> None:
        """The start has ended: requests are admitted without waiting, or the next one starts again, or raises the
        error."""
        if self._life.state is not LimiterState.STARTING:
            return
        if error is None:
            self._life.move(LimiterState.RUNNING)
        elif isinstance(error, ConfigurationError):
            self._fail(error)
        else:
            self._life.move(LimiterState.NEW)
        self._set_gate()

    def _set_gate(self) -> None:
        """Admit requests while this limiter is starting or running, and call `_begin` first otherwise."""
        is_open = self._life.state in (LimiterState.STARTING, LimiterState.RUNNING)
        with self._gate:
            self._gate.resting = IDLE if is_open else NOT_STARTED

    # -- reports

    def _time_s(self) -> float:
        """The clock by which the node's loops work."""
        raise NotImplementedError

    def health(self) -> list[Health]:
        """One line per dependency."""
        node = self._parts.node
        return [] if node is None else node.health(self._time_s())

    @property
    def _reserving(self) -> Reserving | None:
        """Reservations at the origin; None without one."""
        node = self._parts.node
        return None if node is None else node.reserving

    def _reserve_here(self, items: list[Item], life_ms: int, at_ms: int) -> Taken:
        """Reserve without an origin: in memory."""
        if not items:
            return Taken("", items, [], at_ms)
        name = self._reservation_name()
        with self._gate:
            wall_ms = self._gate.now_ms()
            until_ms = wall_ms + life_ms
            decisions = self._parts.engine.reserve(items, name, at_ms, wall_ms, until_ms, LOCAL)
        return Taken(name if decisions and all(decisions) else "", items, decisions, until_ms)

    def _end_here(self, name: str, items: list[Item]) -> Ending:
        """End what was reserved without an origin, and count what was used."""
        with self._gate:
            self._parts.engine.reservations.drop(name)
            now_ms = self._gate.now_ms()
            self._parts.engine.count_spent(items, now_ms, self._gate.clock_ms(), now_ms)
        return Ending(True, False)

    def _reservation_name(self) -> str:
        """Names a hold at the origin: unique for all time, because the id of a node is."""
        with self._gate:
            self._reservations += 1
            return f"{self._parts.engine.node_id}+{self._reservations}"

    def _reset_here(self, limit: object, identifier: object) -> Reset:
        """Reset a counter in the memory of this process."""
        if not isinstance(limit, Limit):
            raise InvalidInput("limit", limit, "a Limit")
        name = checked_name("identifier", identifier)
        with self._gate:
            return self._parts.engine.resets.make(limit, name, self._gate.now_ms())

    def _usage(self, identifier: str, decision: Decision, known: OriginUsage | None) -> Usage:
        """What is behind the decision of a `peek`, and what the origin adds to that."""
        with self._gate:
            return usage_of(self._parts.engine, identifier, decision, known, self._gate.now_ms())

    @property
    def inspection(self) -> Inspection:
        """What is in memory, for reading."""
        return Inspection(self._parts.engine)

    @property
    def subjects_max(self) -> int:
        """The bound on subjects in memory."""
        return self._fleet.tuning.subjects_max

    def statistics(self) -> Statistics:
        """Counters and gauges of every part, as of now."""
        return self._parts.statistics(self._fleet.region, self._time_s())

    def __repr__(self) -> str:
        place = f"region {self._fleet.region!r}" if self._fleet.shares else "embedded"
        engine = self._parts.engine
        return f"<{type(self).__name__} {place}, node {engine.node_id}, {engine.subjects.count} subjects>"

    # -- forks; see `tidegate.adapters.forks`

    def _before_fork(self) -> None:
        """Nothing to wait for."""

    def _after_fork_in_parent(self) -> None:
        """Nothing was held."""

    def _after_fork_in_child(self) -> None:
        """A limiter that shares something starts again, as a new node."""
        raise NotImplementedError


def checked_batch(requests: Sequence[Request]) -> Sequence[Request]:
    """A batch is iterated more than once: an iterator would be empty the second time."""
    if isinstance(requests, (list, tuple)):
        return requests
    raise InvalidInput("requests", requests, "a list or a tuple of Request items")
