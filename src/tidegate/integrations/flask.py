"""Flask: `install(app, "1000/hour")`, and `@limited("5/minute")` at views, synchronous and asynchronous ones.

    app = Flask(__name__)
    install(app, "1000/hour")

    @app.post("/emails")
    @limited("5/minute", by=user)
    def send(): ...

The limits of application and view are one batch, decided before the view runs. Settings come from `app.config`
(`TIDEGATE_ORIGIN`, …), then from the environment. Functions of rules get Flask's `request`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from flask import Flask, Response, current_app, g, request

from tidegate.core.model import Decision
from tidegate.errors import ConfigurationError, LimitExceeded
from tidegate.integrations.rate_limits import SyncRateLimits
from tidegate.integrations.rules import guarded, make_rules, rules_of
from tidegate.integrations.wsgi import WsgiIncoming

__all__ = ["install", "limited"]

EXTENSION: Final = "tidegate"
OUTCOME: Final = "_tidegate_outcome"

View = TypeVar("View", bound=Callable[..., Any])


class FlaskIncoming(WsgiIncoming):
    """`native` is Flask's request."""

    __slots__ = ()

    def user(self) -> object:
        if hasattr(current_app, "login_manager"):
            from flask_login import current_user

            return cast("object", current_user)
        return g.get("user")


def install(app: Flask, *rules: Any, **options: Any) -> SyncRateLimits:
    """Add rate limits to an application: all arguments of `RateLimits`. Call it after what finds the user."""
    limits = SyncRateLimits(*rules, settings=app.config, **options)
    app.extensions[EXTENSION] = limits
    app.before_request(_decide)
    app.after_request(_add_headers)
    app.register_error_handler(LimitExceeded, _exceeded)
    return limits


def limited(*limits: Any, **options: Any) -> Callable[[View], View]:
    """Decorate a view: `@limited("10/second; 1000/hour", by=user)`. Takes what `Rule` takes, or rules."""
    rules = make_rules(limits, **options)

    def decorate(view: View) -> View:
        return cast("View", guarded(view, rules, _verify))

    return decorate


def _verify(*_args: Any, **_kwargs: Any) -> None:
    if EXTENSION not in current_app.extensions:
        raise ConfigurationError("limited: call tidegate.integrations.flask.install(app) first")


def _rate_limits() -> SyncRateLimits:
    return cast("SyncRateLimits", current_app.extensions[EXTENSION])


def _decide() -> Response | None:
    limits = _rate_limits()
    name = request.endpoint
    native = cast("Any", request)._get_current_object()  # noqa: SLF001  # the documented way to pass a request on
    incoming = FlaskIncoming(request.environ, native, name)
    view = None if name is None else current_app.view_functions.get(name)
    outcome = limits.check(incoming, limits.applicable(incoming), rules_of(view))
    if not outcome.allowed:
        return _denied(outcome.decisions)
    if outcome.closest is not None:
        setattr(g, OUTCOME, outcome)
    return None


def _add_headers(response: Response) -> Response:
    outcome = g.get(OUTCOME)
    if outcome is not None and "RateLimit" not in response.headers:
        response.headers.update(_rate_limits().headers(outcome))
    return response


def _exceeded(error: LimitExceeded) -> Response:
    return _denied(error.decisions)


def _denied(decisions: Sequence[Decision]) -> Response:
    denial, content_type, body = _rate_limits().denial(decisions)
    return Response(body, denial.status, denial.headers, content_type=content_type)
