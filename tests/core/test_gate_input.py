"""Bad input: a typed error that names field, value and what would be right, and nothing is counted."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum, StrEnum
from typing import Any, NoReturn

import pytest

from tests.core.nodes import Node
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.gate import CLOSED, IDLE, NOT_STARTED, Gate
from tidegate.core.model import Decision, Limit, OriginReply, Request, Tuning, make_limit
from tidegate.core.tickets import Ticket
from tidegate.errors import Closed, InvalidInput, TidegateError

LIMIT = Limit(10, duration_ms=1_000, namespace="default")
NOW_MS = 1_700_000_000_000

NOT_INTS = [True, False, 1.0, 1.5, "1", b"1", None, [], 1j, float("nan")]
NOT_NAMES = [None, 1, 1.0, b"a", ["a"], True]


def never(*_arguments: object) -> NoReturn:
    raise AssertionError("nothing needs to be read")


@pytest.fixture
def gate() -> Gate:
    engine = Engine(Tuning(), node_id="n1")
    return Gate(engine, lambda: NOW_MS * 1_000_000 + 999_999, lambda: None, never)


@pytest.fixture
def engine(gate: Gate) -> Engine:
    return gate._engine


def refused(field: str, value: object, call: Callable[[], object]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        call()
    error = caught.value
    assert error.field == field
    assert error.value is value or error.value == value
    assert error.expected
    assert str(error).startswith(f"{field}: got ")
    assert issubclass(InvalidInput, ValueError) and issubclass(InvalidInput, TidegateError)
    assert not error.transient
    return error


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a caller without a type checker sees."""
    return function


# -- Limit


@pytest.mark.parametrize("value", [value for value in NOT_INTS if not isinstance(value, str)])
def test_a_limit_that_is_not_an_int_is_refused(value: object) -> None:
    refused("quota", value, lambda: untyped(Limit)(value, duration_ms=1_000, namespace="default"))


@pytest.mark.parametrize("value", [0, -1, -(2**70)])
def test_a_limit_below_one_is_refused(value: int) -> None:
    refused("quota", value, lambda: Limit(value, duration_ms=1_000, namespace="default"))


@pytest.mark.parametrize("value", NOT_INTS)
def test_a_duration_that_is_not_an_int_is_refused(value: object) -> None:
    refused("duration_ms", value, lambda: untyped(Limit)(10, duration_ms=value, namespace="default"))


@pytest.mark.parametrize("value", [999, 0, -1_000])
def test_a_duration_below_a_second_is_refused(value: int) -> None:
    refused("duration_ms", value, lambda: Limit(10, duration_ms=value, namespace="default"))
    assert Limit(10, duration_ms=1_000, namespace="default").duration_ms == 1_000


def test_a_limit_in_numbers_needs_a_duration_and_one_in_words_has_it() -> None:
    refused("duration_ms", None, lambda: untyped(Limit)(10, namespace="default"))
    refused("duration_ms", 1_000, lambda: untyped(Limit)("10/s", duration_ms=1_000, namespace="default"))


@pytest.mark.parametrize("field", ["namespace", "workspace"])
@pytest.mark.parametrize("value", [*NOT_NAMES, "", "x" * 513])
def test_a_name_that_is_empty_too_long_or_not_a_str_is_refused(field: str, value: object) -> None:
    refused(field, value, lambda: untyped(Limit)("10/s", **{"namespace": "test", field: value}))


@pytest.mark.parametrize("value", [None, "", "allow", "Deny", 1, True])
def test_an_unknown_policy_for_outages_is_refused(value: object) -> None:
    refused("on_outage", value, lambda: untyped(Limit)("10/s", namespace="n", on_outage=value))


def test_names_may_hold_512_characters_of_any_kind() -> None:
    for name in ("x" * 512, "\U0001f30a" * 512, "\x00", " ", "\ud800"):
        limit = Limit("10/s", namespace=name, workspace=name)
        assert (limit.namespace, limit.workspace) == (name, name)


def test_an_override_may_be_zero_but_not_less() -> None:
    assert make_limit(0, 1_000, "test", "default").quota == 0
    refused("quota", -1, lambda: make_limit(-1, 1_000, "test", "default"))


# -- one request


@pytest.mark.parametrize("value", [None, "100/minute", 10, 1.5, object])
def test_a_request_without_a_limit_is_refused(gate: Gate, engine: Engine, value: object) -> None:
    refused("limit", value, lambda: gate.limit(value, "a"))
    refused("limit", value, lambda: gate.ask(value, "a", 1, None))
    assert engine.subjects.count == 0


@pytest.mark.parametrize("value", [*NOT_NAMES, "", "x" * 513])
def test_an_identifier_that_is_empty_too_long_or_not_a_str_is_refused(
    gate: Gate, engine: Engine, value: object
) -> None:
    for _ in range(2):
        refused("identifier", value, lambda: gate.limit(LIMIT, value))
        refused("identifier", value, lambda: gate.ask(LIMIT, value, 1, None))
    assert (engine.subjects.count, engine.allowed, engine.denied, len(engine.subjects.tables)) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("value", [*NOT_INTS, -1, -(2**70)])
def test_a_cost_that_is_negative_or_not_an_int_is_refused_and_nothing_is_counted(
    gate: Gate, engine: Engine, value: object
) -> None:
    assert gate.limit(LIMIT, "a", 3)
    refused("cost", value, lambda: gate.limit(LIMIT, "a", value))
    refused("cost", value, lambda: gate.ask(LIMIT, "a", value, None))
    assert gate.limit(LIMIT, "a", 0).effective == 3
    assert (engine.allowed, engine.denied) == (2, 0)


@pytest.mark.parametrize("value", [value for value in [*NOT_INTS, -1] if value is not None])
def test_a_time_that_is_negative_or_not_an_int_is_refused(gate: Gate, engine: Engine, value: object) -> None:
    refused("now_ms", value, lambda: gate.limit(LIMIT, "a", 1, value))
    refused("now_ms", value, lambda: gate.ask(LIMIT, "a", 1, value))
    refused("now_ms", value, lambda: gate.decide_many([Request(LIMIT, "a")], value))
    assert engine.subjects.count == 0


def test_the_gate_accepts_requests_after_a_refused_one(gate: Gate) -> None:
    refused("identifier", "", lambda: gate.limit(LIMIT, ""))
    assert gate.limit(LIMIT, "a")


def test_a_request_without_a_time_gets_the_clocks_and_one_with_a_time_keeps_it(gate: Gate) -> None:
    assert gate.now_ms() == NOW_MS
    assert gate.limit(LIMIT, "a").reset_at_ms == NOW_MS + 1_000
    assert gate.limit(LIMIT, "a", now_ms=0).reset_at_ms == 1_000
    assert gate.limit(LIMIT, "a", 1, 5_000).reset_at_ms == 6_000


class Plan(StrEnum):
    FREE = "free"


class Weight(IntEnum):
    HEAVY = 4


def test_members_of_enumerations_are_accepted_as_their_values(gate: Gate) -> None:
    assert gate.limit(LIMIT, Plan.FREE, Weight.HEAVY)
    assert gate.limit(LIMIT, "free", 0).effective == 4
    decisions, _ = gate.decide_many([Request(LIMIT, Plan.FREE, Weight.HEAVY)])
    assert decisions is not None and decisions[0].effective == 8


# -- batches


@pytest.mark.parametrize("value", [*NOT_INTS, -1])
def test_a_batch_with_one_bad_cost_counts_nothing_at_all(gate: Gate, engine: Engine, value: object) -> None:
    bad = untyped(Request)(LIMIT, "b", value)
    refused("cost", value, lambda: gate.decide_many([Request(LIMIT, "a"), bad]))
    assert (engine.subjects.count, engine.allowed) == (0, 0)


@pytest.mark.parametrize("value", [*NOT_NAMES, "", "x" * 513])
def test_a_batch_with_one_bad_identifier_counts_nothing_at_all(
    gate: Gate, engine: Engine, value: object
) -> None:
    bad = untyped(Request)(LIMIT, value)
    refused("identifier", value, lambda: gate.decide_many([Request(LIMIT, "a"), bad]))
    assert engine.subjects.count == 0


@pytest.mark.parametrize("value", [None, "100/minute", 10])
def test_a_batch_with_one_bad_limit_counts_nothing_at_all(gate: Gate, engine: Engine, value: object) -> None:
    bad = untyped(Request)(value, "b")
    refused("limit", value, lambda: gate.decide_many([Request(LIMIT, "a"), bad]))
    assert engine.subjects.count == 0


@pytest.mark.parametrize("value", [1, None, "a", (LIMIT, "a", 1), LIMIT])
def test_a_batch_of_something_else_is_refused(gate: Gate, engine: Engine, value: object) -> None:
    refused("requests", value, lambda: gate.decide_many([Request(LIMIT, "a"), value]))
    assert engine.subjects.count == 0


@pytest.mark.parametrize("value", [1, None, LIMIT])
def test_something_that_is_not_a_batch_is_refused(gate: Gate, value: object) -> None:
    refused("requests", value, lambda: untyped(gate.decide_many)(value))


def test_a_batch_may_come_from_an_iterator(gate: Gate) -> None:
    def items() -> Iterator[Request]:
        yield Request(LIMIT, "a", 3)
        yield Request(LIMIT, "a", 4)

    decisions, needs = gate.decide_many(items())
    assert decisions is not None and [decision.effective for decision in decisions] == [3, 7]
    assert needs == []


# -- errors


def test_an_error_shows_a_long_value_short_and_can_be_pickled() -> None:
    error = refused("namespace", "x" * 10_000, lambda: Limit("1/s", namespace="x" * 10_000))
    assert len(str(error)) < 200
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.field, twin.value, twin.expected, str(twin)) == (
        error.field,
        error.value,
        error.expected,
        str(error),
    )


# -- the driver's side of the gate


def test_a_closed_gate_stays_closed_and_so_does_the_same_gate_in_a_child(gate: Gate, engine: Engine) -> None:
    assert gate.limit(LIMIT, "a")
    with gate:
        gate.resting = CLOSED
    lock = threading.RLock()
    for door in (gate, gate.with_lock(lock.acquire, lock.release)):
        with pytest.raises(Closed):
            door.limit(LIMIT, "a")
        with pytest.raises(Closed):
            door.ask(LIMIT, "a", 1, None)
        with pytest.raises(Closed):
            door.decide_many([Request(LIMIT, "a")])
        assert door.attempt(LIMIT, "a", 1, NOW_MS) is None
        assert door.attempt_many([(LIMIT, "a", 1)], NOW_MS) is None
    assert engine.allowed == 1
    assert lock.acquire(blocking=False), "a refusal releases the lock"
    lock.release()


def test_a_gate_with_another_lock_uses_the_same_engine_and_is_open(gate: Gate) -> None:
    """In a forked child, the old lock may be held by a thread that does not exist there, in the middle of a
    decision."""
    gate.limit(LIMIT, "a", 3)
    lock = threading.RLock()
    with gate:
        child = gate.with_lock(lock.acquire, lock.release)
        assert child.limit(LIMIT, "a", 4).effective == 7


@pytest.mark.parametrize("locked", [True, False])
def test_a_request_to_a_gate_that_is_not_started_begins_outside_the_lock_and_is_decided_then(
    engine: Engine, locked: bool
) -> None:
    lock = threading.Lock()  # not reentrant: a `begin` with the lock held would hang
    begun: list[bool] = []

    def begin() -> None:
        with lock:
            begun.append(True)
        with door:
            door.resting = IDLE

    acquire, release = (lock.acquire, lock.release) if locked else (None, None)
    door = Gate(engine, lambda: NOW_MS * 10**6, lambda: None, never, acquire, release, begin, NOT_STARTED)
    assert not door.is_open
    assert door.attempt(LIMIT, "a", 1, NOW_MS) is None
    assert door.attempt_many([(LIMIT, "a", 1)], NOW_MS) is None
    with door:
        pass  # background loops enter meanwhile
    assert not door.is_open
    assert door.limit(LIMIT, "a").effective == 1
    assert door.limit(LIMIT, "a").effective == 2
    assert begun == [True]


def test_a_begin_that_raises_leaves_the_gate_not_started_and_nothing_counted(engine: Engine) -> None:
    lock = threading.Lock()

    def begin() -> None:
        raise LookupError("cannot start")

    gate = Gate(
        engine, lambda: NOW_MS * 10**6, lambda: None, never, lock.acquire, lock.release, begin, NOT_STARTED
    )
    for _ in range(2):
        with pytest.raises(LookupError):
            gate.limit(LIMIT, "a")
    assert not gate.is_open
    assert not lock.locked()
    assert engine.allowed == 0


def test_the_driver_is_woken_outside_the_lock_when_a_decision_leaves_work() -> None:
    node = Node(has_origin=True)
    engine = node.engine
    held: list[str] = []
    woken: list[tuple[str, ...]] = []

    def acquire() -> bool:
        held.append("lock")
        return True

    def release() -> None:
        held.pop()

    def wake() -> None:
        woken.append(tuple(held))
        engine.pending.is_urgent = False

    def settle(limit: Limit, identifier: str, cost: int, now_ms: int, need: Need | Ticket) -> Decision:
        assert isinstance(need, Need)
        assert not held
        node.origin_sync.apply_read(need, [OriginReply(0, 0), OriginReply(0, 0)], now_ms)
        answer = door.decide(limit, identifier, cost, now_ms, 1)
        assert isinstance(answer, Decision)
        return answer

    door = Gate(engine, lambda: NOW_MS * 10**6, wake, settle, acquire, release)
    assert door.limit(LIMIT, "a").source == "origin"
    assert woken == [()]
    assert isinstance(door.ask(LIMIT, "b", 1, None), Need)
    assert door.attempt(LIMIT, "b", 1, None) is None
    assert door.attempt_many([(LIMIT, "a", 1), (LIMIT, "b", 1)], NOW_MS) is None
    decisions, needs = door.decide_many([Request(LIMIT, "c")])
    assert decisions is None and [need.subject.identifier for need in needs] == ["c"]
    decisions, _ = door.decide_many([Request(LIMIT, "c")], None, 2)
    assert decisions is not None and decisions[0].source == "degraded"
    assert woken == [(), ()]
    assert held == []


def test_a_batch_from_memory_is_decided_and_wakes_the_driver() -> None:
    hourly = Limit("10/hour", namespace="default")
    engine = Engine(Tuning(), node_id="n1", has_ledger=True)
    woken: list[bool] = []

    def settle(limit: Limit, identifier: str, cost: int, now_ms: int, need: Need | Ticket) -> Decision:
        assert isinstance(need, Need)
        raise AssertionError("nothing is read without an origin")

    door = Gate(engine, lambda: NOW_MS * 10**6, lambda: woken.append(engine.pending.is_urgent), settle)
    decisions = door.attempt_many([(hourly, "c", 2), (hourly, "c", hourly.quota - 2)], NOW_MS)
    assert decisions is not None and [decision.effective for decision in decisions] == [2, hourly.quota]
    assert woken == [True], "other regions must learn of a spent limit"
    decisions = door.attempt_many([(hourly, "d", 1), (hourly, "c", 1)], NOW_MS)
    assert decisions is not None and [decision.allowed for decision in decisions] == [True, False]
    assert engine.allowed == 3 and engine.denied == 1
