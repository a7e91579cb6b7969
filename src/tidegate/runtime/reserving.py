"""Reservations of a node with Redis (an origin): how they are taken, kept and ended (docs/adr/0021-reservations.md).

Taking one is a message for credit under a writer of its own, then a claim that makes it last. It does not spend the
credit of the node: the origin decides alone, so that every node can end it, and it stays when the node stops.
If the origin does not answer, a reservation is decided and held in memory; when it answers again, it says whether it
holds it as well.

The end is one claim, which counts what was used in the same step. A node that gets no answer repeats it until there is
one. If the origin does not know the reservation, the node that took it counts what was used itself: not before all
messages about it have arrived or are lost, because a late one could still have the origin count it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from tidegate.core.engine import Engine
from tidegate.core.gate import Gate
from tidegate.core.grants import CellPart, CreditReply, CreditRequest, Run
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Tuning, subject_digest
from tidegate.core.reservations import (
    ENDED,
    ENDED_BEFORE,
    ENDED_MS,
    GONE,
    HELD,
    Claim,
    ClaimReply,
    are_same_counters,
    reserved_bytes,
)
from tidegate.errors import DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls
from tidegate.runtime.reservation import Ending, Item, Taken

__all__ = ["Reserving"]

# How long a reservation waits for other nodes to give back credit: longer than a request, whose work is shorter.
PATIENCE_S: Final = 0.1
PAUSE_S: Final = 0.005
# Between two tries to end what got no answer.
RETRY_S: Final = 1.0
# The `retry_after` of a refusal that counts do not explain: by then other nodes have given credit back, or are known
# not to.
RETRY_HELD_MS: Final = 100
# So long after a message about a reservation got no answer, it is not on its way any more.
LATE_S: Final = 10.0
# Of those, how many are looked up in one turn.
UNSURE_PER_TURN: Final = 100
# Ends that wait for the origin, and their memory, by estimate. Further ones are counted in memory at once: if the
# origin has not lost the reservation, it holds it for the rest of its life too.
WAITING_MAX: Final = 10_000
WAITING_BYTES_MAX: Final = 10_000_000


class _End(NamedTuple):
    """An end that the origin has not confirmed."""

    items: list[Item]
    """With what was used."""
    at_ms: int
    sure_s: float
    """Time of the event loop until which an earlier message about it may arrive."""


class Reserving:
    """One node's reservations at its origin."""

    def __init__(
        self,
        origin: Origin,
        gate: Gate,
        engine: Engine,
        tuning: Tuning,
        *,
        is_usable: Callable[[], bool],
        on_work: Callable[[], object],
    ) -> None:
        self._origin = origin
        self._gate = gate
        self._engine = engine
        # Called when counts have to be reported or published.
        self._on_work = on_work
        self._timeout_s = tuning.read_timeout_ms / 1000
        self.calls: Final[Calls] = Calls(
            "origin_reserve", tuning, is_usable, carries="ends of reservations and resets"
        )
        # Ends that got no answer.
        self._waiting: dict[str, _End] = {}
        self._waiting_bytes = 0
        # Taken without an answer of the origin, which may hold them or not: what, until when, and how long messages may
        # be late.
        self._unsure: dict[str, tuple[list[Item], int, float]] = {}

    @property
    def waiting(self) -> list[str]:
        """The names of reservations whose end the origin has not confirmed. A crash loses these ends."""
        return list(self._waiting)

    # -- taking

    async def take(self, items: list[Item], new_name: Callable[[], str], life_ms: int, at_ms: int) -> Taken:
        """Reserve all or nothing."""
        with self._gate:
            self._engine.reservations.expire(self._gate.now_ms())
            if not self._engine.reservations.has_room(items):
                # Looked at again when it is taken; here, so that a refusal costs the origin nothing.
                return Taken("", items, [], 0)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while True:
            name = new_name()
            try:
                replies = await self._ask(items, name, at_ms)
                missing = [
                    i for i, reply in enumerate(replies) if items[i][2] > 0 and reply.granted < items[i][2]
                ]
                if not missing:
                    return await self._keep(items, name, life_ms, at_ms)
            except DependencyError:
                taken = self._take_here(items, name, life_ms, at_ms, DEGRADED)
                if taken.name:
                    self._unsure[name] = (items, taken.until_ms, loop.time() + LATE_S)
                else:
                    self._let_go_later(items, name, at_ms)
                return taken
            await self._let_go(items, name, at_ms)
            can_fit = all(replies[i].spare > replies[i].firm + replies[i].stuck for i in missing)
            if not can_fit or loop.time() >= deadline_s:
                held = [
                    (each.firm, each.following) if i in missing else None for i, each in enumerate(replies)
                ]
                return self._refuse(items, held, at_ms)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, items: list[Item], name: str, at_ms: int) -> list[CreditReply]:
        with self._gate:
            messages = [self._message(item, name, at_ms) for item in items]
        return await self.calls.call(
            ["reserve"],
            lambda timeout_s: self._origin.exchange(messages, timeout_s=timeout_s),
            self._timeout_s,
        )

    def _message(self, item: Item, name: str, at_ms: int) -> CreditRequest:
        limit, identifier, cost = item
        engine = self._engine
        subject = engine.subjects.find(limit.key, identifier)
        sequence = at_ms // limit.duration_ms
        cells = []
        for each in (sequence, sequence - 1):
            cell = None if subject is None else subject.cell(each)
            # Without what this node has counted: its own messages report that, and its hold covers what they have not.
            others, foreign = (0, 0) if cell is None else (cell.others, cell.foreign)
            cells.append(CellPart(each, 0, others, foreign))
        engine.message_number += 1
        return CreditRequest(
            _digest(item),
            name,
            engine.message_number,
            limit.duration_ms,
            tuple(cells),
            limit.quota,
            at_ms,
            (Run(at_ms, cost, 1),) if cost > 0 else (),
            0,
            0,
            self._origin.rules.life_ms,
            generation=engine.resets.generation_of(limit.key, identifier),
        )

    async def _keep(self, items: list[Item], name: str, life_ms: int, at_ms: int) -> Taken:
        replies = await self._claim(items, name, at_ms, is_final=False, life_ms=life_ms)
        if any(reply.state != HELD for reply in replies):
            # The subject has as many reservations as it may have, or the origin lost this one at once.
            await self._let_go(items, name, at_ms)
            return self._refuse(items, [(0, 0) if reply.state != HELD else None for reply in replies], at_ms)
        taken = self._take_here(items, name, life_ms, at_ms, ORIGIN)
        if not taken.name:
            # More is known here than at the origin.
            await self._let_go(items, name, at_ms)
        return taken

    async def _let_go(self, items: list[Item], name: str, at_ms: int) -> None:
        """Free what the origin holds of a reservation that is refused, now or later. Its name must not be used again:
        this message may arrive late, and ends what has the name then."""
        try:
            await self._claim(items, name, at_ms, is_final=True, life_ms=1, amount=0)
        except DependencyError:
            self._let_go_later(items, name, at_ms)

    def _let_go_later(self, items: list[Item], name: str, at_ms: int) -> None:
        """The origin may still hold it: report that nothing was used."""
        self._wait(name, [(limit, who, 0) for limit, who, _ in items], at_ms, 0.0)

    def _take_here(self, items: list[Item], name: str, life_ms: int, at_ms: int, source: int) -> Taken:
        with self._gate:
            wall_ms = self._gate.now_ms()
            until_ms = wall_ms + life_ms
            decisions = self._engine.reserve(items, name, at_ms, wall_ms, until_ms, source)
        return Taken(name if decisions and all(decisions) else "", items, decisions, until_ms)

    def _refuse(self, items: list[Item], held: list[tuple[int, int] | None], at_ms: int) -> Taken:
        with self._gate:
            decisions: list[Decision] = self._engine.refuse_held(
                items, held, RETRY_HELD_MS, at_ms, self._gate.now_ms()
            )
        return Taken("", items, decisions, 0)

    # -- ending

    async def end(self, name: str, items: list[Item], *, is_first: bool = False) -> Ending:
        """Count what was used, once, and free the rest.

        Of a reservation that this node holds, or whose first end this is, it always succeeds, now or later. Of another
        one it raises a `DependencyError` when the origin does not answer.
        """
        at_ms = self._gate.now_ms()
        waiting = self._waiting.get(name)
        if waiting is not None and are_same_counters(waiting.items, items):
            return Ending(True, True)
        with self._gate:
            is_ours = is_first or self._engine.reservations.holds(name, items)
            if is_ours:
                self._engine.reservations.drop(name)
                unsure = self._unsure.pop(name, None)
                if not self._wait(name, items, at_ms, 0.0 if unsure is None else unsure[2]):
                    self._engine.count_spent(items, at_ms, self._gate.clock_ms(), at_ms)
                    return Ending(True, False)
                # Until the origin has counted it, it is counted here.
                self._engine.reservations.add(_spent(name), items, at_ms + max(_durations(items)))
        if is_ours:
            try:
                return await self._finish(name)
            except DependencyError:
                return Ending(True, False)
        replies = await self._claim(items, name, at_ms, is_final=True, life_ms=ENDED_MS)
        self._learn(items, replies, at_ms)
        states = {reply.state for reply in replies}
        return Ending(states != {GONE}, ENDED not in states and ENDED_BEFORE in states)

    def _wait(self, name: str, items: list[Item], at_ms: int, sure_s: float) -> bool:
        """Keep an end until the origin has it; False if too many wait."""
        needed = reserved_bytes(items)
        if len(self._waiting) >= WAITING_MAX or self._waiting_bytes + needed > WAITING_BYTES_MAX:
            return False
        self._waiting[name] = _End(items, at_ms, sure_s)
        self._waiting_bytes += needed
        return True

    async def _finish(self, name: str, *, is_last: bool = False) -> Ending:
        """End one of ours. Only the first answer counts what the origin does not know. `is_last`: the node stops."""
        loop = asyncio.get_running_loop()
        items, at_ms, sure_s = self._waiting[name]
        try:
            replies = await self._claim(items, name, at_ms, is_final=True, life_ms=ENDED_MS)
        except DependencyError:
            if name in self._waiting:
                self._waiting[name] = _End(items, at_ms, loop.time() + LATE_S)
            raise
        if name not in self._waiting:
            return Ending(True, True)
        is_gone = any(reply.state == GONE for reply in replies)
        if is_gone and loop.time() < sure_s and not is_last:
            return Ending(True, False)
        del self._waiting[name]
        self._waiting_bytes -= reserved_bytes(items)
        lost = [item for item, reply in zip(items, replies, strict=True) if reply.state == GONE]
        self._learn(items, replies, at_ms)
        with self._gate:
            self._engine.reservations.drop(_spent(name))
            if lost:
                self._engine.count_spent(lost, at_ms, self._gate.clock_ms(), self._gate.now_ms())
        self._on_work()
        return Ending(True, all(reply.state == ENDED_BEFORE for reply in replies))

    def _learn(self, items: list[Item], replies: list[ClaimReply], at_ms: int) -> None:
        with self._gate:
            for (limit, identifier, _), reply in zip(items, replies, strict=True):
                self._engine.learn_total(limit, identifier, at_ms // limit.duration_ms, reply.total)

    async def _claim(
        self,
        items: list[Item],
        name: str,
        at_ms: int,
        *,
        is_final: bool,
        life_ms: int,
        amount: int | None = None,
    ) -> list[ClaimReply]:
        generations = self._generations(items)
        claims = [
            Claim(
                _digest(item),
                name,
                item[0].duration_ms,
                at_ms // item[0].duration_ms,
                item[2] if amount is None else amount,
                life_ms,
                is_final,
                generation,
            )
            for item, generation in zip(items, generations, strict=True)
        ]
        replies = await self.calls.call(
            ["reserve"],
            lambda timeout_s: self._origin.claim(claims, timeout_s=timeout_s),
            self._timeout_s,
        )
        # A total from before a reset that came meanwhile is not one of the counter as it is now.
        return [
            reply if before == after else reply._replace(total=0)
            for reply, before, after in zip(replies, generations, self._generations(items), strict=True)
        ]

    def _generations(self, items: list[Item]) -> list[int]:
        with self._gate:
            return [
                self._engine.resets.generation_of(limit.key, identifier) for limit, identifier, _ in items
            ]

    async def run_once(self, *, is_last: bool = False) -> int:
        """Try again what got no answer; how many still wait. Raises a `DependencyError`."""
        now_ms = self._gate.now_ms()
        for name in [name for name, (_, until_ms, _) in self._unsure.items() if until_ms <= now_ms]:
            del self._unsure[name]
        for name in list(self._waiting):
            if name in self._waiting:
                await self._finish(name, is_last=is_last)
        for name in list(self._unsure)[:UNSURE_PER_TURN]:
            if name in self._unsure:
                await self._look_up(name)
        return len(self._waiting)

    async def _look_up(self, name: str) -> None:
        """A reservation that was taken without an answer: any node may end it if the origin has it, and may have."""
        items, until_ms, sure_s = self._unsure[name]
        now_ms = self._gate.now_ms()
        life_ms = max(1, until_ms - now_ms)
        replies = await self._claim(items, name, now_ms, is_final=False, life_ms=life_ms)
        with self._gate:
            reservations = self._engine.reservations
            if self._unsure.get(name) is None or not reservations.holds(name, items):
                self._unsure.pop(name, None)
            elif any(reply.state == ENDED_BEFORE for reply in replies):
                del self._unsure[name]
                reservations.drop(name)
            elif all(reply.state == HELD for reply in replies):
                del self._unsure[name]
                reservations.drop(name)
                reservations.add(name, items, until_ms, self._engine.has_credit)
            elif asyncio.get_running_loop().time() >= sure_s:
                del self._unsure[name]

    async def run(self) -> None:
        """The same every second, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self.run_once()
            except DependencyError:
                continue


def _spent(name: str) -> str:
    return name + " spent"


def _durations(items: list[Item]) -> list[int]:
    return [limit.duration_ms for limit, _, _ in items]


def _digest(item: Item) -> bytes:
    limit, identifier, _ = item
    return subject_digest(limit.workspace, limit.namespace, identifier, limit.duration_ms)
