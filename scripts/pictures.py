#!/usr/bin/env python3
"""Draws the pictures of the documentation, and writes its tables of accuracy.

    PYTHONPATH=src python scripts/pictures.py                     draw docs/pictures/*.svg from docs/pictures/*.json
    PYTHONPATH=src python scripts/pictures.py --measure [NAME]…   run the simulator first: accuracy, convergence, fleet;
                                                                  all of them by default (minutes)

`make pictures` and `make pictures-measure` run it. tests/test_pictures.py fails if a picture or a table does not match
its data, and runs small cases of the simulator again to see whether the data is current.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from charts import Chart, Series, drawing
from tidegate.core.model import Decision, Limit, Tuning
from tidegate.sim.accuracy import WARM_UP_S, cases, measure_all
from tidegate.sim.capacity import measure_fleets as simulate_fleets
from tidegate.sim.fleet import Fleet, Offer
from tidegate.sim.plan import EPOCH_MS

__all__ = ["DATA", "ROOT", "measure_convergence", "pictures", "tables"]

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURES: Final = ROOT / "docs" / "pictures"
PAGES: Final = (ROOT / "docs" / "architecture" / "accuracy.md", ROOT / "docs" / "operations" / "capacity.md")
DATA: Final = ("accuracy", "convergence", "fleet")
FLEET_SECONDS: Final = 5
# The columns of the plain scheme: what it publishes from, and how often.
PLAIN: Final = ("plain 20 %, 5 s", "plain 50 %, 10 s")
TABLE: Final = re.compile(r"(<!-- accuracy: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FLEET_TABLE: Final = re.compile(r"(<!-- fleet -->\n).*?(<!-- end -->)", re.DOTALL)

# The run of the picture of convergence: three regions with two processes each, one caller who asks for twice the quota.
REGIONS: Final = ("fra", "iad", "sin")
QUOTA: Final = 300
DURATION_MS: Final = 60_000
PER_SECOND: Final = (6, 3, 1)
SECONDS: Final = 45


def measure_convergence() -> dict[str, Any]:
    """What a process of each region counts at each of its decisions, and what all regions have really allowed."""
    fleet = Fleet(
        [2] * len(REGIONS),
        Tuning(),
        ledger_delay_ms=60,
        seed=1,
        start_ms=EPOCH_MS // DURATION_MS * DURATION_MS - WARM_UP_S * 1_000,
    )
    limit = Limit(QUOTA, duration_ms=DURATION_MS, namespace="convergence")
    offers = sorted(
        Offer(WARM_UP_S * 1_000_000 + number * 1_000_000 // each, region * 2 + number % 2)
        for region, each in enumerate(PER_SECOND)
        for number in range(each * SECONDS)
    )
    allowed: list[list[float]] = []
    counted: list[list[list[float]]] = [[] for _ in REGIONS]

    def answered(offer: Offer, decision: Decision) -> None:
        at_s = offer.at_us / 1e6 - WARM_UP_S
        if decision:
            allowed.append([round(at_s, 3), len(allowed) + 1])
        # One process of each region. A denied request is part of `effective` and was not counted.
        if offer.node % 2 == 0:
            counted[fleet.regions[offer.node]].append([round(at_s, 3), decision.effective - (not decision)])

    fleet.run(lambda _identifier: limit, offers, answered)
    return {
        "quota": QUOTA,
        "per_second": list(PER_SECOND),
        "allowed": allowed,
        "counted": dict(zip(REGIONS, counted, strict=True)),
    }


def measure_accuracy() -> dict[str, Any]:
    results = []
    chosen = cases()
    for number, one in enumerate(measure_all(chosen, 2), 1):
        print(f"accuracy: {number} of {len(chosen)} ({one.case.name})", file=sys.stderr, flush=True)
        results.append(one.document())
    return {"results": results}


def measure_fleets() -> dict[str, Any]:
    def say(text: str) -> None:
        print(f"fleet: {text} (minutes)", file=sys.stderr, flush=True)

    fleets = [one.document() for one in simulate_fleets(FLEET_SECONDS, 1, say)]
    # The figures from when every node read every row are kept for comparison.
    return {"fleets": fleets, "before": _read("fleet")["before"]}


def measure(names: Sequence[str]) -> None:
    """Run the simulator and write its results as JSON."""
    measures = {"accuracy": measure_accuracy, "convergence": measure_convergence, "fleet": measure_fleets}
    for name in names or DATA:
        _write(name, measures[name]())


def _write(name: str, document: object) -> None:
    (PICTURES / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(name: str) -> Any:
    return json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))


def pictures() -> Iterator[tuple[Path, str]]:
    """Every picture: its file and its content."""
    yield PICTURES / "overview.svg", overview()
    yield PICTURES / "window.svg", window()
    for name, chart in charts():
        yield PICTURES / f"{name}.svg", chart.svg()


def charts() -> Iterator[tuple[str, Chart]]:
    results = _read("accuracy")["results"]
    for group, title, x, place, ticks in (
        ("regions", "Twice the quota, spread evenly over regions", "regions", "regions", (1, 2, 5, 10, 20)),
        ("lag", "10 regions × 20/s", "one way to the database, up to ms", "ledger_delay_ms", ()),
        ("nodes", "Processes of one region at twice the quota", "processes", "nodes", (1, 2, 4, 8, 16, 32)),
        ("load", "4 processes of one region", "offered, × quota", "load", (0.5, 1, 2, 5, 10)),
    ):
        yield f"accuracy-{group}", _accuracy_chart(results, group, title, x, place, ticks)
    yield "fleet", _fleet_chart(_read("fleet"))
    yield "convergence", _convergence_chart(_read("convergence"))


def _accuracy_chart(
    results: list[Any], group: str, title: str, x: str, place: str, ticks: tuple[float, ...]
) -> Chart:
    chosen = [one for one in results if one["case"]["group"] == group]

    def at(one: Any) -> float:
        case = one["case"]
        if place == "load":
            return float(case["per_second"] * case["duration_ms"] / 1_000 / case["limit"])
        return float(case[place])

    series = [Series("Tidegate", [(at(one), one["first_window_of_limit"]) for one in chosen], 0)]
    for color, name in enumerate(chosen[0]["plain_first_window"], 1):
        points = [(at(one), one["plain_first_window"][name] / one["case"]["limit"]) for one in chosen]
        series.append(Series(f"plain scheme, {name}", points, color, dashed=True))
    return Chart(
        title, x, "allowed in the first window, × quota", series, line_at=(1.0, "quota"), x_ticks=ticks
    )


def _fleet_chart(data: Any) -> Chart:
    fleets = data["fleets"]
    names = (
        ("requests_per_s", "requests"),
        ("origin_commands_per_s", "Redis commands"),
        ("ledger_rows_written_per_s", "database rows written"),
        ("ledger_reads_per_s", "database reads"),
        ("ledger_rows_read_per_s", "database rows read"),
    )
    series = [
        Series(label, [(one["nodes"], one[name]) for one in fleets], color)
        for color, (name, label) in enumerate(names)
    ]
    # As it was when every node read every row; the largest of those fleets was computed.
    series += [
        Series(
            f"{label}, by every node",
            [(one["nodes"], one[name]) for one in data["before"]],
            color,
            dashed=True,
        )
        for color, (name, label) in enumerate(names)
        if name in ("ledger_reads_per_s", "ledger_rows_read_per_s")
    ]
    return Chart(
        "How each cost grows with the fleet",
        "processes",
        "per second",
        series,
        log_x=True,
        log_y=True,
        x_ticks=[one["nodes"] for one in fleets],
    )


def _convergence_chart(run: Any) -> Chart:
    series = [Series("allowed in all regions", run["allowed"], 2, markers=False)]
    for color, (region, each, points) in enumerate(
        zip(run["counted"], run["per_second"], run["counted"].values(), strict=True)
    ):
        series.append(
            Series(f"{region} counts ({each}/s)", points, (0, 1, 3)[color], dashed=color > 0, markers=False)
        )
    return Chart(
        "Three regions converge on one caller",
        "seconds since the window began",
        "requests counted",
        series,
        line_at=(run["quota"], f"quota: {run['quota']} per minute"),
        x_ticks=(0, 5, 10, 15, 20, 25, 30, 35, 40, 45),
    )


def tables(page: str) -> str:
    """The page with its tables replaced by those of the data."""
    results = _read("accuracy")["results"]

    def table(found: re.Match[str]) -> str:
        groups = found[2].split()
        columns = ("case", "offered", "allowed", "perfect", "log", "over", "under", "× quota", *PLAIN, "rows")
        lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
        for one in results:
            case = one["case"]
            if case["group"] in groups:
                plain = [count / case["limit"] for count in one["plain_first_window"].values()]
                lines.append(
                    f"| {case['name']} | {one['offered']} | {one['admitted']} | {one['perfect']} | {one['log']} "
                    f"| {one['over_percent']:.2f} % | {one['under_percent']:.2f} % "
                    f"| **{one['first_window_of_limit']:.3f}** | {plain[0]:.2f} | {plain[1]:.2f} "
                    f"| {one['rows_published']} |"
                )
        return found[1] + "\n".join(lines) + "\n" + found[3]

    page = TABLE.sub(table, page)
    return FLEET_TABLE.sub(
        lambda found: found[1] + _fleet_table(_read("fleet")["fleets"]) + "\n" + found[2], page
    )


def _fleet_table(fleets: list[Any]) -> str:
    def row(label: str, name: str) -> str:
        return f"| {label} | {' | '.join(f'{one[name]:,.0f}' for one in fleets)} |"

    def measured(label: str, text: Callable[[Any], str]) -> str:
        return f"| {label} | {' | '.join(text(one) if one['measured'] else '' for one in fleets)} |"

    return "\n".join(
        [
            "| | reference | 10 × | "
            + ("100 × the nodes |" if fleets[-1]["measured"] else "100 × (computed) |"),
            "| --- | ---: | ---: | ---: |",
            row("nodes", "nodes"),
            row("active windows", "windows"),
            row("requests/s", "requests_per_s"),
            row("Redis commands/s, all regions", "origin_commands_per_s"),
            row("counters in them/s", "origin_cells_per_s"),
            row("database rows written/s", "ledger_rows_written_per_s"),
            row("database reads/s (imports and heartbeats)", "ledger_reads_per_s"),
            row("database rows read/s", "ledger_rows_read_per_s"),
            "| bytes/s, everything | "
            + " | ".join(f"{one['bytes_per_s'] / 1e6:,.1f} MB" for one in fleets)
            + " |",
            measured("subjects per node after the run", lambda one: f"{one['subjects_per_node']:,.0f}"),
            measured("memory per node after the run", lambda one: f"{one['memory_mb_per_node']:.1f} MB"),
            measured(
                "age of other regions' counts, p50 / p90 / p99",
                lambda one: (
                    " / ".join(f"{one[f'view_age_ms_{p}']:.0f}" for p in ("p50", "p90", "p99")) + " ms"
                ),
            ),
        ]
    )


def _text(x: float, y: float, text: str, kind: str = "text", **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{more}>{text}</text>'


def _box(x: float, y: float, wide: float, high: float, kind: str = "box", radius: int = 8) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{radius}"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float, both: bool = True) -> str:
    start = ' marker-start="url(#arrow)"' if both else ""
    return (
        f'<line class="c2" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="1.6" '
        f'marker-end="url(#arrow)"{start}/>'
    )


def overview() -> str:
    """Local decision, region, world."""
    parts = [
        (
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="c2" d="M0 0 L10 5 L0 10 z"/></marker></defs>'
        )
    ]
    for left, region in ((250, "region fra"), (580, "region iad")):
        parts.append(_box(left, 24, 300, 226))
        parts.append(_text(left + 16, 46, region, "soft", font_weight=600))
        for number in range(3):
            x = left + 16 + number * 92
            parts.append(_arrow(x + 42, 58, x + 42, 76, both=False))
            parts.append(_box(x, 78, 84, 58, "accent"))
            parts.append(_text(x + 42, 102, "process", text_anchor="middle", font_weight=600))
            parts.append(_text(x + 42, 121, "decides", "soft", text_anchor="middle"))
            parts.append(_arrow(x + 42, 140, left + 150 + (number - 1) * 40, 188))
        parts.append(_box(left + 60, 192, 180, 40, radius=18))
        parts.append(_text(left + 150, 217, "Redis or Valkey", text_anchor="middle"))
    parts.append(_arrow(400, 236, 500, 300))
    parts.append(_arrow(730, 236, 630, 300))
    parts.append(_box(420, 302, 290, 44, radius=18))
    parts.append(_text(565, 329, "MySQL, MariaDB or PostgreSQL", text_anchor="middle"))
    for y, number, title, line in (
        (92, 1, "Decide", ("from memory, in under", "a microsecond")),
        (196, 2, "Share in a region", ("exactly, through Redis,", "in milliseconds")),
        (306, 3, "Share worldwide", ("through a database, in", "about a second")),
    ):
        parts.append(f'<circle class="c0" cx="34" cy="{y}" r="13"/>')
        parts.append(_text(34, y + 5, str(number), "back", text_anchor="middle", font_weight=700))
        parts.append(_text(56, y + 5, title, font_weight=600, font_size=15))
        for row, words in enumerate(line):
            parts.append(_text(56, y + 25 + row * 17, words, "soft"))
    return drawing(904, 368, "A decision is local; counts are shared in a region, then worldwide", parts)


def window() -> str:
    """The sliding window at one instant: the example of the page about it, in numbers."""
    left, wide, low, scale = 70, 300, 250, 1.6
    previous, current, elapsed = 80, 30, 15
    covered = 1 - elapsed / 60
    parts = [_text(left, 34, "100 per minute, 15 s into the minute", font_size=16, font_weight=600)]
    parts.append(f'<line class="axis" x1="{left}" x2="{left + 2 * wide}" y1="{low}" y2="{low}"/>')
    parts.append(_box(left, low - previous * scale, wide, previous * scale, radius=0))
    parts.append(
        _box(
            left + wide * (1 - covered), low - previous * scale, wide * covered, previous * scale, "accent", 0
        )
    )
    parts.append(_box(left + wide, low - current * scale, wide * elapsed / 60, current * scale, "accent", 0))
    now = left + wide + wide * elapsed / 60
    begin = left + wide * (1 - covered)
    parts.append(f'<line class="mark" x1="{now:g}" x2="{now:g}" y1="70" y2="{low + 10}"/>')
    parts.append(_text(now + 6, 84, "now"))
    parts.append(f'<line class="mark" x1="{begin:g}" x2="{now:g}" y1="{low + 22}" y2="{low + 22}"/>')
    parts.append(_text((begin + now) / 2, low + 40, "sliding window: 60 s", text_anchor="middle"))
    parts.append(
        _text(
            left + wide / 2,
            low - previous * scale - 8,
            "previous minute: 80 allowed",
            "soft",
            text_anchor="middle",
        )
    )
    parts.append(_text(now + 10, low - 14, "this minute: 30 allowed", "soft"))
    parts.append(
        _text(
            left,
            low + 74,
            "30 + 80 × 45 / 60 + 1 = 91 ≤ 100: the request is allowed",
            font_size=15,
            font_weight=600,
        )
    )
    return drawing(
        740, 350, "The sliding window counts the part of the previous minute that it still covers", parts
    )


def main() -> None:
    if sys.argv[1:2] == ["--measure"] and set(sys.argv[2:]) <= set(DATA):
        measure(sys.argv[2:])
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    for path, content in pictures():
        path.write_text(content, encoding="utf-8")
    for page in PAGES:
        page.write_text(tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
