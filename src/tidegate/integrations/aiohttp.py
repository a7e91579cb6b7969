"""aiohttp's server: `install(app, "1000/hour")`, and `@limited("5/minute")` at handlers.

    app = web.Application()
    install(app, "1000/hour")

    @limited("5/minute", by=user)
    async def send(request: web.Request) -> web.Response: ...

The limits of application and handler are one batch, decided before the handler runs. `messages` limits what a client
sends over a websocket: one message too many closes the connection and never arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from tidegate.core.model import Decision
from tidegate.errors import ConfigurationError, LimitExceeded
from tidegate.integrations.answers import Outcome, closest, describe
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rate_limits import AsyncRateLimits
from tidegate.integrations.rules import (
    Rule,
    guarded,
    make_rules,
    message_rules,
    refuse_shared_names,
    rules_of,
)

__all__ = ["install", "limited"]

LIMITS: Final = web.AppKey("tidegate", AsyncRateLimits)
MESSAGES: Final = web.AppKey("tidegate_messages", tuple[Rule, ...])
# aiohttp has keys for requests since 3.14, and warns about texts since then.
OUTCOME: Final[Any] = getattr(web, "RequestKey", lambda name, _: name)("tidegate_outcome", Outcome)

Handler = TypeVar("Handler", bound=Callable[..., Any])


class AiohttpIncoming(Incoming):
    """`native` is aiohttp's request."""

    __slots__ = ()

    def __init__(self, request: web.Request, route: str | None) -> None:
        super().__init__(request, request.method, request.path, request.remote, route)

    def header(self, name: str) -> str | None:
        found = self.native.headers.getall(name, ())
        return ", ".join(found) if found else None

    def user(self) -> object:
        return self.native.get("user")


def install(app: web.Application, *rules: Any, messages: Any = (), **options: Any) -> AsyncRateLimits:
    """Add rate limits to an application: all arguments of `RateLimits`, and `messages` for websockets.

    Call it after what finds the user.
    The key `user` is what a middleware has put into `request["user"]`.
    """
    limits = AsyncRateLimits(*rules, **options)
    app[LIMITS] = limits
    app[MESSAGES] = message_rules(messages)
    app.middlewares.append(_middleware)
    app.on_response_prepare.append(_add_headers)
    if messages:
        app.on_response_prepare.append(_limit_messages)
    app.on_startup.append(_start)
    app.on_cleanup.append(_stop)
    return limits


def limited(*limits: Any, **options: Any) -> Callable[[Handler], Handler]:
    """Decorate a handler: `@limited("10/second; 1000/hour", by=user)`. Takes what `Rule` takes, or rules."""
    rules = make_rules(limits, **options)

    def decorate(handler: Handler) -> Handler:
        return cast("Handler", guarded(handler, rules, _verify))

    return decorate


def _verify(request: web.Request) -> None:
    if OUTCOME not in request:
        raise ConfigurationError("limited: call tidegate.integrations.aiohttp.install(app) first")


async def _start(app: web.Application) -> None:
    refuse_shared_names(
        (_name(route), route.handler, rules_of(route.handler)) for route in app.router.routes()
    )
    await app[LIMITS].start()


async def _stop(app: web.Application) -> None:
    await app[LIMITS].stop()


def _name(route: web.AbstractRoute) -> str:
    return route.name or str(getattr(route.handler, "__name__", route.handler))


@web.middleware
async def _middleware(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    limits = request.config_dict[LIMITS]
    match = request.match_info
    incoming = AiohttpIncoming(request, _name(match.route))
    outcome = await limits.check(incoming, limits.applicable(incoming), rules_of(match.handler))
    request[OUTCOME] = outcome
    if not outcome.allowed:
        return _denied(limits, outcome.decisions)
    try:
        return cast("web.StreamResponse", await handler(request))
    except LimitExceeded as error:
        return _denied(limits, error.decisions)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    outcome = request.get(OUTCOME)
    if outcome is not None and outcome.closest is not None and "RateLimit" not in response.headers:
        response.headers.update(request.config_dict[LIMITS].headers(outcome))


async def _limit_messages(request: web.Request, response: web.StreamResponse) -> None:
    """Every message that arrives over a websocket is counted; a denied one closes the connection."""
    if not isinstance(response, web.WebSocketResponse):
        return
    limits, rules = request.config_dict[LIMITS], request.config_dict[MESSAGES]
    incoming = AiohttpIncoming(request, _name(request.match_info.route))
    receive = response.receive

    async def limited_receive(timeout: float | None = None) -> WSMessage:
        message = await receive(timeout)
        if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return message
        outcome = await limits.check(incoming, rules)
        if outcome.allowed:
            return message
        reason = describe(closest(outcome.decisions))
        await response.close(code=WSCloseCode.POLICY_VIOLATION, message=reason.encode())
        return WSMessage(WSMsgType.CLOSED, None, None)

    # All ways to receive (`receive_str`, `async for`, …) end in this method.
    cast("Any", response).receive = limited_receive


def _denied(limits: AsyncRateLimits, decisions: Sequence[Decision]) -> web.Response:
    denial, content_type, body = limits.denial(decisions)
    return web.Response(
        body=body, status=denial.status, headers=denial.headers | {"Content-Type": content_type}
    )
