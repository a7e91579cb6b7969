from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tidegate import AsyncLimiter, InvalidInput, Limit, Limiter, LimitExceeded, Request
from tidegate.errors import Closed
from tidegate.testing import (
    AllowingLimiter,
    AsyncAllowingLimiter,
    AsyncDenyingLimiter,
    AsyncFailingLimiter,
    DenyingLimiter,
    FailingLimiter,
    ManualClock,
    advance_to_reset,
    advance_until_empty,
    consumed,
    make_async_limiter,
    make_limiter,
)

ROOT = Path(__file__).parents[2]
MAIL = Limit("2/minute", namespace="mail")
HOUR = Limit("9/hour", namespace="mail")


def test_an_allowing_limiter_allows_everything_and_remembers_what_was_asked() -> None:
    limiter = AllowingLimiter()
    assert isinstance(limiter, Limiter)
    assert all(limiter.limit(MAIL, "ann") for _ in range(5))
    assert all(limiter.limit_many([Request(MAIL, "bob", 3), Request(HOUR, "bob")]))
    assert limiter.requests[0] == Request(MAIL, "ann", 1)
    assert limiter.requests[-2:] == [Request(MAIL, "bob", 3), Request(HOUR, "bob", 1)]
    assert limiter.wait(MAIL, "ann", timeout=0)


def test_a_denying_limiter_denies_everything_with_a_retry_after() -> None:
    decision = DenyingLimiter(retry_after=30).limit(MAIL, "ann")
    assert not decision and decision.retry_after == 30 and decision.headers()["Retry-After"] == "30"
    assert DenyingLimiter(retry_after=None).limit(MAIL, "ann").retry_after is None
    with pytest.raises(InvalidInput, match="retry_after"):
        DenyingLimiter(retry_after=0)

    @DenyingLimiter().limited(MAIL)
    def send() -> None:
        raise AssertionError("never called")

    with pytest.raises(LimitExceeded):
        send()


def test_a_failing_limiter_raises() -> None:
    with pytest.raises(Closed):
        FailingLimiter().limit(MAIL, "ann")
    with pytest.raises(OSError, match="disk"):
        FailingLimiter(OSError("disk")).limit_many([Request(MAIL, "ann")])


async def test_the_doubles_for_tasks_answer_alike() -> None:
    allowing, denying, failing = AsyncAllowingLimiter(), AsyncDenyingLimiter(5), AsyncFailingLimiter()
    assert isinstance(allowing, AsyncLimiter)
    assert await allowing.limit(MAIL, "ann") and all(await allowing.limit_many([Request(MAIL, "ann")]))
    assert allowing.requests == [Request(MAIL, "ann", 1)] * 2
    assert not await denying.limit(MAIL, "ann")
    assert (await denying.wait(MAIL, "ann", timeout=0)).retry_after == 5
    assert denying.limit_nowait(MAIL, "ann") is not None
    with pytest.raises(Closed):
        await failing.limit_many([Request(MAIL, "ann")])


def test_what_was_consumed_can_be_asked_without_consuming() -> None:
    clock = ManualClock(60_000)
    limiter, tasks = make_limiter(clock=clock), make_async_limiter(clock=clock)
    limiter.limit(MAIL, "ann", 2)
    assert [consumed(limiter, MAIL, "ann") for _ in range(2)] == [2, 2]
    asyncio.run(tasks.limit(MAIL, "ann"))
    assert consumed(tasks, MAIL, "ann") == 1
    assert consumed(tasks, MAIL, "bob") == 0


def test_time_moves_to_the_reset_and_until_nothing_counts() -> None:
    clock = ManualClock(61_000)
    limiter = make_limiter(clock=clock)
    decision = limiter.limit(MAIL, "ann", 2)
    assert advance_to_reset(clock, MAIL) == decision.reset_at_ms == 120_000
    # The window slides: at its beginning all of the last one still counts.
    assert consumed(limiter, MAIL, "ann") == 2
    clock.set(61_000)
    assert advance_until_empty(clock, MAIL) == 180_000
    assert consumed(limiter, MAIL, "ann") == 0


USERS_TESTS = """
    from tidegate import Limit
    from tidegate.testing import advance_until_empty, consumed, make_limiter

    MAIL = Limit("2/minute", namespace="mail")

    def test_time_stands_still(tidegate_clock, tidegate_limiter):
        assert [bool(tidegate_limiter.limit(MAIL, "ann")) for _ in range(3)] == [True, True, False]
        advance_until_empty(tidegate_clock, MAIL)
        assert tidegate_limiter.limit(MAIL, "ann")

    def test_every_test_has_a_limiter_of_its_own(tidegate_limiter, tidegate_async_limiter):
        assert consumed(tidegate_limiter, MAIL, "ann") == 0
        assert consumed(tidegate_async_limiter, MAIL, "ann") == 0

    def test_a_fault(tidegate_clock, tidegate_origin):
        with make_limiter(region="test", origin=tidegate_origin, clock=tidegate_clock) as limiter:
            tidegate_origin.faults.fail("exchange")
            decision = limiter.limit(MAIL, "ann")
            assert decision and decision.source == "degraded"
            assert tidegate_origin.faults.fired["exchange"]
"""


def test_the_plugin_works_in_a_project_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(textwrap.dedent(USERS_TESTS))
    is_installed = any(point.name == "tidegate" for point in entry_points(group="pytest11"))
    by_hand = [] if is_installed else ["-p", "tidegate.pytest_plugin"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *by_hand,
            "test_users.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_plugin_is_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tidegate": "tidegate.pytest_plugin"}
