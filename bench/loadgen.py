"""An open-loop load generator: requests leave at times fixed beforehand, whatever the server does.

A closed-loop generator (wrk) stops asking while it waits, so that a pause of the server delays one request where
users would have sent hundreds. Here a latency is counted from the moment at which a request should have been sent:
time spent waiting for a free connection, or for this process to get the processor, counts against the server.
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Latencies", "run"]

LATE_S = 0.001


class Latencies(NamedTuple):
    """Of one run, in milliseconds."""

    sent: int
    errors: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    sent_late: float
    """Share of requests that left more than a millisecond late although a connection was free: our own fault."""


def _connect(address: tuple[str, int]) -> socket.socket:
    opened = socket.create_connection(address, timeout=10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setblocking(False)
    return opened


def run(
    address: tuple[str, int],
    requests: Sequence[bytes],
    *,
    rate_per_s: float,
    seconds: float,
    connections: int = 64,
    seed: int = 1,
) -> Latencies:
    """Send `requests` in turn at `rate_per_s` with Poisson arrivals for `seconds`; one at a time on a connection."""
    chance = random.Random(seed)
    opened = {item.fileno(): item for item in (_connect(address) for _ in range(connections))}
    poller = select.epoll()
    for number in opened:
        poller.register(number, select.EPOLLIN)
    free = deque(opened)
    due: dict[int, float] = {}  # by connection: when its request should have been sent
    waiting: deque[float] = deque()
    latencies: list[float] = []
    errors = late = sent = 0
    now = time.perf_counter
    next_at = now() + 0.01
    end = next_at + seconds
    give_up = end + 10
    while True:
        moment = now()
        while next_at <= moment and next_at < end:
            waiting.append(next_at)
            next_at += chance.expovariate(rate_per_s)
        while waiting and free:
            number = free.popleft()
            intended = waiting.popleft()
            if now() - intended > LATE_S and len(free) + 1 > connections // 2:
                late += 1
            due[number] = intended
            opened[number].send(requests[sent % len(requests)])
            sent += 1
        if next_at >= end and not due and not waiting:
            break
        ready = poller.poll(0)
        if not ready:
            if moment > give_up:
                errors += len(due) + len(waiting)
                break
            os.sched_yield()  # databases of the run may share this core
            continue
        for number, _ in ready:
            answer = opened[number].recv(65_536)
            latencies.append(now() - due.pop(number))
            if not answer.startswith(b"HTTP/1.1 200"):
                errors += 1
            free.append(number)
    poller.close()
    for item in opened.values():
        item.close()
    latencies.sort()

    def percentile(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(len(latencies) * share))] * 1_000

    return Latencies(
        sent,
        errors,
        percentile(0.5),
        percentile(0.99),
        percentile(0.999),
        latencies[-1] * 1_000,
        late / max(1, sent),
    )
