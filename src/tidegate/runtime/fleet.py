"""From what a user writes to the parts of a limiter: node id, engine, gate, origin, ledger.

Both drivers are assembled here, so that they cannot differ in what they accept. A mistake in the arguments is raised
here, by the constructor, and not by the first request. Nothing is connected yet. What only a shared limiter needs is
imported when one is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from tidegate.adapters.clock import WallClock, now_ns
from tidegate.adapters.forks import INHERITED
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.gate import IDLE, NOT_STARTED, Gate
from tidegate.core.model import Decision, Limit, Tuning, checked_region
from tidegate.core.tickets import Ticket
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.ports import Ledger, Origin
from tidegate.runtime.environment import Environment, decides_in_one_step
from tidegate.runtime.statistics import Statistics

if TYPE_CHECKING:
    from tidegate.runtime.node import Node

__all__ = ["Fleet", "Parts"]

# For an origin or a ledger in memory, which no other process can see.
EMBEDDED_REGION: Final = "embedded"

ORIGIN_METHODS: Final = (
    "open",
    "read",
    "merge",
    "exchange",
    "listen",
    "rules",
    "can_be_recalled",
    "pulse",
    "resets",
    "close",
    "statistics",
)
LEDGER_METHODS: Final = ("open", "publish", "changes", "heartbeat", "close", "statistics")


def _check_store(name: str, given: object, example: str, methods: Sequence[str]) -> None:
    """An origin or a ledger is a URL or an adapter object."""
    if isinstance(given, str):
        from tidegate.adapters.urls import check_directory

        check_directory(given)
    elif given is not None and not all(hasattr(given, method) for method in methods):
        raise ConfigurationError(
            f"{name}: got {given!r:.80}, expected a URL such as {example!r}, or an object with the methods "
            f"{', '.join(methods)}"
        )


def _named_region(region: object, *, has_origin: bool, has_ledger: bool, is_embedded: bool) -> str | None:
    """The checked name of the region; None for an embedded limiter."""
    if region is not None:
        name = checked_region(region)
        if not has_origin and not has_ledger and not is_embedded:
            raise ConfigurationError(
                f"region: got {name!r}, but no origin and no ledger; add origin='redis://host:6379' or "
                "ledger='mysql://host/database', or leave region out to limit in this process only"
            )
        return name
    if has_ledger:
        raise ConfigurationError(
            "region: a limiter with a ledger needs the stable name of its region, such as region='fra'; "
            "there is no default, because two regions with one name would overwrite each other's counts"
        )
    if has_origin:
        raise ConfigurationError(
            "region: a limiter with an origin needs the stable name of its region, such as region='fra'"
        )
    return None


def _opened_origin(given: str | Origin | None) -> Origin | None:
    """The origin, not connected yet; raises for a wrong URL or a missing extra."""
    if not isinstance(given, str):
        return given
    from tidegate.adapters.urls import open_origin

    return open_origin(given)


def _opened_ledger(given: str | Ledger | None) -> Ledger | None:
    if not isinstance(given, str):
        return given
    from tidegate.adapters.urls import open_ledger

    return open_ledger(given)


@dataclass(frozen=True)
class Parts:
    """What a limiter consists of. Made again in every process: a forked child is a new node."""

    engine: Engine
    gate: Gate
    node: Node | None

    def statistics(self, region: str | None, now_s: float) -> Statistics:
        subjects = self.engine.subjects
        known = {} if self.node is None else self.node.statistics(now_s)
        by_import = known.pop("cells_created_by_import", 0)
        assert isinstance(by_import, int)
        return Statistics(
            node_id=self.engine.node_id,
            region=region,
            allowed=self.engine.allowed,
            denied=self.engine.denied,
            from_origin=self.engine.from_origin,
            denied_from_origin=self.engine.denied_from_origin,
            from_degraded=self.engine.from_degraded,
            exceeded_in_shadow=self.engine.exceeded_in_shadow,
            resets_made=self.engine.resets.made,
            resets_received=self.engine.resets.applied - self.engine.resets.made,
            subjects=subjects.count,
            subjects_bytes=subjects.bytes,
            cells=subjects.cells,
            cells_created_by_traffic=subjects.cells_created - by_import,
            cells_created_by_import=by_import,
            subjects_evicted={
                "lru": subjects.evicted_clean,
                "blocked": subjects.evicted_blocked,
                "unreplayed": subjects.evicted_unreplayed,
            },
            subjects_expired=subjects.expired,
            strict_activations=self.engine.strict_activations,
            **known,  # type: ignore[arg-type]  # Node.statistics names fields of Statistics; a test compares them
        )


class Fleet:
    """What was configured, checked once. Makes the parts of a node whenever a process needs new ones."""

    def __init__(
        self,
        region: str | None,
        origin: str | Origin | None,
        ledger: str | Ledger | None,
        tuning: Tuning | None,
        environment: Environment,
    ) -> None:
        is_embedded = origin == "memory://"
        if is_embedded:
            # Only this process uses it: the engine's own memory is the origin.
            origin = None
        if tuning is not None and not isinstance(tuning, Tuning):
            raise InvalidInput("tuning", tuning, "a Tuning, or None for the defaults")
        self.region: str | None = _named_region(
            region, has_origin=origin is not None, has_ledger=ledger is not None, is_embedded=is_embedded
        )
        self.tuning: Tuning = Tuning() if tuning is None else tuning
        self.environment: Environment = environment
        self._origin = origin
        self._ledger = ledger
        _check_store("origin", origin, "redis://host:6379", ORIGIN_METHODS)
        _check_store("ledger", ledger, "mysql://host/database", LEDGER_METHODS)
        self._open_origin = _opened_origin(origin)
        self._open_ledger = _opened_ledger(ledger)

    @property
    def shares(self) -> bool:
        """There is an origin or a ledger, so that background work must be started."""
        return self._origin is not None or self._ledger is not None

    def make(
        self,
        wake: Callable[[], object],
        settle: Callable[[Limit, str, int, int, Need | Ticket], Decision],
        begin: Callable[[], object],
        on_loop_closed: Callable[[], object],
        acquire: Callable[[], bool] | None = None,
        release: Callable[[], None] | None = None,
    ) -> Parts:
        """The parts of a new node."""
        engine = Engine(
            self.tuning,
            node_id=self.environment.node_id or os.urandom(8).hex(),
            has_origin=self._origin is not None,
            has_ledger=self._ledger is not None,
            has_credit=self.tuning.credit,
        )
        time_ns = now_ns if isinstance(self.environment.clock, WallClock) else self._now_ns
        state = NOT_STARTED if self.shares else IDLE
        gate = Gate(
            engine,
            time_ns,
            wake,
            settle,
            acquire,
            release,
            begin,
            state,
            self.environment.monotonic_ns,
            decides_in_one_step(),
        )
        return Parts(engine, gate, self._node(engine, gate, on_loop_closed) if self.shares else None)

    def make_for_new_loop(self, parts: Parts, on_loop_closed: Callable[[], object]) -> Parts:
        """The same counts under a new node: the event loop of the old one was closed without a `stop`."""
        return Parts(parts.engine, parts.gate, self._node(parts.engine, parts.gate, on_loop_closed))

    def _node(self, engine: Engine, gate: Gate, on_loop_closed: Callable[[], object]) -> Node:
        from tidegate.runtime.node import Node

        return Node(
            engine,
            gate,
            self.tuning,
            self.environment.random,
            region=self.region or EMBEDDED_REGION,
            origin=self._open_origin,
            ledger=self._open_ledger,
            on_loop_closed=on_loop_closed,
        )

    def _now_ns(self) -> int:
        return self.environment.clock.now_ms() * 1_000_000

    def reopen(self) -> None:
        """In a forked child: a new node id, and connections of its own. Those of the parent are kept and never used:
        their destructors would write to its sockets."""
        INHERITED.append((self._open_origin, self._open_ledger))
        self.environment = replace(self.environment, node_id=None, random=Random())
        self._open_origin = self._open_ledger = None
        for given in (self._origin, self._ledger):
            if given is not None and not isinstance(given, str):
                raise ConfigurationError(
                    "this limiter was given an adapter object and then forked; give it a URL instead, so that "
                    "every process can open a connection of its own"
                )
        self._open_origin = _opened_origin(self._origin)
        self._open_ledger = _opened_ledger(self._ledger)
