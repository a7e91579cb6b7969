"""The clients of a demo: HTTP requests to every node, at a steady rate, and what was answered.

Three kinds of caller: a hot identifier that uses up its limit, most of it in one region; an attacker who tries to log
in; and users below their limit. When the limit of the hot identifier is used up, the next round has another. The
tally counts answers as clients see them, so that it can be compared with what the nodes count.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from tidegate.core.windows import effective

__all__ = ["CALLERS", "HOT", "Caller", "Client", "Count", "Tally", "Target", "Traffic"]

ANSWER_TIMEOUT_S: Final = 5.0
CONNECTIONS_PER_NODE: Final = 4
LATENCIES_KEPT: Final = 2_000
HEADER_BYTES_MAX: Final = 65_536


@dataclass(frozen=True)
class Caller:
    """One kind of caller: whom it calls for, under which limit, and how often all of its kind call together."""

    kind: str
    namespace: str
    identifiers: tuple[str, ...]
    quota: int
    duration_ms: int
    per_s: float


HOT: Final = Caller("hot", "api", (), 600, 86_400_000, 30)
"""Its identifiers are `hot-1`, `hot-2`, …. The window is a day, so that no round meets its end by accident."""
CALLERS: Final = (
    HOT,
    Caller("attacker", "login", ("203.0.113.7",), 10, 60_000, 60),
    Caller("users", "api", tuple(f"user_{number}" for number in range(1, 201)), 120, 60_000, 80),
)
# The part of the hot identifier's requests that goes to the first region: regions differ in practice too.
HOT_AT_HOME: Final = 0.7


class Target(NamedTuple):
    """Where a client sends its requests."""

    name: str
    region: str
    host: str
    port: int


@dataclass
class Count:
    """Answers by their outcome."""

    allowed: int = 0
    denied: int = 0
    failed: int = 0

    @property
    def decisions(self) -> int:
        return self.allowed + self.denied


@dataclass
class Tally:
    """All answers so far. Written by the clients, in one event loop."""

    by_kind: dict[str, Count] = field(default_factory=lambda: {caller.kind: Count() for caller in CALLERS})
    by_node: dict[str, Count] = field(default_factory=dict)
    hot_cells: dict[tuple[str, int], int] = field(default_factory=dict)
    """Accepted for hot identifiers, by identifier and sequence of the cell."""
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    def add(self, node: str, caller: Caller, identifier: str, answer: Any, took_ms: float) -> None:
        """Count one answer; None is a request that failed."""
        for count in (self.by_kind[caller.kind], self.by_node.setdefault(node, Count())):
            if answer is None:
                count.failed += 1
            elif answer["success"]:
                count.allowed += 1
            else:
                count.denied += 1
        if answer is None:
            return
        self.latencies_ms.append(took_ms)
        if caller is HOT and answer["success"]:
            # `reset` is the end of the cell that the node counted in: its clock decides, not ours.
            sequence = answer["reset"] // caller.duration_ms - 1
            cell = (identifier, sequence)
            self.hot_cells[cell] = self.hot_cells.get(cell, 0) + 1

    def total(self) -> Count:
        """Over all nodes."""
        counts = self.by_node.values()
        return Count(
            sum(count.allowed for count in counts),
            sum(count.denied for count in counts),
            sum(count.failed for count in counts),
        )

    def hot_accepted(self, identifier: str, now_ms: int) -> int:
        """What the clients know to be accepted for a hot identifier in the sliding window that ends at `now_ms`."""
        sequence, elapsed_ms = divmod(now_ms, HOT.duration_ms)
        current = self.hot_cells.get((identifier, sequence), 0)
        previous = self.hot_cells.get((identifier, sequence - 1), 0)
        return effective(current, previous, elapsed_ms, HOT.duration_ms)

    def p99_ms(self) -> float:
        """Of the last answers."""
        latencies = sorted(self.latencies_ms)
        return latencies[int(len(latencies) * 0.99)] if latencies else 0.0


class Client:
    """One connection to one node; it connects again by itself."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host = host
        self._port = port
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def limit(self, caller: Caller, identifier: str, cost: int = 1) -> Any:
        """The `data` of the answer, or None if there was no decision."""
        body = msgspec.json.encode(
            {
                "namespace": caller.namespace,
                "identifier": identifier,
                "limit": caller.quota,
                "duration": caller.duration_ms,
                "cost": cost,
            }
        )
        head = (
            f"POST /v2/ratelimit.limit HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        status, answer = await self._exchange(head.encode("ascii") + body)
        return msgspec.json.decode(answer)["data"] if status == 200 else None

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if self._streams is None:
                    self._streams = await asyncio.open_connection(
                        self._host, self._port, limit=HEADER_BYTES_MAX
                    )
                reader, writer = self._streams
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                return int(lines[0].split()[1]), await reader.readexactly(int(fields["content-length"]))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            await self.close()
            return 0, b""

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()


class Traffic:
    """Clients of every node, until `stop`."""

    def __init__(
        self, targets: Sequence[Target], key: str, tally: Tally, random: Random, speed: float = 1.0
    ) -> None:
        """`speed` multiplies all rates."""
        self.hot = "hot-1"
        """The identifier of this round. Written by the session."""
        self._targets = targets
        self._key = key
        self._tally = tally
        self._random = random
        self._speed = speed
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self) -> None:
        """Start all clients."""
        loop = asyncio.get_running_loop()
        for target in self._targets:
            for _ in range(CONNECTIONS_PER_NODE):
                client = Client(target.host, target.port, self._key)
                self._tasks.append(loop.create_task(self._run(target, client)))

    def _rates(self, target: Target) -> list[float]:
        """Requests per second of one client, by kind of caller."""
        home = self._targets[0].region
        here = sum(each.region == target.region for each in self._targets) * CONNECTIONS_PER_NODE
        elsewhere = sum(each.region != home for each in self._targets) * CONNECTIONS_PER_NODE
        rates = []
        for caller in CALLERS:
            share = 1 / (len(self._targets) * CONNECTIONS_PER_NODE)
            if caller is HOT and elsewhere:
                share = HOT_AT_HOME / here if target.region == home else (1 - HOT_AT_HOME) / elsewhere
            rates.append(self._speed * caller.per_s * share)
        return rates

    async def _run(self, target: Target, client: Client) -> None:
        """One client: a share of every kind of caller, in random order, at a steady rate."""
        loop = asyncio.get_running_loop()
        rates = self._rates(target)
        pause_s = 1 / sum(rates)
        next_s = loop.time() + self._random.random() * pause_s
        try:
            while not self._is_stopping:
                await asyncio.sleep(next_s - loop.time())
                # A client that was delayed does not catch up.
                next_s = max(next_s, loop.time() - pause_s) + pause_s
                caller = self._random.choices(CALLERS, rates)[0]
                identifier = self.hot if caller is HOT else self._random.choice(caller.identifiers)
                # The clock of the loop has a resolution of a millisecond.
                began_s = time.perf_counter()
                answer = await client.limit(caller, identifier)
                took_ms = (time.perf_counter() - began_s) * 1000
                self._tally.add(target.name, caller, identifier, answer, took_ms)
        finally:
            await client.close()

    async def stop(self) -> None:
        """Stop all clients after the request that each has under way: what a node counted is counted here too."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)
        self._tasks = []
