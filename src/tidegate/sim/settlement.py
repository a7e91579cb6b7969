"""The end of a world: what may have been lost, and whether everybody agrees on the rest.

Counts may be lost in two ways only. A node that crashes takes with it what it accepted in its last round trip. And an
origin that is wiped, or fails over to an older copy, forgets the parts of nodes that no longer live to tell it again:
such a cell is damaged. Everything else must be there at the end, for every node to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.core.cells import Cell
from tidegate.core.model import Component, Limit, subject_digest
from tidegate.core.windows import publish_threshold
from tidegate.sim.auditor import WORKSPACE, CellId, key_of
from tidegate.sim.plan import SubjectSpec

if TYPE_CHECKING:
    from tidegate.sim.life import Life
    from tidegate.sim.world import World

__all__ = ["Settlement"]


class Settlement:
    """The accounts of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        # (region, digest, sequence) of cells whose dead parts the origin has lost.
        self._damaged: set[tuple[str, bytes, int]] = set()
        # By how much the fastest clock was ahead when all were set right.
        self.ahead_ms = 0
        self._compared = 0
        self._agreed_total = 0
        self._lost_total = 0

    def describe(self) -> str:
        return (
            f"{self._compared} cells compared, {self._agreed_total} counted, "
            f"{self._lost_total} lost in crashes, {len(self._damaged)} cells damaged"
        )

    # -- losses

    def lose(self, region: str, accident: Callable[[], None]) -> None:
        """An accident befalls an origin: note which parts of the dead it takes."""
        memory = self._world.origins[region].memory
        before = memory.snapshot()
        accident()
        after = memory.snapshot()
        living = {life.node_id for life in self._world.lives.values() if life.is_running}
        if "subjects_max" in self._world.plan.tuning:
            # Who had to forget a subject cannot tell its part again either.
            living = set()
        for (digest, sequence), cell in before.cells.items():
            left = after.cells.get((digest, sequence))
            for writer, count in cell.components.items():
                kept = 0 if left is None else left.components.get(writer, 0)
                if kept < count and (writer not in living):
                    self._damaged.add((region, digest, sequence))

    def died(self, life: Life) -> None:
        """A life is over: what the origin had already lost of it will not be told again."""
        for (digest, sequence), count in life.acknowledged.items():
            if self._component(life, digest, sequence) < count:
                self._damaged.add((life.region, digest, sequence))

    def _component(self, life: Life, digest: bytes, sequence: int) -> int:
        wanted = Component(digest, sequence, life.node_id, 0, 0)
        return self._world.origins[life.region].memory.read_nowait([wanted])[0].component

    def check_crash(self, life: Life) -> None:
        """A crash loses the counts of the last round trip and no more, if the way to the origin was good."""
        world = self._world
        tuning = world.tuning
        if tuning.replay_cells_max < 50 or life.evictions or life.has_stepped:
            return
        network = world.weather.network
        way_ms = max(network.delay_ms, network.slow_ms if network.slow_percent else 0)
        round_trip_s = 2 * way_ms / 1000
        pardon_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.replay_timeout_ms) / 1000 + 1
        now_s = world.loop.time()
        if now_s - max(life.origin_link.troubled_s, life.born_s) < pardon_s or life.is_paused:
            return
        if world.origins[life.region].is_down or life.origin_link.is_cut:
            return
        lately_s = now_s - 2 * round_trip_s - 0.005
        unacknowledged: dict[tuple[bytes, int], int] = {}
        for at_s, digest, sequence, cost in life.accepted:
            place = (digest, sequence)
            if at_s < lately_s:
                unacknowledged[place] = unacknowledged.get(place, -life.acknowledged.get(place, 0)) + cost
        now_ms = life.clock.now_ms()
        for (digest, sequence), count in unacknowledged.items():
            duration_ms = world.auditor.cell_of(digest, sequence).key[2]
            if count > 0 and now_ms < (sequence + 3) * duration_ms:
                world.auditor.fail(
                    8,
                    f"{life.node_id} crashed and lost {count} that it had accepted before its last round trip",
                )

    def check_stop(self, life: Life, started_s: float) -> None:
        """A graceful stop loses nothing, if the way to the origin was good."""
        world = self._world
        tuning = world.tuning
        pardon_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.replay_timeout_ms) / 1000 + 1
        origin = world.origins[life.region]
        if max(life.origin_link.troubled_s, life.born_s) > started_s - pardon_s or life.origin_link.is_cut:
            return
        if origin.is_down or origin.is_frozen or life.evictions:
            return
        now_ms = life.clock.now_ms()
        for cell_id, lives in world.auditor.accepted.items():
            duration_ms = cell_id.key[2]
            if lives.get(life.node_id, 0) and now_ms + 1_000 < (cell_id.sequence + 3) * duration_ms:
                digest = subject_digest(*cell_id.key[:2], cell_id.identifier, duration_ms)
                # What the origin acknowledged and lost since, in a failover that no answer could show, was told.
                told = max(
                    self._component(life, digest, cell_id.sequence),
                    life.acknowledged.get((digest, cell_id.sequence), 0),
                )
                if (
                    told != lives[life.node_id]
                    and world.clock.now_ms() < (cell_id.sequence + 3) * duration_ms
                ):
                    world.auditor.fail(
                        8, f"{life.node_id} stopped with {told} of {lives[life.node_id]} told of {cell_id}"
                    )

    # -- agreement

    async def settle(self) -> None:
        """Peace: time passes, everybody looks at everything, and then all must agree."""
        world = self._world
        tuning = world.tuning
        turn_s = (tuning.publish_interval_ms + tuning.import_interval_ms) / 1000 * 1.3
        calm_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.ledger_timeout_ms) / 1000
        calm_s += (tuning.read_retry_ms + tuning.replay_timeout_ms + world.ledger.lag_ms) / 1000
        if any(event.kind == "ledger_rejects" for event in world.plan.events):
            calm_s += tuning.set_aside_ms * 32 / 1000
        # A clock that was ahead, and was set right, trusts what it had heard until its old deadline.
        calm_s += max(0, self.ahead_ms) / 1000
        await asyncio.sleep(calm_s + turn_s)
        for _ in range(2):
            await self._look()
            await asyncio.sleep(max(tuning.fresh_ms / 1000 + 0.1, turn_s + world.ledger.lag_ms / 1000))
        await self._look()
        world.sweep()
        if world.auditor.violations:
            return
        for spec, limits in zip(world.plan.subjects, world.limits, strict=True):
            sequence = world.clock.now_ms() // spec.duration_ms
            for one in (sequence - 1, sequence):
                self._compare(spec, CellId(key_of(limits[0]), spec.identifier, one))
        if not world.auditor.violations:
            self._repeat_everything()
            self._forget_everything()

    async def _look(self) -> None:
        """Every node looks at every subject, without consuming and without a limit: whatever is stale is read."""
        for life in self._world.lives.values():
            for spec in self._world.plan.subjects:
                boundless = Limit(
                    1 << 60, duration_ms=spec.duration_ms, namespace=spec.namespace, workspace=WORKSPACE
                )
                await life.limiter.limit(boundless, spec.identifier, 0)

    def _compare(self, spec: SubjectSpec, cell_id: CellId) -> None:
        world = self._world
        digest = subject_digest(WORKSPACE, spec.namespace, spec.identifier, spec.duration_ms)
        views: dict[str, dict[str, Cell]] = {}
        for life in world.lives.values():
            subject = life.engine.subjects.find(cell_id.key, cell_id.identifier)
            cell = None if subject is None else subject.cell(cell_id.sequence)
            if cell is not None:
                views.setdefault(life.region, {})[life.node_id] = cell
        for region in world.plan.regions:
            self._compare_region(region, digest, cell_id, views.get(region, {}))
        if "subjects_max" in world.plan.tuning:
            # Who may remember three subjects cannot remember what other regions said about a fourth.
            return
        if spec.duration_ms >= world.tuning.ledger_duration_ms_min:
            self._compare_world(cell_id, views)

    def _compare_region(self, region: str, digest: bytes, cell_id: CellId, views: dict[str, Cell]) -> None:
        """The nodes of a region agree with its origin, and the origin with the truth."""
        world = self._world
        accepted = world.auditor.accepted.get(cell_id, {})
        lives = [life for life in world.all_lives if life.region == region]
        living = {life.node_id for life in world.lives.values()}
        place = (digest, cell_id.sequence)
        highest = sum(accepted.get(life.node_id, 0) for life in lives)
        lowest = sum(
            accepted.get(life.node_id, 0) if life.node_id in living else life.acknowledged.get(place, 0)
            for life in lives
            if not life.engine.subjects.evicted_unreplayed
        )
        held = world.origins[region].memory.read_nowait([Component(*place, "", 0, 0)])[0].total
        damaged = (region, *place) in self._damaged
        if damaged:
            lowest = sum(accepted.get(node_id, 0) for node_id in living)
            lowest = min(lowest, highest)
        self._compared += 1
        self._agreed_total += held
        self._lost_total += highest - held
        if not damaged and not lowest <= held <= highest:
            world.auditor.fail(8, f"region {region} holds {held} of {cell_id}: not {lowest} to {highest}")
        if "subjects_max" in world.plan.tuning:
            return
        # A node may publish more than it has replayed, and crash: then the region's own row knows more.
        known = max(held, self._rows(cell_id).get(region, 0))
        for node_id, cell in views.items():
            view = cell.own + cell.others
            if view != known and not (damaged and cell.own <= view <= highest):
                world.auditor.fail(8, f"{node_id} believes {view} of {cell_id}, its region knows {known}")

    def _rows(self, cell_id: CellId) -> dict[str, int]:
        """What the ledger holds of a cell, by region."""
        return {
            row.region: row.regional
            for row in self._world.ledger.memory.rows()
            if (row.workspace, row.namespace, row.duration_ms) == cell_id.key
            and (row.identifier, row.sequence) == cell_id[1:]
        }

    def _compare_world(self, cell_id: CellId, views: dict[str, dict[str, Cell]]) -> None:
        """The regions agree through the ledger, and those that stay silent hold little (9)."""
        world = self._world
        rows = self._rows(cell_id)
        regions = len(world.plan.regions)
        silent = 0
        limits: list[int] = []
        for region, nodes in views.items():
            known = max(cell.own + cell.others for cell in nodes.values())
            told = rows.get(region, 0)
            limit = min(
                (cell.ledger.quota_min for cell in nodes.values() if cell.ledger and cell.ledger.quota_min),
                default=0,
            )
            should = bool(rows.keys() - {region}) or (limit and known >= publish_threshold(limit, regions))
            if should and known > 0 and told != known:
                world.auditor.fail(8, f"region {region} has {known} of {cell_id}, and published {told}")
            if not told and limit:
                silent += known
                limits.append(limit)
        if limits and regions > 1 and silent * 2 > max(limits):
            world.auditor.fail(9, f"silent regions hold {silent} of {cell_id}, limit {max(limits)}")
        for region, nodes in views.items():
            foreign = {other: count for other, count in rows.items() if other != region}
            for node_id, cell in nodes.items():
                heard = (
                    {} if cell.ledger is None or cell.ledger.components is None else cell.ledger.components
                )
                if dict(heard) != foreign:
                    world.auditor.fail(8, f"{node_id} knows {heard} of {cell_id}, the ledger says {foreign}")

    # -- after the end

    def _repeat_everything(self) -> None:
        """Deliver everything once more, in another order: nothing may change (5)."""
        world = self._world
        for region, origin in world.origins.items():
            before = origin.memory.snapshot()
            again = [
                Component(digest, sequence, writer, own, cell.expires_at_ms)
                for (digest, sequence), cell in before.cells.items()
                for writer, own in cell.components.items()
            ]
            again += [one._replace(own=one.own // 2) for one in again]
            world.weather.random.shuffle(again)
            origin.memory.merge_nowait(again)
            if origin.memory.snapshot().cells != before.cells:
                world.auditor.fail(5, f"the origin of {region} changed when it heard everything again")
        rows = world.ledger.memory.rows()
        world.weather.random.shuffle(rows)
        for life in world.lives.values():
            if "subjects_max" in world.plan.tuning:
                continue
            before_ms = life.clock.now_ms()
            counts = _counts(life)
            life.node.ledger_sync.apply_import([*rows, *reversed(rows)], before_ms)
            if any(count != 0 and counts.get(place) != count for place, count in _counts(life).items()):
                world.auditor.fail(5, f"{life.node_id} changed when it imported everything again")

    def _forget_everything(self) -> None:
        """Long after the end nothing is remembered (10)."""
        for life in self._world.lives.values():
            subjects = life.engine.subjects
            subjects.expire(life.clock.now_ms() + 10**9, 1 << 60)
            if subjects.count:
                self._world.auditor.fail(10, f"{life.node_id} still remembers {subjects.count} subjects")


def _counts(life: Life) -> dict[tuple[int, int], int]:
    return {
        (subject.slot, cell.sequence): cell.total()
        for subject in life.engine.subjects.slots
        if subject is not None
        for cell in subject.cells()
    }
