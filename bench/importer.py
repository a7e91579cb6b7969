"""One node imports for its region: how fast counts reach an idle region, and what ten regions far away allow.

    python -m bench importer [--on mariadb|mysql|postgres] [--only takeover|ten] [--runs N]

`takeover`: a region of three processes around a Redis, which take no requests; another region uses up identifiers one
after the other. In the middle the process that imports is stopped (SIGSTOP), later the next one is killed (SIGKILL).
`ten`: ten regions in one process, each with Redis keys of its own, 100 requests/s each against 1000/minute, over a
proxy that makes the database 80 ms away. Everything runs on one machine at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

from bench.ledger import HOUR_MS, MINUTE_MS, SERVERS, Line, Regions, _percentile, _receive, _until_regions
from tidegate import AsyncLimiter, Limit
from tidegate.adapters.migrations import migrate
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.core.model import subject_digest
from tidegate.core.sharing import Share
from tidegate.testing.limiters import make_async_limiter
from tidegate.testing.proxy import FaultProxy, Faults
from tidegate.testing.servers import MissingBinary, RedisServer

__all__ = ["main"]

TABLE: Final = "ratelimit_window_counts"
CELLS: Final = 300
SPAN_S: Final = 60.0
STOP_AFTER_S: Final = 20.0
KILL_AFTER_S: Final = 40.0
FULL: Final = Limit(100, duration_ms=HOUR_MS, namespace="bench")
DISTANCE_MS: Final = 80
REGIONS: Final = 10
RATE: Final = 100


async def _sender_life(pipe: Connection, ledger: str, origin: str) -> None:
    """Uses up one identifier after the other, at random moments."""
    async with make_async_limiter(region="sender", ledger=ledger, origin=origin) as limiter:
        await _until_regions(limiter, 2)
        pipe.send("ready")
        await _receive(pipe)
        chance = random.Random(7)
        began_s = time.monotonic()
        used_up: dict[int, float] = {}
        for number, offset_s in enumerate(sorted(chance.uniform(0, SPAN_S) for _ in range(CELLS))):
            await asyncio.sleep(max(0.0, began_s + offset_s - time.monotonic()))
            while await limiter.limit(FULL, f"user-{number}"):
                used_up[number] = time.monotonic()
        pipe.send(used_up)
        await _receive(pipe)


async def _idle_life(pipe: Connection, ledger: str, origin: str) -> None:
    """Takes no requests."""
    async with make_async_limiter(region="idle", ledger=ledger, origin=origin) as limiter:
        await _until_regions(limiter, 2)
        pipe.send(limiter.statistics().node_id)
        await _receive(pipe)
        passed = sum([bool(await limiter.limit(FULL, f"user-{number}")) for number in range(CELLS)])
        pipe.send(passed)
        await _receive(pipe)


class Watcher:
    """Reads the counts in the idle region's Redis, which its nodes decide with."""

    def __init__(self, url: str) -> None:
        self._origin = RedisOrigin(url)
        sequence = time.time_ns() // 1_000_000 // HOUR_MS
        digests = [subject_digest("default", "bench", f"user-{n}", HOUR_MS) for n in range(CELLS)]
        self._entries = [Share(digest, HOUR_MS, sequence, "", 0, "bench") for digest in digests]
        self.seen_s: dict[int, float] = {}
        self.miscounted = 0
        self.taken_over_s: list[float] = []

    async def holder(self) -> str:
        return (await self._origin.lease("", life_ms=0, timeout_s=2)).holder

    async def run(self, nodes: dict[str, int], is_done: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        attacks = [(STOP_AFTER_S, signal.SIGSTOP), (KILL_AFTER_S, signal.SIGKILL)]
        stopped: tuple[str, float] | None = None
        while not is_done() or len(self.seen_s) < CELLS:
            now_s = time.monotonic()
            if now_s - began_s > SPAN_S + 30:
                break
            waiting = [n for n in range(CELLS) if n not in self.seen_s]
            replies = await self._origin.share([self._entries[n] for n in waiting], timeout_s=5)
            for number, reply in zip(waiting, replies, strict=True):
                if reply.foreign >= FULL.quota:
                    self.seen_s[number] = time.monotonic()
            if stopped is not None:
                holder = await self.holder()
                if holder not in ("", stopped[0]):
                    self.taken_over_s.append(time.monotonic() - stopped[1])
                    stopped = None
            elif attacks and now_s - began_s >= attacks[0][0]:
                holder = await self.holder()
                if holder in nodes:
                    os.kill(nodes[holder], attacks.pop(0)[1])
                    stopped = (holder, time.monotonic())
            await asyncio.sleep(0.01)
        replies = await self._origin.share(self._entries, timeout_s=5)
        self.miscounted = sum((reply.total, reply.foreign) != (0, FULL.quota) for reply in replies)
        await self._origin.close()


def _takeover(server: Any, redis: RedisServer) -> list[Line]:
    url = server.create_database()
    asyncio.run(migrate(url))
    idle_url, sender_url = f"{redis.url}?prefix=idle", f"{redis.url}?prefix=sender"
    idle = Regions(_idle_life, [(url, idle_url)] * 3)
    sender = Regions(_sender_life, [(url, sender_url)])
    names = idle.receive()
    sender.receive()
    nodes = {name: process.pid or 0 for name, process in zip(names, idle.processes, strict=True)}
    sender.send("go")
    watcher = Watcher(idle_url)
    asyncio.run(watcher.run(nodes, lambda: sender.pipes[0].poll(0)))
    (used_up,) = sender.receive()
    lags_s = [watcher.seen_s[n] - at_s for n, at_s in used_up.items() if n in watcher.seen_s]
    away = [(began, began + 3.5) for began in (STOP_AFTER_S, KILL_AFTER_S)]
    first_s = min(used_up.values())
    calm = [
        watcher.seen_s[n] - at_s
        for n, at_s in used_up.items()
        if n in watcher.seen_s and not any(low - 1 <= at_s - first_s <= high for low, high in away)
    ]
    # Counted once: no request passes on the last node of the idle region.
    passed = 0
    for process, pipe in zip(idle.processes, idle.pipes, strict=True):
        with suppress(ProcessLookupError, OSError, EOFError, BrokenPipeError):
            os.kill(process.pid or 0, signal.SIGCONT)
            pipe.send("go")
            if pipe.poll(30):
                passed += pipe.recv()
            pipe.send("end")
    sender.send("end")
    sender.end()
    idle.end()
    ((rows, counted),) = server.sql(f"SELECT COUNT(*), SUM(count) FROM {TABLE}", url.rpartition("/")[2])
    over = ", ".join(f"{one:.2f} s" for one in watcher.taken_over_s)
    return [
        Line(
            f"used up in one region → known in an idle one, p50 / p99 of {len(calm)} identifiers",
            f"{_percentile(calm, 50):.2f} / {_percentile(calm, 99):.2f} s",
            "≤ 0.4 / 1 s",
        ),
        Line(
            f"  with the seconds in which the importer was stopped and killed, {len(lags_s)} of {len(used_up)}",
            f"{_percentile(lags_s, 50):.2f} / {_percentile(lags_s, 99):.2f} s",
        ),
        Line("  until another node imported, after SIGSTOP and SIGKILL", over, "≤ 3 s"),
        Line("  requests that passed in the idle region although all were used up", f"{passed}", "0"),
        Line("  identifiers that the idle region's Redis counted otherwise", f"{watcher.miscounted}", "0"),
        Line(
            "  rows in the database, and their sum",
            f"{rows}, {int(counted):,}",
            f"{CELLS}, {CELLS * FULL.quota:,}",
        ),
    ]


async def _ten_life(pipe: Connection, ledger: str, origins: Sequence[str]) -> None:
    """All regions in one process, to measure the path to the database and not how long ten processes wait for two
    cores."""
    async with AsyncExitStack() as stack:
        limiters = [
            make_async_limiter(region=f"region-{number}", ledger=ledger, origin=origin)
            for number, origin in enumerate(origins)
        ]
        for number, limiter in enumerate(limiters):
            await stack.enter_async_context(limiter)
            # A region that has published before: the first row of a new region costs the others two more round trips.
            while await limiter.limit(FULL, f"before {number}"):
                pass
        for limiter in limiters:
            await _until_regions(limiter, REGIONS)
        await asyncio.sleep(2)
        pipe.send("ready")
        start_s = await _receive(pipe)
        asked = [_ask(limiter, start_s, number) for number, limiter in enumerate(limiters)]
        answers = await asyncio.gather(*asked)
        statistics = [limiter.statistics() for limiter in limiters]
        pipe.send(
            (
                sum(admitted for admitted, _ in answers),
                sum(one.publish_rows for one in statistics),
                sum(one.import_rows for one in statistics),
                max(late_s for _, late_s in answers),
            )
        )


async def _ask(limiter: AsyncLimiter, start_s: float, seed: int) -> tuple[int, float]:
    """A region's requests for one window: how many passed, and how late the latest of the first two seconds was."""
    limit = Limit(1000, duration_ms=MINUTE_MS, namespace="bench")
    chance = random.Random(seed)
    admitted, late_s = 0, 0.0
    next_s = start_s + chance.random() / RATE
    while next_s < start_s + 59.5:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        if next_s < start_s + 2:
            late_s = max(late_s, time.monotonic() - next_s)
        admitted += bool(await limiter.limit(limit, "one"))
        next_s += chance.expovariate(RATE)
    return admitted, late_s


def _ten(server: Any, redis: RedisServer) -> list[Line]:
    url = server.create_database()
    asyncio.run(migrate(url))
    with FaultProxy(urlsplit(url).port or 0) as proxy:
        proxy.apply(Faults(latency_ms=DISTANCE_MS / 2))
        run = f"ten{time.monotonic_ns()}"
        origins = [f"{redis.url}?prefix={run}-{number}" for number in range(REGIONS)]
        regions = Regions(_ten_life, [(proxy.through(url), origins)])
        regions.receive()
        # At the start of a minute by the wall clock, which Redis uses.
        wait_ms = MINUTE_MS - (time.time_ns() // 1_000_000) % MINUTE_MS
        regions.send(time.monotonic() + wait_ms / 1000 + (60 if wait_ms < 1_000 else 0))
        ((admitted, written, read, late_s),) = regions.receive(timeout_s=240)
        regions.end()
    return [
        Line(
            f"{REGIONS} regions × {RATE}/s against 1000/minute, {DISTANCE_MS} ms away: admitted, of the limit",
            f"{admitted / 1000:.3f} ×",
            "≤ 1.10 ×",
        ),
        Line("  rows written, rows read", f"{written}, {read}"),
        Line("  longest wait of a request for the CPU in the first two seconds", f"{late_s * 1000:.0f} ms"),
    ]


PARTS: Final = {"takeover": _takeover, "ten": _ten}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print one table."""
    parser = argparse.ArgumentParser(prog="python -m bench importer", description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="Run these parts only.")
    parser.add_argument("--on", choices=sorted(SERVERS), action="append", help="Use these servers only.")
    parser.add_argument("--runs", type=int, default=1, help="How often to run each part.")
    options = parser.parse_args(arguments)
    for kind in options.on or SERVERS:
        try:
            with SERVERS[kind]() as server, RedisServer() as redis:
                print(f"{kind} {server.version}\n\n| | measured | target |\n|---|---:|---:|")
                for name in options.only or PARTS:
                    for _ in range(options.runs):
                        for line in PARTS[name](server, redis):
                            print(f"| {line.what} | {line.measured} | {line.target} |", flush=True)
        except MissingBinary as error:
            print(f"Not measured: {error}")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
