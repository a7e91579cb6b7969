"""Middleware for every WSGI application: `app = RateLimitMiddleware(app, "100/minute")`.

It decides before the application is called and adds header fields to its response. A `LimitExceeded` that leaves the
application before its answer began becomes a 429 as well. Works under threads and under servers that fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from tidegate.core.model import Decision
from tidegate.errors import LimitExceeded
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rate_limits import SyncRateLimits

__all__ = ["RateLimitMiddleware", "WsgiIncoming"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class WsgiIncoming(Incoming):
    """A request from a WSGI environ."""

    __slots__ = ("environ",)

    def __init__(self, environ: Environ, native: Any = None, route: str | None = None) -> None:
        path = (environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")) or "/"
        super().__init__(
            environ if native is None else native,
            environ["REQUEST_METHOD"],
            # WSGI hands out bytes as Latin-1.
            path.encode("latin-1").decode("utf-8", "replace"),
            environ.get("REMOTE_ADDR") or None,
            route,
        )
        self.environ = environ

    def header(self, name: str) -> str | None:
        key = name.upper().replace("-", "_")
        return self.environ.get(key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}")


class RateLimitMiddleware:
    """All options of `RateLimits`, or one that is made already."""

    def __init__(
        self, app: App, *rules: Any, rate_limits: SyncRateLimits | None = None, **options: Any
    ) -> None:
        self.app = app
        self.rate_limits = SyncRateLimits(*rules, **options) if rate_limits is None else rate_limits

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        limits = self.rate_limits
        incoming = WsgiIncoming(environ)
        outcome = limits.check(incoming, limits.applicable(incoming))
        if not outcome.allowed:
            return self._deny(environ, start_response, outcome.decisions)
        fields = list(limits.headers(outcome).items())
        started = False

        def start_with_headers(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            nonlocal started
            started = True
            return start_response(status, [*headers, *fields], *error)

        try:
            return self.app(environ, start_with_headers)
        except LimitExceeded as error:
            if started:
                raise
            return self._deny(environ, start_response, error.decisions)

    def _deny(
        self, environ: Environ, start_response: StartResponse, decisions: Iterable[Decision]
    ) -> list[bytes]:
        denial, content_type, body = self.rate_limits.denial(list(decisions))
        headers = [
            *denial.headers.items(),
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
        ]
        start_response(f"{denial.status} {HTTPStatus(denial.status).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
