"""Checks resets in a simulation, on separate counters (probes) that the other checks leave out.

Each request before the reset of a probe costs 1,000, each one after it costs 1. So a node that has applied the reset
and counts 1,000 or more has counted something from before it: a late replay, credit message, publish or import, or a
store that lost data, has brought it back. After all faults are removed, every node must learn of a reset that one of
them knows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tidegate.core.model import Limit

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess
    from tidegate.sim.simulation import Simulation

__all__ = ["BEFORE_COST", "PROBES_WORKSPACE", "ResetCheck"]

PROBES_WORKSPACE: Final = "probes"
BEFORE_COST: Final = 1_000
# So long that no clock of a simulation is in another window, which the reset would not cover.
PROBE: Final = Limit(10_000, duration_ms=120_000, namespace="resets", workspace=PROBES_WORKSPACE)
# Virtual time until all nodes have it when nothing fails: they may have to wait for a full read of the ledger.
SPREAD_S: Final = 40.0


class ResetCheck:
    """Makes requests and resets of probes, and judges them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._names: dict[str, None] = {}
        # By probe: requests from before the reset that were decided after it, because they waited.
        self._late: dict[str, int] = {}
        self.made = 0

    def _know(self, number: int) -> str:
        name = f"probe-{number}"
        if name not in self._names:
            self._names[name] = None
            self._simulation.auditor.know_probe((PROBES_WORKSPACE, PROBE.namespace, PROBE.duration_ms), name)
        return name

    async def request(self, process: NodeProcess, number: int, cost: int) -> None:
        name = self._know(number)
        decision = await process.limiter.limit(PROBE, name, cost)
        if decision and cost == BEFORE_COST and process.engine.resets.generation_of(PROBE.key, name):
            self._late[name] = self._late.get(name, 0) + 1

    async def reset(self, process: NodeProcess, number: int) -> None:
        self.made += 1
        await process.limiter.reset(PROBE, self._know(number))

    def sweep(self, process: NodeProcess) -> None:
        for name in self._names:
            subject = process.engine.subjects.find(PROBE.key, name)
            if subject is None or subject.generation == 0:
                continue
            known = max(cell.total() for cell in subject.cells())
            # A late request may also be counted twice after a loss.
            if known >= BEFORE_COST * (1 + 3 * self._late.get(name, 0)):
                self._simulation.auditor.fail(
                    5, f"{process.node_id} knows {known} of {name}, which was reset: old counts came back"
                )

    def _running(self) -> list[NodeProcess]:
        return [process for process in self._simulation.processes.values() if process.is_running]

    def _generation(self, process: NodeProcess, name: str) -> int:
        return process.engine.resets.generation_of(PROBE.key, name)

    async def check(self) -> None:
        """All faults are removed: a reset that one node knows must reach all nodes."""
        latest = {
            name: max(self._generation(process, name) for process in self._running()) for name in self._names
        }
        deadline_s = self._simulation.loop.time() + SPREAD_S
        while True:
            behind = [
                (process.node_id, name)
                for process in self._running()
                for name, generation in latest.items()
                if self._generation(process, name) < generation
            ]
            if not behind or self._simulation.loop.time() >= deadline_s:
                break
            await asyncio.sleep(0.25)
        for node_id, name in behind:
            self._simulation.auditor.fail(8, f"{node_id} does not know that {name} was reset")
        for process in self._running():
            for name in self._names:
                await process.limiter.peek(PROBE, name)
            self.sweep(process)
