"""One request that could not be answered in the moment in which it arrived.

A stream object exists while the request is incomplete, while its method works, or while its answer waits for the
peer's window. Calls that are complete in one read and answered at once never get one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tidegate.server.http2.headers import RequestHead


@dataclass(slots=True, eq=False)
class Stream:
    """The state of one open stream. Written by its connection only."""

    id: int
    head: RequestHead
    # The tick at which it began: it has to be over in time, whatever it waits for.
    started: int
    # The peer has sent its last frame.
    is_ended: bool
    # Bytes of DATA so far. They are kept in `body` only if there is a method that wants them.
    received: int = 0
    body: bytearray = field(default_factory=bytearray)
    task: asyncio.Task[bytes] | None = None
    # The part of the answer that waits for the window; `trailers` follow it.
    pending: bytes = b""
    trailers: bytes = b""
    # What the peer has added to this stream's window, less what was sent. The window itself is the initial
    # window of the settings plus this, so that a change of the settings needs no loop over the streams.
    window_change: int = 0
