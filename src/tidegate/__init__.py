"""Tidegate: a rate limiter whose every process decides from its own memory.

    from tidegate import Limit, Limiter

    limiter = Limiter()
    emails = Limit("100/minute", namespace="email.send")
    if not limiter.limit(emails, "user_123"):
        ...

Nodes of a region converge through a shared origin, regions through a ledger; see `Limiter`.
"""

import typing

from tidegate.core.model import Decision, Limit, Request, Tuning
from tidegate.errors import (
    ConfigurationError,
    InvalidInput,
    LimitExceeded,
    TidegateError,
)
from tidegate.runtime.environment import is_compiled as _is_compiled
from tidegate.runtime.limiter import Limiter
from tidegate.runtime.reservation import AsyncReservation, Reservation
from tidegate.runtime.statistics import Health, Statistics
from tidegate.runtime.usage import RegionUsage, Usage

if typing.TYPE_CHECKING:
    from tidegate.runtime.async_limiter import AsyncLimiter

__all__ = [
    "AsyncLimiter",
    "AsyncReservation",
    "ConfigurationError",
    "Decision",
    "Health",
    "InvalidInput",
    "Limit",
    "LimitExceeded",
    "Limiter",
    "RegionUsage",
    "Request",
    "Reservation",
    "Statistics",
    "TidegateError",
    "Tuning",
    "Usage",
    "__version__",
    "compiled",
]

__version__ = "0.1.0"

compiled: bool = _is_compiled()
"""True when the core runs as compiled extension modules, False when the same source is interpreted."""


def __getattr__(name: str) -> object:
    """`AsyncLimiter`, imported when it is first used: asyncio takes a third of the time of an import."""
    if name != "AsyncLimiter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidegate.runtime.async_limiter import AsyncLimiter

    globals()[name] = AsyncLimiter
    return AsyncLimiter


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
