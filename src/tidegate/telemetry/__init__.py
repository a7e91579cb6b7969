"""What a running limiter tells the people who operate it: metrics, logs, traces.

Optional and lazy: nothing below this package imports it, and importing it costs nothing until it is used. It reads
the `statistics()` of the parts and never touches a decision.

    from tidegate.telemetry import collect, render

    page = render([collect(limiter)])      # what a /metrics handler answers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.telemetry.collecting import collect
    from tidegate.telemetry.prometheus import Collector, render

__all__ = ["Collector", "collect", "render"]

_HOMES = {
    "Collector": "tidegate.telemetry.prometheus",
    "collect": "tidegate.telemetry.collecting",
    "render": "tidegate.telemetry.prometheus",
}


def __getattr__(name: str) -> Any:
    """Import it at its first use: most commands need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
