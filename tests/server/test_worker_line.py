"""The pipe between a supervisor and its workers."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from tidegate.server.process.worker import MESSAGE_BYTES_MAX, Line, ToSupervisor, ToWorker


async def test_a_message_that_is_too_long_is_dropped_and_the_next_one_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = socket.socketpair()
    here, there = await Line.open(one), await Line.open(other)
    here.send(ToWorker(answered=1, answers=["x" * MESSAGE_BYTES_MAX]))
    here.send(ToWorker(answered=2))
    async with asyncio.timeout(20):
        received = await there.receive(ToWorker)
    assert isinstance(received, ToWorker)
    assert received.answered == 2
    assert "was dropped" in caplog.text
    await here.close()
    assert await there.receive(ToSupervisor) is None, "the end of the line is its end"
    await there.close()
    assert msgspec.json.decode(b"{}", type=ToWorker) == ToWorker()
