"""The plan of a simulation, as data: nodes, tuning, clocks, network conditions and timed events (requests and faults).

A plan is drawn from one seed, can be written to a scenario file, and is what `--shrink` reduces. Faults of single
messages are drawn while the simulation runs, from the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, Final, NamedTuple

from tidegate.core.model import Tuning

__all__ = [
    "TRAFFIC",
    "Event",
    "NetworkConditions",
    "Options",
    "Plan",
    "SubjectSpec",
    "draw_plan",
    "plan_from",
    "plan_to",
]

TRAFFIC: Final = ("even", "skewed", "bursts")

# Simulations start here, plus or minus a random part of a minute.
EPOCH_MS: Final = 1_799_971_200_000

# One simulation in this many decides without credit, by the rules of freshness.
NO_CREDIT_EVERY: Final = 4
# In one simulation in this many, origins, their links and clocks work, and every answer is compared with a single
# counter.
HEALTHY_EVERY: Final = 5
HEALTHY_REST: Final = 3
HARMLESS: Final = (
    "ledger_down",
    "ledger_freeze",
    "ledger_chunk",
    "ledger_rejects",
    "ledger_wipe",
    "node_stop",
)


# In one simulation in this many, counters are reset.
RESETS_EVERY: Final = 3
# In one simulation in this many, clients make reservations.
RESERVATIONS_EVERY: Final = 5
RESERVATIONS_REST: Final = 2


# A reservation this long does not expire within a simulation.
LONG_LIFE_MS: Final = 1_000_000


class Options(NamedTuple):
    """Options of the command line; those that are None are drawn from the seed."""

    regions: int | None = None
    nodes: int | None = None
    """In each region."""
    minutes: float | None = None
    """How long the phase with traffic and faults lasts."""
    traffic: str | None = None


class Event(NamedTuple):
    """A request or a fault, at a point in virtual time."""

    at_ms: int
    kind: str
    """A request (limit, batch, probe, spend, reserve), a reset or a fault; see `simulation.py` for what each does."""
    who: str
    """A node, a region, or empty for the ledger."""
    what: Mapping[str, Any]


@dataclass(frozen=True)
class NetworkConditions:
    """How messages are delayed, lost and duplicated."""

    delay_ms: int = 2
    """Longest usual delay in one direction."""
    slow_percent: float = 0.0
    """Share of messages that take up to `slow_ms`, so that later ones can overtake them."""
    slow_ms: int = 100
    loss_percent: float = 0.0
    """Share of requests that never arrive."""
    reply_loss_percent: float = 0.0
    """Share of replies that are lost: the request was applied, and times out."""
    duplicate_percent: float = 0.0
    """Share of requests that arrive a second time, later."""


@dataclass(frozen=True)
class SubjectSpec:
    """A subject, with the quotas of its two limits."""

    namespace: str
    identifier: str
    duration_ms: int
    limits: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All input of a simulation."""

    seed: int
    epoch_ms: int
    trouble_ms: int
    """How long the phase with traffic and faults lasts; then all faults are removed."""
    traffic: str
    nodes: tuple[tuple[str, str], ...]
    """(name, region)"""
    tuning: Mapping[str, Any]
    network: NetworkConditions
    replica_lag_ms: int
    clocks: Mapping[str, tuple[int, int]]
    """For each node: offset in ms, drift in ppm."""
    subjects: tuple[SubjectSpec, ...]
    events: tuple[Event, ...] = field(default=())

    @property
    def regions(self) -> list[str]:
        return sorted({region for _, region in self.nodes})

    def tuned(self) -> Tuning:
        return Tuning(**self.tuning)

    def with_tuning(self, **tuning: Any) -> Plan:
        return replace(self, tuning={**self.tuning, **tuning})

    def with_events(self, events: tuple[Event, ...]) -> Plan:
        return replace(self, events=events)


def plan_to(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data."""
    document = asdict(plan)
    document["events"] = [[event.at_ms, event.kind, event.who, dict(event.what)] for event in plan.events]
    return document


def plan_from(document: Mapping[str, Any]) -> Plan:
    """Read what `plan_to` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    return Plan(
        seed=document["seed"],
        epoch_ms=document["epoch_ms"],
        trouble_ms=document["trouble_ms"],
        traffic=document["traffic"],
        nodes=tuple((name, region) for name, region in document["nodes"]),
        tuning=dict(document["tuning"]),
        network=NetworkConditions(**document["network"]),
        replica_lag_ms=document["replica_lag_ms"],
        clocks={name: (offset, drift) for name, (offset, drift) in document["clocks"].items()},
        subjects=tuple(
            SubjectSpec(one["namespace"], one["identifier"], one["duration_ms"], tuple(one["limits"]))
            for one in document["subjects"]
        ),
        events=tuple(Event(at_ms, kind, who, what) for at_ms, kind, who, what in document["events"]),
    )


def draw_plan(seed: int, options: Options = Options()) -> Plan:  # noqa: B008 - immutable, so a shared default is safe
    """Draw the plan of this seed."""
    random = Random(f"plan {seed}")
    regions = options.regions or random.choice((1, 2, 2, 3))
    per_region = options.nodes or random.choice((1, 2, 2, 3, 4))
    nodes = tuple((f"{_region(r)}{n}", _region(r)) for r in range(regions) for n in range(1, per_region + 1))
    drawn_ms = random.randrange(6_000, 16_000)
    trouble_ms = int(options.minutes * 60_000) if options.minutes is not None else drawn_ms
    drawn_traffic = random.choice(TRAFFIC)
    traffic = options.traffic or drawn_traffic
    tuning = _tuning(random)
    if seed % NO_CREDIT_EVERY == 0:
        tuning["credit"] = False
    # In some simulations only whole parts fail, so that a healthy region can be compared with its exact counts.
    is_healthy = seed % HEALTHY_EVERY == HEALTHY_REST
    is_calm = random.random() < 0.2 or is_healthy
    plan = Plan(
        seed=seed,
        epoch_ms=EPOCH_MS + random.randrange(-60_000, 60_000),
        trouble_ms=trouble_ms,
        traffic=traffic,
        nodes=nodes,
        tuning=tuning,
        network=_network(random, is_calm),
        replica_lag_ms=random.choice((0, 0, 0, random.randrange(50, 2_000))),
        clocks=_clocks(random, nodes, is_calm),
        subjects=_subjects(random),
    )
    requests, faults = _requests(random, plan), _faults(random, plan)
    if is_healthy:
        faults = [fault for fault in faults if fault.kind in HARMLESS]
    events = [*requests, *faults, *_sprays(random, plan), *_resets(plan), *_reservations(plan)]
    # Sorted by time only: the sort is stable, so events of the same time stay in the order in which they were drawn.
    events.sort(key=lambda event: event.at_ms)
    return plan.with_events(tuple(events))


def _region(number: int) -> str:
    return chr(ord("a") + number % 26) * (1 + number // 26)


def _tuning(random: Random) -> dict[str, int | bool]:
    """Valid tuning, never slower than the defaults: the liveness phase would take too long otherwise."""
    tuning: dict[str, int | bool] = {
        "fresh_ms": random.randrange(1_000, 3_001),
        "read_timeout_ms": random.randrange(50, 301),
        "read_retry_ms": random.randrange(100, 301),
        "rollover_grace_ms": random.randrange(200, 1_001),
        "replay_cells_max": random.choice((2, 250)),
        "replay_timeout_ms": random.randrange(150, 1_001),
        "backoff_first_ms": random.randrange(20, 101),
        "backoff_last_ms": random.randrange(200, 1_001),
        "ledger_duration_ms_min": random.choice((20_000, 60_000)),
        "publish_interval_ms": random.randrange(400, 2_001),
        "import_interval_ms": random.randrange(400, 2_001),
        "pressure_interval_ms": random.randrange(100, 251),
        "import_hot_interval_ms": random.randrange(150, 251),
        "pressure_parts": random.randrange(2, 9),
        "import_full_interval_ms": random.choice((3_000, 300_000)),
        "publish_rows_max": random.choice((2, 5_000)),
        "ledger_timeout_ms": random.randrange(300, 1_201),
        "set_aside_ms": random.randrange(100, 501),
        "anticipation": random.random() < 0.5,
        "breaker_calls_min": random.randrange(4, 21),
        "breaker_window_ms": random.randrange(2_000, 10_001),
        "breaker_open_ms": random.randrange(300, 1_501),
    }
    if random.random() < 0.15:
        tuning["subjects_max"] = random.choice((3, 5, 8))
    return tuning


def _network(random: Random, is_calm: bool) -> NetworkConditions:
    if is_calm or random.random() < 0.25:
        return NetworkConditions(delay_ms=random.randrange(1, 20))
    return NetworkConditions(
        delay_ms=random.randrange(1, 20),
        slow_percent=random.choice((0.0, 3.0, 15.0)),
        slow_ms=random.randrange(50, 2_000),
        loss_percent=random.choice((0.0, 2.0, 10.0)),
        reply_loss_percent=random.choice((0.0, 2.0, 10.0)),
        duplicate_percent=random.choice((0.0, 3.0, 20.0)),
    )


def _clocks(random: Random, nodes: tuple[tuple[str, str], ...], is_calm: bool) -> dict[str, tuple[int, int]]:
    spread_ms = 0 if is_calm else random.choice((0, 50, 400, 5_000))
    drift_ppm = 0 if is_calm else random.choice((0, 100, 5_000))
    return {
        name: (random.randint(-spread_ms, spread_ms), random.randint(-drift_ppm, drift_ppm))
        for name, _ in nodes
    }


def _subjects(random: Random) -> tuple[SubjectSpec, ...]:
    found = []
    for number in range(random.randrange(2, 7)):
        limit = random.choice((1, 3, 6, 10, 20, 40, 150))
        limits = (limit, random.choice((limit, limit, max(1, limit // 3))))
        duration_ms = random.choice((1_000, 5_000, 20_000, 60_000, 60_000, 60_000, 120_000))
        found.append(SubjectSpec(random.choice(("api", "mail")), f"user-{number}", duration_ms, limits))
    return tuple(found)


def _requests(random: Random, plan: Plan) -> list[Event]:
    names = [name for name, _ in plan.nodes]
    weights = [1.0] * len(names)
    if plan.traffic == "skewed":
        weights = [1.0 / (1 + number) ** 2 for number in range(len(names))]
    events: list[Event] = []
    at_ms = 200.0
    per_second = random.choice((10, 25, 40))
    while at_ms < plan.trouble_ms:
        burst = 1
        if plan.traffic == "bursts" and random.random() < 0.1:
            burst = random.randrange(5, 25)
        for _ in range(burst):
            who = random.choices(names, weights)[0]
            events.append(Event(int(at_ms), *_request(random, plan, who)))
        at_ms += random.expovariate(per_second / burst / 1_000)
    return events


def _request(random: Random, plan: Plan, who: str) -> tuple[str, str, dict[str, Any]]:
    drawn = random.random()
    if drawn < 0.12:
        items = [
            [random.randrange(len(plan.subjects)), random.randrange(2), random.choice((1, 1, 2, 0))]
            for _ in range(random.randrange(2, 4))
        ]
        return "batch", who, {"items": items}
    what: dict[str, Any] = {
        "subject": random.randrange(len(plan.subjects)),
        "limit": random.randrange(2),
        "cost": random.choice((1, 1, 1, 1, 2, 5, 0, 30)),
    }
    if drawn < 0.16:
        what["own_time_ms"] = random.choice(
            (random.randrange(-3_000, 3_000), random.randrange(-3_000, 3_000), 3_600_000, -3_600_000)
        )
    elif drawn < 0.2:
        what["patience_ms"] = random.randrange(0, 60)
    elif drawn < 0.5:
        what["nowait"] = True
    return "limit", who, what


# Faults of a region, besides those of its origin, its importer and its lease.
REGION_FAULTS: Final = frozenset({"cut_region", "region_deploy", "cut_half"})


def _faults(random: Random, plan: Plan) -> list[Event]:
    """Faults, each with a duration that ends within the fault phase."""
    if random.random() < 0.05:
        return []
    kinds = (
        *("cut_node", "cut_region", "origin_crash", "origin_freeze", "origin_wipe", "origin_failover"),
        *("ledger_down", "ledger_freeze", "ledger_chunk", "ledger_rejects", "node_crash", "node_crash"),
        *("node_stop", "node_pause", "clock_step", "clock_step"),
        *("region_deploy", "ledger_wipe", "origin_readonly", "origin_evicts"),
        *("importer_pause", "importer_crash", "cut_half", "lease_lost"),
    )
    events: list[Event] = []
    for _ in range(random.randrange(1, 2 + max(4, plan.trouble_ms // 2_500))):
        kind = random.choice(kinds)
        name, region = random.choice(plan.nodes)
        at_ms = random.randrange(300, max(301, plan.trouble_ms - 500))
        lasts_ms = min(random.choice((200, 800, 2_500, 6_000)), plan.trouble_ms - at_ms)
        what: dict[str, Any] = {"lasts_ms": lasts_ms}
        who = name
        if kind.startswith("ledger"):
            who = ""
        elif kind.startswith(("origin", "importer", "lease")) or kind in REGION_FAULTS:
            who = region
        if kind == "origin_crash":
            what["comes_back"] = random.choice(("whole", "wiped"))
        elif kind == "origin_failover":
            what["age_ms"] = random.randrange(100, 4_000)
        elif kind == "ledger_rejects":
            what["subject"] = random.randrange(len(plan.subjects))
        elif kind == "origin_evicts":
            what["odd"] = random.randrange(2)
        elif kind == "region_deploy":
            what |= {"apart_ms": random.choice((0, 300, 1_000)), "wipes": random.random() < 0.5}
        elif kind == "clock_step":
            what = {"by_ms": random.choice((-20_000, -20_000, -1_500, -80, 80, 1_500, 20_000))}
        events.append(Event(at_ms, kind, who, what))
    return events


def _sprays(random: Random, plan: Plan) -> list[Event]:
    """Requests for many new identifiers, if memory is small enough for them to fill it."""
    if "subjects_max" not in plan.tuning:
        return []
    events: list[Event] = []
    for _ in range(random.randrange(1, 6)):
        what = {
            "subject": random.randrange(len(plan.subjects)),
            "count": random.randrange(2, 20),
            "cost": random.choice((0, 1, 1_000)),
        }
        at_ms = random.randrange(300, max(301, plan.trouble_ms - 500))
        events.append(Event(at_ms, "spray", random.choice(plan.nodes)[0], what))
    return events


def _resets(plan: Plan) -> list[Event]:
    """Requests for separate counters, each reset once (`reset_check.py`). Drawn from a random source of their own, so
    that simulations without resets do not change; none if memory is too small for more counters."""
    if plan.seed % RESETS_EVERY or "subjects_max" in plan.tuning:
        return []
    random = Random(f"resets {plan.seed}")
    names = [name for name, _ in plan.nodes]
    events: list[Event] = []
    for probe in range(random.randrange(1, 4)):
        reset_ms = random.randrange(plan.trouble_ms // 4, 3 * plan.trouble_ms // 4)
        for _ in range(random.randrange(3, 9)):
            what = {"probe": probe, "cost": 1_000}
            events.append(Event(random.randrange(200, reset_ms), "probe", random.choice(names), what))
        events.append(Event(reset_ms, "reset", random.choice(names), {"probe": probe}))
        for _ in range(random.randrange(10, 40)):
            at_ms = random.randrange(reset_ms + 1, plan.trouble_ms + 1)
            events.append(Event(at_ms, "probe", random.choice(names), {"probe": probe, "cost": 1}))
    return events


def _reservations(plan: Plan) -> list[Event]:
    """Clients that reserve, and others that spend from the same counters (`reservation_check.py`); drawn like
    resets."""
    if plan.seed % RESERVATIONS_EVERY != RESERVATIONS_REST or "subjects_max" in plan.tuning:
        return []
    random = Random(f"reservations {plan.seed}")
    events: list[Event] = []
    for region in plan.regions:
        names = [name for name, home in plan.nodes if home == region]
        for counter in range(random.randrange(1, 4)):
            for _ in range(random.randrange(4, 14)):
                who = random.choice(names)
                estimate = random.randrange(1, 9)
                what: dict[str, Any] = {
                    "counter": counter,
                    "estimate": estimate,
                    "life_ms": random.choice((300, 1_500, 6_000, LONG_LIFE_MS, LONG_LIFE_MS)),
                    "hold_ms": random.choice((0, 100, 500, 3_000)),
                    # What was used: as estimated, less, nothing or more; or the client never ends the reservation.
                    "actual": random.choice((estimate, estimate // 2, 0, 0, estimate + 3, None)),
                    "ends_at": random.choice(
                        ([who], [who, who], [random.choice(names), who], [random.choice(names)])
                    ),
                }
                if what["actual"] is None:
                    what["life_ms"] = min(what["life_ms"], 6_000)
                events.append(Event(random.randrange(200, plan.trouble_ms), "reserve", who, what))
            for _ in range(random.randrange(4, 20)):
                what = {"counter": counter, "cost": random.choice((1, 1, 2, 5))}
                events.append(
                    Event(random.randrange(200, plan.trouble_ms), "spend", random.choice(names), what)
                )
    return events
