"""How a store writes the subject of a reset: as JSON, which has a form for every str, lone surrogates included."""

from __future__ import annotations

import json
from typing import Final

from tidegate.core.resets import Reset

__all__ = ["RESETS_PER_ANSWER", "reset_of", "subject_of"]

# The most that one answer of `Origin.resets` carries, as the port says.
RESETS_PER_ANSWER: Final = 1_000


def subject_of(reset: Reset) -> str:
    return json.dumps(reset[:4], separators=(",", ":"))


def reset_of(subject: str, generation: int) -> Reset | None:
    """The reset; None for what is not one."""
    try:
        workspace, namespace, identifier, duration_ms = json.loads(subject)
        return Reset(str(workspace), str(namespace), str(identifier), int(duration_ms), generation)
    except (TypeError, ValueError):
        return None
