"""What a demo shows: a picture of the fleet as a screen for a terminal or as one line for a log. No input or output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.quota import format_quota
from tidegate.demo.traffic import CALLERS, HOT

__all__ = ["NodePicture", "Picture", "log_line", "screen"]

BAR_LENGTH = 24
KEYS = "k  kill an origin      p  partition a region      h  heal everything      q  quit"


@dataclass(frozen=True)
class NodePicture:
    """One node: its region and how that is, the rates of the last moment, and what the node has counted."""

    name: str
    region: str
    origin: str
    database: str
    allowed_per_s: float
    denied_per_s: float
    sees: int


@dataclass(frozen=True)
class Picture:
    """The fleet at one moment."""

    title: str
    at_s: float
    nodes: tuple[NodePicture, ...]
    hot: str
    """The hot identifier of this round."""
    hot_accepted: int
    """What the clients know to be accepted in its window."""
    rounds: tuple[str, ...]
    """How the rounds before ended."""
    totals: tuple[tuple[str, int, int], ...]
    """By kind of caller: allowed and denied since the start."""
    failed: int
    p99_ms: float
    events: tuple[str, ...]
    addresses: tuple[str, ...]

    @property
    def is_converged(self) -> bool:
        """Whether every node has the true count."""
        return all(node.sees == self.hot_accepted for node in self.nodes)


def _spread(picture: Picture) -> str:
    seen = sorted({node.sees for node in picture.nodes})
    if picture.is_converged:
        return f"all {len(picture.nodes)} nodes see {seen[0]:,}"
    return f"nodes see {seen[0]:,}" if len(seen) == 1 else f"nodes see {seen[0]:,} to {seen[-1]:,}"


def screen(picture: Picture) -> list[str]:
    """The lines of a terminal."""
    lines = [f"{picture.title}    {picture.at_s:.0f} s", *picture.addresses, ""]
    head = (
        "region",
        "origin",
        "database",
        "node",
        "allowed/s",
        "denied/s",
        f"sees of {picture.hot}",
    )
    lines.append(_row(head))
    last = ""
    for node in picture.nodes:
        is_first = node.region != last
        last = node.region
        state = (node.region, node.origin, node.database) if is_first else ("", "", "")
        bar = _bar(node.sees)
        rates = (f"{node.allowed_per_s:.0f}", f"{node.denied_per_s:.0f}")
        lines.append(_row((*state, node.name, *rates, f"{node.sees:>6,}  {bar}")))
    lines += [
        "",
        *picture.rounds[-3:],
        f"{picture.hot}, limit {HOT.quota:,}: {picture.hot_accepted:,} accepted; {_spread(picture)}",
        *(_caller_line(*total) for total in picture.totals),
        f"clients: {picture.failed} requests failed, 99 % of the answers came within {picture.p99_ms:.1f} ms",
        "",
        *picture.events[-6:],
        "",
        KEYS,
    ]
    return lines


def _bar(used: int) -> str:
    """How much of the limit is used, and by how much it is exceeded."""
    filled = round(BAR_LENGTH * used / HOT.quota)
    beyond = min(filled - BAR_LENGTH, BAR_LENGTH)
    return "█" * min(filled, BAR_LENGTH) + "·" * -beyond + "▒" * beyond


def _row(cells: Sequence[str]) -> str:
    widths = (8, 10, 12, 10)
    left = "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    return f"{left}{cells[4]:>9}  {cells[5]:>8}   {cells[6]}".rstrip()


def _caller_line(kind: str, allowed: int, denied: int) -> str:
    caller = next(each for each in CALLERS if each.kind == kind)
    return (
        f"{kind:<9} limit {format_quota(caller.quota, caller.duration_ms):<17} {allowed:>7,} allowed "
        f"{denied:>7,} denied"
    )


def log_line(picture: Picture) -> str:
    """The same on one line, for output that is not a terminal."""
    allowed = sum(node.allowed_per_s for node in picture.nodes)
    denied = sum(node.denied_per_s for node in picture.nodes)
    troubles = {
        f"{node.region} {name} {state}"
        for node in picture.nodes
        for name, state in (("origin", node.origin), ("database", node.database))
        if state != "ok"
    }
    return (
        f"{picture.at_s:5.1f} s  {allowed:.0f} allowed/s, {denied:.0f} denied/s, {picture.failed} failed, "
        f"p99 {picture.p99_ms:.1f} ms; {picture.hot}: {picture.hot_accepted:,} accepted, {_spread(picture)}; "
        f"{', '.join(sorted(troubles)) or 'all well'}"
    )
