"""gRPC servers: interceptors for `grpc.server` and for `grpc.aio.server`.

    server = grpc.server(ThreadPoolExecutor(), interceptors=[RateLimitInterceptor("100/second")])

A rule's `path` is the full method, such as "/mail.Mailer/*"; the route has the same name without the first slash. A
denied call ends with RESOURCE_EXHAUSTED. Its trailing metadata has `grpc-retry-pushback-ms`, which gRPC clients with a
retry policy follow, and the header fields of HTTP. Functions of rules get a `Call`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio

from tidegate.core.model import Decision
from tidegate.errors import ConfigurationError, LimitExceeded
from tidegate.integrations.answers import Denial
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rate_limits import AsyncRateLimits, RateLimits, SyncRateLimits

__all__ = ["AsyncRateLimitInterceptor", "Call", "RateLimitInterceptor"]

PUSHBACK: Final = "grpc-retry-pushback-ms"


class Call(NamedTuple):
    """One call: what functions of rules get."""

    method: str
    request: Any
    """The message, or an iterator of messages where the client streams."""
    context: Any

    def metadata(self, name: str) -> str | None:
        """A value that the client sent, by its lower-case name."""
        for key, value in self.context.invocation_metadata() or ():
            if key == name:
                return value.decode("latin-1") if isinstance(value, bytes) else str(value)
        return None


class GrpcIncoming(Incoming):
    """`native` is a `Call`."""

    __slots__ = ()

    def __init__(self, call: Call) -> None:
        super().__init__(call, "POST", call.method, _peer(call.context.peer()), call.method.lstrip("/"))

    def header(self, name: str) -> str | None:
        found: str | None = self.native.metadata(name)
        return found


def _peer(peer: str) -> str | None:
    """The address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None on a Unix socket."""
    kind, _, rest = unquote(peer).partition(":")
    return rest if kind in ("ipv4", "ipv6") else None


def _trailers(limits: RateLimits[Any], decision: Decision) -> tuple[tuple[str, str], ...]:
    fields = [(name.lower(), value) for name, value in limits.answers.fields(decision).items()]
    if not decision and decision.retry_after_ms is not None:
        fields.append((PUSHBACK, str(decision.retry_after_ms)))
    return tuple(fields)


def _rebuilt(handler: Any, limited: Callable[..., Any]) -> Any:
    """The handler with another function in it."""
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    return make(limited, handler.request_deserializer, handler.response_serializer)


def _kind(handler: Any) -> str:
    return "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )


class RateLimitInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`: all arguments of `RateLimits`. Call `rate_limits.stop()` after `server.stop()`."""

    def __init__(self, *rules: Any, **options: Any) -> None:
        self.rate_limits = SyncRateLimits(*rules, **options)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the method's function: only there is the caller known."""
        handler = continuation(details)
        if handler is None:
            return None
        function = getattr(handler, _kind(handler))
        method = details.method

        def unary(request: Any, context: Any) -> Any:
            self._check(Call(method, request, context))
            try:
                return function(request, context)
            except LimitExceeded as error:
                self._abort(context, error.decisions)

        def stream(request: Any, context: Any) -> Iterator[Any]:
            self._check(Call(method, request, context))
            try:
                yield from function(request, context)
            except LimitExceeded as error:
                self._abort(context, error.decisions)

        return _rebuilt(handler, stream if handler.response_streaming else unary)

    def _check(self, call: Call) -> None:
        incoming = GrpcIncoming(call)
        outcome = self.rate_limits.check(incoming, self.rate_limits.applicable(incoming))
        if not outcome.allowed:
            self._abort(call.context, outcome.decisions)
        if outcome.closest is not None:
            call.context.set_trailing_metadata(_trailers(self.rate_limits, outcome.closest))

    def _abort(self, context: Any, decisions: Sequence[Decision]) -> None:
        denial: Denial = self.rate_limits.answers.denial(decisions)
        context.set_trailing_metadata(_trailers(self.rate_limits, denial.decision))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, denial.detail)


class AsyncRateLimitInterceptor(grpc.aio.ServerInterceptor):
    """For `grpc.aio.server`: all arguments of `RateLimits`. Await `rate_limits.stop()` after `server.stop()`."""

    def __init__(self, *rules: Any, **options: Any) -> None:
        self.rate_limits = AsyncRateLimits(*rules, **options)

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the method's function: only there is the caller known."""
        handler = await continuation(details)
        if handler is None:
            return None
        function = getattr(handler, _kind(handler))
        method = details.method
        if not inspect.iscoroutinefunction(function) and not inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"{method}: an asynchronous server with rate limits needs coroutine functions; make it `async def`"
            )

        async def unary(request: Any, context: Any) -> Any:
            await self._check(Call(method, request, context))
            try:
                return await function(request, context)
            except LimitExceeded as error:
                await self._abort(context, error.decisions)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(Call(method, request, context))
            try:
                async for message in function(request, context):
                    yield message
            except LimitExceeded as error:
                await self._abort(context, error.decisions)

        return _rebuilt(handler, stream if inspect.isasyncgenfunction(function) else unary)

    async def _check(self, call: Call) -> None:
        incoming = GrpcIncoming(call)
        outcome = await self.rate_limits.check(incoming, self.rate_limits.applicable(incoming))
        if not outcome.allowed:
            await self._abort(call.context, outcome.decisions)
        if outcome.closest is not None:
            call.context.set_trailing_metadata(_trailers(self.rate_limits, outcome.closest))

    async def _abort(self, context: Any, decisions: Sequence[Decision]) -> None:
        denial: Denial = self.rate_limits.answers.denial(decisions)
        trailers = _trailers(self.rate_limits, denial.decision)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, denial.detail, trailers)
