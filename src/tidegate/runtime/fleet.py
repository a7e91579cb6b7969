"""From what a user writes to the parts of a limiter: node id, engine, gate, origin, ledger.

Both drivers are assembled here, so that they cannot differ in what they accept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from secrets import token_hex
from time import time_ns
from typing import Final

from tidegate.adapters.clock import WallClock
from tidegate.adapters.urls import open_ledger, open_origin
from tidegate.core.engine import Engine, Need
from tidegate.core.gate import Gate
from tidegate.core.model import Decision, Limit, Tuning, checked_name
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.ports import Clock, Ledger, Origin
from tidegate.runtime.forks import INHERITED
from tidegate.runtime.node import Node
from tidegate.runtime.statistics import Statistics

__all__ = ["Fleet", "Parts"]

# A region that only one process knows needs no name that others could meet.
EMBEDDED_REGION = "embedded"

ORIGIN_METHODS: Final = ("open", "read", "merge", "pulse", "close", "statistics")
LEDGER_METHODS: Final = ("open", "publish", "changes", "heartbeat", "close", "statistics")


def _refuse_other_than(field: str, given: object, example: str, methods: Sequence[str]) -> None:
    if given is None or isinstance(given, str) or all(hasattr(given, method) for method in methods):
        return
    raise ConfigurationError(
        f"{field}: got {given!r:.80}, expected a URL such as {example!r}, or an object with the methods "
        f"{', '.join(methods)}"
    )


# What a column of the ledger's primary key holds.
REGION_BYTES_MAX = 255


def checked_region(region: object) -> str:
    """`region` as the name of a region, or an `InvalidInput`."""
    name = checked_name("region", region)
    if len(name.encode("utf-8", "surrogatepass")) > REGION_BYTES_MAX:
        raise InvalidInput("region", name, f"at most {REGION_BYTES_MAX} bytes in UTF-8")
    return name


@dataclass(frozen=True)
class Parts:
    """A limiter, taken apart. Made anew in every process: a fork is a new node."""

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
            subjects=subjects.count,
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
    """What was configured, checked once, from which parts are made as often as processes need them."""

    def __init__(
        self,
        region: str | None,
        origin: str | Origin | None,
        ledger: str | Ledger | None,
        clock: Clock | None,
        tuning: Tuning | None,
        node_id: str | None,
        random: Random | None,
    ) -> None:
        if origin == "memory://":
            # One process and nobody to share with: the engine's own memory is the origin.
            origin = None
        if ledger is not None and region is None:
            raise ConfigurationError(
                "region: a limiter with a ledger needs the stable name of its region, such as region='fra'; "
                "there is no default, because two regions with one name would overwrite each other"
            )
        if origin is not None and region is None:
            raise ConfigurationError(
                "region: a limiter with an origin needs the stable name of its region, such as region='fra'"
            )
        self.region = None if region is None else checked_region(region)
        self._origin = origin
        self._ledger = ledger
        self.clock: Clock = WallClock() if clock is None else clock
        self.tuning = Tuning() if tuning is None else tuning
        self._node_id = node_id
        self._random = Random() if random is None else random
        self._pid = os.getpid()
        _refuse_other_than("origin", origin, "redis://host:6379", ORIGIN_METHODS)
        _refuse_other_than("ledger", ledger, "mysql://host/database", LEDGER_METHODS)
        # Wrong URLs and missing extras are told now, not at the first request. Nothing is connected yet.
        self._made_origin = open_origin(origin) if isinstance(origin, str) else origin
        self._made_ledger = open_ledger(ledger) if isinstance(ledger, str) else ledger

    @property
    def shares(self) -> bool:
        """There is something outside this process to keep in touch with."""
        return self._origin is not None or self._ledger is not None

    def make(
        self,
        wake: Callable[[], object],
        settle: Callable[[Limit, str, int, int, Need], Decision],
        acquire: Callable[[], bool] | None = None,
        release: Callable[[], None] | None = None,
    ) -> Parts:
        """The parts of a new node."""
        if self.shares and os.getpid() != self._pid:
            self._reopen()
        engine = Engine(
            self.tuning,
            node_id=self._node_id or token_hex(8),
            has_origin=self._origin is not None,
            has_ledger=self._ledger is not None,
        )
        now_ns = time_ns if isinstance(self.clock, WallClock) else self._now_ns
        gate = Gate(engine, now_ns, wake, settle, acquire, release)
        return Parts(engine, gate, self._node(engine, gate) if self.shares else None)

    def make_for_new_loop(self, parts: Parts) -> Parts:
        """The same counts under a new node: the event loop of the old one has ended without a `stop`."""
        return Parts(parts.engine, parts.gate, self._node(parts.engine, parts.gate))

    def _node(self, engine: Engine, gate: Gate) -> Node:
        return Node(
            engine,
            gate,
            self.tuning,
            self._random,
            region=self.region or EMBEDDED_REGION,
            origin=self._made_origin,
            ledger=self._made_ledger,
        )

    def _now_ns(self) -> int:
        return self.clock.now_ms() * 1_000_000

    def _reopen(self) -> None:
        """After a fork: a new node id, and connections of our own. Those of the parent are kept and never touched:
        their destructors would speak on its sockets."""
        INHERITED.append((self._made_origin, self._made_ledger))
        self._pid = os.getpid()
        self._node_id = None
        self._random = Random()
        for given in (self._origin, self._ledger):
            if given is not None and not isinstance(given, str):
                raise ConfigurationError(
                    "this limiter was given an adapter object and then forked; give it a URL instead, so that "
                    "every process can open a connection of its own"
                )
        self._made_origin = open_origin(self._origin) if isinstance(self._origin, str) else None
        self._made_ledger = open_ledger(self._ledger) if isinstance(self._ledger, str) else None
