"""What all connections of a listener share in time: deadlines, and answers that are sent together.

`Wheel` ticks once for all connections instead of one timer for each request. Moving a deadline to a later moment is one
assignment (`expires`), which every request does; the wheel reads it when the old moment comes. A deadline never fires
early, and late by at most one tick plus the delay of the loop.

`Outbox` sends the answers of one turn of the loop together at its end. Each answer wakes its client. Sent one by one,
that costs the sender more than the rest of a small answer: the client wakes, reads it, and sleeps again before the
next one is ready. A single answer still leaves in the same turn.

Compiled with the core where that is possible (setup.py): every request passes through here.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, final

# Connections whose answers wait for one another. More gain nothing: the clients are awake by then.
WAITING_MAX: Final = 16


class Timed(Protocol):
    """What can have a deadline."""

    expires: int
    """The tick at which `on_deadline` is due; 0: never. Written by the owner and by `watch`."""
    scheduled: int
    """The tick at which the wheel reads `expires` next; 0: not at all. Written by the wheel."""

    def on_deadline(self) -> None: ...


@final
class Wheel:
    """A calendar of ticks. `run_once` is called once for each tick that has passed."""

    __slots__ = ("_due", "now", "tick_s")

    def __init__(self, tick_s: float) -> None:
        self.tick_s: Final[float] = tick_s
        # Counts ticks. Begins at 1: 0 means never.
        self.now: int = 1
        # By tick. An item is in one set at most.
        self._due: dict[int, set[Timed]] = {}

    def ticks(self, seconds: float) -> int:
        """`seconds` in ticks, rounded up, plus one because the present tick has partly passed."""
        return int(-(-seconds // self.tick_s)) + 1

    def watch(self, item: Timed, ticks: int) -> None:
        """`item.on_deadline()` after `ticks`, unless its `expires` is moved before that."""
        item.expires = expires = self.now + ticks
        if item.scheduled == 0 or expires < item.scheduled:
            self.forget(item)
            item.scheduled = expires
            self._due.setdefault(expires, set()).add(item)

    def forget(self, item: Timed) -> None:
        """Drop the reference to `item`."""
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


class Sender(Protocol):
    """What has something to send."""

    def flush(self) -> None: ...


@final
class Outbox:
    """The connections that have something to send in this turn."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Final[asyncio.AbstractEventLoop] = loop
        self._waiting: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """Call `sender.flush()` before the loop waits again. Once is enough until then; more do no harm."""
        waiting = self._waiting
        if not waiting:
            self._loop.call_soon(self.flush)
        waiting.append(sender)
        if len(waiting) >= WAITING_MAX:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sender in waiting:
            sender.flush()
