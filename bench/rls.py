"""The figures of Envoy's rate limit service: calls per second, CPU per call, latency at fixed rates.

Compared in the same run, in turns: grpcio with a handler that does nothing, and the Go service (envoyproxy/ratelimit)
with its Redis, if its binary is installed (scripts/gateways). The service runs on one core; the generator
(openloop_grpc.c) and Redis run on the other. CPU per call is that of the service's process alone; that of Redis is
printed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import NamedTuple, Self

from bench.turns import Figures, in_turns
from tidegate.testing import RedisServer

HERE = Path(__file__).parent
SERVER_CORE, LOAD_CORE = "0", "1"
PATH = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
CONNECTIONS, STREAMS = 4, 32
RATES_PER_S = (5_000, 20_000)
START_TIMEOUT_S = 30.0
# The same load before a turn, not counted, because users were dropped from memory during the turns of other services.
# Not before the load that measures users who were not seen for long.
WARM_S = 2.0
WIDE = "1,000,000 users in turn"
RULES = """
domain: bench
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 1000000000}
"""


class Run(NamedTuple):
    """The results of the generator for one turn."""

    sent: int
    errors: int
    seconds: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    sent_late: float
    is_real_time: bool


class Turn(NamedTuple):
    """The results of one turn, with the CPU time of the service and its Redis."""

    run: Run
    cpu_us: float
    redis_us: float

    @property
    def rate(self) -> float:
        return self.run.sent / self.run.seconds


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Service:
    """One of the compared services, on the service's core."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        redis: RedisServer | None = None,
        env: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        self.name = name
        self._redis = redis
        self._command = ["taskset", "-c", SERVER_CORE, *command]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[str] | None = None
        # 0: it prints its port.
        self.port = port

    def __enter__(self) -> Self:
        is_silent = bool(self.port)
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL if is_silent else subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_silent else None,
            text=True,
            env=self._env,
        )
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            if is_silent:
                self._wait_for_port()
            else:
                assert self._process.stdout is not None
                found = re.search(r":(\d+)\s*$", self._process.stdout.readline())
                if found is None:
                    raise SystemExit(f"{self.name} does not start")
                self.port = int(found[1])
        finally:
            watchdog.cancel()
        return self

    def _wait_for_port(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise SystemExit(f"{self.name} does not start")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def become_real_time(self) -> None:
        """Give the service real-time priority on its core. At fixed rates it uses only a part of the core."""
        assert self._process is not None
        subprocess.run(
            ["chrt", "-f", "-a", "-p", "1", str(self._process.pid)], check=True, capture_output=True
        )

    def load(self, generator: Path, messages: Path, *, rate: float, seconds: float) -> Turn:
        """One turn of the generator. Rate 0: as fast as it answers."""
        assert self._process is not None
        before = cpu_s(self._process.pid), cpu_s(self._redis.pid) if self._redis else 0.0
        values = (self.port, rate, seconds, CONNECTIONS, STREAMS, 1, PATH, messages)
        output = subprocess.run(
            ["taskset", "-c", LOAD_CORE, str(generator), *map(str, values)],
            capture_output=True,
            text=True,
            check=False,
        )
        if output.returncode:
            raise SystemExit(f"{self.name}: {output.stderr}")
        run = Run(**json.loads(output.stdout))
        if run.errors and not rate:
            raise SystemExit(f"{self.name}: {run.errors} of {run.sent} calls failed")
        after = cpu_s(self._process.pid), cpu_s(self._redis.pid) if self._redis else 0.0
        return Turn(run, *[(b - a) / run.sent * 1e6 for a, b in zip(before, after, strict=True)])


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag, len(data)]) + data


def write_messages(path: Path, users: Iterable[str]) -> Path:
    """RateLimitRequest{domain: bench, descriptors: [{entries: [{user, …}]}]} for each user."""
    with path.open("wb") as file:
        for user in users:
            entry = field(0x0A, b"user") + field(0x12, user.encode())
            message = field(0x0A, b"bench") + field(0x12, field(0x0A, entry))
            file.write(struct.pack("<I", len(message)) + message)
    return path


def find_go_service() -> str | None:
    tools = os.environ.get("TIDEGATE_GATEWAYS", str(HERE.parent / ".gateways"))
    return shutil.which("ratelimit", path=os.pathsep.join([f"{tools}/bin", os.environ.get("PATH", "")]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def go_service(program: str, folder: Path, redis: RedisServer) -> Service:
    config = folder / "go" / "ratelimit" / "config"
    config.mkdir(parents=True)
    (config / "bench.yaml").write_text(RULES)
    port = free_port()
    settings = {
        "USE_STATSD": "false",
        "LOG_LEVEL": "error",
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": f"127.0.0.1:{redis.port}",
        "RUNTIME_ROOT": str(folder / "go"),
        "RUNTIME_SUBDIRECTORY": "ratelimit",
        "RUNTIME_WATCH_ROOT": "false",
        "HOST": "127.0.0.1",
        "GRPC_HOST": "127.0.0.1",
        "DEBUG_HOST": "127.0.0.1",
        "PORT": str(free_port()),
        "GRPC_PORT": str(port),
        "DEBUG_PORT": str(free_port()),
        "GOMAXPROCS": "1",
    }
    return Service("envoyproxy/ratelimit (Go) + Redis", [program], redis=redis, env=settings, port=port)


def contestants(folder: Path, stack: ExitStack) -> dict[str, Service]:
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    peers = HERE / "peers"
    redis = stack.enter_context(RedisServer())
    subprocess.run(["taskset", "-cp", LOAD_CORE, str(redis.pid)], check=True, capture_output=True)
    tidegate = [sys.executable, str(peers / "rls_tidegate.py"), str(rules)]
    found = [
        Service("Tidegate", tidegate),
        Service("Tidegate + Redis", [*tidegate, redis.url], redis=redis),
        Service("grpcio, empty handler", [sys.executable, str(peers / "rls_grpcio.py")]),
    ]
    program = find_go_service()
    if program is None:
        print("envoyproxy/ratelimit (Go): not run, it is not installed: scripts/gateways installs it\n")
    else:
        found.append(go_service(program, folder, redis))
    return {service.name: stack.enter_context(service) for service in found}


def throughput(
    services: Mapping[str, Service], generator: Path, folder: Path, seconds: float, rounds: int
) -> None:
    loads = {
        "10,000 users in turn": write_messages(folder / "many", (f"user-{n:06d}" for n in range(10_000))),
        "one user": write_messages(folder / "one", ["user-000000"]),
        WIDE: write_messages(folder / "wide", (f"user-{n:06d}" for n in range(1_000_000))),
    }
    for title, messages in loads.items():
        print(f"As fast as it answers, {CONNECTIONS} connections with {STREAMS} calls each, {title}\n")
        print("| service | calls/s | CPU per call, µs | Redis, µs |\n|---|---|---|---|")
        found: dict[str, list[Turn]] = {name: [] for name in services}
        for name in in_turns(services, rounds):
            if messages != loads[WIDE]:
                services[name].load(generator, messages, rate=0, seconds=WARM_S)
            found[name].append(services[name].load(generator, messages, rate=0, seconds=seconds))
        for name, turns in found.items():
            rate, cpu_us = Figures(turn.rate for turn in turns), Figures(turn.cpu_us for turn in turns)
            redis_us = Figures(turn.redis_us for turn in turns)
            print(f"| {name} | {rate.shown()} | {cpu_us.shown(1)} | {redis_us.shown(1)} |", flush=True)
        print()


def latency(
    services: Mapping[str, Service],
    generator: Path,
    folder: Path,
    seconds: float,
    rounds: int,
    *,
    is_real_time: bool,
) -> None:
    messages = folder / "many"
    if is_real_time:
        for service in services.values():
            service.become_real_time()
    print("Open loop, Poisson arrivals, 10,000 users in turn; milliseconds from the moment a call was due\n")
    print("| service | calls/s | p50 | p99 | p99.9 | CPU per call, µs |\n|---|---|---|---|---|---|")
    for rate in RATES_PER_S:
        found: dict[str, list[Turn]] = {name: [] for name in services}
        for name in in_turns(services, rounds):
            services[name].load(generator, messages, rate=rate, seconds=WARM_S)
            found[name].append(services[name].load(generator, messages, rate=rate, seconds=seconds))
        for name, turns in found.items():
            runs = [turn.run for turn in turns]
            late = median(run.sent_late for run in runs)
            note = "" if late < 0.01 else f" ({late:.0%} sent late)"
            if any(run.errors for run in runs):
                failed = sum(run.errors for run in runs) / sum(run.sent for run in runs)
                note += f" ({failed:.0%} not answered within 5 s of the end)"
            p50_ms, p99_ms, p999_ms = (
                Figures(getattr(run, figure) for run in runs) for figure in ("p50_ms", "p99_ms", "p999_ms")
            )
            cpu_us = Figures(turn.cpu_us for turn in turns)
            print(
                f"| {name} | {rate:,} | {p50_ms.shown(2)} | {p99_ms.shown(2)} | {p999_ms.shown(2)}{note} | "
                f"{cpu_us.shown(1)} |",
                flush=True,
            )


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench rls")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="measure latency with services as real-time processes: for a machine that others use too",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each service")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-rls-") as name, ExitStack() as stack:
        folder = Path(name)
        generator = folder / "openloop_grpc"
        subprocess.run(["cc", "-O2", "-o", str(generator), str(HERE / "openloop_grpc.c"), "-lm"], check=True)
        services = contestants(folder, stack)
        print(f"These run: {', '.join(services)}. Medians of {options.rounds} rounds in turns (and range).\n")
        throughput(services, generator, folder, options.seconds, options.rounds)
        latency(
            services, generator, folder, 2 * options.seconds, options.rounds, is_real_time=options.real_time
        )


if __name__ == "__main__":
    main(sys.argv[1:])
