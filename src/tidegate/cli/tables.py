"""Lists as text: columns under headers. A name that a client chose cannot control the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

__all__ = ["shorten", "table", "visible"]

# Control characters, and those that are invisible or change the direction of what follows.
HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with such characters shown by their numbers."""
    return HIDDEN.sub(lambda found: f"<U+{ord(found.group()):04X}>", text)


def shorten(text: str, width: int) -> str:
    """At most `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()
) -> str:
    """Columns as wide as their content; `right`: the numbers of those that are aligned to the right."""
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [headers, *shown]) for column in range(len(headers))]
    lines = []
    for row in [headers, *shown]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
