from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.model import Request, make_limit
from tidegate.errors import ConfigurationError, InvalidInput
from tidegate.telemetry.decisions import DecisionRecord, Sampling, read_records
from tidegate.telemetry.what_if import Run, WhatIf, replay, replay_runs
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_limiter

MINUTE_MS = 60_000

names = st.text(min_size=1, max_size=20)
records = st.builds(
    DecisionRecord,
    at_ms=st.integers(0, 2**53),
    workspace=names,
    namespace=names,
    identifier=names,
    cost=st.integers(0, 1000),
    quota=st.integers(0, 2**53),
    duration_ms=st.integers(1000, 2**53),
    allowed=st.booleans(),
    batch=st.none() | st.integers(0, 2**53),
)
# (milliseconds since the request before, identifier, cost, whether the next request belongs to the same batch)
requests = st.lists(
    st.tuples(st.integers(0, 30_000), st.sampled_from("abc"), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=60,
)


def replayed(runs: list[Run], quota: int, *, against_replay: bool = False) -> WhatIf:
    """The report of all steps."""
    found: list[WhatIf] = []

    def steps() -> Iterator[None]:
        found.append((yield from replay_runs(runs, quota, MINUTE_MS, against_replay=against_replay)))

    assert list(steps()) == [], "so few need no pause"
    return found[0]


def recorded(asked: list[tuple[int, str, int, bool]], quota: int) -> list[DecisionRecord]:
    """The log that one node with an empty memory would write."""
    clock = ManualClock()
    limiter = make_limiter(clock=clock)
    limit = make_limit(quota, MINUTE_MS, "api", "acme")
    log: list[DecisionRecord] = []
    waiting: list[Request] = []
    at_ms = 1_700_000_000_000
    for number, (later_ms, identifier, cost, has_next) in enumerate(asked):
        if not waiting:
            at_ms += later_ms
        waiting.append(Request(limit, identifier, cost))
        if has_next and number < len(asked) - 1:
            continue
        clock.set(at_ms)
        decisions = limiter.limit_many(waiting)
        batch = number if len(waiting) > 1 else None
        for request, decision in zip(waiting, decisions, strict=True):
            log.append(
                DecisionRecord(
                    at_ms,
                    "acme",
                    "api",
                    request.identifier,
                    request.cost,
                    quota,
                    MINUTE_MS,
                    decision.allowed,
                    batch,
                )
            )
        waiting = []
    return log


@given(records)
def test_a_record_survives_its_line(record: DecisionRecord) -> None:
    line = record.to_line().encode("ascii")
    assert line.count(b"\n") == 1
    assert DecisionRecord.from_line(line) == record


@given(requests, st.integers(1, 20))
def test_the_same_limit_changes_nothing(asked: list[tuple[int, str, int, bool]], quota: int) -> None:
    log = recorded(asked, quota)
    result = replay(log, quota, MINUTE_MS)
    assert (result.newly_denied, result.newly_allowed) == (0, 0)
    assert result.agreed == result.requests == len(log)


@given(requests, st.integers(1, 20), st.integers(1, 20))
def test_a_replay_decides_as_a_limiter_with_the_new_limit_would_have(
    asked: list[tuple[int, str, int, bool]], quota: int, other: int
) -> None:
    result = replay(recorded(asked, quota), other, MINUTE_MS)
    would_be: dict[tuple[int, int | None, int], list[bool]] = {}
    for number, record in enumerate(recorded(asked, other)):
        key = (record.at_ms, record.batch, number if record.batch is None else -1)
        would_be.setdefault(key, []).append(record.allowed)
    assert result.would_be_allowed == sum(len(batch) for batch in would_be.values() if all(batch))
    assert result.requests == sum(caller.requests for caller in result.callers)
    assert result.newly_denied == sum(caller.newly_denied for caller in result.callers)
    assert result.would_be_allowed == sum(moment.would_be_allowed for moment in result.moments)
    assert result.newly_allowed - result.newly_denied == result.would_be_allowed - result.allowed
    if other >= quota:
        assert result.would_be_allowed >= result.allowed or any(
            record.batch is not None for record in recorded(asked, quota)
        )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30_000), st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 9), st.booleans()
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_equal_requests_of_one_moment_are_decided_together_as_one_after_the_other(
    asked: list[tuple[int, str, int, int, bool]], quota: int, other: int
) -> None:
    runs = []
    at_ms = 1_700_000_000_000
    for later_ms, identifier, cost, times, allowed in asked:
        at_ms += later_ms
        record = DecisionRecord(at_ms, "acme", "api", identifier, cost, quota, MINUTE_MS, allowed)
        runs.append((record, times))
    one_by_one = replay([record for record, times in runs for _ in range(times)], other, MINUTE_MS)
    assert replayed(runs, other) == one_by_one


def test_a_replay_that_takes_long_counts_as_much_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = count(1_800_000_000_000_000_000, 60 * 10**9)
    monkeypatch.setattr("tidegate.runtime.fleet.now_ns", lambda: next(minutes))
    base = DecisionRecord(1_700_000_000_000, "acme", "api", "a", 1, 10, MINUTE_MS, True)
    result = replay([base, base._replace(identifier="b"), base], 1, MINUTE_MS)
    assert result.would_be_allowed == 2


def test_denials_by_counts_of_other_regions_are_not_counted_as_newly_allowed() -> None:
    base = DecisionRecord(1_700_000_000_000, "acme", "api", "a", 1, 10, MINUTE_MS, True)
    runs: list[Run] = [(base, 4), (base._replace(at_ms=base.at_ms + 1, allowed=False), 20)]
    against_log, against_replay = (replayed(runs, 5, against_replay=each) for each in (False, True))
    assert (against_log.newly_denied, against_log.newly_allowed) == (0, 1)
    assert (against_replay.allowed, against_replay.would_be_allowed) == (10, 5)
    assert (against_replay.newly_denied, against_replay.newly_allowed) == (5, 0)
    assert against_log.agreed == against_replay.agreed == 18


def test_a_replay_pauses_so_that_a_server_can_decide_in_between() -> None:
    record = recorded([(1000, "a", 1, False)], quota=5)[0]
    steps = replay_runs([(record._replace(at_ms=number), 10**6) for number in range(1_000)], 5, MINUTE_MS)
    assert sum(1 for _ in steps) == 5


def test_the_logs_of_several_nodes_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    log = recorded([(1000, "a", 1, False)] * 20, quota=5)
    (tmp_path / "decisions-0.jsonl").write_text("".join(record.to_line() for record in log[::2]))
    (tmp_path / "decisions-1.jsonl").write_text("".join(record.to_line() for record in log[1::2]))
    result = replay(read_records([tmp_path]), 2, MINUTE_MS)
    assert result == replay(log, 2, MINUTE_MS)
    assert (result.allowed, result.would_be_allowed, result.newly_denied) == (5, 2, 3)
    assert result.limits == {"5 per minute": 20}
    assert json.loads(json.dumps(result.document(1)))["callers"][0]["newly_denied"] == 3


def test_only_the_named_namespace_gets_the_new_limit() -> None:
    log = recorded([(1000, "a", 1, False)] * 4, quota=4)
    both = [*log, *(record._replace(namespace="other") for record in log)]
    with pytest.raises(InvalidInput, match="api, other"):
        replay(both, 1, MINUTE_MS)
    with pytest.raises(InvalidInput, match="one of those in the log: api, other"):
        replay(both, 1, MINUTE_MS, "nowhere")
    result = replay(both, 1, MINUTE_MS, "other")
    assert (result.requests, result.newly_denied) == (4, 3)


def test_a_log_that_is_cut_off_is_read_up_to_there_and_a_faulty_line_is_named(tmp_path: Path) -> None:
    log = recorded([(1000, "a", 1, False)] * 3, quota=3)
    text = "".join(record.to_line() for record in log)
    file = tmp_path / "log.jsonl"
    file.write_text(text[:-10])
    assert list(read_records([file])) == log[:2]
    for fault, named in (
        ("nonsense\n", "not a line of JSON"),
        ("[]\n", "not a JSON object"),
        (log[0].to_line().replace('"cost":1', '"cost":-1'), "cost: got -1"),
        (log[0].to_line().replace('"cost":1', '"cost":true'), "cost: got True"),
        (log[0].to_line().replace('"identifier":"a"', '"identifier":""'), "identifier: got ''"),
        (log[0].to_line().replace("true", '"yes"'), "allowed: got 'yes'"),
        ("[" * 50_000 + "\n", "not a line of JSON"),
    ):
        file.write_text(text + fault)
        with pytest.raises(ConfigurationError) as caught:
            list(read_records([file]))
        assert f"log.jsonl:4: {named}" in str(caught.value)
    file.write_text("x" * 70_000 + "\n")
    with pytest.raises(ConfigurationError, match=r"log.jsonl:1: longer than"):
        list(read_records([file]))


def test_a_directory_without_a_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no \*\.jsonl file"):
        list(read_records([tmp_path]))
    with pytest.raises(InvalidInput, match="no decision"):
        replay([], 1, MINUTE_MS)


@given(st.lists(names, unique=True, max_size=20), st.floats(0.01, 0.99))
def test_every_node_chooses_the_same_identifiers(identifiers: list[str], share: float) -> None:
    one, other = Sampling(share), Sampling(share, b"k" * 16)
    assert [one.includes(each) for each in identifiers] == [other.includes(each) for each in identifiers]
    assert all(Sampling(1.0).includes(each) for each in identifiers)


def test_a_sample_has_about_its_share_of_the_identifiers() -> None:
    chosen = sum(Sampling(0.1).includes(f"user_{number}") for number in range(10_000))
    assert 850 <= chosen <= 1150


def test_a_hash_hides_the_identifier_and_depends_on_the_key() -> None:
    hidden = Sampling(1.0, b"k" * 16).written("alice@example.com")
    assert hidden == Sampling(1.0, b"k" * 16).written("alice@example.com")
    assert "alice" not in hidden and hidden != Sampling(1.0, b"l" * 16).written("alice@example.com")
    assert Sampling(1.0).written("alice@example.com") == "alice@example.com"
