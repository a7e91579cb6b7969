"""Answers of Redis that are read after a pause of this process; tests/runtime/test_running_time.py has the rule."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tests.runtime.test_running_time import stall
from tests.runtime.world import on_virtual_time, turns
from tidegate.adapters.deadline import Deadline
from tidegate.adapters.redis.link import Statistics, settle
from tidegate.adapters.redis.wire import Reply, Wire
from tidegate.errors import DependencyTimeout


class SilentWire:
    shown = "redis"

    def is_silent(self, longest_s: float) -> bool:
        return False


@on_virtual_time
async def test_an_answer_that_is_read_right_after_a_stall_is_used() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Reply]] = loop.create_future()
    sent = [(cast("Wire", SilentWire()), answer)]
    waiting = asyncio.create_task(settle(sent, Deadline.after(0.285, loop.time()), Statistics()))
    await turns(3)
    stall(2.0)
    await turns(2)
    answer.set_result([b"1"])
    assert await waiting == [[b"1"]]


@on_virtual_time
async def test_an_answer_that_does_not_come_after_a_stall_is_not_waited_for() -> None:
    loop = asyncio.get_running_loop()
    sent: list[Any] = [(SilentWire(), loop.create_future())]
    waiting = asyncio.create_task(settle(sent, Deadline.after(0.285, loop.time()), Statistics()))
    await turns(3)
    stall(2.0)
    with pytest.raises(DependencyTimeout, match="no answer within"):
        await waiting
    assert loop.time() <= 2.286


@on_virtual_time
async def test_a_connection_is_silent_only_if_nothing_comes_after_a_stall_either() -> None:
    loop = asyncio.get_running_loop()
    wire = Wire(loop, "redis")
    wire.connection_made(cast("asyncio.Transport", Transport()))
    answer = wire.send(b"", 1)
    stall(30.0)
    assert not wire.is_silent(1.0), "this process has not read anything yet"
    wire.data_received(b":1\r\n")
    assert await answer == [1]
    wire.send(b"", 1)
    stall(30.0)
    assert not wire.is_silent(1.0)
    await asyncio.sleep(0.06)
    assert wire.is_silent(1.0)
    wire.connection_lost(None)


class Transport:
    def write(self, packed: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return False
