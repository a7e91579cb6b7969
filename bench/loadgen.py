"""Compiles and runs the open-loop load generator (`openloop.c`), and returns its results."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Generator", "Latencies"]

SOURCE = Path(__file__).parent / "openloop.c"


class Latencies(NamedTuple):
    """Latencies of one run, in milliseconds from the moment at which each request should have been sent."""

    sent: int
    errors: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    sent_late: float
    """Share of requests sent more than a millisecond late with a free connection: the generator was too slow."""
    is_real_time: bool
    """The generator ran with real-time priority on its core."""
    tenths: Sequence[int]
    """Answers in each tenth of a second."""


class Generator:
    """Compiled into `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._program = directory / "openloop"
        subprocess.run(["cc", "-O2", "-o", str(self._program), str(SOURCE), "-lm"], check=True)

    def requests(self, name: str, requests: Sequence[bytes]) -> Path:
        """A file of requests, for `run`."""
        path = self._directory / f"{name}.requests"
        path.write_bytes(b"".join(struct.pack("<I", len(each)) + each for each in requests))
        return path

    def run(
        self, port: int, requests: Path, *, rate_per_s: float, seconds: float, connections: int, seed: int = 1
    ) -> Latencies:
        """Send the requests in turn at `rate_per_s`, Poisson arrivals, for `seconds`; at 0 as fast as they are
        answered."""
        values = (port, rate_per_s, seconds, connections, seed, requests)
        output = subprocess.run(
            [str(self._program), *map(str, values)], capture_output=True, text=True, check=True
        ).stdout
        return Latencies(**json.loads(output))
