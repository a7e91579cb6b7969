"""The virtual network: messages can be delayed, lost, duplicated and reordered; servers can be down or frozen.

A message that was sent arrives or is lost, whatever happens to its sender. So a request can be applied after its sender
stopped waiting, timed out, was paused or crashed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

from tidegate.errors import DependencyError, DependencyTimeout, DependencyUnavailable
from tidegate.sim.plan import NetworkConditions
from tidegate.sim.virtual_time import VirtualLoop

__all__ = ["Link", "Network", "Server"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Network:
    """The current conditions for messages, and a count of the faults that happened."""

    def __init__(self, loop: VirtualLoop, random: Random, conditions: NetworkConditions) -> None:
        self.loop = loop
        self.random = random
        self.conditions = conditions
        self.fired: Counter[str] = Counter()
        # Messages on their way, and servers, belong to no simulated process: a pause of one does not hold them.
        self._context = Context()

    def call_later(self, delay_s: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        self.loop.call_later(delay_s, callback, *args, context=self._context)

    def delay_s(self) -> float:
        conditions = self.conditions
        if conditions.slow_percent and self.random.random() * 100 < conditions.slow_percent:
            self.fired["message delayed"] += 1
            return (
                self.random.randrange(conditions.delay_ms, max(conditions.delay_ms, conditions.slow_ms) + 1)
                / 1000
            )
        return self.random.randrange(0, conditions.delay_ms * 1000 + 1) / 1e6

    def happens(self, percent: float, name: str) -> bool:
        if percent and self.random.random() * 100 < percent:
            self.fired[name] += 1
            return True
        return False

    def remove_faults(self) -> None:
        """From now on messages are only delayed as usual."""
        self.conditions = NetworkConditions(delay_ms=self.conditions.delay_ms)


class Server:
    """A virtual server: up, down (refuses requests) or frozen (queues requests until it is thawed)."""

    def __init__(self) -> None:
        self.is_down = False
        self._frozen: list[Callable[[], None]] | None = None

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    def freeze(self) -> None:
        if self._frozen is None:
            self._frozen = []

    def thaw(self) -> None:
        waiting, self._frozen = self._frozen or [], None
        for arrive in waiting:
            arrive()

    def take(self, arrive: Callable[[], None]) -> None:
        """Receive a request."""
        if self._frozen is not None:
            self._frozen.append(arrive)
        else:
            arrive()


class Link:
    """The connection of one node to one server."""

    def __init__(self, network: Network, server: Server) -> None:
        self._network = network
        self._server = server
        self.is_cut = False
        self.is_dead = False
        # Loop time of the last fault on this link: calls may be slow for a while after it.
        self.disturbed_s = 0.0
        self._sent = 0
        self._newest = 0

    async def call(self, apply: Callable[[], T], timeout_s: float) -> T:
        """Run `apply` on the server, and wait for its reply."""
        network = self._network
        loop = network.loop
        if self.is_dead:
            raise DependencyUnavailable("the process has ended")
        reply: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(timeout_s, self._time_out, reply)
        conditions = network.conditions
        if self.is_cut:
            network.fired["message into a partition"] += 1
        elif network.happens(conditions.loss_percent, "request lost"):
            # Marked now, not when the call times out: the node may crash while it waits.
            self.disturbed_s = loop.time()
        else:
            self._sent += 1
            self._send(apply, reply, self._sent)
            if network.happens(conditions.duplicate_percent, "request duplicated"):
                self._send(apply, None, self._sent)
        try:
            return await reply
        finally:
            timer.cancel()

    def push(self, deliver: Callable[[], None], context: Context) -> None:
        """Send a message from the server to the node. It can be lost like a reply."""
        network = self._network
        if self.is_cut or self.is_dead:
            network.fired["message into a partition"] += 1
        elif not network.happens(network.conditions.reply_loss_percent, "push lost"):
            network.call_later(network.delay_s(), self._deliver, deliver, context)

    def _deliver(self, deliver: Callable[[], None], context: Context) -> None:
        if not self.is_dead:
            self._network.loop.call_soon(deliver, context=context)

    def _time_out(self, reply: asyncio.Future[Any]) -> None:
        if not reply.done():
            self._network.fired["call timed out"] += 1
            self.disturbed_s = self._network.loop.time()
            reply.set_exception(DependencyTimeout("the call timed out"))

    def _send(self, apply: Callable[[], T], reply: asyncio.Future[T] | None, number: int) -> None:
        self._network.call_later(
            self._network.delay_s(), self._server.take, lambda: self._arrive(apply, reply, number)
        )

    def _arrive(self, apply: Callable[[], T], reply: asyncio.Future[T] | None, number: int) -> None:
        network = self._network
        if number < self._newest:
            network.fired["message overtaken"] += 1
        self._newest = max(self._newest, number)
        answer: T | None = None
        failure: DependencyError | None = None
        if self._server.is_down:
            failure = DependencyUnavailable("connection refused")
        else:
            try:
                answer = apply()
            except DependencyError as error:
                failure = error
        if reply is None or self.is_cut:
            return
        if reply.done():
            if failure is None:
                network.fired["applied although timed out"] += 1
            return
        if failure is None and network.happens(network.conditions.reply_loss_percent, "reply lost"):
            self.disturbed_s = network.loop.time()
            return
        network.call_later(network.delay_s(), self._answer, reply, answer, failure)

    def _answer(self, reply: asyncio.Future[Any], answer: object, failure: DependencyError | None) -> None:
        if reply.done():
            if failure is None:
                self._network.fired["applied although timed out"] += 1
        elif failure is None:
            reply.set_result(answer)
        else:
            self.disturbed_s = self._network.loop.time()
            reply.set_exception(failure)
