"""Measures accuracy: what Tidegate admits, compared with a perfect counter, an exact log and the plain scheme.

Each case is an attack or a load on one identifier. Its requests are drawn from a seed and sent to real nodes in virtual
time and to the baselines. When a case starts, the nodes have been running long enough to know how many regions there
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from random import Random
from typing import Any, Final

from tidegate.core.model import Decision, Limit, Tuning
from tidegate.sim.baselines import PlainOptions, PlainScheme, admitted_by_log, admitted_by_perfect_counter
from tidegate.sim.fleet import Fleet, Offer
from tidegate.sim.plan import EPOCH_MS

__all__ = ["GROUPS", "Case", "Measured", "cases", "measure", "measure_all", "table"]

# Enough for all regions to see each other's heartbeats, which come every 5 s.
WARM_UP_S: Final = 15
GROUPS: Final = (
    *(
        "small",
        "nodes",
        "window",
        "load",
        "regions",
        "skewed",
        "spreader",
        "mechanisms",
        "lag",
        "burst",
        "stop",
    ),
)
PLAIN: Final = (PlainOptions(20, 5), PlainOptions(50, 10))


@dataclass(frozen=True)
class Case:
    """One experiment."""

    group: str
    """The table and plot that it belongs to."""
    name: str
    regions: int = 1
    nodes: int = 1
    """In each region."""
    limit: int = 1_000
    duration_ms: int = 60_000
    windows: float = 2.0
    """How long requests are sent, in durations of the limit."""
    per_second: float = 20.0
    """In all regions together."""
    kind: str = "even"
    """even (every node in turn), random, skewed (80 % in one region), burst (all at the same instant), stop (when nine
    tenths of the limit are used, all regions but one stop, and that one continues), stop_short (the same, and that
    region requests only what is left)."""
    ledger_delay_ms: int = 60
    """Longest delay to the ledger in one direction."""
    tuning: dict[str, Any] = field(default_factory=dict)
    seed: int = 1

    @property
    def load(self) -> float:
        """Requests per duration, as a multiple of the limit."""
        return self.per_second * self.duration_ms / 1_000 / self.limit

    @property
    def start_ms(self) -> int:
        """Chosen so that a cell begins with the first request."""
        return EPOCH_MS // self.duration_ms * self.duration_ms - WARM_UP_S * 1_000


@dataclass(frozen=True)
class Measured:
    """The result of a case."""

    case: Case
    offered: int
    admitted: int
    perfect: int
    log: int
    first_window: int
    """Admitted in the first cell."""
    plain: dict[str, int]
    plain_first_window: dict[str, int]
    rows_published: int
    ledger_calls: int
    origin_commands: int

    @property
    def over_percent(self) -> float:
        """How much more was admitted than by one perfect counter."""
        return max(0.0, 100 * (self.admitted / self.perfect - 1)) if self.perfect else 0.0

    @property
    def under_percent(self) -> float:
        return max(0.0, 100 * (1 - self.admitted / self.perfect)) if self.perfect else 0.0

    @property
    def of_limit(self) -> float:
        """Admitted in the first cell, as a multiple of the limit."""
        return self.first_window / self.case.limit

    def document(self) -> dict[str, object]:
        return asdict(self) | {
            "over_percent": round(self.over_percent, 3),
            "under_percent": round(self.under_percent, 3),
            "first_window_of_limit": round(self.of_limit, 4),
        }


def offers_of(case: Case) -> list[Offer]:
    """The requests of a case, in order."""
    random = Random(f"offers {case.seed} {case.name}")
    members = case.regions * case.nodes
    begin_us = WARM_UP_S * 1_000_000
    if case.kind == "burst":
        return [Offer(begin_us, number % members) for number in range(members * case.limit)]
    if case.kind in {"stop", "stop_short"}:
        return _stopping(case, begin_us)
    count = int(case.per_second * case.windows * case.duration_ms / 1_000)
    step_us = 1e6 / case.per_second
    offers = []
    for number in range(count):
        if case.kind == "even":
            node = number % members
        elif case.kind == "skewed" and random.random() < 0.8:
            node = random.randrange(case.nodes)
        else:
            node = random.randrange(members)
        jitter_us = step_us * random.random() if case.kind != "even" else 0.0
        offers.append(Offer(begin_us + int(number * step_us + jitter_us), node))
    offers.sort(key=lambda offer: offer.at_us)
    return offers


def _stopping(case: Case, begin_us: int) -> list[Offer]:
    """All regions send until nine tenths of the limit are used; then one region continues alone."""
    step_us = 1e6 / case.per_second
    crowd = case.limit * 9 // 10
    offers = [Offer(begin_us + int(number * step_us), number % case.regions) for number in range(crowd)]
    alone_us = offers[-1].at_us
    rest = case.limit - crowd
    if case.kind == "stop":
        rest = int((begin_us + case.duration_ms * 1_000 - alone_us) / (step_us * case.regions)) - 1
    offers += [Offer(alone_us + int((number + 1) * step_us * case.regions), 0) for number in range(rest)]
    return offers


def measure(case: Case) -> Measured:
    """Run one case on Tidegate and on the baselines."""
    offers = offers_of(case)
    tuning = replace(Tuning(), **case.tuning)
    fleet = Fleet(
        [case.nodes] * case.regions,
        tuning,
        ledger_delay_ms=case.ledger_delay_ms,
        seed=case.seed,
        start_ms=case.start_ms,
    )
    limit = Limit(case.limit, duration_ms=case.duration_ms, namespace="accuracy")
    admitted: list[int] = []

    def answered(offer: Offer, decision: Decision) -> None:
        if decision:
            admitted.append(offer.at_us)

    fleet.run(lambda _identifier: limit, offers, answered)
    first_until_us = WARM_UP_S * 1_000_000 + case.duration_ms * 1_000
    plain: dict[str, int] = {}
    plain_first: dict[str, int] = {}
    for scheme in PLAIN:
        name = f"{scheme.floor_percent} % floor, {scheme.interval_s} s"
        baseline = PlainScheme(
            scheme,
            regions=case.regions,
            nodes=case.nodes,
            limit=case.limit,
            duration_ms=case.duration_ms,
            start_ms=case.start_ms,
            ledger_delay_ms=case.ledger_delay_ms,
            seed=case.seed,
        )
        answers = [baseline.admits(offer) for offer in offers]
        plain[name] = sum(answers)
        plain_first[name] = sum(
            fits for fits, offer in zip(answers, offers, strict=True) if offer.at_us < first_until_us
        )
    return Measured(
        case=case,
        offered=len(offers),
        admitted=len(admitted),
        perfect=sum(admitted_by_perfect_counter(offers, case.limit, case.duration_ms, case.start_ms)),
        log=sum(admitted_by_log(offers, case.limit, case.duration_ms)),
        first_window=sum(at_us < first_until_us for at_us in admitted),
        plain=plain,
        plain_first_window=plain_first,
        rows_published=fleet.traffic.rows_published,
        ledger_calls=fleet.traffic.ledger_calls,
        origin_commands=fleet.traffic.merges + fleet.traffic.reads,
    )


def cases(seed: int = 1) -> list[Case]:
    """All experiments."""
    return [replace(case, seed=seed) for case in (*_inside_a_region(), *_between_regions())]


def _inside_a_region() -> Iterator[Case]:
    # Small limits that many nodes share: one request after the other, and all at one instant.
    small = Case("small", "", windows=1, per_second=20)
    for limit in (1, 5, 20, 100):
        for nodes in (2, 8, 32):
            for kind, how in (("even", "in turn, 50 ms apart"), ("burst", "all at once")):
                case = replace(
                    small, name=f"{nodes} nodes, limit {limit}, {how}", nodes=nodes, limit=limit, kind=kind
                )
                yield case
                yield replace(case, name=f"{case.name}, without credit", tuning={"credit": False})
    region = Case("nodes", "", duration_ms=10_000, windows=10, per_second=200, kind="random")
    for nodes in (1, 2, 4, 8, 16, 32):
        yield replace(region, name=f"{nodes} nodes", nodes=nodes)
    for seconds, limit in ((1, 100), (10, 1_000), (60, 1_000), (3_600, 3_600)):
        yield replace(
            region,
            group="window",
            name=f"window of {seconds} s",
            nodes=4,
            limit=limit,
            duration_ms=seconds * 1_000,
            windows=max(2.0, min(50.0, 200 / seconds)),
            per_second=2 * limit / seconds,
        )
    for load in (0.5, 0.9, 1.0, 2.0, 5.0, 10.0):
        yield replace(
            region, group="load", name=f"load {load:g}", nodes=4, limit=500, windows=6, per_second=50 * load
        )


def _between_regions() -> Iterator[Case]:
    for regions in (1, 2, 5, 10, 20):
        yield Case("regions", f"{regions} regions, load 2", regions=regions, per_second=2_000 / 60)
    for regions in (5, 10):
        name = f"{regions} regions, 80 % in one"
        yield Case("skewed", name, regions=regions, per_second=2_000 / 60, kind="skewed")
    attack = Case("spreader", "", regions=10, windows=1, per_second=200)
    for regions, each in ((10, 20), (20, 20), (10, 100)):
        name = f"{regions} regions × {each}/s"
        yield replace(attack, name=name, regions=regions, per_second=regions * each)
    without: dict[str, Any] = {}
    for name, less in (
        ("without anticipation", {"anticipation": False}),
        ("and without fast import", {"import_hot_interval_ms": 5_000}),
        ("and without pressure", {"pressure_interval_ms": 5_000}),
    ):
        without |= less
        yield replace(attack, group="mechanisms", name=name, tuning=dict(without))
    for delay_ms in (20, 60, 150, 300, 600):
        yield replace(attack, group="lag", name=f"one way up to {delay_ms} ms", ledger_delay_ms=delay_ms)
    for regions in (2, 10):
        name = f"{regions} regions in one instant"
        yield replace(attack, group="burst", name=name, regions=regions, kind="burst", limit=200)
    for each in (20, 100):
        name = f"9 of 10 regions stop, {each}/s each"
        yield replace(attack, group="stop", name=name, kind="stop", per_second=10 * each)
        name = f"the same, and only the rest is asked for, {each}/s"
        yield replace(attack, group="stop", name=name, kind="stop_short", per_second=10 * each)


def measure_all(chosen: Sequence[Case], jobs: int) -> Iterator[Measured]:
    """Measure all cases on `jobs` processes; results come in the order of the cases."""
    if jobs <= 1:
        yield from map(measure, chosen)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(measure, chosen)


def table(results: Sequence[Measured]) -> Iterator[str]:
    """Text. Multiples of the limit are for the first cell; percentages compare with one perfect counter."""
    yield (
        f"{'case':<50} {'offered':>8} {'admitted':>8} {'perfect':>8} {'log':>8} {'over %':>7} {'under %':>7} "
        f"{'× limit':>8} {'plain 20 %, 5 s':>15} {'plain 50 %, 10 s':>16} {'rows':>6}"
    )
    group = ""
    for one in results:
        if one.case.group != group:
            group = one.case.group
            yield f"-- {group}"
        first = [count / one.case.limit for count in one.plain_first_window.values()]
        yield (
            f"{one.case.name:<50} {one.offered:>8} {one.admitted:>8} {one.perfect:>8} {one.log:>8} "
            f"{one.over_percent:>7.2f} {one.under_percent:>7.2f} {one.of_limit:>8.3f} "
            f"{first[0]:>15.2f} {first[1]:>16.2f} {one.rows_published:>6}"
        )
