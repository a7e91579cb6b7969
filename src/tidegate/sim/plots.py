"""Plots of accuracy, capacity and replays, as PNG and SVG. Only this module needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import MissingExtra
from tidegate.sim.accuracy import Case, Measured
from tidegate.sim.capacity import FleetCost
from tidegate.telemetry.what_if import WhatIf

__all__ = ["plot_accuracy", "plot_fleet", "plot_replay"]

PLOTTED_CALLERS = 20
BLUE, RED, GREY = "#1f5fa8", "#c0392b", "#7f8c8d"


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra("plot", "tidegate simulate --plot") from error
    mpl.use("Agg")
    # Makes the SVG reproducible, byte for byte.
    mpl.rcParams["svg.hashsalt"] = "tidegate"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure: Any, directory: Path, name: str) -> list[Path]:
    from matplotlib import pyplot as plt

    directory.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=metadata)
    plt.close(figure)
    return paths


def _compare(axes: Any, places: Sequence[float], results: Sequence[Measured]) -> None:
    axes.plot(places, [one.of_limit for one in results], "o-", color=BLUE, label="Tidegate")
    for name, color in zip(results[0].plain_first_window, (RED, GREY), strict=True):
        multiples = [one.plain_first_window[name] / one.case.limit for one in results]
        axes.plot(places, multiples, "s--", color=color, label=f"plain scheme, {name}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.legend()


def plot_accuracy(results: Sequence[Measured], directory: Path) -> list[Path]:
    """Admitted in the first cell as a multiple of the limit: against regions, lag and load."""
    paths: list[Path] = []
    groups = {
        group: [one for one in results if one.case.group == group]
        for group in ("regions", "lag", "load", "nodes")
    }
    plots: tuple[tuple[str, str, str, Callable[[Case], float]], ...] = (
        ("regions", "Twice the limit, spread evenly over regions", "regions", lambda case: case.regions),
        (
            "lag",
            "10 regions × 20/s",
            "delay to the ledger in one direction, up to ms",
            lambda case: case.ledger_delay_ms,
        ),
        ("load", "4 nodes of one region", "offered, × limit", lambda case: case.load),
        ("nodes", "Nodes of one region at twice the limit", "nodes", lambda case: case.nodes),
    )
    for group, title, x, place in plots:
        if groups[group]:
            figure, axes = _figure(title, x, "admitted in one window, × limit")
            _compare(axes, [place(one.case) for one in groups[group]], groups[group])
            paths += _save(figure, directory, f"accuracy-{group}")
    return paths


def plot_fleet(costs: Sequence[FleetCost], directory: Path) -> list[Path]:
    """How each cost grows with the fleet."""
    figure, axes = _figure("Cost of a fleet", "nodes", "per second")
    nodes = [one.nodes for one in costs]
    for name, label in (
        ("requests_per_s", "requests"),
        ("origin_commands_per_s", "origin commands"),
        ("origin_cells_per_s", "cells in them"),
        ("ledger_rows_written_per_s", "ledger rows written"),
        ("ledger_reads_per_s", "ledger reads"),
        ("ledger_rows_read_per_s", "ledger rows read"),
    ):
        axes.plot(nodes, [getattr(one, name) for one in costs], "o-", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    return _save(figure, directory, "fleet")


def plot_replay(result: WhatIf, directory: Path) -> list[Path]:
    """Requests over time, as they were and as they would be; and who would be denied."""
    figure, axes = _figure(
        f"{result.namespace} with {result.new_limit}", "seconds since the first request", "requests"
    )
    first_ms = result.moments[0].at_ms
    places = [(moment.at_ms - first_ms) / 1000 for moment in result.moments]
    axes.step(
        places,
        [each.allowed for each in result.moments],
        color=GREY,
        where="post",
        label="allowed, as logged",
    )
    axes.step(
        places,
        [each.would_be_allowed for each in result.moments],
        color=BLUE,
        where="post",
        label="would be allowed",
    )
    axes.step(
        places,
        [each.would_be_denied for each in result.moments],
        color=RED,
        where="post",
        label="would be denied",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    paths = _save(figure, directory, "replay")
    worst = [caller for caller in result.callers[:PLOTTED_CALLERS] if caller.newly_denied][::-1]
    if worst:
        figure, axes = _figure("Requests that would be denied", "requests", "")
        # Dollar signs would start a formula.
        names = [repr(caller.identifier)[1:-1][:40].replace("$", r"\$") for caller in worst]
        axes.barh(range(len(worst)), [caller.newly_denied for caller in worst], color=RED)
        axes.set_yticks(range(len(worst)), names)
        paths += _save(figure, directory, "replay-identifiers")
    return paths
