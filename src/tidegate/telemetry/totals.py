"""Metrics of several worker processes, summed so that counters never fall when a worker is replaced.

Prometheus treats a counter that falls as restarted, and would count the other workers a second time. So the counters of
a worker that ended stay in the totals; its gauges are dropped. No I/O: the server passes the snapshots in.
"""

from __future__ import annotations

from tidegate.telemetry.metrics import Snapshot, merge, metric

__all__ = ["Totals"]


class Totals:
    """Call `update` with new snapshots and `retire` when a worker has ended; render `snapshots()`."""

    def __init__(self) -> None:
        self._retired = Snapshot("retired", {})
        self._live: dict[str, Snapshot] = {}

    def update(self, snapshot: Snapshot) -> None:
        """Replace the snapshot of one worker, identified by its node id, which is new at every start."""
        self._live[snapshot.node] = snapshot

    def retire(self, node: str) -> None:
        """A worker ended: keep its counters. A repeated call, or an unknown node, changes nothing."""
        ended = self._live.pop(node, None)
        if ended is None:
            return
        counters = {key: value for key, value in ended.values.items() if metric(key[0]).kind == "counter"}
        self._retired = merge([self._retired, Snapshot("", counters, ended.histograms)])

    def snapshots(self) -> list[Snapshot]:
        """The snapshots to render: every running worker, and the counters of those that ended."""
        workers = Snapshot("workers", {("workers", ()): len(self._live)})
        return [*self._live.values(), self._retired, workers]
