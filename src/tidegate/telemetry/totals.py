"""The numbers of several worker processes over time, so that counters never fall when a worker is replaced.

A scraper takes a counter that falls for one that started again and would count the survivors' numbers a second time.
So what a worker had counted when it went stays in the totals; its gauges go with it. No I/O: the server brings the
snapshots, by whatever means its processes talk.
"""

from __future__ import annotations

from tidegate.telemetry.metrics import Snapshot, merge, metric

__all__ = ["Totals"]


class Totals:
    """Feed it with `update`; tell it with `retire` that a worker is gone; render `snapshots()`."""

    def __init__(self) -> None:
        self._retired = Snapshot("retired", {})
        self._live: dict[str, Snapshot] = {}

    def update(self, snapshot: Snapshot) -> None:
        """The newest numbers of one worker, known by its node id, which is new at every start."""
        self._live[snapshot.node] = snapshot

    def retire(self, node: str) -> None:
        """The worker is gone. Its counts stay; calling it again, or for an unknown node, changes nothing."""
        gone = self._live.pop(node, None)
        if gone is None:
            return
        counters = {key: value for key, value in gone.values.items() if metric(key[0]).kind == "counter"}
        self._retired = merge([self._retired, Snapshot("", counters, gone.histograms)])

    def snapshots(self) -> list[Snapshot]:
        """What to render: every live worker, and what the departed ones left behind."""
        workers = Snapshot("workers", {("workers", ()): len(self._live)})
        return [*self._live.values(), self._retired, workers]
