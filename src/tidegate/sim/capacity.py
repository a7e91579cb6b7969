"""What a fleet costs: commands at the origins, rows and reads at the ledger, bytes, memory, and how old views are.

The reference fleet has 33 nodes in 10 regions and 24,000 active windows, of which 5 % are seen in several regions; 3 %
of the requests are denied, 25 % in bursts. It is run with real nodes in virtual time. Ten times the fleet means ten
times the nodes, windows and requests, run for the same time; a hundred times is computed from the two, by the growth
between them.
"""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from random import Random
from typing import Final

from tidegate.core.engine import Engine
from tidegate.core.model import Decision, Limit, Tuning
from tidegate.sim.fairground import Fairground, Offer
from tidegate.sim.inside import parts_of

__all__ = ["FleetCost", "extrapolated", "measure_fleet", "table"]

REGIONS: Final = 10
NODES: Final = 33
WINDOWS: Final = 24_000
SHARED_PERCENT: Final = 5
# A window is asked for this often, by a caller that keeps its limit, and by one that does not.
PER_MINUTE: Final = 10
LIMIT: Final = 100
HOT_LIMIT: Final = 10
HOT_PER_MINUTE: Final = 400
# Share of all requests that come from callers beyond their limit: usually, and in the bursts of the second half.
HOT_PERCENT: Final = 4
BURST_PERCENT: Final = 30
DURATION_MS: Final = 60_000

# What travels, counted from the wire formats: a merge or read of a cell at the origin with its answer, a row to the
# ledger and from it, and what a command costs without any.
CELL_BYTES: Final = 96
ROW_BYTES: Final = 180
COMMAND_BYTES: Final = 120


@dataclass(frozen=True)
class FleetCost:
    """What one fleet costs, per second where it is a rate."""

    scale: float
    nodes: int
    windows: int
    requests_per_s: float
    denied_percent: float
    """Outside of bursts."""
    denied_percent_in_bursts: float
    origin_commands_per_s: float
    """Of all origins together; each region has its own."""
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
    measured: bool

    def document(self) -> dict[str, object]:
        return asdict(self)


class _Views:
    """How old foreign counts are where they are used."""

    def __init__(self, ground: Fairground, identifiers: Sequence[str], key: tuple[str, str, int]) -> None:
        self._ground = ground
        self._identifiers = identifiers
        self._key = key
        # (identifier, region) -> times at which its count rose, one for each unit accepted.
        self.rises: dict[tuple[str, int], list[float]] = {
            (one, r): [] for one in identifiers for r in range(REGIONS)
        }
        self.ages_ms: list[float] = []

    def look(self) -> None:
        now_s = self._ground.loop.time()
        sequence = self._ground.clock.now_ms() // self._key[2]
        first_s = now_s - (self._ground.clock.now_ms() - sequence * self._key[2]) / 1000
        for node, limiter in enumerate(self._ground.limiters[:: max(1, len(self._ground.limiters) // NODES)]):
            region = self._ground.regions[node * max(1, len(self._ground.limiters) // NODES)]
            engine = parts_of(limiter).engine
            for identifier in self._identifiers:
                subject = engine.subjects.find(self._key, identifier)
                cell = None if subject is None else subject.cell(sequence)
                if cell is None or cell.ledger is None or not cell.ledger.components:
                    continue
                for other in range(REGIONS):
                    rises = self.rises[identifier, other]
                    begin = bisect_right(rises, first_s)
                    known = cell.ledger.components.get(f"region-{other}", 0)
                    if other == region or known == 0 or begin + known > len(rises):
                        continue
                    # Nothing new since: the view is right now. Otherwise it is as old as what it does not know.
                    missed = begin + known < len(rises)
                    self.ages_ms.append((now_s - rises[begin + known]) * 1000 if missed else 0.0)


def measure_fleet(scale: int, seconds: float, seed: int = 1, tuning: Tuning | None = None) -> FleetCost:
    """Run the fleet for so many virtual seconds, after a warm-up of six."""
    random = Random(f"fleet {seed} {scale}")
    members = NODES * scale
    nodes = [members // REGIONS + (region < members % REGIONS) for region in range(REGIONS)]
    ground = Fairground(nodes, tuning or Tuning(), ledger_delay_ms=60, seed=seed)
    by_region: list[list[int]] = [[] for _ in range(REGIONS)]
    for node, region in enumerate(ground.regions):
        by_region[region].append(node)
    windows = WINDOWS * scale
    homes = _homes(random, windows)
    warm_s = 6.0
    limit = Limit(LIMIT, duration_ms=DURATION_MS, namespace="fleet")
    hot_limit = Limit(HOT_LIMIT, duration_ms=DURATION_MS, namespace="fleet")
    shared = [name for name, regions in homes.items() if len(regions) > 1 and name.startswith("hot")][:20]
    views = _Views(ground, shared, (limit.workspace, limit.namespace, DURATION_MS))
    ground.look = views.look
    outcomes: Counter[tuple[bool, bool]] = Counter()
    burst_us = (warm_s + seconds / 2) * 1e6

    before: dict[str, float] = {}

    def answered(offer: Offer, decision: Decision) -> None:
        if not before:
            before.update(_counted(ground))
        outcomes[offer.at_us >= burst_us, decision.allowed] += 1
        if decision and (offer.identifier, ground.regions[offer.node]) in views.rises:
            views.rises[offer.identifier, ground.regions[offer.node]].append(ground.loop.time())

    offers = _offers(random, homes, by_region, windows, warm_s, seconds)
    ground.run(lambda name: hot_limit if name.startswith("hot") else limit, offers, answered)
    after = _counted(ground)
    rates = {name: (after[name] - before[name]) / seconds for name in after}
    subjects = sum(parts_of(one).engine.subjects.count for one in ground.limiters) / members
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
        measured=True,
    )


def _bytes(rates: dict[str, float]) -> float:
    commands = rates["commands"] + rates["ledger_reads"] + rates["publishes"]
    rows = rates["rows_written"] + rates["rows_read"]
    return commands * COMMAND_BYTES + rates["cells"] * CELL_BYTES + rows * ROW_BYTES


def _counted(ground: Fairground) -> dict[str, float]:
    traffic = ground.traffic
    imported = sum(one.statistics().import_rows for one in ground.limiters) if traffic.ledger_calls else 0
    return {
        "commands": traffic.merges + traffic.reads,
        "cells": traffic.cells_merged + traffic.cells_read,
        "publishes": traffic.publishes,
        "rows_written": traffic.rows_published,
        "ledger_reads": traffic.ledger_calls - traffic.publishes,
        "rows_read": imported,
    }


def _homes(random: Random, windows: int) -> dict[str, list[int]]:
    """Where each identifier is seen: in one region, or in two to four."""
    homes = {}
    hot = windows * PER_MINUTE * HOT_PERCENT // 100 // HOT_PER_MINUTE
    for number in range(windows):
        name = f"hot-{number}" if number < hot else f"user-{number}"
        several = number % (100 // SHARED_PERCENT) == 0
        homes[name] = random.sample(range(REGIONS), random.randrange(2, 5) if several else 1)
    return homes


def _offers(
    random: Random,
    homes: dict[str, list[int]],
    by_region: list[list[int]],
    windows: int,
    warm_s: float,
    seconds: float,
) -> Iterator[Offer]:
    names = list(homes)
    hot = [name for name in names if name.startswith("hot")]
    usual = names[len(hot) :]
    per_second = windows * PER_MINUTE / 60
    at_s = warm_s
    end_s = warm_s + seconds
    while at_s < end_s:
        percent = HOT_PERCENT if at_s < warm_s + seconds / 2 else BURST_PERCENT
        name = random.choice(hot if random.random() * 100 < percent else usual)
        region = random.choice(homes[name])
        yield Offer(int(at_s * 1e6), random.choice(by_region[region]), name)
        at_s += random.expovariate(per_second)


def subject_bytes() -> float:
    """What one subject with a current and a previous cell weighs in this build, measured."""
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


def extrapolated(small: FleetCost, large: FleetCost, scale: int) -> FleetCost:
    """A fleet too large to run: every rate grows on as it grew between two that were run, by their power law."""
    factor = scale / large.scale
    step = large.scale / small.scale

    def grown(name: str) -> float:
        low, high = float(getattr(small, name)), float(getattr(large, name))
        if low <= 0 or high <= 0:
            return high
        # high / low = step ** power, so that high * factor ** power is the same growth, continued.
        return float(high * factor ** (log(high / low) / log(step)))

    rates = (
        *("requests_per_s", "origin_commands_per_s", "origin_cells_per_s", "ledger_rows_written_per_s"),
        *("ledger_reads_per_s", "ledger_rows_read_per_s", "bytes_per_s"),
    )
    return replace(
        large,
        scale=scale,
        nodes=NODES * scale,
        windows=WINDOWS * scale,
        measured=False,
        **{name: round(grown(name)) for name in rates},
    )


def table(costs: Sequence[FleetCost]) -> Iterator[str]:
    """For people: one column for each fleet."""
    names = [name for name in costs[0].document() if name != "measured"]
    for name in names:
        yield f"{name:<28}" + "".join(f"{getattr(one, name):>16,}" for one in costs)
    yield f"{'':<28}" + "".join(f"{'measured' if one.measured else 'computed':>16}" for one in costs)
