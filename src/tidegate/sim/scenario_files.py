"""Reads and checks scenario files.

A malformed file is rejected as a whole before anything runs; the error names the file, the scenario and the step.
Unknown names are errors, because a misspelled expectation would always pass. docs/how-to/scenario-files.md documents
the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from tidegate.core.model import LedgerRow, Tuning, checked_region
from tidegate.errors import InvalidInput, TidegateError
from tidegate.sim.plan import Plan, plan_from

__all__ = ["Load", "MalformedScenario", "NodeSpec", "Scenario", "Step", "bundled_files", "load_file"]

SCHEMA: Final = 1

_CELL: Final = frozenset({"workspace", "namespace", "identifier", "duration_ms", "sequence"})
_SUBJECT: Final = _CELL - {"sequence"}
_REQUEST: Final = frozenset({"workspace", "namespace", "identifier", "limit", "duration_ms", "cost"})
_ROW: Final = frozenset({*_CELL, "region", "count", "expires_at"})
_LIMIT_EXPECTS: Final = frozenset({"expect", "expect_successes", "expect_error", "expect_unchanged"})
_ROW_EXPECTS: Final = frozenset(
    {"expect_rows", "expect_row_count", "expect_first_row", "expect_last_row", "expect_chunks", "expect_ok"}
)

# For each operation: the required fields, and the expectations that it may have.
OPERATIONS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "limit": (frozenset({"node", *_REQUEST}) - {"cost", "identifier"}, _LIMIT_EXPECTS),
    "concurrent": (frozenset({"node", *_REQUEST}) - {"cost", "identifier"}, _LIMIT_EXPECTS),
    "batch": (frozenset({"node", "requests"}), _LIMIT_EXPECTS),
    "batch_begin": (frozenset({"node", "requests", "handle"}), _LIMIT_EXPECTS),
    "batch_end": (frozenset({"handle"}), _LIMIT_EXPECTS),
    "reserve": (frozenset({"node", "requests", "handle"}), frozenset({"expect", "expect_successes"})),
    "settle": (frozenset({"node", "handle", "costs"}), frozenset({"expect"})),
    "release": (frozenset({"node", "handle"}), frozenset({"expect"})),
    "usage": (frozenset({"node", *_REQUEST}) - {"cost"}, frozenset({"expect"})),
    "reset": (frozenset({"node", *_REQUEST}) - {"cost"}, frozenset({"expect_ok"})),
    "sync_resets": (frozenset({"node"}), frozenset({"expect_ok"})),
    "replay": (frozenset({"node"}), frozenset({"expect_ok"})),
    "publish": (frozenset({"node"}), _ROW_EXPECTS),
    "import": (frozenset({"node"}), frozenset({"expect_ok"})),
    "peek_cell": (frozenset({"node", *_CELL}), frozenset({"expect"})),
    "peek_strict": (frozenset({"node", *_SUBJECT}), frozenset({"expect"})),
    "peek_origin": (frozenset({"region", *_CELL}), frozenset({"expect"})),
    "peek_store": (frozenset(), _ROW_EXPECTS - {"expect_chunks", "expect_ok"}),
    "origin_add": (frozenset({"region", "amount", *_CELL}), frozenset()),
    "origin_down": (frozenset({"region"}), frozenset()),
    "origin_up": (frozenset({"region"}), frozenset()),
    "origin_wipe": (frozenset({"region"}), frozenset()),
    "store_down": (frozenset(), frozenset()),
    "store_up": (frozenset(), frozenset()),
    "store_fail_chunk": (frozenset({"index"}), frozenset()),
    "store_put": (frozenset({"rows"}), frozenset()),
    "origin_stats": (frozenset({"region"}), frozenset({"expect"})),
    "store_stats": (frozenset(), frozenset({"expect"})),
    "janitor": (frozenset({"node"}), frozenset()),
    "cleanup": (frozenset({"cutoff_ms"}), frozenset({"expect_deleted"})),
    "restart": (frozenset({"node"}), frozenset()),
    "tick": (frozenset(), frozenset()),
}

# The fields that any step may have besides its expectations.
_KNOWN: Final = frozenset(
    {
        "t_ms",
        "op",
        "why",
        "note",
        "count",
        "identifier_pattern",
        "time_ms",
        "life_ms",
        "shadow",
        *_CELL,
        *_REQUEST,
    }.union(*(required for required, _ in OPERATIONS.values()))
)
# Fields of the format that must be integers, and the lowest of each. The limiter itself checks the values of a request.
_NUMBERS: Final = {
    "t_ms": 0, "amount": 0, "count": 1, "index": 0, "cutoff_ms": 0, "sequence": 0, "life_ms": 0,
}  # fmt: skip


class MalformedScenario(TidegateError):
    """A scenario file is malformed. The message names the file, the scenario and the step."""


@dataclass(frozen=True)
class Step:
    """One step, with its fields checked."""

    number: int
    """Counted from 1."""
    op: str
    t_ms: int | None
    fields: Mapping[str, Any]
    place: str
    """Its file, scenario and step, for messages."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def text(self, name: str) -> str:
        value = self.fields[name]
        if not isinstance(value, str):
            raise MalformedScenario(f"{self.place}: {name} must be a string, not {value!r}")
        return value

    def whole(self, name: str) -> int:
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise MalformedScenario(f"{self.place}: {name} must be an integer, not {value!r}")
        return value

    def rows(self) -> list[LedgerRow]:
        """The rows of a store_put step."""
        return [
            LedgerRow(
                row["workspace"],
                row["namespace"],
                row["identifier"],
                row["duration_ms"],
                row["sequence"],
                row["region"],
                row["count"],
                row["expires_at"],
            )
            for row in self.fields["rows"]
        ]


@dataclass(frozen=True)
class NodeSpec:
    """A node of a scenario, and its region."""

    id: str
    region: str


@dataclass(frozen=True)
class Load:
    """The parameters of a scenario of kind "load"."""

    nodes_count: int
    limit: int
    duration_ms: int
    start_ms: int
    interval_ns: int
    total_requests: int
    seed: int
    replay_every_ms: int
    expect_successes: object


# What a scenario of each kind may have beside its name.
_FIELDS: Final = {
    "load": frozenset(field.name for field in fields(Load)),
    "steps": frozenset({"nodes", "steps"}),
    "world": frozenset({"plan"}),
}


@dataclass(frozen=True)
class Scenario:
    """Nodes with timed steps and expected results; or a load; or the plan of a simulation."""

    file: str
    name: str
    why: str
    nodes: tuple[NodeSpec, ...]
    tuning: Tuning
    steps: tuple[Step, ...]
    load: Load | None = None
    plan: Plan | None = None


def bundled_files() -> list[Path]:
    """The scenario files that come with Tidegate."""
    return sorted((Path(__file__).parent / "scenarios").glob("*.json"))


def load_file(path: Path) -> list[Scenario]:
    """All scenarios of a file. Raises `MalformedScenario`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MalformedScenario(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MalformedScenario(f"{path}: is not JSON: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise MalformedScenario(f'{path}: a scenario file is {{"schema": {SCHEMA}, "scenarios": […]}}')
    if document["schema"] != SCHEMA:
        raise MalformedScenario(
            f"{path}: schema {document['schema']!r} is unknown; this version reads schema {SCHEMA}"
        )
    scenarios = document.get("scenarios")
    if not isinstance(scenarios, list):
        raise MalformedScenario(f"{path}: scenarios must be a list, not {scenarios!r}")
    return [_scenario(str(path), number, one) for number, one in enumerate(scenarios, 1)]


def _scenario(file: str, number: int, raw: object) -> Scenario:
    place = f"{file}: scenario {number}"
    if not isinstance(raw, dict):
        raise MalformedScenario(f"{place}: must be an object, not {raw!r}")
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedScenario(f"{place}: needs a name")
    place = f"{place} ({name!r})"
    tuning = _tuning(place, raw.get("tuning", {}))
    kind = raw.get("kind", "steps")
    why = str(raw.get("why", ""))
    _check_fields(place, kind, raw)
    if kind == "load":
        return Scenario(file, name, why, (), tuning, (), _load(place, raw))
    if kind == "world":
        return Scenario(file, name, why, (), tuning, (), plan=_plan(place, raw.get("plan")))
    nodes = tuple(_nodes(place, raw.get("nodes")))
    steps = raw.get("steps")
    if not isinstance(steps, list):
        raise MalformedScenario(f"{place}: steps must be a list, not {steps!r}")
    checked = tuple(_step(f"{place}, step {index}", index, one) for index, one in enumerate(steps, 1))
    _check_references(nodes, checked)
    return Scenario(file, name, why, nodes, tuning, checked)


def _check_fields(place: str, kind: object, raw: Mapping[str, Any]) -> None:
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise MalformedScenario(f"{place}: kind {kind!r} is unknown; leave it out, or use 'load' or 'world'")
    known = _FIELDS[kind] | {"kind", "name", "tuning", "why"}
    for unknown in sorted(raw.keys() - known):
        raise MalformedScenario(f"{place}: unknown field {unknown!r}; use {', '.join(sorted(known))}")


def _tuning(place: str, raw: object) -> Tuning:
    if not isinstance(raw, dict):
        raise MalformedScenario(f"{place}: tuning must be an object, not {raw!r}")
    # Types come from the defaults: annotations are classes in a compiled core and strings in an interpreted one.
    known = asdict(Tuning())
    for name, value in raw.items():
        if name not in known:
            raise MalformedScenario(f"{place}: tuning has no field {name!r}")
        if type(value) is not type(known[name]):
            kind = "true or false" if isinstance(known[name], bool) else "an integer"
            raise MalformedScenario(f"{place}: tuning.{name} must be {kind}, not {value!r}")
    try:
        return Tuning(**({"anticipation": False, "credit": False} | raw))
    except InvalidInput as error:
        raise MalformedScenario(f"{place}: tuning: {error}") from error


def _nodes(place: str, raw: object) -> Iterator[NodeSpec]:
    if not isinstance(raw, list):
        raise MalformedScenario(f"{place}: nodes must be a list of {{id, region}}, not {raw!r}")
    seen: set[str] = set()
    for node in raw:
        if not isinstance(node, dict) or not all(isinstance(node.get(key), str) for key in ("id", "region")):
            raise MalformedScenario(f"{place}: a node is {{id, region}}, not {node!r}")
        if node["id"] in seen:
            raise MalformedScenario(f"{place}: two nodes have the id {node['id']!r}")
        try:
            checked_region(node["region"])
        except InvalidInput as error:
            raise MalformedScenario(f"{place}: node {node['id']!r}: {error}") from error
        seen.add(node["id"])
        yield NodeSpec(node["id"], node["region"])


# More nodes or requests than these take hours.
_LOAD_BOUNDS: Final = (
    ("nodes_count", 1, 1_000),
    ("replay_every_ms", 1, 86_400_000),
    ("interval_ns", 0, 86_400_000_000_000),
    ("total_requests", 1, 100_000_000),
)


def _load(place: str, raw: Mapping[str, Any]) -> Load:
    values: dict[str, Any] = {}
    for field in fields(Load):
        if field.name not in raw:
            raise MalformedScenario(f"{place}: a load needs {field.name}")
        values[field.name] = raw[field.name]
        if field.type == "int" and (
            isinstance(raw[field.name], bool) or not isinstance(raw[field.name], int)
        ):
            raise MalformedScenario(f"{place}: {field.name} must be an integer, not {raw[field.name]!r}")
    for name, lowest, highest in _LOAD_BOUNDS:
        if not lowest <= values[name] <= highest:
            raise MalformedScenario(f"{place}: {name} must be {lowest} to {highest}, not {values[name]}")
    return Load(**values)


def _plan(place: str, raw: object) -> Plan:
    if not isinstance(raw, dict):
        raise MalformedScenario(f"{place}: plan must be an object, not {raw!r}")
    try:
        plan = plan_from(raw)
        plan.tuned()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedScenario(
            f"{place}: plan is not valid, use one that --shrink wrote: {error!r}"
        ) from error
    return plan


def _step(place: str, number: int, raw: object) -> Step:
    if not isinstance(raw, dict):
        raise MalformedScenario(f"{place}: must be an object, not {raw!r}")
    op = raw.get("op")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise MalformedScenario(f"{place}: op {op!r} is unknown; use one of {', '.join(OPERATIONS)}")
    place = f"{place} ({op})"
    required, expects = OPERATIONS[op]
    for name in sorted(required):
        if name not in raw:
            raise MalformedScenario(f"{place}: needs {name}")
    for name, value in raw.items():
        if name.startswith("expect"):
            if name not in expects:
                raise MalformedScenario(f"{place}: cannot have {name}")
        elif name not in _KNOWN:
            raise MalformedScenario(f"{place}: unknown field {name!r}")
        elif name in _NUMBERS:
            _check_number(place, name, value)
    if op in {"limit", "concurrent"} and "identifier" not in raw and "identifier_pattern" not in raw:
        raise MalformedScenario(f"{place}: needs identifier, or identifier_pattern")
    if "requests" in raw:
        _check_items(place, "requests", raw["requests"], _REQUEST - {"cost"}, _REQUEST | {"shadow"})
    costs = raw.get("costs", [])
    if not isinstance(costs, list) or not all(type(cost) is int and cost >= 0 for cost in costs):
        raise MalformedScenario(f"{place}: costs must be a list of integers, 0 or more, not {costs!r}")
    if "rows" in raw:
        _check_items(place, "rows", raw["rows"], _ROW, _ROW | {"updated_at"})
    return Step(number, op, raw.get("t_ms"), raw, place)


def _check_number(place: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedScenario(f"{place}: {name} must be an integer, not {value!r}")
    if value < _NUMBERS[name]:
        raise MalformedScenario(f"{place}: {name} must be {_NUMBERS[name]} or more, not {value}")


def _check_items(
    place: str, name: str, items: object, required: frozenset[str], known: frozenset[str]
) -> None:
    if not isinstance(items, list):
        raise MalformedScenario(f"{place}: {name} must be a list, not {items!r}")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise MalformedScenario(f"{place}: {name}[{index}] must be an object, not {item!r}")
        for missing in sorted(required - item.keys()):
            raise MalformedScenario(f"{place}: {name}[{index}] needs {missing}")
        for unknown in sorted(item.keys() - known):
            raise MalformedScenario(f"{place}: {name}[{index}]: unknown field {unknown!r}")


def _check_references(nodes: tuple[NodeSpec, ...], steps: tuple[Step, ...]) -> None:
    ids = {node.id for node in nodes}
    handles: set[str] = set()
    for step in steps:
        if "node" in step.fields and step.text("node") not in ids:
            raise MalformedScenario(f"{step.place}: there is no node {step.text('node')!r}")
        if "region" in step.fields:
            step.text("region")
        if step.op in {"batch_begin", "reserve"}:
            handles.add(step.text("handle"))
        elif step.op == "settle" and step.text("handle") not in handles:
            raise MalformedScenario(f"{step.place}: no reserve has the handle {step.text('handle')!r}")
        elif step.op == "batch_end" and step.text("handle") not in handles:
            raise MalformedScenario(f"{step.place}: no batch_begin has the handle {step.text('handle')!r}")
