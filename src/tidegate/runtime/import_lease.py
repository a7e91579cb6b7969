"""The lease by which one node imports for its region, and what the nodes share about the database (the ledger).

One node holds a lease at Redis (the origin), imports for all nodes of its region, and writes the counts of other
regions to the origin. The other nodes do not read the ledger while the origin answers. Every node requests the lease a
few times a second: a holder that stops, crashes or hangs is replaced within two seconds, and the next one continues
from its cursor. Two holders at once do no harm. While the origin does not answer, every node imports and publishes for
itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from tidegate.core.gate import Gate
from tidegate.core.ledger_sync import LedgerSync
from tidegate.core.model import Tuning
from tidegate.core.sharing import ImportState, Lease, Share, ShareReply
from tidegate.core.sweep import Sweep
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls

__all__ = ["ImportLease"]

logger: Final = logging.getLogger(__name__)

# A holder whose import has made no progress for this long gives the lease back: its connection to the ledger hangs.
STALLED_AFTER_S: Final = 1.5
# After a failed import a node leaves the lease to others for a random time, from this to twice this.
BACK_OFF_S: Final = 1.0


class ImportLease:
    """One node's side of the lease: requests it, renews it, and keeps what the origin answered."""

    def __init__(
        self,
        origin: Origin,
        node_id: str,
        gate: Gate,
        sync: LedgerSync,
        sweep: Sweep,
        tuning: Tuning,
        random: Random,
        *,
        is_usable: Callable[[], bool],
        can_import: Callable[[], bool],
        can_publish: Callable[[], bool],
        on_change: Callable[[], object],
    ) -> None:
        self._origin = origin
        self.node_id: Final[str] = node_id
        self._gate = gate
        self._sync = sync
        self._sweep = sweep
        self._random = random
        self._life_ms = tuning.import_lease_ms
        # For this long after an answer the nodes of the region act together.
        self._shared_s = 2 * tuning.import_lease_ms / 1000
        self._interval_s = tuning.import_lease_interval_ms / 1000
        self._jitter = tuning.jitter_percent / 100
        self._timeout_s = tuning.read_timeout_ms / 1000
        self._share_timeout_s = tuning.replay_timeout_ms / 1000
        self._is_usable = is_usable
        self._can_import = can_import
        self._can_publish = can_publish
        # Called when this node starts or stops importing for its region, or for itself.
        self._on_change = on_change
        self.calls: Final[Calls] = Calls("origin_share", tuning, is_usable)
        self.lease: Lease | None = None
        # Loop times: of this node's start; of the last answer; when its lease ends; of the last progress of its import;
        # until when it leaves the lease to others.
        self._began_s = float("-inf")
        self._answered_s = float("-inf")
        self._held_until_s = float("-inf")
        self._progress_s = 0.0
        self._backs_off_until_s = float("-inf")
        # The progress of the import; stored at the origin with the lease.
        self.state: ImportState = ImportState()
        # How often this node has loaded `state` from the origin. Each time, the import continues from there.
        self.terms: int = 0
        self._losses = 0
        self._was = (False, False)

    # -- state

    @property
    def is_shared(self) -> bool:
        """The origin answers: one node imports for all, and the origin says which node publishes."""
        return self._is_shared_at(asyncio.get_running_loop().time())

    @property
    def says_who_publishes(self) -> bool:
        """The origin says which node publishes. A node that has just started waits for its first answer."""
        now_s = asyncio.get_running_loop().time()
        return self._is_shared_at(now_s) or (self._is_usable() and now_s - self._began_s <= self._shared_s)

    def _is_shared_at(self, now_s: float) -> bool:
        return self._is_usable() and now_s - self._answered_s <= self._shared_s

    @property
    def is_holder(self) -> bool:
        """This node imports for its region."""
        return self.is_shared and asyncio.get_running_loop().time() < self._held_until_s

    def origin_ms(self) -> int:
        """The origin's time."""
        assert self.lease is not None
        return self.lease.time_ms + int((asyncio.get_running_loop().time() - self._answered_s) * 1000)

    def note_progress(self) -> None:
        """Record that the import has made progress."""
        self._progress_s = asyncio.get_running_loop().time()

    def back_off(self) -> None:
        """Leave the import to another node for a moment: the ledger does not answer this one."""
        now_s = asyncio.get_running_loop().time()
        self._backs_off_until_s = now_s + BACK_OFF_S * (1 + self._random.random())
        self._held_until_s = now_s

    async def share(self, shares: Sequence[Share]) -> list[ShareReply]:
        """Write to the origin what the ledger holds. Raises a `DependencyError`."""
        return await self.calls.call(
            ["share"],
            lambda timeout_s: self._origin.share(shares, timeout_s=timeout_s),
            self._share_timeout_s,
        )

    # -- the lease

    async def run_once(self) -> bool:
        """Request the lease, or renew it. False when the origin does not answer."""
        if not self._is_usable():
            self._note_change()
            return False
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        was_holder = self.is_holder
        if was_holder and asked_s - self._progress_s > STALLED_AFTER_S:
            self.back_off()
        wants = self._can_import() and asked_s >= self._backs_off_until_s
        losses = self._sweep.losses
        try:
            async with asyncio.timeout(self._timeout_s):
                lease = await self._origin.lease(
                    self.node_id,
                    life_ms=self._life_ms if wants else 0,
                    state=self.state if was_holder else None,
                    has_lost=losses > self._losses,
                    timeout_s=self._timeout_s,
                )
        except (DependencyError, TimeoutError):
            self._note_change()
            return False
        self._losses = losses
        self._apply(lease, asked_s, wants)
        return True

    def _apply(self, lease: Lease, asked_s: float, wants: bool) -> None:
        loop = asyncio.get_running_loop()
        known = self.lease
        # If its start is new, another node has imported, or the origin has lost its data and what was imported. If it
        # had only ended for a moment, this node continues: it has read more than the origin knows of. But an origin
        # that knows something else than it answered last may be an older copy.
        is_new = (
            known is None
            or lease.since_ms != known.since_ms
            or (asked_s >= self._held_until_s and lease.state != known.state)
        )
        self.lease = lease
        self._answered_s = loop.time()
        is_mine = lease.holder == self.node_id and wants
        if is_mine and is_new:
            self.terms += 1
            self.state = lease.state
        if is_mine and asked_s >= self._held_until_s:
            self._progress_s = loop.time()  # it begins now, or again
        # From before the message was sent, so that it ends here before it ends at the origin.
        self._held_until_s = asked_s + self._life_ms / 1000 if is_mine else asked_s
        state = lease.state
        if is_mine and self.state.epoch > state.epoch:
            state = self.state
        with self._gate:
            self._sync.can_publish = self._can_publish()
            # Not later than `is_shared` ends: the origin has read its clock before the answer arrived.
            self._sync.alone_at_ms = lease.time_ms + 2 * self._life_ms
            if state.imported_at_ms >= 0:
                age_ms = max(0, lease.time_ms - state.imported_at_ms)
                self._sync.apply_lease(age_ms, state.regions, state.lag_ms, self._gate.now_ms())
            if state.epoch > self._sync.epoch:
                self._sync.epoch = state.epoch
                self._sweep.start_take_back()
        self._note_change()

    def _note_change(self) -> None:
        now = (self.is_shared, self.is_holder)
        if not now[0]:
            # Messages from now on know what this node publishes for itself.
            with self._gate:
                self._sync.alone_at_ms = 0
        if now != self._was:
            if now[1] != self._was[1]:
                logger.info(
                    "node %s %s for its region", self.node_id, "imports" if now[1] else "no longer imports"
                )
            self._was = now
            self._on_change()

    async def run(self) -> None:
        """The loop, until cancelled."""
        self._began_s = asyncio.get_running_loop().time()
        while True:
            await self.run_once()
            await asyncio.sleep(self._interval_s * (1 + self._jitter * (self._random.random() - 0.5)))

    async def release(self) -> None:
        """Give the lease back when the node stops. Another one gets it with its next request."""
        if self.is_holder:
            self._held_until_s = float("-inf")
            try:
                await self._origin.lease(self.node_id, life_ms=0, state=self.state, timeout_s=self._timeout_s)
            except DependencyError:
                logger.debug("the import lease could not be given back; it expires by itself")

    def statistics(self, now_s: float) -> dict[str, object]:
        """The fields of `Statistics` about the import."""
        lease = self.lease
        if lease is None or not self._is_shared_at(now_s):
            return {}
        is_importer = now_s < self._held_until_s
        imported_at_ms = self.state.imported_at_ms if is_importer else lease.state.imported_at_ms
        origin_ms = lease.time_ms + (now_s - self._answered_s) * 1000
        return {
            "importer": lease.holder,
            "is_importer": is_importer,
            "importer_for_s": max(0.0, (origin_ms - lease.since_ms) / 1000),
            "import_age_s": None if imported_at_ms < 0 else max(0.0, (origin_ms - imported_at_ms) / 1000),
        }
