"""What the console costs: recording decisions for it, and serving viewers.

First the cost of recording one decision, by itself. Then a real server on one core at a steady rate, with 0 to 32
viewers on another: their cost while there are no requests, then CPU time per request and latency under load. A viewer
reads the stream of events as a page does.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import loadgen
from bench.server import PATH, Contestant, Cores, Printer, limit_body, make_key, serve
from bench.turns import Figures, in_turns
from tidegate import AsyncLimiter, Limit
from tidegate.server.api.activity import SAMPLED_PER_S, SHARE, Activity

IDENTIFIERS = 10_000
CONNECTIONS = 64
VIEWERS = (0, 1, 8, 32)
# One key has at most twelve streams.
STREAMS_PER_KEY = 8
TIMES = 200_000


def per_call_ns(work: Callable[[int], None]) -> Figures:
    """CPU time, round by round."""
    found = Figures()
    for _ in range(7):
        started_ns = time.process_time_ns()
        work(TIMES)
        found.append((time.process_time_ns() - started_ns) / TIMES)
    return found


def recording(out: Printer) -> None:  # noqa: C901 - one small loop for each row
    """The work of `operations` for each decision, with and without recording it."""
    limiter = AsyncLimiter()
    activity = Activity(lambda: limiter.inspection)
    limit = Limit(1, duration_ms=3_600_000, namespace="rlns_1", workspace="w")
    counts = activity.counts("w", "n")
    followed = activity.recording.followed
    activity.follow("busy")
    keys = [("w", "n", f"user_{number}") for number in range(IDENTIFIERS)]
    decision = limiter.limit_nowait(limit, "x", 2)
    assert decision is not None and not decision.allowed

    def nothing(times: int) -> None:
        for _ in range(times):
            pass

    def left_out(times: int) -> None:
        activity.skips.left = times + 1
        for _ in range(times):
            if activity.skips.left:
                activity.skips.left -= 1
                sample = None
            else:
                sample = activity.begin()
            counts.allowed += 1
            followed.get(keys[0][2])
            if sample is not None:
                activity.end(sample, keys[0])

    def kept(times: int) -> None:
        for number in range(times):
            found = followed.get("busy")
            assert found is not None
            found.add(limit, 1, True, number // 1_000 * 1_000)

    def recorded(times: int) -> None:
        for number in range(times):
            activity.skips.left = 0
            activity.end(activity.begin(), keys[number % IDENTIFIERS])

    def as_it_is(times: int) -> None:
        activity.skips.left = 0
        for number in range(times):
            if activity.skips.left:
                activity.skips.left -= 1
                sample = None
            else:
                sample = activity.begin()
            counts.allowed += 1
            key = keys[number % IDENTIFIERS]
            kept = followed.get(key[2])
            if kept is None and sample is not None:
                kept = activity.follow(key[2])
            if kept is not None:
                kept.add(limit, 1, True, number // 1_000 * 1_000)
            if sample is not None:
                activity.end(sample, key)

    def denied_again(times: int) -> None:
        for _ in range(times):
            activity.record_denial(keys[0], limit, None, decision, 2, 1_000, 1)

    def denied_first(times: int) -> None:
        for number in range(times):
            activity.record_denial(keys[number % 500], limit, None, decision, 2, number * 1_000, 1)

    loop_ns = per_call_ns(nothing)
    out.table("recorded for the console", "ns per decision")
    for what, work in (
        ("left out of the sample: count, compare", left_out),
        ("kept for a replay: one more request of an identifier that is followed", kept),
        (f"recorded: the first {SAMPLED_PER_S:,} in a second, then one in {SHARE}", recorded),
        ("on average at full speed, all identifiers new to the sketch in turn", as_it_is),
        ("a denial, again in the same second", denied_again),
        ("a denial, the first of an identifier in a second, with its cells", denied_first),
    ):
        out.row(what, per_call_ns(work).minus(loop_ns).shown())


class Streams:
    """Viewers of a server; each reads in a thread of its own."""

    def __init__(self, server: Contestant, keys: Sequence[str], count: int) -> None:
        self.bytes = 0
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for number in range(count):
            key = keys[number // STREAMS_PER_KEY]
            connection = socket.create_connection(server.address, timeout=30)
            head = f"GET /console/events HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n\r\n"
            connection.sendall(head.encode())
            first = connection.recv(65_536)
            if not first.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a viewer was refused: {first!r}")
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._read, args=(connection,)))
            self._threads[-1].start()

    def _read(self, connection: socket.socket) -> None:
        while data := connection.recv(65_536):
            self.bytes += len(data)

    def close(self) -> None:
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()


@contextmanager
def watched(server: Contestant, keys: Sequence[str], count: int) -> Iterator[Streams]:
    streams = Streams(server, keys, count)
    try:
        yield streams
    finally:
        streams.close()


class Found(NamedTuple):
    cpu_us: float
    p50_ms: float
    p99_ms: float
    kb_per_s: float


def viewing(out: Printer, seconds: float, rounds: int, rates: Sequence[int]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the load")
    place = Cores(cores[0], cores[-1])
    os.sched_setaffinity(0, {place.load})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as name:
        data_dir = str(Path(name) / "data")
        keys = [make_key("--data-dir", data_dir) for _ in range(-(-max(VIEWERS) // STREAMS_PER_KEY))]
        generator = loadgen.Generator(Path(name))
        with serve("Tidegate, embedded", place, keys[0], "--data-dir", data_dir) as server:
            bodies = [limit_body(f"user_{number}") for number in range(IDENTIFIERS)]
            server.send_all(PATH, bodies)
            file = generator.requests("limit", [server.request(PATH, body) for body in bodies])
            out.table("viewers of a server without other requests", "CPU ms in a second")
            for viewers in VIEWERS:
                with watched(server, keys, viewers):
                    time.sleep(1)  # the first tick asks twice
                    before = server.cpu_s
                    time.sleep(seconds)
                    out.row(str(viewers), f"{(server.cpu_s - before) / seconds * 1000:.1f}")
            out.table(
                "requests/s", "viewers", "CPU µs per request", "p50 ms", "p99 ms", "kB/s to each viewer"
            )
            for rate in rates:
                found: dict[str, list[Found]] = {str(viewers): [] for viewers in VIEWERS}
                for shown in in_turns(found, rounds):
                    viewers = int(shown)
                    with watched(server, keys, viewers) as streams:
                        before = server.cpu_s
                        load = generator.run(
                            server.address[1],
                            file,
                            rate_per_s=rate,
                            seconds=seconds,
                            connections=CONNECTIONS,
                        )
                        cpu_us = (server.cpu_s - before) / load.sent * 1e6
                        each = streams.bytes / viewers / seconds / 1000 if viewers else 0.0
                        found[shown].append(Found(cpu_us, load.p50_ms, load.p99_ms, each))
                for shown, many in found.items():
                    cpu, p50, p99, kb = (Figures(values) for values in zip(*many, strict=True))
                    sent = kb.shown() if int(shown) else ""
                    out.row(f"{rate:,}", shown, cpu.shown(2), p50.shown(3), p99.shown(2), sent)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench console")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=int, nargs="+", default=[5_000, 20_000])
    options = parser.parse_args(arguments)
    out = Printer()
    recording(out)
    viewing(out, options.seconds, options.rounds, options.rates)
