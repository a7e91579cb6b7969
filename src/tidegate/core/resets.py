"""Resets: which subjects were set back to zero, and when (docs/adr/0026-reset.md).

A count only grows, so that a reset cannot take it back. It gives the cells of the subject new names (`generations`), in
memory, at the origin and in the ledger: what arrives late for the old names changes nothing that is used.

A reset is a value that merges by maximum: any order and any repetition gives the same. It is kept until no window can
count anything from before it, in a table that is bounded in bytes, and spread by `runtime/resets.py`.

Only the cold path looks here: a subject asks for its generation when it is created.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, cast, final

from tidegate.core.budget import MemoryBudget
from tidegate.core.cells import BLOCKED, CLEAN, Subject
from tidegate.core.generations import cell_name, reset_expires_at_ms
from tidegate.core.model import Limit
from tidegate.core.pending import Pending
from tidegate.core.subjects import Subjects, text_bytes
from tidegate.errors import TooManyResets

__all__ = ["RESETS_BYTES_MAX", "Reset", "Resets", "ResetsReply"]

# What the live resets of one node take, by estimate: about 24,000 with short names.
RESETS_BYTES_MAX: Final = 16_000_000
# A reset with its places in the table and in the queue, without its names. Measured by tests/core/test_resets.py.
RESET_BYTES: Final = 650


# Those that a later reset of the same counter has replaced, in the queue of those that expire.
REPLACED_MAX: Final = 1_000
# No time of a clock, and a name that a database cannot store: a row that holds it is damaged.
GENERATION_MAX: Final = 2**53


class Reset(NamedTuple):
    """A subject was set back to zero."""

    workspace: str
    namespace: str
    identifier: str
    duration_ms: int
    generation: int
    """When, in Unix ms; at least one more than that of the reset before."""

    @property
    def expires_at_ms(self) -> int:
        """From then on it has no effect."""
        return reset_expires_at_ms(self.generation, self.duration_ms)


class ResetsReply(NamedTuple):
    """What the origin answers about resets."""

    number: int
    """Pass it to the next call to continue from here. 0 after another number: the origin has lost resets."""
    resets: list[Reset]
    more: bool = False
    """There were too many for one answer: ask again at once."""


def reset_bytes(reset: Reset) -> int:
    """What a reset takes in memory, by estimate."""
    names = text_bytes(reset.workspace) + text_bytes(reset.namespace) + text_bytes(reset.identifier)
    return RESET_BYTES + names


@final
class Resets:
    """The live resets of one node."""

    __slots__ = (
        "_due",
        "_live",
        "_pending",
        "_subjects",
        "applied",
        "budget",
        "dropped",
        "imported",
        "made",
    )

    def __init__(self, subjects: Subjects, pending: Pending) -> None:
        self._subjects: Final[Subjects] = subjects
        self._pending: Final[Pending] = pending
        # By (key, identifier), as `Subjects.generations`, which holds their generations.
        self._live: dict[tuple[object, str], Reset] = {}
        # A heap of (expiry, generation, place). One that a later reset has replaced is skipped.
        self._due: list[tuple[int, int, tuple[object, str]]] = []
        self.budget: Final[MemoryBudget] = MemoryBudget(RESETS_BYTES_MAX)
        # Resets that this node has applied, and how many of them it made itself; and those that were not kept, because
        # the table is full.
        self.applied: int = 0
        self.made: int = 0
        self.dropped: int = 0
        # Those that the ledger brought, for the origin. Taken by `take_imported`.
        self.imported: list[Reset] = []

    def __len__(self) -> int:
        return len(self._live)

    def has_room(self, reset: Reset) -> bool:
        """Whether its workspace may hold this one too: no more than is free then."""
        if (_key(reset), reset.identifier) in self._live:
            return True
        return self.budget.allows(reset.workspace, reset_bytes(reset))

    def generation_of(self, key: object, identifier: str) -> int:
        """The generation of a subject, in memory or not; 0 when it was not reset."""
        subject = self._subjects.find(key, identifier)
        if subject is not None:
            return subject.generation
        return self._subjects.generations.get((key, identifier), 0)

    def make(self, limit: Limit, identifier: str, now_ms: int) -> Reset:
        """Reset a counter, in the memory of this node. Raises `TooManyResets`."""
        self.expire(now_ms)
        known = self.generation_of(limit.key, identifier)
        generation = now_ms if now_ms > known else known + 1
        reset = Reset(limit.workspace, limit.namespace, identifier, limit.duration_ms, generation)
        if not self.has_room(reset):
            raise TooManyResets(limit.workspace)
        self.apply(reset, now_ms)
        self.made += 1
        return reset

    def live(self) -> list[Reset]:
        """All of them."""
        return list(self._live.values())

    def apply(self, reset: Reset, now_ms: int) -> bool:
        """Take over a reset that was made here or received. False when it is known, older than a known one or over.

        Beyond the bound it is applied to what is in memory and not kept; twice the bound is never exceeded, although
        nodes may receive more than each of them would make.
        """
        self.expire(now_ms)
        if now_ms >= reset.expires_at_ms or not 0 < reset.generation < GENERATION_MAX:
            return False
        key = _key(reset)
        place = (key, reset.identifier)
        held = self._live.get(place)
        if held is not None and reset.generation <= held.generation:
            return False
        subject = self._subjects.find(key, reset.identifier)
        if subject is not None:
            if reset.generation <= subject.generation:
                return False
            self._renew(subject, reset)
        self.applied += 1
        needed = reset_bytes(reset)
        if held is None and self.budget.bytes + needed > 2 * RESETS_BYTES_MAX:
            self.dropped += 1
            return True
        if held is None:
            self.budget.take(reset.workspace, needed)
        self._live[place] = reset
        self._subjects.generations[place] = reset.generation
        heappush(self._due, (reset.expires_at_ms, reset.generation, place))
        if len(self._due) > 2 * len(self._live) + REPLACED_MAX:
            # One counter may be reset any number of times.
            self._due = [(one.expires_at_ms, one.generation, each) for each, one in self._live.items()]
            heapify(self._due)
        return True

    def import_reset(self, reset: Reset, now_ms: int) -> None:
        """Apply one that the ledger holds."""
        if self.apply(reset, now_ms):
            self.imported.append(reset)

    def take_imported(self) -> list[Reset]:
        """Those that the ledger has brought since the last call."""
        taken = self.imported
        self.imported = []
        return taken

    def expire(self, now_ms: int) -> None:
        """Forget those that have no effect any more."""
        while self._due and self._due[0][0] <= now_ms:
            _, generation, place = heappop(self._due)
            held = self._live.get(place)
            if held is not None and held.generation == generation:
                del self._live[place]
                del self._subjects.generations[place]
                self.budget.take(held.workspace, -reset_bytes(held))

    def _renew(self, subject: Subject, reset: Reset) -> None:
        """Replace the cells that the reset concerns by empty ones, and drop the subject's credit.

        Credit that was granted beside the old counts would be spent beside the new ones of other nodes. What waits asks
        again; an answer to a message of before is recognised by its generation.
        """
        before = subject.generation
        subject.generation = reset.generation
        for cell in subject.cells():
            sequence = cell.sequence
            name = cell_name(sequence, reset.generation, reset.duration_ms)
            if name != cell_name(sequence, before, reset.duration_ms):
                subject.replace(self._subjects.blank_cell(sequence, reset.duration_ms))
        subject.strict_until_ms = 0
        if subject.queue == BLOCKED:
            self._subjects.move(subject, CLEAN, subject.touched_ms)
        credit = subject.credit
        if credit is None:
            return
        credit.spare = 0
        credit.is_dirty = True
        if credit.waiting is not None and not credit.in_flight:
            self._pending.queue_ask(subject)
        self._pending.queue_replay(subject, subject.touched_ms)


def _key(reset: Reset) -> object:
    return cast("object", (reset.workspace, reset.namespace, reset.duration_ms))
