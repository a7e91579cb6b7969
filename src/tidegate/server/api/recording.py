"""The last minutes of the busiest identifiers, in bounded memory, for the question "what if the limit were different?".

A replay needs every request of an identifier, not a sample of requests. So some identifiers are followed, with all of
their requests. An operation that is sampled (`activity`) adds its identifier; when there is no room, the quieter half
is dropped. A server with few identifiers follows all of them. A request of an identifier that is not followed costs one
lookup in a dictionary. Equal requests within one second are one record with a number. Compiled with the core where
that is possible (setup.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, final

from tidegate.core.model import Limit

# Five minutes are replayed. 250 × 400 records of about 100 bytes are 10 MB at most; 400 are enough for five minutes of
# an identifier that is allowed in every second and denied in every third.
SPAN_MS: Final = 300_000
IDENTIFIERS_MAX: Final = 250
RECORDS_EACH_MAX: Final = 400
# Room is made at most this often: it sorts all followed identifiers.
MAKE_ROOM_EVERY_S: Final = 1.0


@final
class Recorded:
    """Requests of one second with the same limit, cost and outcome."""

    __slots__ = ("allowed", "at_ms", "cost", "count", "limit", "second")

    def __init__(self, at_ms: int, limit: Limit, cost: int, allowed: bool) -> None:
        self.at_ms = at_ms
        self.second = at_ms // 1000
        self.limit = limit
        self.cost = cost
        self.allowed = allowed
        self.count = 1


@final
class Followed:
    """All requests of one identifier, in all namespaces of all workspaces."""

    __slots__ = ("_before", "_last", "records", "requests")

    def __init__(self) -> None:
        self.records: deque[Recorded] = deque(maxlen=RECORDS_EACH_MAX)
        # The two newest records: allowed and denied requests may alternate within a second.
        self._last: Recorded | None = None
        self._before: Recorded | None = None
        # How busy it is: requests, halved whenever room is made.
        self.requests = 0

    def add(self, limit: Limit, cost: int, allowed: bool, now_ms: int) -> None:
        """Called for each of its decisions. One that consumes nothing is not recorded."""
        if not cost:
            return
        self.requests += 1
        second = now_ms // 1000
        last = self._last
        if (
            last is not None
            and last.second == second
            and last.limit is limit
            and last.allowed is allowed
            and last.cost == cost
        ):
            last.count += 1
            return
        before = self._before
        self._before = last
        if (
            before is not None
            and before.second == second
            and before.limit is limit
            and before.allowed is allowed
            and before.cost == cost
        ):
            before.count += 1
            self._last = before
            return
        self._last = Recorded(now_ms, limit, cost, allowed)
        self.records.append(self._last)


RecordedRow = tuple[str, int, int, int, int, bool, int]
"""Identifier, time in ms, cost, quota, duration in ms, whether allowed, and how many such requests."""


@final
class Recording:
    """One per process; used by the loop's thread only."""

    __slots__ = ("_room_made_s", "followed", "has_left_out")

    def __init__(self) -> None:
        # By identifier. Read by the operations, which keep a reference: it is always the same dictionary.
        self.followed: dict[str, Followed] = {}
        # Whether there were more identifiers than are followed.
        self.has_left_out = False
        self._room_made_s = float("-inf")

    def follow(self, identifier: str, now_s: float) -> Followed | None:
        """Follow an identifier from now on; None if there is no room."""
        if len(self.followed) >= IDENTIFIERS_MAX:
            self.has_left_out = True
            if now_s - self._room_made_s < MAKE_ROOM_EVERY_S:
                return None
            self._room_made_s = now_s
            self._make_room()
        found = self.followed[identifier] = Followed()
        return found

    def _make_room(self) -> None:
        """Forget the quieter half."""
        quiet = sorted(self.followed, key=lambda each: self.followed[each].requests)
        for identifier in quiet[: IDENTIFIERS_MAX // 2]:
            del self.followed[identifier]
        for each in self.followed.values():
            each.requests //= 2

    def runs(self, workspace: str, namespace_id: str, since_ms: int) -> Iterator[RecordedRow]:
        """What is recorded of a namespace, by identifier."""
        for identifier, followed in self.followed.items():
            for each in followed.records:
                limit = each.limit
                if (
                    limit.workspace == workspace
                    and limit.namespace == namespace_id
                    and each.at_ms >= since_ms
                ):
                    rule = (limit.quota, limit.duration_ms)
                    yield identifier, each.at_ms, each.cost, *rule, each.allowed, each.count
