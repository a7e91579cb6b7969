"""One connection: RESP2 over an asyncio transport. Commands go out at once, replies come back in order.

Several calls share a connection: each waits for its own replies. A call that is cancelled or gives up leaves its
place in the queue, so that its replies are read and dropped and can never answer another caller. Knows
bytes and replies, nothing of keys, scripts or who serves what.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import hiredis
from hiredis import ReplyError

from tidegate.adapters.running_time import STEP_S
from tidegate.errors import DependencyUnavailable

__all__ = ["Reply", "ReplyError", "Wire", "pack"]

# bytes, int, None, a list of those, or a ReplyError.
Reply = object

# hiredis declares a tuple of one element.
pack: Final = cast("Callable[[tuple[bytes | str | int, ...]], bytes]", hiredis.pack_command)


class _Exchange:
    """Commands that were sent, and the replies that have come back so far."""

    __slots__ = ("count", "future", "replies", "sent_at")

    def __init__(self, future: asyncio.Future[list[Reply]], count: int, sent_at: float) -> None:
        self.future = future
        self.count = count
        self.sent_at = sent_at
        self.replies: list[Reply] = []


class Wire(asyncio.Protocol):
    """A connection in use. Made by `loop.create_connection(Wire)`; never reconnects."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shown: str) -> None:
        self.shown = shown
        """The server as messages name it."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is gone."""
        self._loop = loop
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Exchange] = deque()
        self._received_at = 0.0
        # When `is_silent` first found that nothing comes.
        self._suspected_at: float | None = None
        self._aborted = False
        self.on_message: Callable[[bytes], None] | None = None
        """Called with each message of the channels that this connection has subscribed to."""

    @property
    def is_lost(self) -> bool:
        return self._aborted or self.lost.done()

    def send(self, packed: bytes, count: int) -> asyncio.Future[list[Reply]]:
        """Send commands that have `count` replies. The future may be cancelled or given an exception at any time."""
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        transport = self._transport
        if transport is None or self.is_lost:
            future.set_exception(DependencyUnavailable(f"{self.shown}: the connection is closed"))
            return future
        self._waiting.append(_Exchange(future, count, self._loop.time()))
        transport.write(packed)
        return future

    def is_silent(self, longest_s: float) -> bool:
        """Whether an answer has been outstanding for so long without any bytes.

        It takes two looks, a step apart: a process that did not run has read nothing, and reads between the two.
        """
        now_s = self._loop.time()
        if not self._waiting or now_s - max(self._waiting[0].sent_at, self._received_at) < longest_s:
            self._suspected_at = None
            return False
        if self._suspected_at is None:
            self._suspected_at = now_s
        return now_s - self._suspected_at >= STEP_S

    def abort(self) -> None:
        """Close at once. Callers that wait get `DependencyUnavailable`."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        self._received_at = self._loop.time()
        self._suspected_at = None
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                if self.on_message is not None and isinstance(reply, list) and reply[0] == b"message":
                    self.on_message(cast("bytes", reply[2]))
                    continue
                exchange = waiting[0]
                exchange.replies.append(reply)
                if len(exchange.replies) == exchange.count:
                    waiting.popleft()
                    if not exchange.future.done():
                        exchange.future.set_result(exchange.replies)
        except (hiredis.ProtocolError, IndexError):
            # Not RESP, or an answer to no command: this server cannot be used.
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc is not None and str(exc) else ""
        for exchange in self._waiting:
            if not exchange.future.done():
                exchange.future.set_exception(
                    DependencyUnavailable(f"{self.shown}: the connection was lost{reason}")
                )
        self._waiting.clear()
        if not self.lost.done():
            self.lost.set_result(None)
