"""Requests whose head came before: `RepeatedHeads` answers them, the base of `HttpConnection`.

A request whose head has the same bytes as an earlier one of its connection is not parsed again: between two messages
the parser holds no state, so the same bytes give the same head. It is answered inside `data_received`, without a task.
Nearly all requests of a connection that is kept open are such requests, so this module is compiled with the core where
that is possible (setup.py). Everything else is in `connection`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from tidegate.core._native import mypyc_attr
from tidegate.server.messages import Head, Operation
from tidegate.server.schedule import Outbox, Wheel

# Heads that one connection remembers. Usually they differ in Content-Length only.
HEADS_MAX: Final = 32
# Heads that all connections together remember: ten thousand connections could otherwise fill the memory.
REMEMBERED_BYTES_MAX: Final = 33_554_432
# Content-Length lines up to here are ready-made; the answers of all warm requests are shorter.
READY_LENGTHS: Final = 2_048
LENGTH_LINES: Final[list[bytes]] = [
    f"content-length: {length}\r\n\r\n".encode("ascii") for length in range(READY_LENGTHS)
]


@final
class RequestHead:
    """The head of a request as it was parsed. Nothing changes it: the same bytes may bring many requests."""

    __slots__ = ("content_length", "fields", "is_head", "is_http10", "keep_alive", "operation")

    def __init__(
        self,
        operation: Operation,
        fields: Head,
        content_length: int,
        keep_alive: bool,
        is_http10: bool,
        is_head: bool,
    ) -> None:
        """`content_length`: 0 also for a body in chunks, whose length the head does not say; `is_http10`: its answers
        must say that the connection stays open; `is_head`: HEAD, the answer is sent without its body."""
        self.operation: Final[Operation] = operation
        self.fields: Final[Head] = fields
        self.content_length: Final[int] = content_length
        self.keep_alive: Final[bool] = keep_alive
        self.is_http10: Final[bool] = is_http10
        self.is_head: Final[bool] = is_head


@final
class Shared:
    """What all connections of a server share, as every request reads it."""

    __slots__ = ("begin", "begin_ok", "idle_ticks", "is_draining", "outbox", "remembered_bytes", "wheel")

    def __init__(self, wheel: Wheel, outbox: Outbox, idle_ticks: int, begin: Callable[[int], bytes]) -> None:
        """`begin`: the first two lines of an answer by status, for the present second."""
        self.wheel: Final[Wheel] = wheel
        self.outbox: Final[Outbox] = outbox
        self.idle_ticks: Final[int] = idle_ticks
        self.begin: Final[Callable[[int], bytes]] = begin
        # What `begin` gives for 200; empty when the second has passed. Written by the server.
        self.begin_ok: bytes = b""
        self.is_draining: bool = False
        # Bytes of heads that connections remember. Written by the connections.
        self.remembered_bytes: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class RepeatedHeads:
    """What a connection remembers of its heads, and what it has to send. A subclass has the rest."""

    __slots__ = (
        "_heads",
        "_is_idle",
        "_last_bytes",
        "_last_head",
        "_shared",
        "_transport",
        "_unsent",
        "expires",
        "scheduled",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared: Final[Shared] = shared
        # Between two requests, and nothing waits in either direction. Written by the subclass.
        self._is_idle: bool = True
        self._heads: dict[bytes, RequestHead] = {}
        # The head that came last, and its bytes.
        self._last_bytes: bytes = b""
        self._last_head: RequestHead | None = None
        # What waits in the outbox, if anything does.
        self._unsent: list[bytes] = []
        # Of the wheel.
        self.expires: int = 0
        self.scheduled: int = 0
        # Set by the subclass when there is one. Of the event loop: any object with its methods.
        self._transport: Any = None

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            head = self._last_head
            if head is not None and data.startswith(self._last_bytes):
                end = len(self._last_bytes)
            else:
                end = data.find(b"\r\n\r\n") + 4
                self._last_bytes = data[:end]
                self._last_head = head = self._heads.get(self._last_bytes)
            if head is not None and len(data) - end == head.content_length:
                operation = head.operation
                answer: Any
                try:
                    answer = operation.handler(head.fields, data[end:])
                except Exception as error:  # noqa: BLE001 - logged in failed; one request must not end the rest
                    answer = self.failed(head, error)
                shared = self._shared
                if type(answer) is not tuple or shared.is_draining:
                    self.respond(head, answer)
                    return
                status: int = answer[0]
                lines: bytes = answer[1]
                body: bytes = answer[2]
                if status == 200:
                    begin = shared.begin_ok or shared.begin(200)
                    operation.ok += 1
                else:
                    begin = shared.begin(status)
                    operation.count(status)
                unsent = self._unsent
                is_first = not unsent
                unsent.append(begin)
                unsent.append(lines)
                unsent.append(length_line(len(body)))
                unsent.append(body)
                if is_first:
                    shared.outbox.add(self)
                self.expires = shared.wheel.now + shared.idle_ticks
                return
        self.take(data)

    def flush(self) -> None:
        """Send what was put. Called by the outbox, and before anything that would prevent sending."""
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            # An idle connection is not being closed by this server; a transport that failed drops what it is given.
            if self._is_idle or not self._transport.is_closing():
                self._transport.write(data)

    def _remember(self, data: bytes, head: RequestHead) -> None:
        shared = self._shared
        if len(self._heads) >= HEADS_MAX:
            self._forget_heads()
        if shared.remembered_bytes + len(data) <= REMEMBERED_BYTES_MAX:
            shared.remembered_bytes += len(data)
            self._heads[data] = head

    def _forget_heads(self) -> None:
        for data in self._heads:
            self._shared.remembered_bytes -= len(data)
        self._heads.clear()
        self._last_bytes = b""
        self._last_head = None

    def take(self, data: bytes) -> None:
        """Bytes that are not a repeated request."""
        raise NotImplementedError

    def respond(self, head: RequestHead, answer: Any) -> None:
        """An answer that is not the usual one: it must wait, it is a stream, or the server stops."""
        raise NotImplementedError

    def failed(self, head: RequestHead, error: BaseException | None) -> Any:
        """The answer to a request whose operation raised."""
        raise NotImplementedError


def length_line(length: int) -> bytes:
    """The last line of a head, and the empty line after it."""
    return LENGTH_LINES[length] if length < READY_LENGTHS else f"content-length: {length}\r\n\r\n".encode()
