"""Measures what a fleet costs: origin commands, ledger rows and reads, bytes, memory, and the age of foreign counts.

The reference fleet has 33 nodes in 10 regions and 24,000 active windows, 5 % of them in several regions; 3 % of the
requests are denied, 25 % in bursts. It runs with real nodes in virtual time. The fleet of ten times the size has ten
times the nodes, windows and requests. The largest one has a hundred times the nodes but only ten times the windows,
that is, a tenth of the windows and requests per node, so that it can be run.
"""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

from tidegate.core.engine import Engine
from tidegate.core.model import Decision, Limit, Tuning
from tidegate.sim.fleet import Fleet, Offer
from tidegate.sim.node_process import parts_of

__all__ = ["FleetCost", "measure_fleet", "measure_fleets", "table"]

REGIONS: Final = 10
NODES: Final = 33
WINDOWS: Final = 24_000
SHARED_PERCENT: Final = 5
# Requests per window of a caller within its limit, and of one beyond it.
PER_MINUTE: Final = 10
LIMIT: Final = 100
HOT_LIMIT: Final = 10
HOT_PER_MINUTE: Final = 400
# Share of all requests from callers beyond their limit: usually, and in the bursts of the second half.
HOT_PERCENT: Final = 4
BURST_PERCENT: Final = 30
DURATION_MS: Final = 60_000

# Sizes from the wire formats: a cell in a merge or read with its reply, a row written to or read from the ledger, and
# a command without either.
CELL_BYTES: Final = 96
ROW_BYTES: Final = 180
COMMAND_BYTES: Final = 120


@dataclass(frozen=True)
class FleetCost:
    """The cost of one fleet. Rates are per second."""

    scale: float
    nodes: int
    windows: int
    requests_per_s: float
    denied_percent: float
    """Outside bursts."""
    denied_percent_in_bursts: float
    origin_commands_per_s: float
    """Sum over the origins of all regions."""
    origin_cells_per_s: float
    ledger_rows_written_per_s: float
    ledger_reads_per_s: float
    ledger_rows_read_per_s: float
    bytes_per_s: float
    subjects_per_node: float
    memory_mb_per_node: float
    view_age_ms_p50: float
    view_age_ms_p90: float
    view_age_ms_p99: float
    measured: bool = True
    """False in data of older versions, which computed the largest fleet."""

    def document(self) -> dict[str, object]:
        return asdict(self)


class _Views:
    """Measures the age of the foreign counts with which a node allows a request. A node that denies reads nothing."""

    def __init__(self, fleet: Fleet, identifiers: Sequence[str], key: tuple[str, str, int]) -> None:
        self._fleet = fleet
        self._key = key
        # (identifier, region) -> times at which its count rose, one for each unit accepted.
        self.rises: dict[tuple[str, int], list[float]] = {
            (one, r): [] for one in identifiers for r in range(REGIONS)
        }
        self.ages_ms: list[float] = []

    def note(self, offer: Offer) -> None:
        """A node has allowed this."""
        region = self._fleet.regions[offer.node]
        if (offer.identifier, region) not in self.rises:
            return
        now_s = self._fleet.loop.time()
        sequence = self._fleet.clock.now_ms() // self._key[2]
        first_s = now_s - (self._fleet.clock.now_ms() - sequence * self._key[2]) / 1000
        subject = parts_of(self._fleet.limiters[offer.node]).engine.subjects.find(self._key, offer.identifier)
        cell = None if subject is None else subject.cell(sequence)
        others = [self.rises[offer.identifier, other] for other in range(REGIONS) if other != region]
        rises = sorted(at_s for one in others for at_s in one[bisect_right(one, first_s) :])
        foreign = 0 if cell is None else cell.foreign
        if foreign <= len(rises):
            # Age 0 if nothing is missing, otherwise the age of the oldest missing count.
            self.ages_ms.append((now_s - rises[foreign]) * 1000 if foreign < len(rises) else 0.0)
        self.rises[offer.identifier, region].append(now_s)


def measure_fleet(
    scale: int, seconds: float, seed: int = 1, tuning: Tuning | None = None, windows_scale: int | None = None
) -> FleetCost:
    """Run the fleet for `seconds` of virtual time, after a warm-up of six; `windows_scale` for fewer windows."""
    random = Random(f"fleet {seed} {scale}")
    members = NODES * scale
    nodes = [members // REGIONS + (region < members % REGIONS) for region in range(REGIONS)]
    fleet = Fleet(nodes, tuning or Tuning(), ledger_delay_ms=60, seed=seed)
    by_region: list[list[int]] = [[] for _ in range(REGIONS)]
    for node, region in enumerate(fleet.regions):
        by_region[region].append(node)
    windows = WINDOWS * (windows_scale or scale)
    regions_of = _regions_by_identifier(random, windows)
    warm_s = 6.0
    limit = Limit(LIMIT, duration_ms=DURATION_MS, namespace="fleet")
    hot_limit = Limit(HOT_LIMIT, duration_ms=DURATION_MS, namespace="fleet")
    shared = [name for name, regions in regions_of.items() if len(regions) > 1 and name.startswith("hot")][
        :20
    ]
    views = _Views(fleet, shared, (limit.workspace, limit.namespace, DURATION_MS))
    outcomes: Counter[tuple[bool, bool]] = Counter()
    burst_us = (warm_s + seconds / 2) * 1e6

    before: dict[str, float] = {}

    def answered(offer: Offer, decision: Decision) -> None:
        if not before:
            before.update(_counted(fleet))
        outcomes[offer.at_us >= burst_us, decision.allowed] += 1
        if decision:
            views.note(offer)

    offers = _offers(random, regions_of, by_region, windows, warm_s, seconds)
    fleet.run(lambda name: hot_limit if name.startswith("hot") else limit, offers, answered)
    after = _counted(fleet)
    rates = {name: (after[name] - before[name]) / seconds for name in after}
    subjects = sum(parts_of(one).engine.subjects.count for one in fleet.limiters) / members
    ages = sorted(views.ages_ms) or [0.0]
    requests = outcomes.total() / seconds
    usual = outcomes[False, True] + outcomes[False, False]
    bursts = outcomes[True, True] + outcomes[True, False]
    return FleetCost(
        scale=scale,
        nodes=members,
        windows=windows,
        requests_per_s=round(requests),
        denied_percent=round(100 * outcomes[False, False] / max(1, usual), 1),
        denied_percent_in_bursts=round(100 * outcomes[True, False] / max(1, bursts), 1),
        origin_commands_per_s=round(rates["commands"]),
        origin_cells_per_s=round(rates["cells"]),
        ledger_rows_written_per_s=round(rates["rows_written"], 1),
        ledger_reads_per_s=round(rates["ledger_reads"], 1),
        ledger_rows_read_per_s=round(rates["rows_read"], 1),
        bytes_per_s=round(_bytes(rates)),
        subjects_per_node=round(subjects),
        memory_mb_per_node=round(subjects * subject_bytes() / 1e6, 2),
        view_age_ms_p50=round(ages[len(ages) // 2], 1),
        view_age_ms_p90=round(ages[len(ages) * 9 // 10], 1),
        view_age_ms_p99=round(ages[len(ages) * 99 // 100], 1),
    )


def _bytes(rates: dict[str, float]) -> float:
    commands = rates["commands"] + rates["ledger_reads"] + rates["publishes"]
    rows = rates["rows_written"] + rates["rows_read"]
    return commands * COMMAND_BYTES + rates["cells"] * CELL_BYTES + rows * ROW_BYTES


def _counted(fleet: Fleet) -> dict[str, float]:
    traffic = fleet.traffic
    imported = sum(one.statistics().import_rows for one in fleet.limiters) if traffic.ledger_calls else 0
    return {
        "commands": traffic.merges + traffic.reads + traffic.other_calls,
        "cells": traffic.cells_merged + traffic.cells_read + traffic.other_cells,
        "publishes": traffic.publishes,
        "rows_written": traffic.rows_published,
        "ledger_reads": traffic.ledger_calls - traffic.publishes,
        "rows_read": imported,
    }


def _regions_by_identifier(random: Random, windows: int) -> dict[str, list[int]]:
    """The regions of each identifier: one, or two to four."""
    regions_of = {}
    hot = windows * PER_MINUTE * HOT_PERCENT // 100 // HOT_PER_MINUTE
    for number in range(windows):
        name = f"hot-{number}" if number < hot else f"user-{number}"
        several = number % (100 // SHARED_PERCENT) == 0
        regions_of[name] = random.sample(range(REGIONS), random.randrange(2, 5) if several else 1)
    return regions_of


def _offers(
    random: Random,
    regions_of: dict[str, list[int]],
    by_region: list[list[int]],
    windows: int,
    warm_s: float,
    seconds: float,
) -> Iterator[Offer]:
    names = list(regions_of)
    hot = [name for name in names if name.startswith("hot")]
    usual = names[len(hot) :]
    per_second = windows * PER_MINUTE / 60
    at_s = warm_s
    end_s = warm_s + seconds
    while at_s < end_s:
        percent = HOT_PERCENT if at_s < warm_s + seconds / 2 else BURST_PERCENT
        name = random.choice(hot if random.random() * 100 < percent else usual)
        region = random.choice(regions_of[name])
        yield Offer(int(at_s * 1e6), random.choice(by_region[region]), name)
        at_s += random.expovariate(per_second)


def subject_bytes() -> float:
    """Measured memory of one subject with a current and a previous cell, in this build."""
    count = 2_000
    limit = Limit(LIMIT, duration_ms=DURATION_MS, namespace="fleet")
    names = [f"user-{number:06d}" for number in range(count)]
    engine = Engine(Tuning(), node_id="weighed", has_origin=True, has_ledger=True)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for name in names:
        engine.decide(limit, name, 1, 10 * DURATION_MS, 1)
        engine.decide(limit, name, 1, 11 * DURATION_MS, 1)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / count


def measure_fleets(seconds: float, seed: int, say: Callable[[str], object]) -> list[FleetCost]:
    """The reference, ten times, and a hundred times its nodes."""
    costs = []
    for scale, windows_scale in ((1, 1), (10, 10), (100, 10)):
        say(f"{scale} times the nodes, {windows_scale} times the windows of the reference fleet")
        costs.append(measure_fleet(scale, seconds, seed, windows_scale=windows_scale))
    return costs


def table(costs: Sequence[FleetCost]) -> Iterator[str]:
    """Text with one column per fleet."""
    names = [name for name in costs[0].document() if name != "measured"]
    for name in names:
        yield f"{name:<28}" + "".join(f"{getattr(one, name):>16,}" for one in costs)
