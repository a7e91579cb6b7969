"""The figures of the server: CPU and rate against a raw ASGI handler, Go and Rust, latency, memory, start, cold starts.

The server runs on one core; wrk, Redis, MariaDB and the open-loop generator run on another. Everything that is compared
is measured in turns in the same run, every other round in reverse order. Each has two figures, as medians with their
range: requests per second, and CPU time per request, which other work on a shared machine affects less. `--part` runs
some of the parts; all of them take about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final, NamedTuple, Self

import tidegate
from bench import loadgen
from bench.peers import throttlecrab
from bench.turns import Figures, in_turns
from tidegate.testing import MariaDBServer, RedisServer

HERE = Path(__file__).parent
IDENTIFIERS = 10_000
CONNECTIONS = 64
SUBJECTS = 1_000_000
START_TIMEOUT_S = 30.0
WARM_S = 2.0
STEADY_PER_S = 5_000
COLD_BATCH = 100
COLD_SUBJECTS = 5_000
# Cold starts: how many, with how many subjects, for how long; the rate of the last part of that time is the warm one.
COLD_STARTS = 3
COLD_START_SUBJECTS = (1_000, IDENTIFIERS)
COLD_S = 15.0
COLD_WARM_S = 5.0
# Each worker must have had so many requests for each subject before that, or there is no warm rate.
COLD_REQUESTS_EACH = 3
PATH = "/v2/ratelimit.limit"
MULTI_PATH = "/v2/ratelimit.multiLimit"
CHECK_PATH = "/v1/check"
# `check` has its parameters in the query: the lines of its file are sent as GET, not as bodies.
CHECK_RULES = """
domain: bench
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 1000000000}
"""
# Never reached in a run. The first request of each identifier costs a quarter of it, so that every cell is above the
# publish threshold and the ledger has work to do.
LIMIT = 20_000
FIRST_COST = LIMIT // 4
DURATION_MS = 3_600_000


class Load(NamedTuple):
    """The results of one turn of wrk."""

    rate: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


class Cores(NamedTuple):
    """Which core runs what."""

    server: int
    load: int


class Contestant:
    """A server process on the server's core."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cores: Cores,
        key: str,
        env: Mapping[str, str] | None = None,
        *,
        path: str = PATH,
        bodies: Path | None = None,
    ) -> None:
        """`path` and `bodies` are for a server with another form of `limit`."""
        self.name = name
        self.key = key
        self.path = path
        self.bodies = bodies
        self._command = ["taskset", "-c", str(cores.server), *command]
        self._cores = cores
        self._env = {**os.environ, **(env or {}), "PEER_KEY": key}
        self._process: subprocess.Popen[str] | None = None
        self.address = ("127.0.0.1", 0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env
        )
        output = self._process.stdout
        assert output is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        said = []
        for line in output:
            said.append(line)
            found = re.search(r"(?:listening|running) on (?:http://)?127\.0\.0\.1:(\d+)", line)
            if found is not None:
                self.address = ("127.0.0.1", int(found[1]))
                watchdog.cancel()
                return
        watchdog.cancel()
        self.stop()
        raise SystemExit(f"{self.name} does not start:\n{''.join(said)}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU time of the process and all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def request(self, path: str, line: str) -> bytes:
        """The bytes of one request: a line of a file is a query for `CHECK_PATH`, a body for the others."""
        if path == CHECK_PATH:
            return (
                f"GET {path}?{line} HTTP/1.1\r\nHost: 127.0.0.1:{self.address[1]}\r\n"
                f"Authorization: Bearer {self.key}\r\n\r\n"
            ).encode()
        return self.post(path, line)

    def post(self, path: str, body: str, method: str = "POST") -> bytes:
        """The bytes of one request with a body."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.address[1]}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return (head + body).encode()

    def send_all(self, path: str, bodies: Iterable[str]) -> None:
        """Send requests one after the other on one connection; each must be answered with 200."""
        with socket.create_connection(self.address, timeout=60) as connection:
            for body in bodies:
                connection.sendall(self.post(path, body))
                answer = connection.recv(1 << 20)
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"{self.name} answers {answer[:500]!r}")
                head, _, rest = answer.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                assert length is not None
                missing = int(length[1]) - len(rest)
                while missing > 0:
                    missing -= len(connection.recv(missing))

    def load(self, path: str, bodies: Path, seconds: float) -> Load:
        """wrk for `seconds`, from the other core."""
        before = self.cpu_s
        url = f"http://127.0.0.1:{self.address[1]}"
        pinned = ["taskset", "-c", str(self._cores.load)]
        wrk = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(HERE / "limit.lua"), url]
        output = subprocess.run(
            [*pinned, *wrk, "--", self.key, path, str(bodies)], capture_output=True, text=True, check=True
        ).stdout
        figures = re.search(r"FIGURES (\d+) (\d+) (\d+) ([\d.]+) ([\d.]+)", output)
        if figures is None:
            raise SystemExit(f"wrk said:\n{output}")
        requests, duration_us, errors = int(figures[1]), int(figures[2]), int(figures[3])
        if errors:
            raise SystemExit(f"{self.name}: {errors} of {requests} requests failed")
        cpu_us = (self.cpu_s - before) / requests * 1e6
        return Load(requests / duration_us * 1e6, cpu_us, float(figures[4]), float(figures[5]))


def limit_body(identifier: str, *, namespace: str = "bench", limit: int = LIMIT, cost: int = 1) -> str:
    """A body of `limit`; the cost only where it is not 1."""
    body = {"namespace": namespace, "identifier": identifier, "limit": limit, "duration": DURATION_MS}
    return json.dumps(body if cost == 1 else body | {"cost": cost}, separators=(",", ":"))


def multi_bodies(prefix: str, count: int, size: int, *, namespace: str = "bench") -> Iterable[str]:
    """Bodies of `multiLimit` over `count` identifiers, `size` in each."""
    for first in range(0, count, size):
        numbers = range(first, min(first + size, count))
        yield (
            "[" + ",".join(limit_body(f"{prefix}{number}", namespace=namespace) for number in numbers) + "]"
        )


class Turns:
    """The results of all turns of one server."""

    def __init__(self, loads: Sequence[Load | loadgen.Latencies]) -> None:
        self._loads = loads

    def each(self, figure: str) -> Figures:
        """A field, round by round."""
        return Figures(getattr(load, figure) for load in self._loads)

    def middle(self, figure: str) -> float:
        """The median of a field."""
        return self.each(figure).middle

    def shown(self, figure: str, digits: int) -> str:
        """The median and its range, for people."""
        return self.each(figure).shown(digits)

    def over(self, other: Turns, figure: str) -> Figures:
        """This figure by that of `other`."""
        return self.each(figure).over(other.each(figure))


def turns(
    seconds: float, rounds: int, loads: Mapping[str, Callable[[float], Load | loadgen.Latencies]]
) -> dict[str, Turns]:
    """Each load once per round."""
    found: dict[str, list[Load | loadgen.Latencies]] = {name: [] for name in loads}
    for load in loads.values():
        load(min(2.0, seconds))  # warm: connections, caches, branch predictors
    for name in in_turns(loads, rounds):
        found[name].append(loads[name](seconds))
    return {name: Turns(many) for name, many in found.items()}


def tidegate_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidegate.cli", *arguments]


def make_key(*where: str) -> str:
    output = subprocess.run(
        tidegate_command("keys", "create", *where, "--workspace", "bench", "--permissions", "all", "--json"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return str(json.loads(output)["key"])


def serve(name: str, cores: Cores, key: str, *arguments: str) -> Contestant:
    command = tidegate_command("serve", "--listen", "127.0.0.1:0", "--log-level", "warning", *arguments)
    return Contestant(name, command, cores, key)


def start_s(server: Contestant) -> float:
    """From the start of the process to its first answer of `limit`."""
    started = time.perf_counter()
    with server:
        server.send_all(PATH, [limit_body("first")])
        return time.perf_counter() - started


class Printer:
    """Markdown on stdout, row by row: a run takes minutes."""

    def table(self, *columns: str) -> None:
        print()
        self.row(*columns)
        self.row(*["---"] * len(columns))

    def figures(self) -> None:
        self.table("figure", "found", "target", "met")

    def row(self, *cells: str) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)

    def figure(self, what: str, found: str, target: str, *, is_met: bool) -> None:
        self.row(what, found, target, "yes" if is_met else "**no**")


def throughput(bench: Bench, out: Printer) -> None:
    """Against the peers."""
    peers = [peer for peer in (bench.raw_asgi, bench.go, bench.throttlecrab) if isinstance(peer, Contestant)]
    found = turns(
        bench.seconds,
        bench.rounds,
        {
            each.name: partial(each.load, each.path, each.bodies or bench.bodies)
            for each in (bench.embedded, *peers)
        },
    )
    ours = found[bench.embedded.name]
    bench.rates[bench.embedded.name] = ours.middle("rate")
    what = f"limit, warm, one core, 64 connections: medians of {bench.rounds} (and range)"
    out.table(what, "requests/s", "CPU µs/request", "p99 ms (wrk)", "its CPU / ours")
    for name, one in found.items():
        behind = "" if one is ours else one.over(ours, "cpu_us").shown(2)
        out.row(name, one.shown("rate", 0), one.shown("cpu_us", 1), one.shown("p99_ms", 1), behind)
    out.figures()
    ratio = ours.over(found[bench.raw_asgi.name], "rate")
    out.figure("rate / raw ASGI under uvicorn", ratio.shown(2), "≥ 2.5", is_met=ratio.middle >= 2.5)
    for what, peer in (
        ("Go net/http, GOMAXPROCS=1", bench.go),
        ("throttlecrab-server (Rust)", bench.throttlecrab),
    ):
        if isinstance(peer, Contestant):
            ratio = ours.over(found[peer.name], "cpu_us")
            out.figure(f"CPU / {what}", ratio.shown(2), "≤ 1", is_met=ratio.middle <= 1)
        else:
            out.row(f"CPU / {what}", f"not measured: {peer}", "≤ 1", "")


def operations(bench: Bench, out: Printer) -> None:
    """multiLimit, denied."""
    server = bench.embedded
    out.figures()
    found = turns(
        bench.seconds,
        bench.rounds,
        {
            "single": lambda seconds: server.load(PATH, bench.bodies, seconds),
            "multi": lambda seconds: server.load(MULTI_PATH, bench.multi, seconds),
            "denied": lambda seconds: server.load(PATH, bench.denied, seconds),
            "check": lambda seconds: server.load(CHECK_PATH, bench.checks, seconds),
        },
    )
    single = found["single"]
    steady = {
        name: steady_cpu_us(bench, name, path, bodies)
        for name, path, bodies in (
            ("single", PATH, bench.bodies),
            ("multi", MULTI_PATH, bench.multi),
            ("denied", PATH, bench.denied),
            ("check", CHECK_PATH, bench.checks),
        )
    }

    # The writes to the file do not depend on the number of requests, so a rarer request appears to use more CPU.
    def shown(name: str) -> str:
        one = found[name]
        steadily = f"{steady[name] / steady['single']:.2f} by CPU at {STEADY_PER_S:,} requests/s each"
        return f"{single.over(one, 'rate').shown(2)} by rate, {one.over(single, 'cpu_us').shown(2)} by CPU; {steadily}"

    by_rate = single.over(found["multi"], "rate").middle
    out.figure("multiLimit of 10 / one limit", shown("multi"), "≤ 2.3 by rate", is_met=by_rate <= 2.3)
    by_cpu = found["denied"].over(single, "cpu_us").middle
    out.figure("denied / allowed", shown("denied"), "≤ 1 by CPU", is_met=by_cpu <= 1)
    out.row("/v1/check / limit", shown("check"), "", "")


def steady_cpu_us(bench: Bench, name: str, path: str, bodies: Path) -> float:
    """CPU time per request of the embedded server at a rate far below what it can do."""
    server = bench.embedded
    requests = [server.request(path, line) for line in bodies.read_text().splitlines()]
    file = bench.generator.requests(name, requests)
    before = server.cpu_s
    found = bench.generator.run(
        server.address[1],
        file,
        rate_per_s=STEADY_PER_S,
        seconds=max(5.0, bench.seconds),
        connections=CONNECTIONS,
    )
    return (server.cpu_s - before) / found.sent * 1e6


def shared(bench: Bench, out: Printer) -> None:
    """With a Redis origin and a ledger, against embedded."""
    out.figures()
    found = turns(
        bench.seconds,
        bench.rounds,
        {each.name: partial(each.load, PATH, bench.bodies) for each in (bench.embedded, bench.fleet)},
    )
    ours, alone = found[bench.fleet.name], found[bench.embedded.name]
    bench.rates |= {name: one.middle("rate") for name, one in found.items()}
    ratio = ours.over(alone, "rate")
    by_cpu = alone.over(ours, "cpu_us").shown(2)
    shown = f"{ratio.shown(2)} by rate, {by_cpu} by CPU; {ours.shown('rate', 0)} requests/s"
    out.figure("Redis and MariaDB / embedded", shown, "≥ 0.6", is_met=ratio.middle >= 0.6)


def latency(bench: Bench, out: Printer) -> None:
    """At half of the maximum rate of the slower server, open loop.

    Compared at the same rate and with bodies of the same size: `GET /livez` of the same process, which shows the cost
    of loop, sockets and machine; and Go. Rounds alternate, and a ratio is that of one round.
    """
    servers = (bench.embedded, bench.fleet)
    for server in servers:
        if server.name not in bench.rates:
            server.load(PATH, bench.bodies, WARM_S)
            bench.rates[server.name] = server.load(PATH, bench.bodies, bench.seconds).rate
    rate_per_s = min(bench.rates[server.name] for server in servers) / 2
    bodies = bench.bodies.read_text().splitlines()
    loads: dict[str, Callable[[float], loadgen.Latencies]] = {}

    def add(name: str, server: Contestant, method: str, path: str) -> None:
        requests = [server.post(path, body, method) for body in bodies]
        run = partial(
            bench.generator.run,
            server.address[1],
            bench.generator.requests(str(len(loads)), requests),
            rate_per_s=rate_per_s,
            connections=CONNECTIONS,
        )

        def load(seconds: float) -> loadgen.Latencies:
            run(seconds=WARM_S)  # the counts from the origin became stale during the turns of other servers
            found = run(seconds=max(5.0, seconds))
            if found.errors:
                raise SystemExit(f"{name}: {found.errors} of {found.sent} requests failed")
            return found

        loads[name] = load

    for server in servers:
        add(server.name, server, "POST", PATH)
        add(f"{server.name}, GET /livez", server, "GET", "/livez")
    if isinstance(bench.go, Contestant):
        add(bench.go.name, bench.go, "POST", PATH)
    found = turns(bench.seconds, bench.rounds, loads)
    out.figures()
    for server in servers:
        what = f"{server.name}, {rate_per_s:,.0f}/s open loop"
        ours, trivial = found[server.name], found[f"{server.name}, GET /livez"]
        ratio = ours.over(trivial, "p99_ms")
        late = f"generator late {ours.middle('sent_late'):.2%}"
        out.figure(
            f"p99 / that of GET /livez, {what}",
            f"{ratio.shown(2)}; {late}",
            "≤ 1.2",
            is_met=ratio.middle <= 1.2,
        )
        out.row(f"p99, {what}", f"{ours.shown('p99_ms', 2)} ms", "", "")
        out.row(f"p99.9, {what}", f"{ours.shown('p999_ms', 2)} ms", "", "")
        out.row(f"p99 of GET /livez, {what}", f"{trivial.shown('p99_ms', 2)} ms", "", "")
        if isinstance(bench.go, Contestant):
            go = found[bench.go.name]
            shown = f"{go.shown('p99_ms', 2)} ms; ours / it: {ours.over(go, 'p99_ms').shown(2)}"
            out.row(f"p99 of {bench.go.name}, {what}", shown, "", "")


def memory_and_start(bench: Bench, out: Printer) -> None:
    """Of one worker, embedded."""
    out.figures()
    directory = bench.directory / "memory"
    make_key("--data-dir", str(directory))
    key = make_key("--data-dir", str(directory))
    server = serve("memory", bench.cores, key, "--data-dir", str(directory))
    best = min(start_s(server) for _ in range(5))
    out.figure("start to first answer", f"{best:.2f} s", "≤ 1 s", is_met=best <= 1)
    with server:
        server.send_all(PATH, [limit_body("first")])
        idle = server.resident_mb
        out.figure("memory of a worker, idle", f"{idle:.0f} MB", "≤ 80 MB", is_met=idle <= 80)
        server.send_all(MULTI_PATH, multi_bodies("subject_", SUBJECTS, 100))
        full = server.resident_mb
        what = f"memory of a worker, {SUBJECTS:,} subjects"
        out.figure(what, f"{full:.0f} MB", "≤ 600 MB", is_met=full <= 600)


def cold(bench: Bench, out: Printer) -> None:
    """Subjects that a server has not seen, and two workers that have seen none."""
    server = bench.embedded
    found: dict[str, list[float]] = {"new": [], "known": []}
    for number in range(bench.rounds):
        bodies = list(multi_bodies(f"new_{number}_", COLD_SUBJECTS, COLD_BATCH))
        for costs in found.values():
            before = server.cpu_s
            server.send_all(MULTI_PATH, bodies)
            costs.append((server.cpu_s - before) / COLD_SUBJECTS * 1e6)
    out.figures()
    new, known = median(found["new"]), median(found["known"])
    shown = f"{new:.1f} µs ({min(found['new']):.1f} to {max(found['new']):.1f})"
    what = f"CPU of a new subject in a batch of {COLD_BATCH}, with its row in the file"
    out.figure(what, f"{shown}; known: {known:.1f} µs", "≤ 25 µs", is_met=new <= 25)
    for subjects in COLD_START_SUBJECTS:
        starts = [cold_start(bench, subjects, number) for number in range(min(COLD_STARTS, bench.rounds))]
        what = f"two cold workers on one core, {subjects:,} subjects in turn: 80 % of their warm rate"
        # Before that nearly every request waits for the file, and the rate is that of a cold worker.
        is_warm = min(each.before for each in starts) >= COLD_REQUESTS_EACH * 2 * subjects
        reached_s = median(each.reached_s for each in starts)
        reached = ", ".join(f"{each.reached_s:.1f} s" for each in starts) if is_warm else "never warm"
        rates = ", ".join(f"{each.first:,.0f} to {each.warm:,.0f}" for each in starts)
        shown = f"{reached}; requests/s in the first second and in the last {COLD_WARM_S:g}: {rates}"
        out.figure(what, shown, "≤ 3 s", is_met=is_warm and reached_s <= 3)


class Start(NamedTuple):
    """How the rate of new workers rises after their start."""

    before: int
    """Requests before the time whose rate is the warm one."""
    first: float
    warm: float
    reached_s: float
    """The end of the first half second with 80 % of the warm rate; infinite if there was none."""


def cold_start(bench: Bench, subjects: int, number: int) -> Start:
    """Full load from the first moment on, on a new file. Both workers get requests for every subject."""
    data_dir = str(bench.directory / f"cold{subjects}_{number}")
    key = make_key("--data-dir", data_dir)
    with serve("cold", bench.cores, key, "--data-dir", data_dir, "--workers", "2") as server:
        requests = [server.post(PATH, limit_body(f"user_{number}")) for number in range(subjects)]
        file = bench.generator.requests("cold", requests)
        found = bench.generator.run(
            server.address[1], file, rate_per_s=0, seconds=COLD_S, connections=CONNECTIONS
        )
    if found.errors:
        raise SystemExit(f"cold start: {found.errors} of {found.sent} requests failed")
    tenths = found.tenths
    warm_from = len(tenths) - int(COLD_WARM_S * 10)
    rates = [2.0 * sum(tenths[start : start + 5]) for start in range(len(tenths) - 4)]
    warm = median(rates[warm_from:])
    reached_s = next((at / 10 + 0.5 for at, rate in enumerate(rates) if rate >= 0.8 * warm), float("inf"))
    return Start(sum(tenths[:warm_from]), float(sum(tenths[:10])), warm, reached_s)


class Bench:
    """The servers of one run."""

    def __init__(self, stack: ExitStack, seconds: float, rounds: int, *, with_fleet: bool) -> None:
        self.seconds = seconds
        self.rounds = rounds
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit("two cores are needed: one for the server, one for the load")
        self.cores = Cores(cores[0], cores[-1])
        os.sched_setaffinity(0, {self.cores.load})  # inherited by all processes that are started from here
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        self.generator = loadgen.Generator(self.directory)
        identifiers = [f"user_{number}" for number in range(IDENTIFIERS)]
        self.bodies = self._file("limit", map(limit_body, identifiers))
        self.multi = self._file("multi", multi_bodies("user_", IDENTIFIERS, 10))
        self.denied = self._file(
            "denied", (limit_body(each, namespace="denied", limit=1) for each in identifiers)
        )
        self.checks = self._file("check", (f"domain=bench&descriptor=user%3D{each}" for each in identifiers))
        rules = self.directory / "rules.yaml"
        rules.write_text(CHECK_RULES)
        data_dir = str(self.directory / "embedded")
        key = make_key("--data-dir", data_dir)
        self.embedded = stack.enter_context(
            serve("Tidegate, embedded", self.cores, key, "--data-dir", data_dir, "--rls-config", str(rules))
        )
        uvicorn = [sys.executable, "-m", "uvicorn", "bench.peers.raw_asgi:app", "--port", "0"]
        uvicorn += ["--http", "httptools", "--loop", "uvloop", "--no-access-log"]
        path = {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
        self.raw_asgi = stack.enter_context(
            Contestant("raw ASGI, uvicorn (httptools, uvloop)", uvicorn, self.cores, key, path)
        )
        # The server, or why it does not run.
        self.go: Contestant | str = "no go on this machine"
        if shutil.which("go"):
            self.go = stack.enter_context(self._go(key))
        binary = throttlecrab.find()
        self.throttlecrab: Contestant | str = binary if isinstance(binary, str) else ""
        if isinstance(binary, Path):
            port = throttlecrab.free_port()
            bodies = self._file("throttlecrab", map(throttlecrab.body, identifiers))
            self.throttlecrab = stack.enter_context(
                Contestant(
                    "throttlecrab-server (Rust): no authentication, nothing is persisted",
                    throttlecrab.command(binary, port),
                    self.cores,
                    key,
                    path=throttlecrab.PATH,
                    bodies=bodies,
                )
            )
        # Requests per second of ours, as the parts find them.
        self.rates: dict[str, float] = {}
        if not with_fleet:
            self.fleet = self.embedded
            self._warm(identifiers, self.embedded)
            return
        redis = stack.enter_context(RedisServer())
        mariadb = stack.enter_context(MariaDBServer())
        ledger = mariadb.create_database()
        subprocess.run(tidegate_command("migrate", "--ledger", ledger), check=True, capture_output=True)
        where = ["--data-dir", str(self.directory / "fleet"), "--origin", redis.url]
        fleet_key = make_key("--ledger", ledger)
        self.fleet = stack.enter_context(
            serve(
                "Tidegate, Redis and MariaDB",
                self.cores,
                fleet_key,
                *where,
                "--ledger",
                ledger,
                "--region",
                "bench",
            )
        )
        self._warm(identifiers, self.embedded, self.fleet)

    def _warm(self, identifiers: Sequence[str], *servers: Contestant) -> None:
        for server in servers:
            server.send_all(PATH, (limit_body(each, cost=FIRST_COST) for each in identifiers))
        self.embedded.send_all(PATH, self.denied.read_text().splitlines())

    def _file(self, name: str, lines: Iterable[str]) -> Path:
        path = self.directory / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _go(self, key: str) -> Contestant:
        binary = self.directory / "peer"
        subprocess.run(["go", "build", "-o", str(binary), "."], cwd=HERE / "peers" / "go", check=True)
        env = {"GOMAXPROCS": "1"}
        return Contestant("Go net/http, GOMAXPROCS=1", [str(binary), "127.0.0.1:0"], self.cores, key, env)


PARTS: Final[Mapping[str, Callable[[Bench, Printer], None]]] = {
    "throughput": throughput,
    "operations": operations,
    "shared": shared,
    "latency": latency,
    "memory": memory_and_start,
    "cold": cold,
}


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench server", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="short turns, one of each; not for conclusions")
    # The same command line may have options of other benchmarks.
    options, _ = parser.parse_known_args(arguments)
    if options.quick:
        options.seconds, options.rounds = 2.0, 1
    if not tidegate.compiled:
        raise SystemExit("install the compiled package first: make bench does")
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is needed: apt-get install wrk")
    out = Printer()
    with ExitStack() as stack:
        parts = options.part or list(PARTS)
        bench = Bench(
            stack, options.seconds, options.rounds, with_fleet=not {"shared", "latency"}.isdisjoint(parts)
        )
        for name, peer in (("Go net/http", bench.go), ("throttlecrab-server", bench.throttlecrab)):
            print(f"{name}: {f'not run, {peer}' if isinstance(peer, str) else 'runs'}", flush=True)
        for part in parts:
            PARTS[part](bench, out)


if __name__ == "__main__":
    main(sys.argv[1:])
