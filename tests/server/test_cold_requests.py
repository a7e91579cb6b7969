"""Requests of callers that are new to this node: those of one turn of the loop share one round trip to the origin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.harness import Hosted
from tests.server.test_outbox import Transport, connected, turn
from tidegate import AsyncLimiter
from tidegate.adapters.memory import MemoryOrigin
from tidegate.server.asgi import create_app
from tidegate.server.http1.listener import HttpServer
from tidegate.server.process.service import Service
from tidegate.testing.faults import TrackingOrigin


def request(key: str, identifier: str) -> bytes:
    body = json.dumps({"namespace": "api", "identifier": identifier, "limit": 3, "duration": 3_600_000})
    head = (
        f"POST /v2/ratelimit.limit HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


@pytest.fixture
async def origin() -> TrackingOrigin:
    return TrackingOrigin(MemoryOrigin())


@pytest.fixture
async def http(hosted: Hosted, origin: TrackingOrigin, tmp_path: Path) -> AsyncIterator[HttpServer]:
    limiter = AsyncLimiter(region="fra", origin=origin)
    async with limiter, create_app(data_dir=str(tmp_path), limiter=limiter) as app:
        service = app._service
        assert isinstance(service, Service)
        config = service._config.http
        yield HttpServer(service.router, config, service.refuse, service.new_id, wall_time=lambda: 1.7e9)


async def answered(*transports: Transport) -> None:
    """Wait for an answer on each: the first request also waits for the thread that writes the catalog."""
    async with asyncio.timeout(30):
        while not all(transport.answers for transport in transports):
            await turn()


async def test_cold_requests_of_one_turn_share_one_round_trip(
    http: HttpServer, hosted: Hosted, origin: TrackingOrigin
) -> None:
    opened = [connected(http) for _ in range(50)]
    first, first_transport = opened[0]
    first.data_received(request(hosted.key, "creates the namespace"))
    await answered(first_transport)
    before = origin.count("exchange")

    for number, (connection, _) in enumerate(opened[1:]):
        connection.data_received(request(hosted.key, f"user_{number}"))
    await answered(*(transport for _, transport in opened[1:]))

    asked = [argument for argument in origin.arguments("exchange")[before:] if isinstance(argument, list)]
    assert len(asked[0]) == 49, "all of the turn, in one message"
    for connection, _ in opened:
        connection.connection_lost(None)
