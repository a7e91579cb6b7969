"""Django: a middleware with settings, and `@limited("5/minute")` at views, synchronous and asynchronous ones.

    MIDDLEWARE = [..., "tidegate.integrations.django.RateLimitMiddleware"]   # after AuthenticationMiddleware
    TIDEGATE_RULES = ["1000/hour"]

Under ASGI, take `get_asgi_application` from here: then the limiter starts and stops with the server.

The limits of site and view are one batch, decided before the view runs; for a URL without a view, before its 404
is sent. Settings: `TIDEGATE_RULES`, `_BY`, `_EXEMPT`, `_PROXIES`, `_ANSWERS`, `_SHADOW`, `_ON_OUTCOME`, `_LIMITER` are
the arguments of `RateLimits`, functions also as dotted paths; `TIDEGATE_REGION`, `_ORIGIN` and `_LEDGER` as everywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core import asgi
from django.http import HttpRequest, HttpResponse
from django.utils.module_loading import import_string

from tidegate.core.model import Decision
from tidegate.errors import ConfigurationError, LimitExceeded, TidegateError
from tidegate.integrations.answers import Outcome
from tidegate.integrations.asgi import App, Receive, Scope, Send
from tidegate.integrations.incoming import Incoming
from tidegate.integrations.rate_limits import AsyncRateLimits, SyncRateLimits
from tidegate.integrations.rules import guarded, make_rules, rules_of
from tidegate.integrations.settings import ENVIRONMENT

__all__ = ["RateLimitMiddleware", "get_asgi_application", "limited"]

ATTRIBUTE: Final = "tidegate_outcome"
OPTIONS: Final = ("limiter", "by", "exempt", "proxies", "answers", "shadow", "on_outcome")

View = TypeVar("View", bound=Callable[..., Any])

# Filled by the middleware while `get_asgi_application` builds an application.
_built: ContextVar[list[AsyncRateLimits]] = ContextVar("tidegate_built")


class DjangoIncoming(Incoming):
    """`native` is Django's request."""

    __slots__ = ("is_async",)

    def __init__(self, request: Any, is_async: bool) -> None:
        match = request.resolver_match
        # A URL without a name has the dotted path of its view.
        route = None if match is None else (match.view_name or match._func_path)  # noqa: SLF001
        super().__init__(
            request, request.method, request.path, request.META.get("REMOTE_ADDR") or None, route
        )
        self.is_async = is_async

    def header(self, name: str) -> str | None:
        value: str | None = self.native.headers.get(name)
        return value

    def cookie(self, name: str) -> str | None:
        value: str | None = self.native.COOKIES.get(name)
        return value

    def user(self) -> object:
        # On an event loop the session must not be read by `request.user`.
        return self.native.auser() if self.is_async else super().user()


def _options() -> tuple[Sequence[Any], dict[str, Any]]:
    options: dict[str, Any] = {}
    for name in OPTIONS:
        value = getattr(settings, f"TIDEGATE_{name.upper()}", None)
        if value is not None:
            options[name] = import_string(value) if isinstance(value, str) else value
    files = [f"{name}_FILE" for name in ENVIRONMENT.values()]
    options["settings"] = {
        name: getattr(settings, name) for name in (*ENVIRONMENT.values(), *files) if hasattr(settings, name)
    }
    rules = getattr(settings, "TIDEGATE_RULES", ())
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Sequence):
        raise ConfigurationError('TIDEGATE_RULES: expected a list, such as ["10/second; 1000/hour"]')
    return rules, options


class RateLimitMiddleware:
    """Synchronous under WSGI, asynchronous under ASGI."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        rules, options = _options()
        self.is_async = iscoroutinefunction(get_response)
        self.rate_limits: AsyncRateLimits | SyncRateLimits
        if self.is_async:
            markcoroutinefunction(self)
            self.rate_limits = AsyncRateLimits(*rules, **options)
            _built.get([]).append(self.rate_limits)
            self.process_view: Any = self._process_view_async
        else:
            self.rate_limits = SyncRateLimits(*rules, **options)
            self.process_view = self._process_view

    def __call__(self, request: Any) -> Any:
        if self.is_async:
            return self._answer_async(request)
        response = self.get_response(request)
        outcome = getattr(request, ATTRIBUTE, None)
        if outcome is None:  # no view was found for it
            outcome = self._check(request, None)
        return self._finished(response, cast("Outcome", outcome))

    async def _answer_async(self, request: Any) -> Any:
        response = await self.get_response(request)
        outcome = getattr(request, ATTRIBUTE, None)
        if outcome is None:
            outcome = await cast("Awaitable[Outcome]", self._check(request, None))
        return self._finished(response, outcome)

    def _check(self, request: Any, view: Any) -> Outcome | Awaitable[Outcome]:
        incoming = DjangoIncoming(request, self.is_async)
        return self.rate_limits.check(incoming, self.rate_limits.applicable(incoming), rules_of(view))

    def _process_view(self, request: Any, view: Any, _args: Any, _kwargs: Any) -> Any:
        return self._decided(request, cast("Outcome", self._check(request, view)))

    async def _process_view_async(self, request: Any, view: Any, _args: Any, _kwargs: Any) -> Any:
        return self._decided(request, await cast("Awaitable[Outcome]", self._check(request, view)))

    def _decided(self, request: Any, outcome: Outcome) -> Any:
        setattr(request, ATTRIBUTE, outcome)
        return None if outcome.allowed else self._denied(outcome.decisions)

    def process_exception(self, _request: Any, exception: Exception) -> Any:
        """A denial of `limiter.limited` anywhere below the view."""
        return self._denied(exception.decisions) if isinstance(exception, LimitExceeded) else None

    def _finished(self, response: Any, outcome: Outcome) -> Any:
        if not outcome.allowed:
            return response if response.has_header("Retry-After") else self._denied(outcome.decisions)
        for name, value in self.rate_limits.headers(outcome).items():
            response.setdefault(name, value)
        return response

    def _denied(self, decisions: Sequence[Decision]) -> Any:
        denial, content_type, body = self.rate_limits.denial(decisions)
        return HttpResponse(body, content_type, denial.status, headers=denial.headers)


def _verify(request: Any, *_args: Any, **_kwargs: Any) -> None:
    if not hasattr(request, ATTRIBUTE):
        raise ConfigurationError(
            "limited: add 'tidegate.integrations.django.RateLimitMiddleware' to MIDDLEWARE, it decides"
        )


def limited(*limits: Any, **options: Any) -> Callable[[View], View]:
    """Decorate a view: `@limited("10/second; 1000/hour", by=user)`. Takes what `Rule` takes, or rules.

    For a class: `@method_decorator(limited("5/minute"), name="dispatch")`.
    """
    rules = make_rules(limits, **options)

    def decorate(view: View) -> View:
        return cast("View", guarded(view, rules, _verify))

    return decorate


def get_asgi_application() -> App:
    """Django's application, which also answers lifespan messages: Django's own does not.

    The limiter starts before the first request, and sends its last counts when the server stops.
    """
    built: list[AsyncRateLimits] = []
    token = _built.set(built)
    try:
        application = cast("App", asgi.get_asgi_application())
    finally:
        _built.reset(token)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        try:
            for limits in built:
                await limits.start()
        except TidegateError as error:
            # If it were raised, servers would assume an application without a lifespan, and continue.
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for limits in built:
            await limits.stop()
        await send({"type": "lifespan.shutdown.complete"})

    return serve
