"""The life cycles of limiters and nodes: the tables themselves, and that limiters follow theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from tests.runtime.world import HUNDRED_A_MINUTE
from tidegate import AsyncLimiter, Limiter
from tidegate.adapters.memory import MemoryOrigin
from tidegate.errors import Closed, ConfigurationError
from tidegate.runtime.driver import TRANSITIONS as LIMITER_TRANSITIONS
from tidegate.runtime.driver import LimiterState
from tidegate.runtime.node import TRANSITIONS as NODE_TRANSITIONS
from tidegate.runtime.node import NodeState
from tidegate.runtime.states import StateMachine

TABLES: list[tuple[type[Enum], Mapping[Any, Any]]] = [
    (LimiterState, LIMITER_TRANSITIONS),
    (NodeState, NODE_TRANSITIONS),
]


@pytest.mark.parametrize(("states", "table"), TABLES)
def test_only_changes_in_the_table_are_allowed_and_a_refused_one_changes_nothing(
    states: type[Enum], table: Mapping[Any, Any]
) -> None:
    for state in states:
        for following in states:
            machine = StateMachine(state, table)
            if following in table[state]:
                machine.move(following)
                assert machine.state is following
            else:
                with pytest.raises(RuntimeError, match=f"from {state.name} to {following.name}"):
                    machine.move(following)
                assert machine.state is state


@pytest.mark.parametrize(("states", "table"), TABLES)
def test_every_state_can_be_reached_and_leads_to_stopped_which_leads_nowhere(
    states: type[Enum], table: Mapping[Any, Any]
) -> None:
    stopped = states["STOPPED"]

    def reachable(start: Enum) -> set[Enum]:
        found: set[Enum] = set()
        waiting = [start]
        while waiting:
            for following in table[waiting.pop()] - found:
                found.add(following)
                waiting.append(following)
        return found

    assert reachable(states["NEW"]) | {states["NEW"]} == set(states)
    assert table[stopped] == set()
    for state in set(states) - {stopped}:
        assert stopped in reachable(state)


def test_a_limiter_that_shares_nothing_runs_from_the_beginning() -> None:
    for limiter in (Limiter(), AsyncLimiter()):
        assert limiter._life.state is LimiterState.RUNNING
        assert limiter._gate.is_open


def test_a_limiter_for_threads_starts_with_its_first_request_and_ends_with_stop() -> None:
    limiter = Limiter(region="fra", origin=MemoryOrigin())
    states = [limiter._life.state]
    assert limiter.limit(HUNDRED_A_MINUTE, "x")
    limiter.start()
    states.append(limiter._life.state)
    limiter.stop()
    states.append(limiter._life.state)
    assert states == [LimiterState.NEW, LimiterState.RUNNING, LimiterState.STOPPED]
    with pytest.raises(Closed):
        limiter.limit(HUNDRED_A_MINUTE, "x")


async def test_a_start_that_can_never_work_fails_for_good_and_a_failed_limiter_can_be_stopped() -> None:
    class Wrong(MemoryOrigin):
        async def open(self, region: str, *, timeout_s: float) -> None:
            raise ConfigurationError("the wrong database")

    limiter = AsyncLimiter(region="fra", origin=Wrong())
    with pytest.raises(ConfigurationError, match="the wrong database"):
        await limiter.start()
    assert limiter._life.state is LimiterState.FAILED
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="the wrong database"):
            await limiter.limit(HUNDRED_A_MINUTE, "x")
    await limiter.stop()
    with pytest.raises(Closed):
        await limiter.limit(HUNDRED_A_MINUTE, "x")


async def test_a_request_that_reads_while_the_start_fails_is_answered() -> None:
    """Its read was cancelled before the first step of its task, and the request waited for ever."""

    class Wrong(MemoryOrigin):
        async def open(self, region: str, *, timeout_s: float) -> None:
            raise ConfigurationError("the wrong database")

    limiter = AsyncLimiter(region="fra", origin=Wrong())
    async with asyncio.timeout(10):
        answers = await asyncio.gather(
            *(limiter.limit(HUNDRED_A_MINUTE, f"user {number}") for number in range(5)),
            return_exceptions=True,
        )
    for answer in answers:
        assert isinstance(answer, ConfigurationError) or getattr(answer, "source", "") == "degraded"


async def test_a_start_that_failed_for_another_reason_is_tried_again_by_the_next_request() -> None:
    class Flaky(MemoryOrigin):
        failures = 1

        async def open(self, region: str, *, timeout_s: float) -> None:
            if self.failures:
                self.failures -= 1
                raise LookupError("a fault of the adapter")
            await super().open(region, timeout_s=timeout_s)

    limiter = AsyncLimiter(region="fra", origin=Flaky())
    with pytest.raises(LookupError):
        await limiter.start()
    assert limiter._life.state is LimiterState.NEW
    assert await limiter.limit(HUNDRED_A_MINUTE, "x")
    await limiter.stop()


def test_an_event_loop_that_closes_during_the_start_leaves_a_limiter_that_starts_on_the_next_one() -> None:
    class Hanging(MemoryOrigin):
        hangs = True

        async def open(self, region: str, *, timeout_s: float) -> None:
            if self.hangs:
                await asyncio.Event().wait()
            await super().open(region, timeout_s=timeout_s)

    origin = Hanging()
    limiter = AsyncLimiter(region="fra", origin=origin)

    async def give_up() -> None:
        starting = asyncio.ensure_future(limiter.start())
        await asyncio.sleep(0)
        starting.cancel()

    asyncio.run(give_up())
    assert limiter._life.state is LimiterState.NEW
    origin.hangs = False

    async def begin_again() -> None:
        decision = await limiter.limit(HUNDRED_A_MINUTE, "x")
        assert decision.source == "origin"
        await limiter.stop()

    asyncio.run(begin_again())
