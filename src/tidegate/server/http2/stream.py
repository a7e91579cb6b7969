"""One request that could not be answered in the moment in which it arrived.

A stream object exists while the request is incomplete, while its method works, or while its answer waits for the
peer's window. Calls that are complete in one read and answered at once never get one.
"""

from __future__ import annotations

import asyncio

from tidegate.server.http2.headers import RequestHead


class Stream:
    """The state of one open stream. Written by its connection only."""

    __slots__ = (
        "body",
        "head",
        "id",
        "is_ended",
        "pending",
        "received",
        "started",
        "task",
        "trailers",
        "window_change",
    )

    def __init__(self, stream_id: int, head: RequestHead, started: int) -> None:
        self.id = stream_id
        self.head = head
        # The tick at which it began: it has to be over in time, whatever it waits for.
        self.started = started
        # Bytes of DATA so far. They are kept in `body` only if there is a method that wants them.
        self.received = 0
        self.body = bytearray()
        # The peer has sent its last frame.
        self.is_ended = False
        self.task: asyncio.Task[bytes] | None = None
        # The part of the answer that waits for the window; `trailers` follow it.
        self.pending = b""
        self.trailers = b""
        # What the peer has added to this stream's window, less what was sent. The window itself is the initial
        # window of the settings plus this, so that a change of the settings needs no loop over the streams.
        self.window_change = 0
