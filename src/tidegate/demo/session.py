"""One demo from start to end: the fleet, its traffic, the keys, the picture; and the report of what happened.

A key acts the same whether a person pressed it or a script gave it. On `q` or after a given time the session heals
everything, waits until all nodes agree, and stops what it started; on a signal it stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

from tidegate.adapters import clock
from tidegate.core.quota import format_count
from tidegate.demo.fleet import HOST, REGIONS, Fleet
from tidegate.demo.stores import EmbeddedDatabase, EmbeddedOrigins, MySQLDatabase, RedisOrigins
from tidegate.demo.traffic import CALLERS, HOT, Client, Count, Tally, Target, Traffic
from tidegate.demo.view import NodePicture, Picture
from tidegate.errors import InvalidInput
from tidegate.testing.servers.directories import DataDirectory, remove_abandoned

__all__ = ["Key", "Options", "Report", "Session", "parse_script"]

PICTURE_INTERVAL_S: Final = 0.5
# Pictures for which all nodes see a used-up limit, before the next round begins.
PICTURES_AFTER_ROUND: Final = 6
# Regions exchange counts every five seconds; a database that was cut off is tried again within five more.
AGREE_TIMEOUT_S: Final = 30.0
AGREE_POLL_S: Final = 0.2
LOG_LINES_KEPT: Final = 200
KEYS: Final = "kphq"


class Key(NamedTuple):
    """One key of a script: what is pressed, and how many seconds after the start."""

    at_s: float
    key: str


def parse_script(text: str) -> list[Key]:
    """`k@5,h@10`: the origin of a region is killed after 5 s, everything is healed after 10 s."""
    keys = []
    for word in text.replace(" ", "").split(","):
        key, at, seconds = word.partition("@")
        if at != "@" or key not in tuple(KEYS) or not seconds.replace(".", "", 1).isdecimal():
            expected = f"keys with seconds such as k@5,h@10; keys are {', '.join(KEYS)}"
            raise InvalidInput("script", word, expected)
        keys.append(Key(float(seconds), key))
    return sorted(keys)


@dataclass(frozen=True)
class Options:
    """What `tidegate demo` was asked for."""

    regions: int = 3
    nodes: int = 2
    redis: bool = False
    mysql: bool = False
    script: Sequence[Key] = ()
    seconds: float | None = None
    speed: float = 1.0
    """Multiplies the rates of all callers."""


@dataclass
class Phase:
    """The time between two events, and the answers that clients got in it."""

    name: str
    began_s: float
    before: Count
    seconds: float = 0.0
    allowed: int = 0
    denied: int = 0
    failed: int = 0


@dataclass
class Report:
    """What happened.

    `agreed_after_s`: how long after the last request every node knew what was accepted of `hot`; None: not within the
    time, or there was no round to judge. Regions that hold less than half of a limit together need not publish yet, so
    that only a round beyond that is judged.
    """

    fleet: str
    nodes: list[str]
    events: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    rounds: list[str] = field(default_factory=list)
    hot: str | None = None
    hot_accepted: int = 0
    hot_seen: dict[str, int] = field(default_factory=dict)
    agreed_after_s: float | None = None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        document = asdict(self)
        for phase in document["phases"]:
            del phase["before"]
        return document


class _LastLines(logging.Handler):
    """Keeps what the nodes log, which would otherwise break the picture on the screen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines = [*self.lines[-LOG_LINES_KEPT:], f"{record.levelname}: {record.getMessage()}"]


class Session:
    """Use `open`, then `run`. `press` may be called at any time in between, from the event loop."""

    def __init__(
        self,
        options: Options,
        fleet: Fleet,
        signalled: asyncio.Event,
        say: Callable[[str], None],
    ) -> None:
        self.console: str = f"{fleet.nodes[0].url}/console"
        self._options = options
        self._say = say
        self.fleet: Fleet = fleet
        self._tally = Tally()
        ports = ", ".join(f"{node.name} {node.port}" for node in fleet.nodes)
        self._addresses = (
            f"console: {self.console}",
            f"nodes: {fleet.nodes[0].url}, ports {ports}",
            f"key: {fleet.key}",
        )
        self._signalled = signalled
        self._ending = asyncio.Event()
        self._round = 1
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._began_s = 0.0
        embedded = [store.description for store in (fleet.origins, fleet.database)]
        size = f"{format_count(len(fleet.regions), 'region')}, {format_count(len(fleet.nodes), 'node')}"
        title = f"Tidegate demo: {size} in this process, "
        self.report: Report = Report(title + ", ".join(embedded), [node.name for node in fleet.nodes])

    @staticmethod
    @asynccontextmanager
    async def open(options: Options, say: Callable[[str], None]) -> AsyncIterator[Session]:
        """Start everything; at the end of the block everything is stopped and removed. `say` reports progress."""
        async with AsyncExitStack() as stack:
            # From the beginning: a start is finished before it is undone, so that nothing is left behind.
            signalled = asyncio.Event()
            _on_signals(signalled.set)
            log = _LastLines()
            root = logging.getLogger()
            root.addHandler(log)
            stack.callback(root.removeHandler, log)
            remove_abandoned()
            directory = DataDirectory("demo")
            stack.callback(directory.remove)
            directory.path.chmod(0o700)
            regions = REGIONS[: options.regions]
            origins = RedisOrigins() if options.redis else EmbeddedOrigins()
            database = MySQLDatabase() if options.mysql else EmbeddedDatabase(directory.path)
            stack.push_async_callback(origins.close)
            stack.push_async_callback(database.close)
            if options.redis or options.mysql:
                say("Starting the servers …")
            await origins.start(regions)
            await database.start(regions)
            fleet = Fleet(regions, options.nodes, origins, database, directory.path)
            stack.push_async_callback(fleet.stop)
            say(f"Starting {format_count(options.regions * options.nodes, 'node')} …")
            await fleet.start()
            yield Session(options, fleet, signalled, say)

    def press(self, key: str) -> None:
        """What the keyboard and the script do. Other keys are ignored."""
        if key == "q":
            self.end()
        elif key in KEYS:
            self._keys.put_nowait(key)

    def end(self) -> None:
        """End the run soon."""
        self._ending.set()

    async def run(self, show: Callable[[Picture], None]) -> Report:
        """Drive traffic until the end, then heal and wait until all nodes agree."""
        loop = asyncio.get_running_loop()
        targets = [Target(node.name, node.region, HOST, node.port) for node in self.fleet.nodes]
        traffic = Traffic(targets, self.fleet.key, self._tally, Random(), self._options.speed)
        await self._warm_up()
        self._began_s = loop.time()
        self._begin_phase("all well")
        traffic.start()
        helpers = [loop.create_task(self._act()), loop.create_task(self._picture(show, traffic))]
        timers = [loop.call_later(key.at_s, self.press, key.key) for key in self._options.script]
        if self._options.seconds is not None:
            timers.append(loop.call_later(self._options.seconds, self.end))
        endings = [loop.create_task(event.wait()) for event in (self._ending, self._signalled)]
        try:
            # A helper ends only if it failed.
            await asyncio.wait([*endings, *helpers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for ending in endings:
                ending.cancel()
            for timer in timers:
                timer.cancel()
            for helper in helpers:
                if not helper.done():
                    helper.cancel()
            results = await asyncio.gather(*helpers, return_exceptions=True)
            await traffic.stop()
        self._end_phase()
        for result in results:
            if isinstance(result, Exception):
                raise result
        if not self._signalled.is_set():
            await self._agree()
        return self.report

    async def _warm_up(self) -> None:
        """Create the namespaces: a node learns of one from another only after a moment."""
        client = Client(HOST, self.fleet.nodes[0].port, self.fleet.key)
        for caller in CALLERS:
            await client.limit(caller, "warm-up", cost=0)
        await client.close()
        self._hot_limit = await self.fleet.limit_of(HOT.namespace, HOT.quota, HOT.duration_ms)

    # Keys.

    async def _act(self) -> None:
        while True:
            key = await self._keys.get()
            if key == "k":
                await self._kill()
            elif key == "p":
                await self._partition()
            else:
                await self.fleet.heal()
                self._note("everything healed")

    async def _kill(self) -> None:
        alive = [region for region in self.fleet.regions if region not in self.fleet.origins.killed]
        if alive:
            await self.fleet.origins.kill(alive[0])
            self._note(f"origin of {alive[0]} killed, its counts are gone")

    async def _partition(self) -> None:
        # From the other end, so that `k` and `p` show two regions with one fault each.
        connected = [region for region in self.fleet.regions if region not in self.fleet.database.cut]
        if connected:
            await self.fleet.database.partition(connected[-1])
            self._note(f"region {connected[-1]} cut off from the database")

    def _note(self, what: str) -> None:
        self.report.events.append(f"{self._elapsed_s():5.1f} s  {what}")
        self._end_phase()
        self._begin_phase(what)

    def _begin_phase(self, name: str) -> None:
        self.report.phases.append(Phase(name, round(self._elapsed_s(), 3), self._tally.total()))

    def _end_phase(self) -> None:
        phase, now = self.report.phases[-1], self._tally.total()
        phase.seconds = round(self._elapsed_s() - phase.began_s, 3)
        phase.allowed = now.allowed - phase.before.allowed
        phase.denied = now.denied - phase.before.denied
        phase.failed = now.failed - phase.before.failed

    def _elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    # Pictures.

    async def _picture(self, show: Callable[[Picture], None], traffic: Traffic) -> None:
        used_up = 0
        before: dict[str, tuple[int, int]] = {}
        before_s = self._elapsed_s()
        while True:
            await asyncio.sleep(PICTURE_INTERVAL_S)
            now_ms = clock.now_ms()
            views = await self.fleet.views(self._hot_limit, traffic.hot, now_ms)
            at_s = self._elapsed_s()
            counts = {name: (count.allowed, count.denied) for name, count in self._tally.by_node.items()}
            show(self._drawn(at_s, now_ms, views, counts, before, at_s - before_s))
            before, before_s = counts, at_s
            used_up = used_up + 1 if min(views.values()) >= HOT.quota else 0
            if used_up == PICTURES_AFTER_ROUND:
                self._next_round(traffic, now_ms, views)

    def _next_round(self, traffic: Traffic, now_ms: int, views: dict[str, int]) -> None:
        accepted = self._tally.hot_accepted(traffic.hot, now_ms)
        seen = f"{min(views.values()):,} to {max(views.values()):,}"
        agree = f"all nodes saw {accepted:,}" if set(views.values()) == {accepted} else f"nodes saw {seen}"
        self.report.rounds.append(f"{traffic.hot}, limit {HOT.quota:,}: {accepted:,} accepted; {agree}")
        self._round += 1
        traffic.hot = f"hot-{self._round}"

    def _drawn(
        self,
        at_s: float,
        now_ms: int,
        views: dict[str, int],
        counts: dict[str, tuple[int, int]],
        before: dict[str, tuple[int, int]],
        seconds: float,
    ) -> Picture:
        nodes = []
        for node in self.fleet.nodes:
            allowed, denied = counts.get(node.name, (0, 0))
            old_allowed, old_denied = before.get(node.name, (0, 0))
            is_killed = node.region in self.fleet.origins.killed
            is_cut = node.region in self.fleet.database.cut
            nodes.append(
                NodePicture(
                    node.name,
                    node.region,
                    "killed" if is_killed else "ok" if node.is_well("origin") else "recovering",
                    "cut off" if is_cut else "ok" if node.is_well("ledger") else "recovering",
                    (allowed - old_allowed) / seconds,
                    (denied - old_denied) / seconds,
                    views[node.name],
                )
            )
        return Picture(
            title=self.report.fleet,
            at_s=at_s,
            nodes=tuple(nodes),
            hot=f"hot-{self._round}",
            hot_accepted=self._tally.hot_accepted(f"hot-{self._round}", now_ms),
            rounds=tuple(self.report.rounds),
            totals=tuple((kind, count.allowed, count.denied) for kind, count in self._tally.by_kind.items()),
            failed=self._tally.total().failed,
            p99_ms=self._tally.p99_ms(),
            events=tuple(self.report.events),
            addresses=self._addresses,
        )

    # The end.

    async def _agree(self) -> None:
        """Heal, and wait until every node knows what the clients know."""
        loop = asyncio.get_running_loop()
        await self.fleet.heal()
        hot = self._judged()
        if hot is None:
            return
        self.report.hot = hot
        self._say("Traffic has ended; waiting until all nodes agree. Ctrl-C ends at once.")
        began_s = loop.time()
        while not self._signalled.is_set() and loop.time() - began_s <= AGREE_TIMEOUT_S:
            now_ms = clock.now_ms()
            self.report.hot_seen = await self.fleet.views(self._hot_limit, hot, now_ms)
            self.report.hot_accepted = self._tally.hot_accepted(hot, now_ms)
            if set(self.report.hot_seen.values()) == {self.report.hot_accepted}:
                self.report.agreed_after_s = round(loop.time() - began_s, 3)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(AGREE_POLL_S):
                    await self._signalled.wait()

    def _judged(self) -> str | None:
        """The newest round of which so much was accepted that at least one region has published."""
        now_ms = clock.now_ms()
        for number in range(self._round, 0, -1):
            if self._tally.hot_accepted(f"hot-{number}", now_ms) > HOT.quota // 2 + len(self.fleet.regions):
                return f"hot-{number}"
        return None


def _on_signals(call: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, call)
