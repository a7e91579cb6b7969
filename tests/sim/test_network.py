from __future__ import annotations

import asyncio
from random import Random

import pytest

from tidegate.errors import DependencyTimeout
from tidegate.sim.network import Link, Network, Server
from tidegate.sim.plan import NetworkConditions
from tidegate.sim.virtual_time import VirtualLoop, owned_context


@pytest.mark.parametrize(
    "conditions",
    [NetworkConditions(loss_percent=100), NetworkConditions(reply_loss_percent=100)],
    ids=["request", "reply"],
)
def test_a_lost_message_disturbs_its_link_before_the_call_times_out(conditions: NetworkConditions) -> None:
    """A node that crashes while it waits for such a call may lose counts: `ConvergenceCheck` must know of it."""
    loop = VirtualLoop()
    link = Link(Network(loop, Random(1), conditions), Server())

    async def call() -> None:
        await asyncio.sleep(5)
        calling = asyncio.ensure_future(link.call(lambda: None, 1.0))
        await asyncio.sleep(0.5)
        assert 5 <= link.disturbed_s <= 5.5
        with pytest.raises(DependencyTimeout):
            await calling
        assert link.disturbed_s == pytest.approx(6)

    try:
        loop.run_until_complete(call())
    finally:
        loop.close()


def test_a_message_arrives_although_its_sender_is_paused_and_the_answer_waits_for_it() -> None:
    loop = VirtualLoop()
    link = Link(Network(loop, Random(1), NetworkConditions(delay_ms=10)), Server())
    arrived_s: list[float] = []
    node = object()

    async def play() -> None:
        call = link.call(lambda: arrived_s.append(loop.time()), 60.0)
        calling = loop.create_task(call, context=owned_context(node))
        await asyncio.sleep(0)
        loop.pause(node)
        await asyncio.sleep(5)
        assert arrived_s and arrived_s[0] <= 0.01
        assert not calling.done()
        loop.resume(node)
        await calling

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
