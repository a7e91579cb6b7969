"""Requests, answers and the routing table, as every part of the server knows them.

A request is a `Head`, the header fields that operations read, and the bytes of its body. An answer is (status, header
lines, body). How they travel is known to `http1` and `asgi`, what they mean to `api`; this module knows neither. It is
compiled with the core where that is possible (setup.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, final
from urllib.parse import unquote_to_bytes

JSON_LINE: Final = b"content-type: application/json\r\n"

Answer = tuple[int, bytes, bytes]
"""(status, header lines each ended by CRLF, body). A plain tuple, because one is made for every request."""


class Whole(NamedTuple):
    """All that a request says before its body, for an operation that does not know which header fields it reads."""

    target: bytes
    """The request target as it was sent, query included."""
    fields: Mapping[str, str]
    """By name in lower case; several fields of one name are joined with a comma."""
    peer: str
    """The address of the other end of the connection; empty for a socket that has none."""


@final
class Head:
    """The header fields that operations read. One head may stand for many requests with the same bytes."""

    __slots__ = ("accept", "authorization", "metrics_off", "test_time", "whole")

    def __init__(
        self,
        authorization: bytes | None = None,
        accept: bytes = b"",
        test_time: bytes | None = None,
        metrics_off: bool = False,
        whole: Whole | None = None,
    ) -> None:
        """`test_time` is X-Test-Time; `metrics_off`: X-Unkey-Metrics is `disabled`; `whole`: only for an operation
        that `reads_whole`."""
        self.authorization: Final[bytes | None] = authorization
        self.accept: Final[bytes] = accept
        self.test_time: Final[bytes | None] = test_time
        self.metrics_off: Final[bool] = metrics_off
        self.whole: Final[Whole | None] = whole


class Subscriber(Protocol):
    """The client of a stream."""

    def push(self, data: bytes) -> bool:
        """Send this part of the body. False: the client has not read the parts before, and this one is not sent."""

    def end(self) -> None:
        """There is no more to send."""


@final
class Stream:
    """An answer (200) whose body is sent part by part, until one side ends it. It is the last of its connection."""

    __slots__ = ("lines", "subscribe")

    def __init__(self, lines: bytes, subscribe: Callable[[Subscriber], Callable[[], object]]) -> None:
        self.lines: Final[bytes] = lines
        # Called once the head has been written. Returns a function that is called when the client has disconnected.
        self.subscribe: Final[Callable[[Subscriber], Callable[[], object]]] = subscribe


Handler = Callable[[Head, bytes], "Answer | Stream | Coroutine[Any, Any, Answer]"]
"""Answers at once, or with a coroutine that must run in a task."""


class Refuse(Protocol):
    """Writes the answer to a request that no operation has seen, with a status of 400 or above."""

    def __call__(
        self, status: int, detail: str, accept: bytes, *, lines: bytes = b"", request_id: str | None = None
    ) -> Answer: ...


@final
class Operation:
    """The target of a path and a method, with its counters."""

    __slots__ = ("_others", "handler", "is_probe", "name", "ok", "reads_whole")

    def __init__(
        self, name: str, handler: Handler, *, reads_whole: bool = False, is_probe: bool = False
    ) -> None:
        self.name: Final[str] = name
        # Replaced while requests are logged.
        self.handler: Handler = handler
        self.reads_whole: Final[bool] = reads_whole
        self.is_probe: Final[bool] = is_probe
        # Answers with 200, and all others by status. Only this server chooses statuses, so they are few.
        self.ok: int = 0
        self._others: dict[int, int] = {}

    def count(self, status: int) -> None:
        if status == 200:
            self.ok += 1
        else:
            self._others[status] = self._others.get(status, 0) + 1

    @property
    def statuses(self) -> dict[int, int]:
        """Answers by status."""
        return {200: self.ok, **self._others} if self.ok else dict(self._others)


class Route(NamedTuple):
    """One line of the routing table."""

    method: str
    path: str
    """One that ends in `/*` stands for all that begin so."""
    name: str
    handler: Handler
    reads_whole: bool = False
    """The operation needs `Head.whole`."""
    is_probe: bool = False
    """Answered also when all connections are in use."""


class Router:
    """Finds the operation for a method and a request target."""

    def __init__(self, routes: Iterable[Route], refuse: Refuse) -> None:
        self._refuse = refuse
        self._routes: dict[bytes, dict[bytes, Operation]] = {}
        # What follows the prefix is not looked at, so that nothing in it leads to another operation.
        self._prefixes: dict[bytes, dict[bytes, Operation]] = {}
        self.operations: list[Operation] = []
        for route in routes:
            operation = Operation(
                route.name, route.handler, reads_whole=route.reads_whole, is_probe=route.is_probe
            )
            self.operations.append(operation)
            path = route.path.encode("ascii")
            if path.endswith(b"/*"):
                methods = self._prefixes.setdefault(path[:-1], {})
            else:
                methods = self._routes.setdefault(path, {})
            methods[route.method.encode("ascii")] = operation
            if route.method == "GET":
                methods[b"HEAD"] = operation
        self.unknown = self._add("unknown", self._refuser(404, "There is nothing at this path. See /docs."))
        # One operation for each set of allowed methods, because the answer must list them.
        self._wrong_method: dict[bytes, Operation] = {}
        for allowed in {
            b", ".join(sorted(methods)) for methods in [*self._routes.values(), *self._prefixes.values()]
        }:
            handler = self._refuser(
                405, f"This path takes {allowed.decode('ascii')}.", b"allow: " + allowed + b"\r\n"
            )
            self._wrong_method[allowed] = self._add("unknown", handler)

    def _add(self, name: str, handler: Handler) -> Operation:
        operation = Operation(name, handler)
        self.operations.append(operation)
        return operation

    def _refuser(self, status: int, detail: str, lines: bytes = b"") -> Handler:
        def refuse(head: Head, _body: bytes) -> Answer:
            return self._refuse(status, detail, head.accept, lines=lines)

        return refuse

    def find(self, method: bytes, target: bytes) -> Operation:
        """The operation of a request line. There always is one: for a wrong path it answers 404."""
        return self.at(method, target if target in self._routes else path_of(target))

    def at(self, method: bytes, path: bytes) -> Operation:
        """`find` for a path that is decoded already."""
        methods = self._routes.get(path)
        if methods is None:
            methods = next(
                (found for prefix, found in self._prefixes.items() if path.startswith(prefix)), None
            )
        if methods is None:
            return self.unknown
        return methods.get(method) or self._wrong_method[b", ".join(sorted(methods))]


def path_of(target: bytes) -> bytes:
    """The path of a request target in origin form or absolute form, percent-decoded and without its query."""
    if not target.startswith(b"/"):
        _, separator, rest = target.partition(b"://")
        if separator:
            _, slash, rest = rest.partition(b"/")
            target = slash + rest
    path = target.partition(b"?")[0]
    return unquote_to_bytes(path) if b"%" in path else path
