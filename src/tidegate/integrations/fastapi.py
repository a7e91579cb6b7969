"""FastAPI: `install(app)`, and `Depends(limited("100/minute", by=user))` at endpoints, routers and applications.

    app = FastAPI()
    install(app)

    @app.get("/emails", dependencies=[Depends(limited("100/minute", by=user))])
    def emails(): ...

Works for synchronous and asynchronous endpoints and for websockets. Several of them at one endpoint, and the rules of
`install`, are one batch, decided when the last dependency asks, before the endpoint runs. The OpenAPI document has
the 429.
"""

# No `from __future__ import annotations` here: FastAPI before 0.12x cannot resolve the texts of an object's `__call__`.
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, cast
from weakref import WeakKeyDictionary

from fastapi import FastAPI, routing
from starlette.requests import HTTPConnection

from tidegate.integrations.answers import PROBLEM_TYPE
from tidegate.integrations.rate_limits import AsyncRateLimits
from tidegate.integrations.rules import make_rules
from tidegate.integrations.starlette import RateLimitMiddleware as StarletteMiddleware
from tidegate.integrations.starlette import StarletteIncoming, Tables, state_of

__all__ = ["install", "limited"]

RESPONSE: Final[dict[str, Any]] = {
    "description": "Too Many Requests",
    "headers": {
        "Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}},
        "RateLimit": {"description": "What is left of the quota", "schema": {"type": "string"}},
        "RateLimit-Policy": {"description": "The quota", "schema": {"type": "string"}},
    },
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string", "example": PROBLEM_TYPE},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "violated-policies": {"type": "array", "items": {"type": "string"}},
                    "retry_after_ms": {"type": "integer"},
                },
            }
        }
    },
}


class Limited:
    """A dependency. Each one is an object of its own, so that `app.dependency_overrides` can replace it."""

    def __init__(self, limits: Sequence[Any], options: dict[str, Any]) -> None:
        self.rules = make_rules(limits, **options)
        # The last route that `_place` was asked for, and its answer.
        self._known: tuple[Any, tuple[str, tuple[Limited, ...]]] | None = None

    async def __call__(self, connection: HTTPConnection) -> None:
        scope = connection.scope
        state = state_of(scope)
        name, siblings = self._place(scope)
        if len(siblings) == 1:
            await state.enforce(StarletteIncoming(scope, connection, name), self.rules)
            return
        state.asked.append(self)
        overridden = getattr(scope["app"], "dependency_overrides", {})
        if all(one in state.asked or one in overridden for one in siblings):
            rules = [rule for one in siblings if one in state.asked for rule in one.rules]
            await state.enforce(StarletteIncoming(scope, connection, name), rules)

    def _place(self, scope: Any) -> tuple[str, "tuple[Limited, ...]"]:
        """The name of the route, and everything that it is limited by."""
        route = scope.get("route")
        if route is not None and self._known is not None and self._known[0] is route:
            return self._known[1]
        table = RateLimitMiddleware.routes(scope["app"])
        entries = [
            entry for entry in table if self in entry.limits and (route is None or entry.route is route)
        ]
        if not entries:
            return scope["path"], (self,)
        if len(entries) > 1:  # a router that was included twice
            entries = [entry for entry in entries if entry.pattern.match(scope["path"])] or entries
            return entries[0].name, entries[0].limits
        found = (entries[0].name, entries[0].limits)
        self._known = (route, found)
        return found


def limited(*limits: Any, **options: Any) -> Limited:
    """A dependency for `Depends`: `limited("10/second; 1000/hour", by=user)`. Takes what `Rule` takes, or rules."""
    return Limited(limits, options)


class RateLimitMiddleware(StarletteMiddleware):
    """Knows FastAPI's dependencies."""

    _tables: ClassVar[Tables] = WeakKeyDictionary()

    @staticmethod
    def each_route(routes: Sequence[Any]) -> Iterator[Any]:
        # FastAPI keeps included routers as they are since 0.14x; before, all routes were in one list.
        contexts = getattr(routing, "iter_route_contexts", None)
        yield from routes if contexts is None else contexts(routes)

    @staticmethod
    def limits_of(route: Any) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(_limits_below(getattr(route, "dependant", None))))


def _limits_below(dependant: Any) -> Iterator[Limited]:
    for one in () if dependant is None else dependant.dependencies:
        if isinstance(one.call, Limited):
            yield one.call
        yield from _limits_below(one)


def install(app: FastAPI, *rules: Any, messages: Any = (), **options: Any) -> AsyncRateLimits:
    """Add rate limits to an application: all arguments of `RateLimits`, and `messages` for websockets."""
    limits = AsyncRateLimits(*rules, **options)
    middleware = cast("Any", RateLimitMiddleware)  # Starlette's type wants plain dictionaries for messages
    app.add_middleware(middleware, rate_limits=limits, messages=messages)
    openapi = app.openapi
    status = limits.answers.status

    def openapi_with_denials() -> dict[str, Any]:
        document = openapi()
        for route in RateLimitMiddleware.each_route(app.routes):
            if not RateLimitMiddleware.limits_of(route):
                continue
            operations = document.get("paths", {}).get(getattr(route, "path_format", None), {})
            for method in getattr(route, "methods", None) or ():
                if method.lower() in operations:
                    operations[method.lower()]["responses"].setdefault(str(status), RESPONSE)
        return document

    app.openapi = openapi_with_denials  # type: ignore[method-assign]  # FastAPI documents this way to extend it
    return limits
