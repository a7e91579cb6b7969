"""Starlette: `install(app, "100/minute")`, and `@limited("5/minute")` at endpoints, synchronous and asynchronous ones.

    app = Starlette(routes=[Route("/emails", emails)])
    install(app, "1000/hour")

Limits of the application and of a route are one batch, decided just before the endpoint. For that the middleware looks
up the route of a request, in applications that have both kinds of limits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.websockets import WebSocket

from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.integrations.asgi import SCOPE_KEY, AsgiIncoming, Scope, State
from tidegate.integrations.asgi import RateLimitMiddleware as AsgiMiddleware
from tidegate.integrations.rate_limits import AsyncRateLimits
from tidegate.integrations.rules import attach_rules, make_rules, refuse_shared_names, rules_of

__all__ = ["RateLimitMiddleware", "StarletteIncoming", "install", "limited", "state_of"]

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class StarletteIncoming(AsgiIncoming):
    """`native` is a `Request`, or a `WebSocket`."""

    __slots__ = ()

    def cookie(self, name: str) -> str | None:
        return HTTPConnection(self.scope).cookies.get(name)


class Entry(NamedTuple):
    """One route of an application, in the order in which Starlette tries them."""

    route: Any
    name: str
    pattern: Any
    methods: frozenset[str] | None
    limits: tuple[Any, ...]
    """What the route is limited by: its rules, or what has them."""
    below: tuple[Entry, ...]
    """The routes of a mounted application."""


Tables = WeakKeyDictionary[Any, tuple[int, tuple[Entry, ...]]]


class RateLimitMiddleware(AsgiMiddleware):
    """The middleware of Starlette and FastAPI; `install` adds it."""

    # One for each class: they see different limits at a route.
    _tables: ClassVar[Tables] = WeakKeyDictionary()

    def incoming(self, scope: Scope) -> AsgiIncoming:
        native = Request(scope) if scope["type"] == "http" else HTTPConnection(scope)
        return StarletteIncoming(scope, native)

    def is_limited_route(self, scope: Scope) -> bool:
        table = self.routes(scope["app"])
        if not any(entry.limits or entry.below for entry in table):
            return False
        entry = _match(table, _route_path(scope), scope.get("method"))
        return entry is not None and bool(entry.limits)

    @classmethod
    def routes(cls, app: Any) -> tuple[Entry, ...]:
        """The routes of an application, read again when it has got more of them."""
        known = cls._tables.get(app)
        if known is None or known[0] != len(app.routes):
            known = cls._tables[app] = (len(app.routes), tuple(cls._entries(app.routes)))
            refuse_shared_names(
                (
                    entry.name,
                    getattr(entry.route, "endpoint", entry.route),
                    [rule for one in entry.limits for rule in getattr(one, "rules", (one,))],
                )
                for entry in known[1]
            )
        return known[1]

    @classmethod
    def _entries(cls, routes: Sequence[Any]) -> Iterator[Entry]:
        for route in cls.each_route(routes):
            pattern = getattr(route, "path_regex", None)
            if pattern is None:
                continue
            methods = getattr(route, "methods", None)
            yield Entry(
                getattr(route, "original_route", route),
                str(getattr(route, "name", None) or getattr(route, "path", "")),
                pattern,
                frozenset(methods) if methods else None,
                cls.limits_of(route),
                tuple(cls._entries(getattr(route, "routes", None) or ())),
            )

    @staticmethod
    def each_route(routes: Sequence[Any]) -> Iterator[Any]:
        """Every route, where a framework nests them."""
        yield from routes

    @staticmethod
    def limits_of(route: Any) -> tuple[Any, ...]:
        """What a route is limited by."""
        return rules_of(getattr(route, "endpoint", None))

    async def _live(self, scope: Scope, receive: Any, send: Any) -> None:
        self.routes(scope["app"])  # names that are not clear are an error at the start, not at a request
        await super()._live(scope, receive, send)


def _route_path(scope: Scope) -> str:
    path: str = scope["path"]
    # Inside a mounted application root_path is the mount's.
    root: str = scope.get("app_root_path", scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path


def _match(table: Sequence[Entry], path: str, method: str | None) -> Entry | None:
    """The route that Starlette will choose: the first whose path and method match."""
    for entry in table:
        found = entry.pattern.match(path)
        if found is None or (method and entry.methods and method not in entry.methods):
            continue
        if entry.below:
            return _match(entry.below, "/" + found.groupdict().get("path", ""), method)
        return entry
    return None


def state_of(scope: Any) -> State:
    """The request's state, which the middleware has put there."""
    state = scope.get(SCOPE_KEY)
    if not isinstance(state, State):
        raise ConfigurationError("limited: call install(app) of this module first, it adds the middleware")
    return state


def install(app: Any, *rules: Any, messages: Any = (), **options: Any) -> AsyncRateLimits:
    """Add rate limits to an application: all arguments of `RateLimits`, and `messages` for websockets."""
    limits = AsyncRateLimits(*rules, **options)
    app.add_middleware(RateLimitMiddleware, rate_limits=limits, messages=messages)
    return limits


def limited(*limits: Any, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Decorate an endpoint: `@limited("10/second; 1000/hour", by=user)`. Arguments are those of `Rule`, or rules."""
    rules = make_rules(limits, **options)

    def decorate(endpoint: Endpoint) -> Endpoint:
        if inspect.isclass(endpoint):
            raise InvalidInput("endpoint", endpoint, "a function; limit a class with a Rule for its path")
        inner = getattr(endpoint, "__tidegate_endpoint__", endpoint)

        @functools.wraps(inner)
        async def limited_endpoint(connection: Request | WebSocket) -> Any:
            scope = connection.scope
            table = RateLimitMiddleware.routes(scope["app"])
            entry = _match(table, _route_path(scope), scope.get("method"))
            name = entry.name if entry is not None else inner.__name__
            incoming = StarletteIncoming(scope, connection, name)
            await state_of(scope).enforce(incoming, rules_of(limited_endpoint))
            if inspect.iscoroutinefunction(inner):
                return await inner(connection)
            return await run_in_threadpool(inner, connection)

        attach_rules(limited_endpoint, (*rules, *rules_of(endpoint)))
        vars(limited_endpoint)["__tidegate_endpoint__"] = inner
        return limited_endpoint  # type: ignore[return-value]  # stays an endpoint, and becomes asynchronous

    return decorate
