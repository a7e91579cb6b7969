"""Every error that Tidegate raises on purpose, drawn as a tree:

    TidegateError
    ├── InvalidInput (ValueError)      a request or a quota is malformed; nothing was counted
    ├── ConfigurationError             the limiter cannot work as it was configured
    │   ├── MissingExtra               an optional dependency is not installed
    │   ├── RegionMismatch             the origin belongs to a region of another name
    │   └── SchemaMissing              the ledger has no schema, or an older one
    ├── Closed                         the limiter was stopped
    ├── ReentrantCall (RuntimeError)   a signal handler or finalizer called in the middle of a decision
    ├── LimitExceeded                  raised by a function that `limited` decorates; carries the decisions
    ├── TooManyReservations            the workspace holds as many reservations as it may; nothing was reserved
    ├── TooManyResets                  the workspace has as many live resets as it may; nothing was reset
    └── DependencyError                an origin or a ledger failed; decisions continued without it
        ├── DependencyTimeout          no answer in time (the call may still have been applied)
        ├── DependencyUnavailable      not reachable, or refused while loading, failing over, shutting down
        ├── CircuitOpen                not tried: the breaker is open
        └── RowsRejected               the database refuses these rows; sending them again will not help

`transient` says whether the same call may succeed later, without any change.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.core.model import Decision

__all__ = [
    "CircuitOpen",
    "Closed",
    "ConfigurationError",
    "DependencyError",
    "DependencyTimeout",
    "DependencyUnavailable",
    "InvalidInput",
    "LimitExceeded",
    "MissingExtra",
    "ReentrantCall",
    "RegionMismatch",
    "RowsRejected",
    "SchemaMissing",
    "TidegateError",
    "TooManyReservations",
    "TooManyResets",
]


class TidegateError(Exception):
    """The root: `except TidegateError` catches everything that Tidegate raises on purpose."""

    transient = False


class InvalidInput(TidegateError, ValueError):
    """A value is not acceptable. Names the field, the value and what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, object, str]]:
        return InvalidInput, (self.field, self.value, self.expected)


class ConfigurationError(TidegateError):
    """The limiter was configured in a way that cannot work. The message says what to change."""


class MissingExtra(ConfigurationError):
    """An optional dependency is needed and not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs an optional dependency: pip install 'tidegate[{extra}]'")
        self.extra = extra
        self.needed_for = needed_for

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self.extra, self.needed_for)


class RegionMismatch(ConfigurationError):
    """This origin is already the origin of a region with another name."""

    def __init__(self, configured: str, held: str) -> None:
        super().__init__(
            f"this node was started for region {configured!r}, but its origin belongs to region {held!r}; "
            "two regions must never share an origin: fix the region name or the origin URL"
        )
        self.configured = configured
        self.held = held

    def __reduce__(self) -> tuple[type[RegionMismatch], tuple[str, str]]:
        return RegionMismatch, (self.configured, self.held)


class SchemaMissing(ConfigurationError):
    """The ledger's schema is absent or too old. The message names the command that creates it."""


class Closed(TidegateError):
    """The limiter was stopped; make a new one."""


class ReentrantCall(TidegateError, RuntimeError):
    """A signal handler or a finalizer asked for a decision in the middle of another one, on the same thread.

    Waiting would deadlock, and continuing could count wrongly, so the call is refused.
    """

    transient = True


class LimitExceeded(TidegateError):
    """A limit denied the call of a function that `limited` decorates. The message says when to retry."""

    transient = True

    def __init__(self, message: str, decisions: Sequence[Decision]) -> None:
        super().__init__(message)
        self.decisions: tuple[Decision, ...] = tuple(decisions)
        """One decision for each limit, in their order. Nothing was counted."""

    @property
    def decision(self) -> Decision:
        """The denial that lasts longest: its `retry_after` says when to retry."""
        return max((each for each in self.decisions if not each), key=_retry_order)

    def __reduce__(self) -> tuple[type[LimitExceeded], tuple[str, tuple[Decision, ...]]]:
        return type(self), (str(self), self.decisions)


def _retry_order(denial: Decision) -> float:
    return inf if denial.retry_after_ms is None else denial.retry_after_ms


class TooManyReservations(TidegateError):
    """The workspace holds as many reservations in the memory of this process as it may. Nothing was reserved."""

    transient = True

    def __init__(self, workspace: str) -> None:
        super().__init__(
            f"workspace {workspace!r} holds as many reservations as it may in the memory of this process; "
            "settle or release some, or give them a shorter life"
        )
        self.workspace = workspace

    def __reduce__(self) -> tuple[type[TooManyReservations], tuple[str]]:
        return TooManyReservations, (self.workspace,)


class TooManyResets(TidegateError):
    """The workspace has as many live resets as it may, and nothing was reset.

    A reset is remembered for at most four windows. Try again later, or allow more with an override.
    """

    transient = True

    def __init__(self, workspace: str) -> None:
        super().__init__(
            f"workspace {workspace!r} has as many live resets as it may; each is remembered for at most four windows; "
            "try again later, or raise the limit of the identifier for a while"
        )
        self.workspace = workspace

    def __reduce__(self) -> tuple[type[TooManyResets], tuple[str]]:
        return TooManyResets, (self.workspace,)


class DependencyError(TidegateError):
    """An origin or a ledger failed. Never reaches a caller of `limit`: decisions continue without it."""

    transient = True


class DependencyTimeout(DependencyError):
    """No answer within the time allowed. The request may have been applied: only idempotent work is repeated."""


class DependencyUnavailable(DependencyError):
    """Not reachable, or it refused because it is loading, failing over or shutting down."""


class CircuitOpen(DependencyError):
    """Not tried: the circuit breaker is open."""


class RowsRejected(DependencyError):
    """The database refuses the content of these rows. Sending the same rows again cannot help."""

    transient = False
