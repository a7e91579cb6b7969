"""Litestar: `RateLimitPlugin("1000/hour")`, and `guards=[limited("5/minute")]` at every layer.

    @get("/emails", guards=[limited("100/minute", by=user)])
    async def emails() -> str: ...

    app = Litestar([emails], plugins=[RateLimitPlugin("1000/hour")])

The limits of the application and of all layers above a handler are one batch, decided by the last guard, before the
handler runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Response
from litestar.config.app import AppConfig
from litestar.connection import ASGIConnection, Request
from litestar.middleware import DefineMiddleware
from litestar.plugins import InitPlugin

from tidegate.errors import ConfigurationError, LimitExceeded
from tidegate.integrations.asgi import SCOPE_KEY, AsgiIncoming, Scope, State
from tidegate.integrations.asgi import RateLimitMiddleware as AsgiMiddleware
from tidegate.integrations.rate_limits import AsyncRateLimits
from tidegate.integrations.rules import make_rules, refuse_shared_names

__all__ = ["RateLimitPlugin", "limited"]


class LitestarIncoming(AsgiIncoming):
    """`native` is Litestar's connection."""

    __slots__ = ()

    def __init__(self, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
        scope: Any = connection.scope
        handler = scope.get("route_handler")
        name = None if handler is None else _name(handler)
        super().__init__(scope, connection, name)

    def user(self) -> object:
        return self.scope.get("user")


class Limited:
    """A guard. All guards of a handler are asked in turn; the last one decides for all."""

    def __init__(self, limits: Sequence[Any], options: dict[str, Any]) -> None:
        self.rules = make_rules(limits, **options)

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], handler: Any) -> None:
        scope: Any = connection.scope
        state = scope.get(SCOPE_KEY)
        if not isinstance(state, State):
            raise ConfigurationError("limited: give the application plugins=[RateLimitPlugin()], it decides")
        state.asked.append(self)
        siblings = _guards(handler)
        if len(state.asked) == len(siblings):
            rules = [rule for one in dict.fromkeys(siblings) for rule in one.rules]
            await state.enforce(LitestarIncoming(connection), rules)


def _guards(handler: Any) -> list[Limited]:
    # Litestar wraps guards, to call synchronous and asynchronous ones alike.
    found = (getattr(guard, "func", guard) for guard in handler.resolve_guards())
    return [guard for guard in found if isinstance(guard, Limited)]


def _name(handler: Any) -> str:
    return str(handler.name or handler.handler_name)


def limited(*limits: Any, **options: Any) -> Limited:
    """A guard: `limited("10/second; 1000/hour", by=user)`. Takes what `Rule` takes, or rules."""
    return Limited(limits, options)


class RateLimitMiddleware(AsgiMiddleware):
    """Runs after Litestar has found the route."""

    def incoming(self, scope: Scope) -> AsgiIncoming:
        return LitestarIncoming(ASGIConnection(scope))  # type: ignore[arg-type]  # the same thing, typed by Litestar

    def is_limited_route(self, scope: Scope) -> bool:
        return bool(_guards(scope["route_handler"]))


def _check_names(app: Litestar) -> None:
    handlers = [handler for route in app.routes for handler in getattr(route, "route_handlers", ())]
    refuse_shared_names(
        (
            _name(handler),
            getattr(handler.fn, "value", handler.fn),
            [rule for one in _guards(handler) for rule in one.rules],
        )
        for handler in handlers
    )


class RateLimitPlugin(InitPlugin):
    """All arguments of `RateLimits`, and `messages` for websockets."""

    def __init__(self, *rules: Any, messages: Any = (), **options: Any) -> None:
        self.rate_limits = AsyncRateLimits(*rules, **options)
        self._messages = messages

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        limits = self.rate_limits
        middleware: Any = RateLimitMiddleware  # an ASGI application; Litestar's type spells out every message
        define = DefineMiddleware(middleware, rate_limits=limits, messages=self._messages)
        app_config.middleware.append(define)
        app_config.exception_handlers[LimitExceeded] = self._exceeded
        app_config.on_startup.append(_check_names)
        app_config.on_startup.append(limits.start)
        app_config.on_shutdown.append(limits.stop)
        return app_config

    def _exceeded(self, _request: Request[Any, Any, Any], error: LimitExceeded) -> Response[bytes]:
        denial, content_type, body = self.rate_limits.denial(error.decisions)
        return Response(body, status_code=denial.status, headers=denial.headers, media_type=content_type)
