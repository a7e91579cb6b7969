"""Additional tests for an origin whose store is another process, which can freeze, die, or come back empty."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from tidegate.core.model import Component, OriginReply
from tidegate.errors import DependencyError, DependencyTimeout
from tidegate.ports import Origin
from tidegate.testing.contracts.origin import (
    REGION,
    TIMEOUT_S,
    OpenNode,
    OriginContract,
    OriginPlace,
    component,
    new_digest,
)

__all__ = ["RemoteOriginContract", "RemotePlace", "expect_timeout"]

# Short, because no reply is expected; and the tolerance for a busy machine.
SHORT_TIMEOUT_S: Final = 0.2
MARGIN_S: Final = 2.0


class RemotePlace(OriginPlace):
    """A store in another process that can be frozen and killed."""

    @abstractmethod
    def freeze(self) -> None:
        """Stop replying; connections stay open, and new ones are accepted."""

    @abstractmethod
    def thaw(self) -> None:
        """End of `freeze`."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once; all data is lost."""

    @abstractmethod
    def start_empty(self) -> None:
        """Start an empty store at the same address, and wait until it is ready."""


class RemoteOriginContract(OriginContract):
    """The tests for a store in another process."""

    @pytest.fixture
    def place(self) -> RemotePlace:
        raise NotImplementedError("define the fixture `place` in your subclass")

    @pytest.mark.parametrize("call", ["read", "merge", "pulse"])
    async def test_the_time_limit_is_kept_when_the_store_is_frozen(
        self, origin: Origin, place: RemotePlace, call: str
    ) -> None:
        cell = component(new_digest(), 3)
        await self.merged(origin, cell)
        place.freeze()
        try:
            for _ in range(2):
                await expect_timeout(calls_of(origin, cell)[call])
        finally:
            place.thaw()
        await self.recovered(origin, cell)
        assert await self.read(origin, cell) == OriginReply(3, 3)

    async def test_the_time_limit_is_kept_when_the_store_is_frozen_before_the_first_connection(
        self, place: RemotePlace
    ) -> None:
        origin = place.node()
        cell = component(new_digest(), 3)
        place.freeze()
        try:
            for call in calls_of(origin, cell).values():
                await expect_timeout(call)
            await expect_timeout(lambda timeout_s: origin.open(REGION, timeout_s=timeout_s))
        finally:
            place.thaw()
        await self.recovered(origin, cell)
        await origin.open(REGION, timeout_s=TIMEOUT_S)
        await origin.close()

    async def test_closing_does_not_wait_for_a_frozen_store(
        self, place: RemotePlace, open_node: OpenNode
    ) -> None:
        origin = await open_node()
        place.freeze()
        try:
            async with asyncio.timeout(MARGIN_S):
                await origin.close()
        finally:
            place.thaw()

    async def test_a_dead_store_is_unavailable_and_is_connected_to_again(
        self, origin: Origin, place: RemotePlace
    ) -> None:
        cell = component(new_digest(), 4)
        await self.merged(origin, cell)
        place.kill()
        for call in calls_of(origin, cell).values():
            with pytest.raises(DependencyError):
                await call(SHORT_TIMEOUT_S)
        place.start_empty()
        await self.recovered(origin, cell)
        assert await self.read(origin, cell) == OriginReply(4, 4)

    async def test_a_node_that_starts_while_the_store_is_down_works_when_it_is_up(
        self, place: RemotePlace
    ) -> None:
        origin = place.node()
        place.kill()
        with pytest.raises(DependencyError):
            await origin.open(REGION, timeout_s=SHORT_TIMEOUT_S)
        place.start_empty()
        cell = component(new_digest(), 4)
        await self.recovered(origin, cell)
        assert (await origin.pulse(REGION, timeout_s=TIMEOUT_S)).region == REGION
        await origin.close()

    async def test_a_store_that_came_back_empty_is_noticed_and_healed(
        self, place: RemotePlace, open_node: OpenNode
    ) -> None:
        here, there = await open_node(), await open_node()
        digest = new_digest()
        await self.merged(here, component(digest, 5, writer="here"))
        await self.merged(there, component(digest, 8, writer="there"))
        place.kill()
        place.start_empty()
        probe = component(new_digest(), 1)
        await self.recovered(here, probe)
        await self.recovered(there, probe)
        assert (await here.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        assert (await there.pulse(REGION, timeout_s=TIMEOUT_S)).was_empty
        assert await self.merged(here, component(digest, 6, writer="here")) == OriginReply(6, 0)
        assert await self.merged(there, component(digest, 8, writer="there")) == OriginReply(14, 0)

    @staticmethod
    async def recovered(origin: Origin, cell: Component) -> None:
        """Merge until it succeeds: the origin must reconnect by itself."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await origin.merge([cell], timeout_s=1.0)
                except DependencyError:
                    await asyncio.sleep(0.01)
                else:
                    return


def calls_of(origin: Origin, cell: Component) -> dict[str, Callable[[float], Awaitable[Any]]]:
    """Every call that can block, as a function of its timeout."""
    return {
        "read": lambda timeout_s: origin.read([cell], timeout_s=timeout_s),
        "merge": lambda timeout_s: origin.merge([cell], timeout_s=timeout_s),
        "pulse": lambda timeout_s: origin.pulse(REGION, timeout_s=timeout_s),
    }


async def expect_timeout(call: Callable[[float], Awaitable[Any]]) -> None:
    """The call raises `DependencyTimeout`, and in time."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(DependencyTimeout):
        await call(SHORT_TIMEOUT_S)
    assert loop.time() - started < SHORT_TIMEOUT_S + MARGIN_S
