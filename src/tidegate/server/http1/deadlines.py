"""Deadlines of connections: one tick for all instead of one timer for each request.

Moving a deadline to a later moment is one assignment (`expires`), which every request does; the wheel notices when
the old moment comes. It never fires early, and late by at most one tick and whatever the loop is late.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Timed", "Wheel"]


class Timed(Protocol):
    """What can have a deadline."""

    expires: int
    """The tick at which `on_deadline` is due; 0: never. Written by the owner and by `watch`."""
    scheduled: int
    """The tick at which the wheel will look next; 0: not at all. Written by the wheel."""

    def on_deadline(self) -> None: ...


class Wheel:
    """A calendar of ticks. `run_once` is called once for each tick that has passed."""

    __slots__ = ("_due", "now", "tick_s")

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        # Counts ticks. Begins at 1: 0 means never.
        self.now = 1
        # By tick. An item is in one set at most.
        self._due: dict[int, set[Timed]] = {}

    def ticks(self, seconds: float) -> int:
        """`seconds` in ticks, rounded up, and one more since the present tick has partly passed."""
        return int(-(-seconds // self.tick_s)) + 1

    def watch(self, item: Timed, ticks: int) -> None:
        """`item.on_deadline()` after `ticks`, unless its `expires` is moved before that."""
        item.expires = expires = self.now + ticks
        if item.scheduled == 0 or expires < item.scheduled:
            self.forget(item)
            item.scheduled = expires
            self._due.setdefault(expires, set()).add(item)

    def forget(self, item: Timed) -> None:
        """Hold no reference to `item` any more."""
        if item.scheduled != 0:
            self._due[item.scheduled].discard(item)
            item.scheduled = 0

    def run_once(self) -> None:
        """One tick."""
        self.now = now = self.now + 1
        for item in self._due.pop(now, ()):
            item.scheduled = 0
            if item.expires > now:
                self.watch(item, item.expires - now)
            elif item.expires != 0:
                item.expires = 0
                item.on_deadline()

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))
