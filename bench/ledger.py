"""Regions over a real MariaDB, MySQL and PostgreSQL, without Redis: the cost of publishing and importing, how long
counts take to reach another region, and how much ten regions allow. `python -m bench importer` measures regions with
Redis.

    python -m bench ledger [--on mariadb|mysql|postgres] [--only publish|incremental|idle|lag|ten]

Every part starts what it needs, runs alone and takes less than three minutes; the regions are real processes. Figures
come from one run, on one machine that does everything at once: the server, the regions and other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import tidegate
from tidegate import AsyncLimiter, Limit
from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.core.model import LedgerRow
from tidegate.runtime.node import Node
from tidegate.runtime.publish import release
from tidegate.testing.limiters import make_async_limiter
from tidegate.testing.servers import MariaDBServer, MissingBinary, MySQLServer, PostgresServer

__all__ = ["main"]

Server = MariaDBServer | MySQLServer | PostgresServer

HOUR_MS: Final = 3_600_000
MINUTE_MS: Final = 60_000


@dataclass(frozen=True)
class Line:
    """One row of the table: what was measured, the result, and the target, if any."""

    what: str
    measured: str
    target: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print one table."""
    parser = argparse.ArgumentParser(prog="python -m bench ledger", description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="Run these parts only.")
    parser.add_argument("--on", choices=sorted(SERVERS), action="append", help="Use these servers only.")
    options = parser.parse_args(arguments)
    for kind in options.on or SERVERS:
        try:
            _measure(SERVERS[kind], options.only or list(PARTS))
        except MissingBinary as error:
            print(f"Not measured: {error}")
    return 0


def _measure(kind: type[Server], chosen: Sequence[str]) -> None:
    state = "compiled" if tidegate.compiled else "interpreted"
    with kind() as server:
        print(
            f"Ledger on {server.kind} {server.version}: Python {platform.python_version()}, core {state}, "
            f"{os.cpu_count()} cores, one run.\n\n| | measured | target |\n|---|---:|---:|"
        )
        for name in PARTS:
            if name in chosen:
                server.restart(empty=True)
                url = server.create_database()
                asyncio.run(migrate(url))
                for line in PARTS[name](url, server):
                    print(f"| {line.what} | {line.measured} | {line.target} |", flush=True)
    print()


# ---- processes


class Shifted:
    """Real time, shifted so that a window begins when all are ready."""

    def __init__(self, shift_ms: int) -> None:
        self._shift_ms = shift_ms

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._shift_ms


class Regions:
    """Processes, each with one end of a pipe: a region runs one coroutine function."""

    def __init__(self, life: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for values in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(life, theirs, *values), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def send(self, message: object) -> None:
        for pipe in self.pipes:
            pipe.send(message)

    def receive(self, timeout_s: float = 120.0) -> list[Any]:
        """One message of every region, in their order."""
        received = []
        for pipe in self.pipes:
            if not pipe.poll(timeout_s):
                raise TimeoutError("a region did not answer")
            received.append(pipe.recv())
        return received

    def end(self) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _live(life: Callable[..., Any], pipe: Connection, *arguments: Any) -> None:
    asyncio.run(life(pipe, *arguments))


async def _receive(pipe: Connection) -> Any:
    """A message of the parent, without holding the loop."""
    while not pipe.poll():  # noqa: ASYNC110 - a pipe sets no event of this loop
        await asyncio.sleep(0.01)
    return pipe.recv()


async def _until_regions(limiter: AsyncLimiter, count: int) -> None:
    while limiter.statistics().regions < count:  # noqa: ASYNC110 - the limiter has no event for it
        await asyncio.sleep(0.05)


def _node(limiter: AsyncLimiter) -> Node:
    node = limiter._parts.node  # noqa: SLF001 - single turns of the loops are measured
    assert node is not None
    return node


# ---- ten regions against one limit


async def _ten_life(pipe: Connection, url: str, region: str, regions: int, rate: int) -> None:
    shift_ms = 0
    clock = Shifted(0)
    async with make_async_limiter(region=region, ledger=url, clock=clock) as limiter:
        await _until_regions(limiter, regions)
        pipe.send("ready")
        start_s, shift_ms = await _receive(pipe)
        clock._shift_ms = shift_ms  # noqa: SLF001 - our own clock
        limit = Limit(1000, duration_ms=MINUTE_MS, namespace="bench")
        admitted = 0
        chance = random.Random(region)
        next_s = start_s + chance.random() / rate
        end_s = start_s + 59.5
        while next_s < end_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            if await limiter.limit(limit, "one"):
                admitted += 1
            next_s += chance.expovariate(rate)
        statistics = limiter.statistics()
        pipe.send((admitted, statistics.publish_rows, statistics.import_rows))


def _ten(url: str, server: Server) -> list[Line]:
    count, rate = 10, 100
    regions = Regions(_ten_life, [(url, f"region-{n}", count, rate) for n in range(count)])
    regions.receive()
    start_s = time.monotonic() + 1.0
    starts_at_ms = time.time_ns() // 1_000_000 + 1000
    regions.send((start_s, -(starts_at_ms % MINUTE_MS)))
    results = regions.receive()
    regions.end()
    admitted = sum(one[0] for one in results)
    ((stored,),) = server.sql("SELECT COUNT(*) FROM ratelimit_window_counts", url.rpartition("/")[2])
    return [
        Line(
            f"{count} regions × {rate}/s against 1000/minute: admitted in the first window, of the limit",
            f"{admitted / 1000:.3f} ×",
            "≤ 1.15 ×",
        ),
        Line(
            "  rows written in that window, all regions", f"{sum(one[1] for one in results)} (into {stored})"
        ),
        Line("  rows imported in that window, all regions", f"{sum(one[2] for one in results)}"),
    ]


# ---- lag


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _spread(lags_s: Sequence[float]) -> str:
    return f"{_percentile(lags_s, 50):.2f} / {_percentile(lags_s, 99):.2f} s"


IDLE_CELLS: Final = 300
IDLE_SPAN_S: Final = 45.0
FULL: Final = Limit(100, duration_ms=HOUR_MS, namespace="bench")


async def _sender_life(pipe: Connection, url: str, shift_ms: int) -> None:
    """Uses up one identifier after the other, at random moments."""
    async with make_async_limiter(region="sender", ledger=url, clock=Shifted(shift_ms)) as limiter:
        await _until_regions(limiter, 2)
        pipe.send("ready")
        await _receive(pipe)
        chance = random.Random(7)
        began_s = time.monotonic()
        used_up: dict[str, float] = {}
        for number, offset_s in enumerate(sorted(chance.uniform(0, IDLE_SPAN_S) for _ in range(IDLE_CELLS))):
            await asyncio.sleep(max(0.0, began_s + offset_s - time.monotonic()))
            identifier = f"user-{number}"
            while await limiter.limit(FULL, identifier):
                used_up[identifier] = time.monotonic()
        pipe.send(used_up)
        await _receive(pipe)


async def _idle_life(pipe: Connection, url: str, shift_ms: int) -> None:
    """Takes no requests, and peeks at what it would answer."""
    async with make_async_limiter(region="idle", ledger=url, clock=Shifted(shift_ms)) as limiter:
        await _until_regions(limiter, 2)
        pipe.send("ready")
        await _receive(pipe)
        denied_at: dict[str, float] = {}
        waiting = {f"user-{number}" for number in range(IDLE_CELLS)}
        give_up_s = time.monotonic() + IDLE_SPAN_S + 20
        while waiting and time.monotonic() < give_up_s:
            for identifier in list(waiting):
                if (await limiter.peek(FULL, identifier)).remaining == 0:
                    denied_at[identifier] = time.monotonic()
                    waiting.discard(identifier)
            await asyncio.sleep(0.01)
        pipe.send(denied_at)
        await _receive(pipe)


async def _both_life(
    pipe: Connection,
    url: str,
    shift_ms: int,
    region: str,
    other: str,
    quota: int,
    rate: float,
    seconds: float,
) -> None:
    """Takes requests for a cell that the other region uses too; records when each count was reached here, and when the
    count of the other region was seen."""
    limit = Limit(quota, duration_ms=HOUR_MS, namespace="bench")
    async with make_async_limiter(region=region, ledger=url, clock=Shifted(shift_ms)) as limiter:
        await _until_regions(limiter, 2)
        pipe.send("ready")
        await _receive(pipe)
        reached: list[float] = []
        seen: list[tuple[float, int]] = []
        stop_s = time.monotonic() + seconds

        async def watch() -> None:
            known = 0
            subjects = limiter._parts.engine.subjects  # noqa: SLF001 - one component is not public
            while True:
                subject = subjects.find((limit.workspace, limit.namespace, limit.duration_ms), "one")
                ledger = None if subject is None else subject.current.ledger
                count = 0 if ledger is None or ledger.components is None else ledger.components.get(other, 0)
                if count > known:
                    known = count
                    seen.append((time.monotonic(), count))
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        chance = random.Random(region)
        next_s = time.monotonic()
        while next_s < stop_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            if await limiter.limit(limit, "one"):
                reached.append(time.monotonic())
            next_s += chance.expovariate(rate)
        await asyncio.sleep(7)  # what is in flight still arrives
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        pipe.send((reached, seen, limiter.statistics().publish_rows))
        await _receive(pipe)


def _lags(reached: Sequence[float], seen: Sequence[tuple[float, int]]) -> list[float]:
    """For every count above the threshold, how long after the other region this region knew it."""
    lags_s: list[float] = []
    place = 0
    first = seen[0][1] if seen else 0
    for count, at_s in enumerate(reached, 1):
        if count < first:
            continue
        while place < len(seen) and seen[place][1] < count:
            place += 1
        if place < len(seen):
            lags_s.append(seen[place][0] - at_s)
    return lags_s


def _mid_hour_shift_ms() -> int:
    now_ms = time.time_ns() // 1_000_000
    return HOUR_MS // 4 - now_ms % HOUR_MS


def _lag(url: str, server: Server) -> list[Line]:
    shift_ms = _mid_hour_shift_ms()
    sender = Regions(_sender_life, [(url, shift_ms)])
    idle = Regions(_idle_life, [(url, shift_ms)])
    for side in (sender, idle):
        side.receive()
    for side in (sender, idle):
        side.send("go")
    (used_up,) = sender.receive()
    (denied_at,) = idle.receive()
    for side in (sender, idle):
        side.send("end")
        side.end()
    lags_s = [denied_at[name] - at_s for name, at_s in used_up.items() if name in denied_at]
    missing = len(used_up) - len(lags_s)
    lines = [
        Line(
            f"used up in one region → denied in an idle one, p50 / p99 of {len(lags_s)} identifiers"
            + (f", {missing} NEVER" if missing else ""),
            _spread(lags_s),
            "p99 ≤ 6.5 s",
        )
    ]
    for quota, rate, seconds in ((1000, 50.0, 12.0), (1000, 10.0, 50.0)):
        database = server.create_database()
        asyncio.run(migrate(database))
        both = Regions(
            _both_life,
            [
                (database, shift_ms, "one", "two", quota, rate, seconds),
                (database, shift_ms, "two", "one", quota, rate, seconds),
            ],
        )
        both.receive()
        both.send("go")
        (reached_1, seen_1, rows_1), (reached_2, seen_2, rows_2) = both.receive()
        both.send("end")
        both.end()
        lags_s = _lags(reached_1, seen_2) + _lags(reached_2, seen_1)
        total = len(reached_1) + len(reached_2)
        lines += [
            Line(
                f"a cell hot in both, 2 × {rate:.0f}/s of {quota}: a count there → known here, p50 / p99 of "
                f"{len(lags_s)} counts",
                _spread(lags_s) if lags_s else "never published",
                "p99 ≤ 1 s",
            ),
            Line("  admitted, and rows written", f"{total} of {quota}, {rows_1 + rows_2} rows"),
        ]
    return lines


# ---- what publishing and importing cost


class Watch:
    """Wall time, our own CPU time, and the longest time that one turn held the event loop.

    The garbage collector is counted separately: it visits every object of the process at once, and their number depends
    on whether the core is compiled (it does not track compiled subjects and cells).
    """

    async def __aenter__(self) -> Self:
        self.worst_ms = 0.0
        self.collector_ms = 0.0
        self._collected_s = self._collecting_s = 0.0
        gc.callbacks.append(self._on_collector)
        self._watching = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        self._began_s, self._cpu_s = time.perf_counter(), time.process_time()
        return self

    async def _watch(self) -> None:
        """CPU and not wall time: the time that other programs take must not count."""
        while True:
            before_s, self._collected_s = time.thread_time(), 0.0
            await asyncio.sleep(0)
            held_s = time.thread_time() - before_s - self._collected_s
            self.worst_ms = max(self.worst_ms, held_s * 1000)

    def _on_collector(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._collecting_s = time.thread_time()
            return
        took_s = time.thread_time() - self._collecting_s
        self._collected_s += took_s
        self.collector_ms = max(self.collector_ms, took_s * 1000)

    def held(self) -> str:
        return f"{self.worst_ms:.1f} ms (collector {self.collector_ms:.0f} ms)"

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # the last turn is seen too
        self.wall_s, self.cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._cpu_s
        gc.callbacks.remove(self._on_collector)
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching


async def _by_hand(region: str, url: str, clock: Shifted) -> AsyncLimiter:
    """A limiter whose ledger is open and whose loops do not run: the benchmark runs every turn."""
    limiter = make_async_limiter(region=region, ledger=url, clock=clock)
    await _node(limiter)._open_ledger()  # noqa: SLF001 - `start` would begin to publish and to import
    return limiter


async def _cost_of(url: str, cells: int) -> list[Line]:
    clock = Shifted(_mid_hour_shift_ms())
    limit = Limit(1000, duration_ms=HOUR_MS, namespace=f"cells-{cells}")
    sender = await _by_hand("fra", url, clock)
    receiver = await _by_hand("iad", url, clock)
    publish, importer = _node(sender).publish, _node(receiver).importer
    assert publish is not None and importer is not None
    for number in range(cells):
        sender._gate.ask(limit, f"user-{number}", 600, None)  # noqa: SLF001 - as a limiter that runs would
    async with Watch() as watch:
        await release((await publish.run_once()).rows)
    lines = [
        Line(
            f"publish {cells:,} hot cells: time, rows, our CPU, longest hold of the event loop (CPU)",
            f"{watch.wall_s:.2f} s, {publish.rows_published:,}, {watch.cpu_s:.2f} s, {watch.held()}",
        )
    ]
    async with Watch() as watch:
        turn = await importer.run_once(full=True)
    lines.append(
        Line(
            f"import {cells:,} hot cells: time, rows, our CPU, longest hold of the event loop (CPU)",
            f"{watch.wall_s:.2f} s, {turn.rows:,}, {watch.cpu_s:.2f} s, {watch.held()}",
        )
    )
    for limiter in (sender, receiver):
        await limiter.stop()
    return lines


def _publish(_url: str, server: Server) -> list[Line]:
    lines = []
    for cells in (5_000, 50_000):
        database = server.create_database()
        asyncio.run(migrate(database))
        lines += asyncio.run(_cost_of(database, cells))
    return lines


# ---- an incremental import against a full one


CELLS: Final = 50_000
REGIONS: Final = 10


def _rows(region: str, count: int, regional: int, now_ms: int) -> list[LedgerRow]:
    sequence = now_ms // HOUR_MS
    return [
        LedgerRow(
            "default",
            "bench",
            f"user-{number}",
            HOUR_MS,
            sequence,
            region,
            regional,
            (sequence + 2) * HOUR_MS,
        )
        for number in range(count)
    ]


async def _publish_rows(url: str, region: str, count: int, regional: int, now_ms: int) -> None:
    ledger = open_ledger(url)
    rows = _rows(region, count, regional, now_ms)
    for start in range(0, len(rows), 5_000):
        await ledger.publish(rows[start : start + 5_000], timeout_s=60)
    await ledger.close()


async def _incremental_of(url: str) -> list[Line]:
    clock = Shifted(_mid_hour_shift_ms())
    for number in range(REGIONS):
        await _publish_rows(url, f"region-{number}", CELLS, 100, clock.now_ms())
    receiver = await _by_hand("receiver", url, clock)
    importer = _node(receiver).importer
    assert importer is not None
    async with Watch() as first_watch:
        first = await importer.run_once(full=True)
    async with Watch() as full_watch:
        full = await importer.run_once(full=True)
    for number in range(REGIONS):
        await _publish_rows(url, f"region-{number}", CELLS // 100, 101, clock.now_ms())
    async with Watch() as little_watch:
        little = await importer.run_once()
    async with Watch() as none_watch:
        none = await importer.run_once()
    await receiver.stop()

    def described(turn: Any, watch: Watch) -> str:
        return f"{turn.rows:,} rows, {watch.wall_s:.3f} s, {watch.cpu_s:.3f} s CPU, {watch.held()}"

    return [
        Line(
            f"full import, {CELLS:,} cells × {REGIONS} regions, by a new node", described(first, first_watch)
        ),
        Line("full import again", described(full, full_watch)),
        Line("incremental import after 1 % changed", described(little, little_watch)),
        Line("incremental import after nothing changed", described(none, none_watch)),
        Line("  full : 1 %, rows", f"{full.rows / max(1, little.rows):.0f} ×", "≥ 20 ×"),
        Line("  full : 1 %, time", f"{full_watch.wall_s / little_watch.wall_s:.0f} ×", "≥ 20 ×"),
    ]


def _incremental(url: str, _server: Server) -> list[Line]:
    return asyncio.run(_incremental_of(url))


# ---- an idle node


async def _idle_node_life(pipe: Connection, url: str, seconds: float) -> None:
    async with AsyncLimiter(region="fra", ledger=url) as limiter:
        await _until_regions(limiter, 1)
        await asyncio.sleep(1)
        gc.collect()
        before_s, began_s = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        pipe.send((time.process_time() - before_s) / (time.monotonic() - began_s))


def _idle(url: str, _server: Server) -> list[Line]:
    idle = Regions(_idle_node_life, [(url, 30.0)])
    (share,) = idle.receive()
    idle.end()
    return [Line("CPU of an idle node with a ledger, of one core, over 30 s", f"{share:.2%}")]


PARTS: Final[dict[str, Callable[[str, Server], list[Line]]]] = {
    "publish": _publish,
    "incremental": _incremental,
    "idle": _idle,
    "lag": _lag,
    "ten": _ten,
}
SERVERS: Final[dict[str, type[Server]]] = {
    "mariadb": MariaDBServer,
    "mysql": MySQLServer,
    "postgres": PostgresServer,
}

if __name__ == "__main__":
    sys.exit(main())
