"""Bad input is a typed error that names the field, the value and what would be right; nothing is counted."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS
from tidegate import AsyncLimiter, ConfigurationError, InvalidInput, Limit, Limiter, Request, Tuning
from tidegate.errors import MissingExtra, TidegateError
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter, make_limiter

TEN_A_MINUTE = Limit("10/minute", namespace="tests")

BAD_REQUESTS = [
    ("limit", "10/minute", "x", 1, None),
    ("limit", None, "x", 1, None),
    ("limit", 10, "x", 1, None),
    ("identifier", TEN_A_MINUTE, "", 1, None),
    ("identifier", TEN_A_MINUTE, None, 1, None),
    ("identifier", TEN_A_MINUTE, 7, 1, None),
    ("identifier", TEN_A_MINUTE, b"x", 1, None),
    ("identifier", TEN_A_MINUTE, "x" * 513, 1, None),
    ("cost", TEN_A_MINUTE, "x", -1, None),
    ("cost", TEN_A_MINUTE, "x", True, None),
    ("cost", TEN_A_MINUTE, "x", 1.0, None),
    ("cost", TEN_A_MINUTE, "x", "1", None),
    ("cost", TEN_A_MINUTE, "x", None, None),
    ("now_ms", TEN_A_MINUTE, "x", 1, -1),
    ("now_ms", TEN_A_MINUTE, "x", 1, 1.5),
    ("now_ms", TEN_A_MINUTE, "x", 1, True),
    ("now_ms", TEN_A_MINUTE, "x", 1, "now"),
]


@pytest.mark.parametrize(("field", "limit", "identifier", "cost", "now_ms"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_on_every_path(
    field: str, limit: Any, identifier: Any, cost: Any, now_ms: Any
) -> None:
    async def collect() -> list[TidegateError]:
        clock = ManualClock(EPOCH_MS)
        limiter = make_limiter(clock=clock)
        tasks = make_async_limiter(clock=clock)
        good = Request(TEN_A_MINUTE, "good")
        request = Request(limit, identifier, cost)
        errors: list[TidegateError] = []
        paths: list[Callable[[], Any]] = [
            lambda: limiter.limit(limit, identifier, cost, now_ms=now_ms),
            lambda: limiter.limit_many([good, request], now_ms=now_ms),
            lambda: tasks.limit(limit, identifier, cost, now_ms=now_ms),
            lambda: tasks.limit_many([good, request], now_ms=now_ms),
            lambda: tasks.limit_nowait(limit, identifier, cost, now_ms=now_ms),
            lambda: tasks.limit_many_nowait([good, request], now_ms=now_ms),
        ]
        if now_ms is None:
            paths += [
                lambda: limiter.wait(limit, identifier, cost),
                lambda: tasks.wait(limit, identifier, cost),
            ]
        if type(cost) is int and cost == 1:
            paths += [
                lambda: limiter.peek(limit, identifier, now_ms=now_ms),
                lambda: tasks.peek(limit, identifier, now_ms=now_ms),
            ]
        for path in paths:
            try:
                answer = path()
                if asyncio.iscoroutine(answer):
                    answer = await answer
            except TidegateError as error:
                errors.append(error)
            else:
                raise AssertionError(f"answered {answer!r}")
        for statistics in (limiter.statistics(), tasks.statistics()):
            assert (statistics.allowed, statistics.denied) == (0, 0)
        assert limiter.peek(TEN_A_MINUTE, "good").effective == 0
        return errors

    wrong = {"limit": limit, "identifier": identifier, "cost": cost, "now_ms": now_ms}[field]
    for error in asyncio.run(collect()):
        assert isinstance(error, InvalidInput)
        assert isinstance(error, ValueError)
        assert error.field == field
        assert error.value == wrong
        assert str(error).startswith(f"{field}: got ")
        assert "expected" in str(error)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"quota": ""}, "quota"),
        ({"quota": "ten/minute"}, "quota"),
        ({"quota": "10"}, "quota"),
        ({"quota": "10/fortnight"}, "quota"),
        ({"quota": "0/minute"}, "quota"),
        ({"quota": "-1/minute"}, "quota"),
        ({"quota": "1.5/minute"}, "quota"),
        ({"quota": "10/500ms"}, "quota"),
        ({"quota": "10/minute", "duration_ms": 60_000}, "duration_ms"),
        ({"quota": 10}, "duration_ms"),
        ({"quota": 10, "duration_ms": 999}, "duration_ms"),
        ({"quota": 10, "duration_ms": 1000.0}, "duration_ms"),
        ({"quota": 10, "duration_ms": True}, "duration_ms"),
        ({"quota": 0, "duration_ms": 1000}, "quota"),
        ({"quota": -5, "duration_ms": 1000}, "quota"),
        ({"quota": True, "duration_ms": 1000}, "quota"),
        ({"quota": 1.0, "duration_ms": 1000}, "quota"),
        ({"quota": "10/s", "namespace": ""}, "namespace"),
        ({"quota": "10/s", "namespace": None}, "namespace"),
        ({"quota": "10/s", "namespace": "n" * 513}, "namespace"),
        ({"quota": "10/s", "workspace": ""}, "workspace"),
        ({"quota": "10/s", "workspace": 5}, "workspace"),
    ],
)
def test_a_bad_limit_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Limit(**{"namespace": "default"} | arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("requests", [None, 5, "ab", {"a": 1}, iter([Request(TEN_A_MINUTE, "x")])])
async def test_a_batch_that_is_not_a_list_is_refused_and_a_generator_is_not_taken_for_an_empty_batch(
    requests: Any,
) -> None:
    tasks = AsyncLimiter()
    with pytest.raises(InvalidInput, match="requests"):
        Limiter().limit_many(requests)
    with pytest.raises(InvalidInput, match="requests"):
        await tasks.limit_many(requests)
    with pytest.raises(InvalidInput, match="requests"):
        tasks.limit_many_nowait(requests)


@pytest.mark.parametrize("item", [None, "x", (TEN_A_MINUTE, "x", 1)])
def test_a_batch_of_something_else_is_refused(item: Any) -> None:
    with pytest.raises(InvalidInput, match="requests"):
        Limiter().limit_many([Request(TEN_A_MINUTE, "x"), item])


@pytest.mark.parametrize("make", [Limiter, AsyncLimiter])
def test_what_cannot_work_is_raised_by_the_constructor(
    make: type[Limiter | AsyncLimiter], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="region"):
        make(origin="sqlite:///counts.db")
    with pytest.raises(ConfigurationError, match="region"):
        make(ledger="memory://")
    with pytest.raises(ConfigurationError, match="region: got 'fra', but no origin and no ledger"):
        make(region="fra")
    with pytest.raises(TypeError):
        make("redis://localhost")  # type: ignore[call-arg]  # the mistake under test
    for region in ("", "-fra", "f" * 65, "fra/1", "fra\n", "ü", 5):
        with pytest.raises(InvalidInput) as refused:
            make(region=region, origin="sqlite:///counts.db")  # type: ignore[arg-type]  # the mistake under test
        assert refused.value.field == "region"
    with pytest.raises(InvalidInput, match="tuning"):
        make(tuning={"fresh_ms": 1})  # type: ignore[arg-type]  # the mistake under test
    for argument in ("origin", "ledger"):
        with pytest.raises(ConfigurationError, match=r"the directory .*/absent does not exist"):
            make(region="fra", **{argument: f"sqlite:///{tmp_path}/absent/counts.db"})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="is a directory"):
            make(region="fra", **{argument: f"sqlite:///{tmp_path}"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="origin"):
        make(region="fra", origin="redsi://localhost")
    with pytest.raises(ConfigurationError, match="not a URL"):
        make(region="fra", origin="localhost:6379")
    with pytest.raises(ConfigurationError, match="ledger"):
        make(region="fra", ledger="oracle://localhost")
    with pytest.raises(ConfigurationError) as caught:
        make(region="fra", origin="redsi://:hunter2@localhost")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="origin: "):
        make(region="fra", origin=5)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigurationError, match="ledger: "):
        make(region="fra", ledger=b"mysql://")  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize("make", [Limiter, AsyncLimiter])
@pytest.mark.parametrize(
    ("argument", "url", "module"),
    [
        ("origin", "redis://localhost", "tidegate.adapters.redis.origin"),
        ("ledger", "mysql://localhost/x", "tidegate.adapters.mysql.ledger"),
        ("ledger", "postgres://localhost/x", "tidegate.adapters.postgres.ledger"),
    ],
)
def test_a_missing_extra_is_raised_by_the_constructor(
    make: type[Limiter | AsyncLimiter],
    argument: str,
    url: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == module:
            raise ModuleNotFoundError("No module named 'driver'", name="driver")

    finder = type("Absent", (), {"find_spec": staticmethod(find_spec)})
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(MissingExtra, match="pip install 'tidegate"):
        make(region="fra", **{argument: url})  # type: ignore[arg-type]


FIELDS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Tuning)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_tuning_is_checked_and_named(name: str) -> None:
    assert getattr(Tuning(**{name: FIELDS[name]}), name) == FIELDS[name]
    bad: list[Any] = [None, "1", 1.0, -1]
    if isinstance(FIELDS[name], bool):
        bad += [0, 1]
    else:
        bad += [True]
    if name.endswith("_percent"):
        bad += [101]
    for value in bad:
        with pytest.raises(InvalidInput) as caught:
            Tuning(**{name: value})
        assert (caught.value.field, caught.value.value) == (name, value)


def test_a_tuning_takes_known_names_by_keyword_only_and_is_immutable() -> None:
    with pytest.raises(TypeError):
        Tuning(True)  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(TypeError, match="fresh"):
        Tuning(fresh=5)  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(AttributeError):
        Tuning().fresh_ms = 5  # type: ignore[misc]  # the mistake under test
