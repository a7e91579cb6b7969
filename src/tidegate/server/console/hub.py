"""Sends events to viewers: one tick a second while there is a viewer, and nothing otherwise.

Every viewer of a workspace gets the same bytes, made once. Laws: viewers are bounded in number, in all and for each
key; a viewer that does not read gets no more until it does, so that nothing is queued for it beyond what its connection
holds; a session that has ended gets no further event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tidegate.server.console.documents import Report, document, merge_identifier, point
from tidegate.server.console.local import Ask
from tidegate.server.messages import Subscriber

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
FIRST_INTERVAL_S: Final = 0.25
# All together cost a few milliseconds of CPU in a second (bench/RESULTS.md), and each usually 3 to 8 kB/s of network.
STREAMS_MAX: Final = 32
# A person opens a few tabs; more would exclude other viewers.
STREAMS_PER_KEY_MAX: Final = 12
# Five minutes of points.
HISTORY_MAX: Final = 300


class Viewer(NamedTuple):
    """One stream."""

    subscriber: Subscriber
    key_id: str
    workspace: str
    namespace: str | None
    """With `identifier`: the identifier to follow, in this namespace (by id) or in all."""
    identifier: str | None


class TooManyViewers(Exception):
    """No further stream is opened."""


def event(name: str, data: object) -> bytes:
    """One server-sent event. JSON in ASCII has no line breaks, whatever the values hold."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


class Hub:
    """One per process."""

    def __init__(self, ask: Ask, now_ms: Callable[[], int], is_valid: Callable[[str], bool]) -> None:
        """`is_valid`: whether the holder of a key may view the console."""
        self._ask = ask
        self._now_ms = now_ms
        self._is_valid = is_valid
        self._viewers: list[Viewer] = []
        self._task: asyncio.Task[None] | None = None
        self._before: dict[str, dict[str, Report]] = {}
        self._last: dict[str, dict[str, Any]] = {}
        self.history: deque[list[float | None]] = deque(maxlen=HISTORY_MAX)
        # Events that were not sent because a viewer did not read.
        self.dropped = 0

    def check_room(self, key_id: str) -> None:
        """Raises `TooManyViewers`."""
        if len(self._viewers) >= STREAMS_MAX:
            raise TooManyViewers(f"This worker has {STREAMS_MAX} viewers already. Close one.")
        if sum(viewer.key_id == key_id for viewer in self._viewers) >= STREAMS_PER_KEY_MAX:
            raise TooManyViewers(f"This key has {STREAMS_PER_KEY_MAX} streams already. Close a tab.")

    def add(self, viewer: Viewer) -> Callable[[], None]:
        """Send to this viewer until the function that is returned is called."""
        self._viewers.append(viewer)
        # The browser connects again by itself after so many milliseconds, and the history fills the charts at once.
        viewer.subscriber.push(b"retry: 2000\n\n" + event("history", list(self.history)))
        last = self._last.get(viewer.workspace)
        if last is not None:
            viewer.subscriber.push(event("tick", last))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

        def remove() -> None:
            if viewer in self._viewers:
                self._viewers.remove(viewer)

        return remove

    async def _run(self) -> None:
        """Ticks, as long as there is a viewer."""
        try:
            while self._viewers:
                try:
                    await self.run_once()
                except Exception:
                    logger.exception("the console could not collect what it shows")
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._task = None
            self._before.clear()
            self._last.clear()

    async def run_once(self) -> None:
        """One tick."""
        self._end_invalid()
        for workspace in {viewer.workspace for viewer in self._viewers}:
            shown = await self._collect(workspace)
            self._send(event("tick", shown), [each for each in self._viewers if each.workspace == workspace])
        if self._last:
            self.history.append(point(next(iter(self._last.values()))))
        watched = {
            (viewer.workspace, viewer.namespace, viewer.identifier)
            for viewer in self._viewers
            if viewer.identifier is not None
        }
        for followed in watched:
            found = await self.identifier(followed[0], followed[1], followed[2] or "")
            self._send(event("identifier", found), [each for each in self._viewers if each[2:] == followed])

    def _end_invalid(self) -> None:
        for viewer in [viewer for viewer in self._viewers if not self._is_valid(viewer.key_id)]:
            viewer.subscriber.push(event("signed-out", {}))
            viewer.subscriber.end()
            if viewer in self._viewers:
                self._viewers.remove(viewer)

    def _send(self, data: bytes, viewers: list[Viewer]) -> None:
        for viewer in viewers:
            if not viewer.subscriber.push(data):
                self.dropped += 1

    async def _collect(self, workspace: str) -> dict[str, Any]:
        if workspace not in self._before:
            # Rates need two reports: the first viewer must not see zeros for a second.
            self._keep(workspace, await self._reports(workspace))
            await asyncio.sleep(FIRST_INTERVAL_S)
        reports = await self._reports(workspace)
        shown = document(self._before.get(workspace, {}), reports, self._now_ms())
        self._keep(workspace, reports)
        self._last[workspace] = shown
        return shown

    async def _reports(self, workspace: str) -> list[Report]:
        return await self._ask({"kind": "report", "workspace": workspace})

    def _keep(self, workspace: str, reports: list[Report]) -> None:
        for gone in self._before.keys() - {viewer.workspace for viewer in self._viewers}:
            del self._before[gone]
            self._last.pop(gone, None)
        self._before[workspace] = {report["node"]: report for report in reports}

    async def snapshot(self, workspace: str) -> dict[str, Any]:
        """What a viewer sees now, also if there is none: then it takes a second to find rates."""
        last = self._last.get(workspace)
        if last is not None and self._now_ms() - last["at_ms"] < 2 * INTERVAL_S * 1000:
            return last
        before = await self._reports(workspace)
        await asyncio.sleep(INTERVAL_S)
        reports = await self._reports(workspace)
        return document({report["node"]: report for report in before}, reports, self._now_ms())

    async def identifier(self, workspace: str, namespace: str | None, identifier: str) -> dict[str, Any]:
        """An identifier as all workers know it."""
        asked = {
            "kind": "identifier",
            "workspace": workspace,
            "namespace": namespace,
            "identifier": identifier,
        }
        return {"identifier": identifier, **merge_identifier(await self._ask(asked))}

    async def stop(self) -> None:
        """End all streams."""
        for viewer in list(self._viewers):
            viewer.subscriber.end()
        self._viewers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
