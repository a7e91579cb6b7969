"""Middleware for every ASGI application: HTTP, websockets (on connect and per message), and its life cycle.

It decides before the application is called and adds header fields to its response. A `LimitExceeded` that leaves the
application becomes a 429 as well. The limiter runs as long as the application: it starts and stops with the lifespan
messages, or with the first request where a server sends none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from tidegate.core.model import Decision
from tidegate.errors import LimitExceeded
from tidegate.integrations.answers import Outcome, describe
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rate_limits import AsyncRateLimits
from tidegate.integrations.rules import Rule, message_rules

__all__ = ["AsgiIncoming", "RateLimitMiddleware", "State"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY: Final = "tidegate"
POLICY_VIOLATION: Final = 1008


class AsgiIncoming(Incoming):
    """A request from an ASGI scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope, native: Any = None, route: str | None = None) -> None:
        # Without super().__init__: this runs for every request.
        client = scope.get("client")
        self.native = scope if native is None else native
        self.method = scope.get("method", "GET")
        self.path = scope["path"]
        self.peer = client[0] if client else None
        self.route = route
        self.scope = scope

    def header(self, name: str) -> str | None:
        wanted = name.encode("latin-1")
        found = [value for field, value in self.scope["headers"] if field == wanted]
        return b", ".join(found).decode("latin-1") if found else None


class State:
    """What one request's scope carries: who decides, what is still to be decided, and what was decided.

    A route that has limits of its own decides them together with the application's, so that they are one batch. Until
    then those of the application wait here; they are decided at the latest when the answer begins.
    """

    __slots__ = ("asked", "limits", "outcome", "waiting")

    def __init__(self, limits: AsyncRateLimits, waiting: Sequence[Rule]) -> None:
        self.limits = limits
        self.waiting = waiting
        # What of the route has asked so far, in frameworks where several parts of a route may be limited.
        self.asked: list[object] = []
        self.outcome: Outcome | None = None

    async def decide(self, incoming: Incoming, route_rules: Sequence[Rule] = ()) -> Outcome:
        """Decide all that waits, together with the rules of the route."""
        waiting, self.waiting = self.waiting, ()
        self.outcome = await self.limits.check(incoming, waiting, route_rules)
        return self.outcome

    async def enforce(self, incoming: Incoming, route_rules: Sequence[Rule]) -> None:
        """`decide`, and raise a denial: the middleware makes the answer of it."""
        waiting, self.waiting = self.waiting, ()
        self.outcome = outcome = await self.limits.check(incoming, waiting, route_rules)
        if outcome.closest is not None and not outcome.allowed:
            raise LimitExceeded(describe(outcome.closest), outcome.decisions)


class RateLimitMiddleware:
    """`app = RateLimitMiddleware(app, "100/minute")`; all options of `RateLimits`, or one that is made already."""

    def __init__(
        self,
        app: App,
        *rules: Any,
        rate_limits: AsyncRateLimits | None = None,
        messages: str | Rule | Sequence[str | Rule] = (),
        **options: Any,
    ) -> None:
        self.app = app
        self.rate_limits = AsyncRateLimits(*rules, **options) if rate_limits is None else rate_limits
        self._messages = message_rules(messages)

    # -- hooks for frameworks

    def incoming(self, scope: Scope) -> AsgiIncoming:
        """The request for rules and keys; a subclass makes the framework's own request of it."""
        return AsgiIncoming(scope)

    def is_limited_route(self, scope: Scope) -> bool:
        """Whether the request goes to a route that decides with limits of its own."""
        return False

    # -- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await (self._live if scope["type"] == "lifespan" else self.app)(scope, receive, send)
            return
        limits = self.rate_limits
        state = scope[SCOPE_KEY] = State(limits, ())
        # Most applications have limits either of their own or of their routes: then this is not needed here.
        incoming = self.incoming(scope) if limits.rules or self._messages else None
        if incoming is not None and limits.rules:
            state.waiting = limits.applicable(incoming)
            if state.waiting and not self.is_limited_route(scope):
                outcome = await state.decide(incoming)
                if not outcome.allowed:
                    await self._deny(scope, send, outcome.decisions)
                    return
        started = denied = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started, denied
            if denied:
                return
            kind = message["type"]
            if kind in {"http.response.start", "websocket.accept"}:
                if state.waiting and incoming is not None and not (await state.decide(incoming)).allowed:
                    # An error before the route is reached, such as a wrong password, counts like any other request.
                    denied = True
                    assert state.outcome is not None
                    await self._deny(scope, send, state.outcome.decisions)
                    return
                started = True
                if state.outcome is not None and state.outcome.closest is not None:
                    headers = message.get("headers", ())
                    lines = limits.answers.lines(state.outcome.closest)
                    if any(name == b"ratelimit" for name, _ in headers):
                        # The application's own, or a framework's answer to a denial: complete it.
                        present = {name for name, _ in headers}
                        lines = [line for line in lines if line[0] not in present]
                    message = {**message, "headers": [*headers, *lines]}
            await send(message)

        if incoming is not None and scope["type"] == "websocket" and self._messages:
            receive, send = self._limited_messages(incoming, receive, send)
        try:
            await self.app(scope, receive, send_with_headers)
        except LimitExceeded as error:
            if started or denied:
                raise
            await self._deny(scope, send, error.decisions)

    async def _deny(self, scope: Scope, send: Send, decisions: Sequence[Decision]) -> None:
        denial, content_type, body = self.rate_limits.denial(decisions)
        prefix = "http"
        if scope["type"] == "websocket":
            if "websocket.http.response" not in (scope.get("extensions") or {}):
                # The server answers 403: without the extension it cannot send another status.
                reason = describe(denial.decision)
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": reason})
                return
            prefix = "websocket.http"
        headers = [
            *self.rate_limits.answers.lines(denial.decision),
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": f"{prefix}.response.start", "status": denial.status, "headers": headers})
        await send({"type": f"{prefix}.response.body", "body": b"" if incoming_is_head(scope) else body})

    # -- websockets

    def _limited_messages(self, incoming: AsgiIncoming, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Every message that arrives is counted; a denied one closes the connection and never arrives."""
        closed = False

        async def limited_receive() -> Message:
            nonlocal closed
            message = await receive()
            if message["type"] != "websocket.receive" or closed:
                return message
            outcome = await self.rate_limits.check(incoming, self._messages)
            if outcome.allowed:
                return message
            closed = True
            reason = describe(self.rate_limits.answers.denial(outcome.decisions).decision)
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": reason})
            return {"type": "websocket.disconnect", "code": POLICY_VIOLATION, "reason": reason}

        async def limited_send(message: Message) -> None:
            if not closed:
                await send(message)

        return limited_receive, limited_send

    # -- start and stop of the application

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The limiter starts before the application, and stops after it."""
        starting = True

        async def receive_and_start() -> Message:
            nonlocal starting
            message = await receive()
            if starting and message["type"] == "lifespan.startup":
                starting = False
                await self.rate_limits.start()
            return message

        async def stop_and_send(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self.rate_limits.stop()
            await send(message)

        await self.app(scope, receive_and_start, stop_and_send)


def incoming_is_head(scope: Scope) -> bool:
    """An answer to HEAD has no body."""
    return bool(scope.get("method") == "HEAD")
