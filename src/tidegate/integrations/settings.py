"""The limiter of an application from `TIDEGATE_…` settings: the names that the server has for the same things.

Read in this place only. A framework's own settings (Flask's `app.config`, Django's `settings`) win over the
environment. A URL may stand in a file instead, named by `TIDEGATE_ORIGIN_FILE` or `TIDEGATE_LEDGER_FILE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypedDict

from tidegate.errors import ConfigurationError

__all__ = ["ENVIRONMENT", "LimiterSettings", "read_settings"]

ENVIRONMENT: Final = {
    "region": "TIDEGATE_REGION",
    "origin": "TIDEGATE_ORIGIN",
    "ledger": "TIDEGATE_LEDGER",
}

# Without a ledger there is no other region; the server has the same default.
ONLY_REGION: Final = "default"


class LimiterSettings(TypedDict):
    """The arguments of `Limiter` and `AsyncLimiter`."""

    region: str | None
    origin: str | None
    ledger: str | None


def read_settings(*sources: Mapping[str, object]) -> LimiterSettings:
    """From several sources; the first one that has a value wins. Empty values count as unset."""
    found: dict[str, str | None] = {}
    for field, name in ENVIRONMENT.items():
        found[field] = next((value for source in sources if (value := _value(source, field, name))), None)
    if found["region"] is None and found["origin"] is not None and found["ledger"] is None:
        found["region"] = ONLY_REGION
    return LimiterSettings(region=found["region"], origin=found["origin"], ledger=found["ledger"])


def _value(source: Mapping[str, object], field: str, name: str) -> str | None:
    value, file = source.get(name), None if field == "region" else source.get(f"{name}_FILE")
    if value and file:
        raise ConfigurationError(f"{name} and {name}_FILE are both set; set one of them")
    if file:
        try:
            return Path(str(file)).read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            # Not shown: the URL itself may have been put where its file's name belongs.
            raise ConfigurationError(
                f"{name}_FILE: the file cannot be read ({reason}); name a readable file that holds the URL"
            ) from None
    if not value:
        return None
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: got {type(value).__name__}, expected a text")
    return value
