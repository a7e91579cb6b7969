"""Where a node is asked to give credit back: a connection of its own that has subscribed to the node's channel.

Laws:
- A connection that is lost or silent is noticed within `SILENCE_MAX_S` and replaced. Until then the node counts as one
  that cannot be recalled: it asks for no credit in advance, and what it holds ends by itself.
- On a Redis Cluster it can be any master: what is published on one reaches the subscribers of all.
- A payload that is not a recall is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tidegate.adapters.redis.credit import parse_recall
from tidegate.adapters.redis.link import CONNECT_TIMEOUT_S, connect, greet
from tidegate.adapters.redis.network import connection_options
from tidegate.adapters.redis.sentinel import Sentinels
from tidegate.adapters.redis.settings import Address, RedisSettings
from tidegate.adapters.redis.wire import ReplyError, Wire, pack
from tidegate.errors import ConfigurationError, DependencyError, DependencyUnavailable

__all__ = ["Recalls"]

PING: Final = pack(("PING",))
# How often the connection is checked with a PING, and how long an answer may take.
PING_INTERVAL_S: Final = 1.0
SILENCE_MAX_S: Final = 1.0
# Between two tries to connect.
RETRY_FIRST_S: Final = 0.1
RETRY_LAST_S: Final = 5.0


class Recalls:
    """Listens until cancelled; connects by itself."""

    def __init__(
        self, settings: RedisSettings, channel: bytes, on_recall: Callable[[bytes, str], None]
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._on_recall = on_recall
        self._at = 0  # which of the hosts is tried next
        self.is_listening: bool = False
        self.recalls: int = 0

    async def run(self) -> None:
        """The loop. Never raises for a dead peer."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    wire = await self._subscribe()
            except (DependencyError, ConfigurationError, TimeoutError, OSError):
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
                continue
            retry_s = RETRY_FIRST_S
            self.is_listening = True
            try:
                await self._watch(wire)
            finally:
                self.is_listening = False
                wire.abort()

    async def _subscribe(self) -> Wire:
        wire = await connect(await self._find(), connection_options(self._settings))
        try:
            await self._prepare(wire)
        except BaseException:
            wire.abort()
            raise
        return wire

    async def _prepare(self, wire: Wire) -> None:
        greeting = await greet(wire, connection_options(self._settings)._replace(db=0))
        if greeting.mode != "cluster" and greeting.role != "master":
            raise DependencyUnavailable(f"{wire.shown}: is a {greeting.role}, not the master")
        wire.on_message = self._on_message
        (reply,) = await wire.send(pack(("SUBSCRIBE", self._channel)), 1)
        if isinstance(reply, ReplyError):
            raise DependencyUnavailable(f"{wire.shown}: SUBSCRIBE was refused: {reply}")

    async def _find(self) -> Address:
        if self._settings.kind == "sentinel":
            return await Sentinels(self._settings).find()
        self._at += 1
        return self._settings.hosts[self._at % len(self._settings.hosts)]

    async def _watch(self, wire: Wire) -> None:
        """Until the connection is lost, or does not answer."""
        while not wire.is_lost:
            await asyncio.wait([wire.lost], timeout=PING_INTERVAL_S)
            try:
                async with asyncio.timeout(SILENCE_MAX_S):
                    await wire.send(PING, 1)
            except (DependencyError, TimeoutError):
                return

    def _on_message(self, payload: bytes) -> None:
        recall = parse_recall(payload)
        if recall is not None:
            self.recalls += 1
            self._on_recall(*recall)
