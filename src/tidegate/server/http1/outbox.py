"""Answers of one turn of the loop, sent together at its end.

Each answer that is sent wakes its client. One by one, that costs the sender more than the rest of a small answer: the
client is woken, takes it, and sleeps again before the next one is ready. Sent in a row, they find it awake. Nobody
waits for more than a handful of other answers, and a lone one leaves in the same turn.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

__all__ = ["Outbox", "Sender"]

# Connections that wait for one another. More gain nothing: the clients are awake by then.
WAITING_MAX: Final = 16


class Sender(Protocol):
    """What has something to send."""

    def flush(self) -> None: ...


class Outbox:
    """Who has something to send in this turn."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """`sender.flush()` before the loop waits again. Once is enough until then; more do no harm."""
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
