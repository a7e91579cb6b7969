"""Requests and answers as the HTTP protocol hands them over: `Head`, `Operation`, `Router`, and bytes on the wire.

A head is parsed once and may stand for many requests: clients on a keep-alive connection send the same bytes again
and again. So a head is never changed by a request, except for the caller that was found for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from tidegate.server.api.problems import METHOD_NOT_ALLOWED, ROUTE_NOT_FOUND, Answer, Refusal

__all__ = ["Handler", "Head", "Operation", "Route", "Router", "length_line", "status_line"]

# Lengths up to here have a ready-made line; every answer of a warm request is shorter.
READY_LENGTHS: Final = 2_048


class Head:
    """The head of a request, and the operation that it asks for."""

    __slots__ = (
        "accept",
        "authorization",
        "caller",
        "caller_epoch",
        "content_length",
        "is_head",
        "is_old",
        "keep_alive",
        "metrics_off",
        "operation",
        "query",
        "raw",
        "test_time",
    )

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.query = b""
        # The bytes that it was parsed from, where it is remembered by them.
        self.raw = b""
        self.authorization: bytes | None = None
        self.accept = b""
        self.test_time: bytes | None = None
        # X-Unkey-Metrics: disabled
        self.metrics_off = False
        # 0 also stands for a body in chunks, whose length is not known beforehand.
        self.content_length = 0
        self.keep_alive = True
        # HTTP/1.0: must be told that its connection stays open.
        self.is_old = False
        # HEAD: the answer goes without its body.
        self.is_head = False
        # Written by the authenticator: who sent this, valid while the catalog's epoch is `caller_epoch`.
        self.caller: Any = None
        self.caller_epoch = -1


Handler = Callable[[Head, bytes], "Answer | Coroutine[Any, Any, Answer]"]


class Operation:
    """What a path and a method lead to, with its counters."""

    __slots__ = ("handler", "name", "statuses")

    def __init__(self, name: str, handler: Handler) -> None:
        self.name = name
        self.handler = handler
        # Answers by status, written by the protocol. The statuses are ours, hence few.
        self.statuses: dict[int, int] = {}

    def count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


class Route(NamedTuple):
    """One line of the routing table."""

    method: str
    path: str
    name: str
    handler: Handler


class Router:
    """Finds the operation for a method and a request target."""

    def __init__(self, routes: Iterable[Route], refuse: Callable[[Head, Refusal], Answer]) -> None:
        self._routes: dict[bytes, dict[bytes, Operation]] = {}
        self.operations: list[Operation] = []
        for route in routes:
            operation = Operation(route.name, route.handler)
            self.operations.append(operation)
            methods = self._routes.setdefault(route.path.encode("ascii"), {})
            methods[route.method.encode("ascii")] = operation
            if route.method == "GET":
                methods[b"HEAD"] = operation

        def not_found(head: Head, _body: bytes) -> Answer:
            return refuse(head, Refusal(ROUTE_NOT_FOUND, "There is nothing at this path. See /docs."))

        self.unknown = Operation("unknown", not_found)
        self.operations.append(self.unknown)
        # One operation for each set of allowed methods, since the answer must name them.
        self._refused: dict[bytes, Operation] = {}
        for methods in self._routes.values():
            allowed = b", ".join(sorted(methods))
            if allowed not in self._refused:
                self._refused[allowed] = Operation("unknown", _method_refuser(allowed, refuse))
                self.operations.append(self._refused[allowed])

    def find(self, method: bytes, target: bytes) -> tuple[Operation, bytes]:
        """(operation, query) of a request line. Always an operation: that of a wrong path answers 404."""
        methods = self._routes.get(target)
        query = b""
        if methods is None:
            path, query = split_target(target)
            methods = self._routes.get(path)
            if methods is None:
                return self.unknown, query
        operation = methods.get(method)
        if operation is None:
            operation = self._refused[b", ".join(sorted(methods))]
        return operation, query


def _method_refuser(allowed: bytes, refuse: Callable[[Head, Refusal], Answer]) -> Handler:
    def method_not_allowed(head: Head, _body: bytes) -> Answer:
        detail = f"This path takes {allowed.decode('ascii')}."
        return refuse(head, Refusal(METHOD_NOT_ALLOWED, detail, headers=b"allow: " + allowed + b"\r\n"))

    return method_not_allowed


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """(path, query) of a request target, in origin or absolute form, percent-decoded."""
    if not target.startswith(b"/"):
        _, separator, rest = target.partition(b"://")
        if separator:
            _, slash, rest = rest.partition(b"/")
            target = slash + rest
    path, _, query = target.partition(b"?")
    return (unquote_to_bytes(path) if b"%" in path else path), query


def status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode("ascii")


_LENGTHS: Final = tuple(
    f"content-length: {length}\r\n\r\n".encode("ascii") for length in range(READY_LENGTHS)
)


def length_line(length: int) -> bytes:
    """The last line of a head, and the empty line after it."""
    return _LENGTHS[length] if length < READY_LENGTHS else f"content-length: {length}\r\n\r\n".encode("ascii")
