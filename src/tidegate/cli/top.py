"""`tidegate top`: what the console shows, in a terminal. `screen` makes the lines; the rest reads keys and events."""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

import click

from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import json_option
from tidegate.cli.tables import shorten, visible
from tidegate.core.quota import format_count, format_duration

__all__ = ["screen", "top"]

Order = Literal["denied", "allowed", "name"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
HELP: Final = "q quit · d, a, n sort by denied, allowed, name · space pause"
# After a lost connection.
RETRY_S: Final = 2.0

Document = Mapping[str, Any]


@click.command()
@click.option(
    "--once", is_flag=True, help="Print once and exit; this is also what happens without a terminal."
)
@click.option(
    "--sort", type=click.Choice(ORDERS), default="denied", show_default=True, help="Order of the lists."
)
@client_options
@json_option
def top(client: Client, once: bool, sort: Order, as_json: bool) -> None:
    """Show who is being limited right now, live: rates, namespaces, identifiers, regions, dependencies.

    Needs a key with console.read, and a server that serves its console (on a loopback address it does by default;
    otherwise start it with --console-enabled on). With --json and without --once it prints one JSON document a second.

    \b
    tidegate top
    tidegate top --once --json
    """
    if as_json and not once:
        for document in _ticks(client):
            click.echo(json.dumps(document))
        return
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        document = client.get("console/snapshot")
        width = shutil.get_terminal_size((120, 0)).columns
        click.echo(json.dumps(document) if as_json else "\n".join(screen(document, sort, width, None)))
        return
    client.get("console/session")  # a wrong key or a console that is off is an error, not an empty screen
    _Live(client, sort).run()


def _ticks(client: Client) -> Iterator[Document]:
    """What the server sends each second. Ends with the connection."""
    kind = ""
    for line in client.lines("console/events"):
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data" and kind == "tick":
            yield json.loads(value)


# The lines.


def screen(document: Document, sort: Order, width: int, height: int | None, note: str = "") -> list[str]:
    """The whole screen, each line at most `width` characters; at most `height` lines."""
    lines = [*_head(document), "", *_namespaces(document, sort), "", *_identifiers(document, sort, width)]
    lines += ["", *_denials(document)]
    if height is not None:
        lines = lines[: max(0, height - 1)]
        lines += [""] * (height - 1 - len(lines)) + [note or HELP]
    return [shorten(line, width) for line in lines]


def _head(document: Document) -> list[str]:
    rates, memory, latency = document["rates"], document["memory"], document["latency_s"]
    round_trip = _seconds(document["origin_latency_s"]["p99"])
    size, connections = _bytes(memory["rss_bytes"]), format_count(document["connections"], "connection")
    identifiers = format_count(memory["subjects"], "identifier")
    total = rates["allowed"] + rates["denied"]
    denied = f" ({100 * rates['denied'] / total:.0f} %)" if total else ""
    at = datetime.fromtimestamp(document["at_ms"] / 1000, UTC).strftime("%H:%M:%S UTC")
    sources = ", ".join(f"{name} {_rate(rate)}/s" for name, rate in rates["sources"].items())
    processes = "1 process" if document["workers"] == 1 else f"{document['workers']} processes"
    lines = [
        f"tidegate {document['version']} · region {document['region']} · {processes} · {at}",
        f"allowed {_rate(rates['allowed'])}/s · denied {_rate(rates['denied'])}/s{denied} · source: {sources}",
        f"time to decide: p50 {_seconds(latency['p50'])}, p99 {_seconds(latency['p99'])} · origin: p99 {round_trip}",
        f"{identifiers} in memory, {memory['evicted']:,} evicted · {size} · {connections}",
    ]
    states = [
        f"{each['name']} {'ok' if each['ok'] else 'DOWN: ' + visible(each['detail'])}"
        for each in document["dependencies"]
    ]
    bad = [f"{each['name']} {each['state']}" for each in document["breakers"] if each["state"] != "closed"]
    states.append("breakers closed" if not bad else "breakers: " + ", ".join(bad))
    lines.append(" · ".join(states))
    if document["regions"]:
        lines.append("regions: " + " · ".join(_region(each) for each in document["regions"]))
    offsets = [node["clock_offset_ms"] for node in document["nodes"] if node["clock_offset_ms"] is not None]
    if offsets:
        worst = max(offsets, key=abs)
        lines.append(f"clock: {worst:+d} ms from the origin")
    return lines


def _region(region: Mapping[str, Any]) -> str:
    name = visible(region["region"]) + (" (this one)" if region["is_own"] else "")
    if not region["is_live"]:
        age = region["heartbeat_age_ms"]
        return f"{name} SILENT{'' if age is None else ' for ' + format_duration(age)}"
    lag = "" if region["lag_ms"] is None else f", lag {format_duration(region['lag_ms'])}"
    return f"{name} live{lag}"


def _order(sort: Order) -> Callable[[Mapping[str, Any]], Any]:
    if sort == "name":
        return lambda row: row.get("name") or row.get("identifier")
    return lambda row: (-row[sort], row["name"])


def _namespaces(document: Document, sort: Order) -> list[str]:
    rows = sorted(document["namespaces"], key=_order(sort))
    lines = [f"{'NAMESPACE':<32} {'ALLOWED/s':>10} {'DENIED/s':>10} {'DENIED':>12}"]
    for row in rows[:10]:
        name = shorten(visible(row["name"]), 32)
        lines.append(
            f"{name:<32} {_rate(row['allowed']):>10} {_rate(row['denied']):>10} {row['total_denied']:>12,}"
        )
    return lines if rows else [lines[0], "(no decision in this workspace yet)"]


def _identifiers(document: Document, sort: Order, width: int) -> list[str]:
    """The two lists side by side, or one below the other on a narrow terminal."""
    half = max(40, (width - 3) // 2) if width >= 83 else width
    lists = [
        _list(title, document[name], sort, half)
        for title, name in (("HOTTEST", "hot"), ("MOST DENIED", "denied_most"))
    ]
    if half == width:
        return [*lists[0], "", *lists[1]]
    return [
        f"{left:<{half}}   {right}".rstrip()
        for left, right in zip(*(part + [""] * (11 - len(part)) for part in lists), strict=True)
        if left or right
    ]


def _list(title: str, rows: Sequence[Mapping[str, Any]], sort: Order, width: int) -> list[str]:
    if sort == "name":
        rows = sorted(rows, key=lambda row: row["identifier"])
    room = width - 10
    names = room * 3 // 5
    lines = [f"{title:<{room}} {'PER s':>9}"]
    for row in rows[:10]:
        name = shorten(visible(row["identifier"]), names)
        place = shorten(visible(row["namespace"]), room - names - 1)
        lines.append(f"{name:<{names}} {place:<{room - names - 1}} {_rate(row['per_s']):>9}")
    return lines


def _denials(document: Document) -> list[str]:
    lines = ["LAST DENIALS"]
    for row in document["denials"][:8]:
        ago = format_duration(max(0, document["at_ms"] - row["at_ms"]))
        because = f", override {visible(row['override_identifier'])}" if row["override_id"] else ""
        retry = row["retry_after_ms"]
        wait = "never fits" if retry is None else f"retry in {format_duration(retry)}"
        lines.append(
            f"{visible(row['identifier'])} in {visible(row['namespace'])}: {row['rule']}{because}, {ago} ago, {wait}"
        )
    return lines if len(lines) > 1 else [*lines, "(none)"]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else "<0.1"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _bytes(value: int | None) -> str:
    return "memory unknown" if value is None else f"{value / 1e6:,.0f} MB"


# Live.


class _Live:
    """Draws each document that arrives, and reads keys, until q or Ctrl-C."""

    def __init__(self, client: Client, sort: Order) -> None:
        self._client = client
        self._sort: Order = sort
        self._is_paused = False
        self._document: Document | None = None
        self._note = "connecting…"
        self._drawn: list[str] = []
        # Written by the thread that reads events: a document, or why there is none.
        self._arrived: queue.SimpleQueue[Document | str] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        with _screen() as key_of:
            while True:
                self._take()
                self._draw()
                key = key_of(0.1)
                if key in {"q", "Q"}:
                    return
                for order in ORDERS:
                    if key == order[0]:
                        self._sort = order
                if key == " ":
                    self._is_paused = not self._is_paused

    def _receive(self) -> None:
        while True:
            try:
                for document in _ticks(self._client):
                    self._arrived.put(document)
                self._arrived.put("the connection was closed; connecting again…")
            except click.ClickException as error:
                self._arrived.put(f"{error.format_message()}; trying again")
            time.sleep(RETRY_S)

    def _take(self) -> None:
        while not self._arrived.empty():
            found = self._arrived.get()
            if isinstance(found, str):
                self._note = found
            else:
                self._note = ""
                if not self._is_paused:
                    self._document = found

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        note = "paused: space resumes" if self._is_paused else self._note
        if self._document is None:
            lines = [shorten(note, size.columns)]
        else:
            lines = screen(self._document, self._sort, size.columns, size.lines, note)
        if lines == self._drawn:
            return
        self._drawn = lines
        # From the upper left corner; the rest of each line is cleared, and everything below.
        sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
        sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[Callable[[float], str]]:
    """The alternate screen of the terminal, and a function that waits for a key. Restored at the end."""
    import select
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write("\x1b[?1049h\x1b[?25l")

    def key(wait_s: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        # Past the buffer of sys.stdin, in which select would not see a second key.
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""

    try:
        yield key
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
