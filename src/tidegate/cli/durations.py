"""Durations on the command line: `60s`, `5m`, `1h`, `250ms`. The unit is required."""

from __future__ import annotations

import re
from typing import Final

import click

from tidegate.core.quota import UNIT_MS

__all__ = ["DURATION", "Duration"]


class Duration(click.ParamType[int]):
    """A duration in whole milliseconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]+)", str(value).strip().lower())
        unit = match.group(2) if match is not None else ""
        unit_ms = UNIT_MS.get(unit) or UNIT_MS.get(unit.removesuffix("s"))
        if match is None or unit_ms is None:
            is_number = re.fullmatch("[0-9]+", str(value).strip()) is not None
            fix = (
                f"add a unit, e.g. {value}s"
                if is_number
                else "write a number and a unit, e.g. 60s, 5m, 1h or 30d"
            )
            self.fail(f"{value!r} is not a duration: {fix}", param, ctx)
        return int(match.group(1)) * unit_ms


DURATION: Final = Duration()
