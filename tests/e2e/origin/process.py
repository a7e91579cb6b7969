"""A node in a process of its own, driven over its standard input and output, one JSON document a line.

Run as a program it is the node, with the thread driver; `NodeProcess` is the test's end of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.e2e.origin.audit import DEADLINE_S, LIMIT, REGION, ShiftedClock, until
from tidegate import Limit, Tuning
from tidegate.testing.limiters import make_limiter

ROOT = Path(__file__).parents[3]


class NodeProcess:
    """A node that can be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.accepted: dict[str, int] = {}
        self.node_id = ""

    @classmethod
    async def start(cls, url: str, clock: ShiftedClock, tuning: dict[str, Any]) -> NodeProcess:
        settings = {"url": url, "offset_ms": clock.offset_ms, "tuning": tuning}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.e2e.origin.process",
            json.dumps(settings),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        node = cls(process)
        node.node_id = (await node.ask("hello"))["node_id"]
        return node

    async def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        async with asyncio.timeout(DEADLINE_S):
            line = await self._process.stdout.readline()
        assert line, f"the node ended instead of answering {verb}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def accept(self, identifier: str, times: int, threads: int = 1, quota: int = LIMIT.quota) -> int:
        answer = await self.ask("accept", identifier=identifier, times=times, threads=threads, quota=quota)
        accepted = int(answer["accepted"])
        self.accepted[identifier] = self.accepted.get(identifier, 0) + accepted
        return accepted

    async def seen(self, identifier: str) -> int:
        return int((await self.ask("seen", identifier=identifier))["effective"])

    async def delivered(self) -> None:
        """Return when everything accepted so far has been acknowledged."""

        async def is_delivered() -> bool:
            return bool((await self.ask("lag"))["is_delivered"])

        await until(is_delivered, "all counts of the node to be acknowledged")

    async def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Stop it gracefully, with the last flush."""
        await self.ask("stop")
        await self._process.wait()


def main(settings: dict[str, Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    clock = ShiftedClock(settings["offset_ms"])
    with make_limiter(
        region=REGION, origin=settings["url"], clock=clock, tuning=Tuning(**settings["tuning"])
    ) as limiter:
        for line in sys.stdin:
            order = json.loads(line)
            answer: dict[str, Any] = {}
            if order["verb"] == "hello":
                answer = {"node_id": limiter.statistics().node_id}
            elif order["verb"] == "accept":
                times, threads, name = order["times"], order["threads"], order["identifier"]
                limit = Limit(order["quota"], duration_ms=LIMIT.duration_ms, namespace=LIMIT.namespace)

                def accept(count: int, name: str = name, limit: Limit = limit) -> int:
                    return sum(bool(limiter.wait(limit, name, timeout=0.2)) for _ in range(count))

                with ThreadPoolExecutor(threads) as crowd:
                    answer = {"accepted": sum(crowd.map(accept, [times // threads] * threads))}
            elif order["verb"] == "seen":
                answer = {"effective": limiter.peek(LIMIT, order["identifier"]).effective}
            elif order["verb"] == "lag":
                statistics = limiter.statistics()
                is_delivered = statistics.origin_dirty_subjects == 0 and statistics.replay_lag_s == 0.0
                answer = {"is_delivered": is_delivered}
            elif order["verb"] == "stop":
                limiter.stop()
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            if order["verb"] == "stop":
                return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
