"""One view of a request for all frameworks: what rules, keys and proxies may ask about it.

Each integration fills in a subclass with the few facts its framework knows. `native` is the framework's own request:
functions that a user writes get that one and never this view.
"""

from __future__ import annotations

from typing import Any

from tidegate.errors import InvalidInput

__all__ = ["Incoming"]


class Incoming:
    """A request as the shared code sees it. Built once per request, so that everything costly is a method."""

    __slots__ = ("method", "native", "path", "peer", "route")

    def __init__(
        self, native: Any, method: str, path: str, peer: str | None, route: str | None = None
    ) -> None:
        self.native = native
        self.method = method
        self.path = path
        # The address of the other end of the connection: the caller, or the last proxy. None on a Unix socket.
        self.peer = peer
        # The framework's name of the route; None before routing.
        self.route = route

    def header(self, name: str) -> str | None:
        """A header by its lower-case name; one that was sent several times is joined with commas."""
        raise NotImplementedError

    def cookie(self, name: str) -> str | None:
        """A cookie by its name."""
        found = self.header("cookie")
        for part in (found or "").split(";"):
            key, _, value = part.strip().partition("=")
            if key == name:
                return value.strip('"')
        return None

    def user(self) -> object:
        """The authenticated user, or None."""
        try:
            return getattr(self.native, "user", None)
        except Exception as error:  # Starlette asserts that AuthenticationMiddleware is installed
            raise InvalidInput(
                "by", "user", f"a request with a user; install the framework's authentication ({error})"
            ) from error

    @property
    def host(self) -> str:
        """The Host header without its port, in lower case."""
        host = (self.header("host") or "").lower()
        if host.startswith("["):
            return host.partition("]")[0][1:]
        return host.partition(":")[0]
