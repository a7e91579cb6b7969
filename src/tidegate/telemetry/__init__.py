"""Metrics, logs and traces of a running limiter.

Optional and lazy: no lower layer imports this package, and importing it loads no other module. It reads `statistics()`
and takes no part in decisions.

    from tidegate.telemetry import collect, render

    page = render([collect(limiter)])      # the body of a /metrics response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.telemetry.collecting import collect
    from tidegate.telemetry.prometheus import Collector, render

__all__ = ["Collector", "collect", "render"]

_MODULES = {
    "Collector": "tidegate.telemetry.prometheus",
    "collect": "tidegate.telemetry.collecting",
    "render": "tidegate.telemetry.prometheus",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line needs none of it, and must start fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
