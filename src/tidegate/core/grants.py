"""Credit, the origin's side: what the origin keeps of a subject, and the one step that answers a message.

A node accepts without asking only what it holds credit for (docs/adr/0015-credit.md). The law that every grant keeps,
over all writers of a subject:

    current cell + carried(previous cell) + unspent credit <= quota

Spending turns credit into counts, time lets `carried` fall, and a roll-over turns the current cell into the previous
one, which weighs no more than before: only a grant can break the law, so only grants check it. Credit therefore belongs
to the subject, not to a cell.

`grant` is the rule itself. The memory and SQLite origins call it; `credit.lua` does the same inside Redis and is proven
equal by tests. It reads no clock: `now_ms` is the origin's time, and is compared only with what the origin wrote.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

from tidegate.core.generations import cell_name
from tidegate.core.sharing import NOT_DUE, Mark, RegionCount, Share, ShareReply, owner_of
from tidegate.core.windows import carried

__all__ = [
    "OUTDATED",
    "CellPart",
    "CellRecord",
    "CellTotals",
    "CreditReply",
    "CreditRequest",
    "GrantRules",
    "Hold",
    "Run",
    "SubjectRecord",
    "drop_expired",
    "grant",
    "share",
]

# `CreditReply.granted` for a message that a later one of the same writer has overtaken.
OUTDATED: Final = -1
# No hold was recalled, or none is stuck.
NEVER: Final = -1


class GrantRules(NamedTuple):
    """The constants of credit. All nodes of an origin use the same."""

    life_ms: int = 5_000
    """How long a node may spend what it was granted, by its own clock, from before the message was sent."""
    margin_ms: int = 1_000
    """How much longer the origin counts it. Covers the last report's delay, and clocks that run at different speeds."""
    firm_ms: int = 50
    """How long a grant to waiting requests counts as about to be spent: longer than any usual round trip."""
    unanswered_ms: int = 50
    """A holder that has not answered a recall by then is not waited for."""
    recall_gap_ms: int = 2
    """A subject's holders are asked at most this often: about a round trip."""
    quiet_ms: int = 100
    """After a recall nothing is granted in advance for this long: it would be recalled again."""
    share: int = 4
    """In advance a writer gets at most one part in so many of what is left, unless it is the only one."""
    advance: int = 1
    """In advance a node asks for at least so many average costs, unless the limit is small (`Credit.want`)."""
    publish_ms: int = 2_000
    """A node that has to publish a cell and has not done so by then is not waited for."""
    publish_pace_ms: int = 100
    """For this long after a node was made responsible, it also publishes further growth: as often as a node
    publishes."""
    report_rests: int = 0
    """A node rests so many times as long as a command of reports took before it sends the next one. For an origin that
    answers one command at a time: requests wait for the others."""


class CellPart(NamedTuple):
    """What a message says of one cell."""

    sequence: int
    own: int
    """What the writer has accepted in this cell, in total."""
    known: int = 0
    """What all writers of the region have accepted in it, as far as this one knows: `own` included. The origin never
    holds less, unless it lost counts."""
    foreign: int = 0
    """What other regions have published for it, as far as the writer knows."""
    acked: int = 0
    """The part of `own` that the origin acknowledged."""
    sent: int = 0
    """The part of `own` that was sent before, acknowledged or not: others may know of it."""
    published: int = 0
    """The part of `own` that is in the row of the region in the ledger, where others may have read it."""
    total: int = 0
    """The highest total that an answer about the record `id` had."""
    id: int = 0
    """`CellTotals.id` of the last answer about this cell; 0 when there was none."""


class Run(NamedTuple):
    """Waiting requests with the same instant and the same cost."""

    at_ms: int
    cost: int
    requests: int


class CreditRequest(NamedTuple):
    """One message to the origin about one subject: read, replay and request for credit."""

    digest: bytes
    writer: str
    number: int
    """Larger than that of every earlier message of this writer. Only the latest one sets the hold."""
    duration_ms: int
    cells: tuple[CellPart, ...]
    """First the cell that is decided in, then the one before it, then any others that the writer has to report."""
    quota: int
    """The lowest quota of what waits, or under which credit is wanted."""
    as_of_ms: int
    """The newest instant of what waits; now, when nothing waits. In the first cell."""
    runs: tuple[Run, ...]
    """What waits, in order, all in the first cell."""
    want: int
    """How much more would be useful."""
    held: int
    """Unspent credit that the node keeps: it is never granted less."""
    life_ms: int
    floor: int = 0
    """From which count on other regions should know the cell; 0: this node does not publish."""
    step: int = 0
    """By how much it may grow after that before it is published at once; 0: it can wait."""
    generation: int = 0
    """The last reset of the subject: part of the names of its cells (`tidegate.core.generations`)."""
    joint: int = 0
    """How much of what waits belongs to batches that need other subjects too. It may be given back instead of spent, so
    that others are not denied because of it: they wait."""
    epoch: int = 0
    """When the ledger last lost rows, as far as the node knows: what was published before may not be there."""
    alone_at_ms: int = 0
    """From when on, by the origin's clock, the node publishes for itself unless it gets another answer; 0 for never.
    What a message that arrives later than that reports may be in the region's row already."""


class CellTotals(NamedTuple):
    """What the origin answers for one cell."""

    total: int
    """Sum of all components, after the merge."""
    component: int
    """The writer's component as it was before the merge: less than was acknowledged shows a loss."""
    foreign: int
    """What other regions have published for it, as far as the origin or this message knows."""
    regions: int = 0
    """How many of them, as far as the origin knows."""
    published: int = 0
    """What this region has published, as far as the origin knows."""
    due: int = NOT_DUE
    """Whether this node has to publish it (`tidegate.core.sharing`)."""
    id: int = 0
    """Names this record of the cell: another one than before shows that the origin lost it. 0: it holds none."""
    base: int = 0
    """The part of `total` that no writer has reported: a row of this region, or what the origin had lost."""


class CreditReply(NamedTuple):
    """The origin's answer to one message."""

    granted: int
    """The hold on top of what the message reported: what the node may have unspent. `OUTDATED`: no answer to that."""
    spare: int
    """Unspent credit of the other writers."""
    firm: int
    """The part of it that their waiting requests were granted: about to be spent."""
    stuck: int
    """The part of it whose holders do not answer a recall."""
    stuck_ms: int
    """In how long the next part of that ends; -1 when nothing is stuck."""
    following: int
    """What counts in the cell after the first one already, by a clock that is ahead. What is added in the first one
    weighs in full at the start of that cell."""
    cells: tuple[CellTotals, ...]
    """In the order of the message."""


@final
class Hold:
    """What the origin knows of one writer's unspent credit."""

    __slots__ = ("expires_at_ms", "firm", "firm_until_ms", "number", "quota", "recalled_at_ms", "spare")

    def __init__(
        self,
        number: int,
        spare: int,
        firm: int,
        firm_until_ms: int,
        quota: int,
        expires_at_ms: int,
        recalled_at_ms: int = NEVER,
    ) -> None:
        self.number: int = number
        self.spare: int = spare
        self.firm: int = firm
        self.firm_until_ms: int = firm_until_ms
        self.quota: int = quota
        self.expires_at_ms: int = expires_at_ms
        # When it was first asked back and has not answered since.
        self.recalled_at_ms: int = recalled_at_ms

    def copied(self) -> Hold:
        return Hold(
            self.number,
            self.spare,
            self.firm,
            self.firm_until_ms,
            self.quota,
            self.expires_at_ms,
            self.recalled_at_ms,
        )


@final
class CellRecord:
    """A G-Counter of writers for one cell.

    `total` is the sum of the components, of what evicted lives of nodes had counted, and of the base: what the origin
    had lost and no writer has reported again (docs/adr/0022-base.md).
    """

    __slots__ = (
        "base",
        "components",
        "foreign",
        "id",
        "learned",
        "mark",
        "regions",
        "returned",
        "total",
    )

    def __init__(self) -> None:
        self.components: dict[str, int] = {}
        self.total: int = 0
        # When it came into being, or was found to be an older copy, by the origin's clock: its name. 0 before the first
        # message about it.
        self.id: int = 0
        self.base: int = 0
        # What writers have reported again since the origin lost it, or an older copy still held. What was known before
        # the loss is `base` and this.
        self.returned: int = 0
        # The sum of what other regions have published, each of them, and when each last rose. Written by `share`.
        self.foreign: int = 0
        self.regions: dict[str, int] = {}
        self.learned: dict[str, int] = {}
        # What this region has published. None until the cell comes near its limit.
        self.mark: Mark | None = None

    def copied(self) -> CellRecord:
        copy = CellRecord()
        copy.components = dict(self.components)
        copy.total = self.total
        copy.id = self.id
        copy.base = self.base
        copy.returned = self.returned
        copy.foreign = self.foreign
        copy.regions = dict(self.regions)
        copy.learned = dict(self.learned)
        copy.mark = None if self.mark is None else self.mark.copied()
        return copy

    def region_counts(self, now_ms: int) -> list[RegionCount]:
        """What each other region has published, and how long ago that was learned."""
        return [
            RegionCount(
                region, count, max(0, now_ms - self.learned[region]) if region in self.learned else -1
            )
            for region, count in self.regions.items()
        ]

    def mark_of(self, epoch: int) -> Mark:
        """The mark. One of an older epoch counts as nothing published: the ledger has lost rows since."""
        if self.mark is None or self.mark.epoch < epoch:
            self.mark = Mark(epoch=epoch)
        return self.mark


@final
class SubjectRecord:
    """All that the origin keeps of one subject."""

    __slots__ = ("cells", "holds", "recalled_at_ms")

    def __init__(self) -> None:
        # By name: the sequence, unless the subject was reset (`tidegate.core.generations`).
        self.cells: dict[int, CellRecord] = {}
        self.holds: dict[str, Hold] = {}
        # The last recall: nothing is granted in advance for a while after it.
        self.recalled_at_ms: int = NEVER

    def copied(self) -> SubjectRecord:
        copy = SubjectRecord()
        copy.cells = {sequence: cell.copied() for sequence, cell in self.cells.items()}
        copy.holds = {writer: hold.copied() for writer, hold in self.holds.items()}
        copy.recalled_at_ms = self.recalled_at_ms
        return copy

    def cell(self, sequence: int) -> CellRecord:
        found = self.cells.get(sequence)
        if found is None:
            found = CellRecord()
            self.cells[sequence] = found
        return found


@final
class Others:
    """The holds of all writers but one, added up."""

    __slots__ = ("count", "firm", "quota_min", "spare", "stuck", "stuck_until_ms")

    def __init__(self, quota: int) -> None:
        self.count: int = 0
        self.spare: int = 0
        self.firm: int = 0
        self.stuck: int = 0
        self.stuck_until_ms: int = NEVER
        # The lowest quota that unspent credit was granted under. What is granted now must leave room under that one.
        self.quota_min: int = quota


def grant(
    record: SubjectRecord, request: CreditRequest, now_ms: int, rules: GrantRules
) -> tuple[CreditReply, list[str]]:
    """Answer one message, and name the writers whose credit must be asked back. One atomic step of the origin."""
    totals = merge(record, request, now_ms, rules)
    drop_expired(record, now_ms)
    writer = request.writer
    others = others_of(record, writer, request.quota, now_ms, rules)
    held = record.holds.get(writer)
    recalled: list[str] = []
    following = 0
    if held is not None and request.number <= held.number:
        granted = held.spare if request.number == held.number else OUTDATED
    else:
        used, previous, elapsed_ms, following = usage(record, request, totals)
        room = others.quota_min - used - others.spare
        firm, refused = grant_runs(request, room, previous, elapsed_ms)
        granted = firm if firm > request.held else request.held
        if refused == 0:
            left = room - granted
            if left > 0 and not was_recalled(record, now_ms, rules.quiet_ms):
                part = left if others.count == 0 else left // rules.share
                ahead = firm + (request.want if request.want < part else part)
                if ahead > granted:
                    granted = ahead
        elif used + others.firm + firm + refused <= request.quota and others.spare > others.firm:
            # It would fit but for what others hold and do not need at once.
            recalled = recall(record, writer, now_ms, rules)
        expires_at_ms = now_ms + request.life_ms + rules.margin_ms
        firm = firm - request.joint if firm > request.joint else 0
        record.holds[writer] = Hold(
            request.number, granted, firm, now_ms + rules.firm_ms, request.quota, expires_at_ms
        )
    stuck_ms = NEVER if others.stuck_until_ms == NEVER else others.stuck_until_ms - now_ms
    reply = CreditReply(granted, others.spare, others.firm, others.stuck, stuck_ms, following, tuple(totals))
    return reply, recalled


def merge(record: SubjectRecord, request: CreditRequest, now_ms: int, rules: GrantRules) -> list[CellTotals]:
    """Keep the larger of each component, and restore what the origin lost; any order and any repetition gives the
    same. Then see who publishes."""
    totals: list[CellTotals] = []
    is_late = 0 < request.alone_at_ms <= now_ms
    for part in request.cells:
        name = cell_name(part.sequence, request.generation, request.duration_ms)
        cell = record.cells.get(name)
        if cell is None:
            if part.known == 0 and part.own == 0:
                totals.append(CellTotals(0, 0, part.foreign))
                continue
            cell = record.cell(name)
        if cell.id == 0 and (part.own > 0 or part.known > 0 or cell.total > 0):
            cell.id = now_ms if now_ms > part.id else part.id + 1
        before = merge_part(cell, part, request.writer, now_ms, is_late)
        foreign = part.foreign if part.foreign > cell.foreign else cell.foreign
        due = NOT_DUE
        # Once another region has published the cell, every change matters.
        if request.floor > 0 and cell.total >= (request.floor if foreign == 0 else 1):
            owner = owner_of(request.writer)
            due = cell.mark_of(request.epoch).assign(
                cell.total, request.step, owner, now_ms, rules.publish_ms, rules.publish_pace_ms
            )
        mark = cell.mark
        published = 0 if mark is None or mark.epoch < request.epoch else mark.published
        totals.append(
            CellTotals(cell.total, before, foreign, len(cell.regions), published, due, cell.id, cell.base)
        )
    return totals


def merge_part(cell: CellRecord, part: CellPart, writer: str, now_ms: int, is_late: bool) -> int:
    """Merge one part, and return the writer's component as it was before."""
    before = adopt(cell, writer)
    if before < 0:
        return part.own  # a life that was evicted: what it had counted is in the total
    if 0 < cell.id <= part.id and (cell.id < part.id or before < part.acked or cell.total < part.total):
        # An older copy of the record that the writer knows. Under a name of its own it is a record like any other that
        # came after a loss: one to which what it holds was reported again.
        cell.id = now_ms if now_ms > part.id else part.id + 1
        cell.returned = cell.total - cell.base
    if part.id < cell.id:
        # The record that the writer knew is gone. What it reports again is a part of what was known then.
        claim(cell, part.total)
        again = min(max(part.sent, part.published), part.own) - before
    else:
        # Another node may have claimed this from the ledger.
        again = min(min(part.published, part.own) - before, cell.base)
    if is_late:
        # And all of this, if the writer has published since it sent the message.
        again = max(again, min(part.own - before, cell.base))
    give_back(cell, again)
    if part.own > before:
        cell.components[writer] = part.own
        cell.total += part.own - before
    if part.known > cell.total:
        cell.base += part.known - cell.total
        cell.total = part.known
    return before


def claim(cell: CellRecord, known: int) -> None:
    """So much was counted before the origin lost the cell: raise the base by what is missing of it."""
    missing = known - cell.base - cell.returned
    if missing > 0:
        cell.base += missing
        cell.total += missing


def give_back(cell: CellRecord, count: int) -> None:
    """A writer reports this again, so that it is not missing any more."""
    if count <= 0:
        return
    cell.returned += count
    part = count if count < cell.base else cell.base
    cell.base -= part
    cell.total -= part


def adopt(cell: CellRecord, writer: str) -> int:
    """The writer's component; -1 when a later life of its node has reported.

    A node that evicts a subject counts under a new name when it comes back. What it had counted before stays in the
    total only, so that a record has one component for each node.
    """
    found = cell.components.get(writer)
    if found is not None:
        return found
    node, _, life = writer.partition("~")
    for name in [one for one in cell.components if one.partition("~")[0] == node]:
        if int(name.partition("~")[2] or 0) > int(life or 0):
            return -1
        del cell.components[name]
        # Kept with nothing counted yet, so that a late message of the life before is known for what it is.
        cell.components[writer] = 0
    return 0


def share(
    record: SubjectRecord, entry: Share, now_ms: int, rules: GrantRules
) -> tuple[ShareReply, list[str]]:
    """Keep what the ledger holds of a cell, and say whether the sender has to publish it.

    Names the writers whose credit must be asked back: what other regions have counted may leave less than is out.
    """
    name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
    if entry.counted == 0 and name not in record.cells:
        return ShareReply(0, 0, 0, NOT_DUE), []
    cell = record.cell(name)
    mark = cell.mark_of(entry.epoch)
    recalled: list[str] = []
    if entry.region:
        known = cell.regions.get(entry.region, 0)
        if entry.counted > known:
            cell.regions[entry.region] = entry.counted
            cell.learned[entry.region] = now_ms
            cell.foreign += entry.counted - known
            recalled = recall_overdrawn(record, entry, now_ms, rules)
    elif entry.epoch == mark.epoch and entry.counted > mark.published:
        mark.published = entry.counted
    due = NOT_DUE
    if cell.foreign > 0 or not entry.region:
        due = mark.assign(cell.total, 0, entry.owner, now_ms, rules.publish_ms, rules.publish_pace_ms)
        if due != NOT_DUE:
            # It asked just now: it is about to publish.
            mark.assigned = cell.total
            mark.until_ms = now_ms + rules.publish_ms
    return ShareReply(cell.total, cell.foreign, mark.published, due), recalled


def recall_overdrawn(record: SubjectRecord, entry: Share, now_ms: int, rules: GrantRules) -> list[str]:
    """Ask all credit back that is not needed at once, if more is out than other regions have left."""
    sequence = now_ms // entry.duration_ms
    if not sequence - 1 <= entry.sequence <= sequence:
        return []
    drop_expired(record, now_ms)
    spare = 0
    quota = NEVER
    for hold in record.holds.values():
        if hold.spare > 0:
            spare += hold.spare
            if quota == NEVER or hold.quota < quota:
                quota = hold.quota
    if spare == 0:
        return []
    current = record.cells.get(cell_name(sequence, entry.generation, entry.duration_ms))
    previous = record.cells.get(cell_name(sequence - 1, entry.generation, entry.duration_ms))
    used = 0 if current is None else current.total + current.foreign
    if previous is not None:
        before = previous.total + previous.foreign
        used += carried(before, now_ms - sequence * entry.duration_ms, entry.duration_ms)
    return recall(record, "", now_ms, rules) if used + spare > quota else []


def drop_expired(record: SubjectRecord, now_ms: int) -> None:
    """A holder that crashed gives back nothing: its credit ends by itself."""
    for writer in [name for name, hold in record.holds.items() if hold.expires_at_ms <= now_ms]:
        del record.holds[writer]


def others_of(record: SubjectRecord, writer: str, quota: int, now_ms: int, rules: GrantRules) -> Others:
    """What all writers but `writer` hold."""
    others = Others(quota)
    for name, hold in record.holds.items():
        if name == writer:
            continue
        others.count += 1
        if hold.spare == 0:
            continue
        others.spare += hold.spare
        if hold.quota < others.quota_min:
            others.quota_min = hold.quota
        if hold.recalled_at_ms != NEVER and now_ms - hold.recalled_at_ms >= rules.unanswered_ms:
            others.stuck += hold.spare
            if others.stuck_until_ms == NEVER or hold.expires_at_ms < others.stuck_until_ms:
                others.stuck_until_ms = hold.expires_at_ms
        elif hold.firm_until_ms > now_ms:
            others.firm += hold.firm if hold.firm < hold.spare else hold.spare
    return others


def at_least(total: int, known: int) -> int:
    return known if known > total else total


def usage(
    record: SubjectRecord, request: CreditRequest, totals: list[CellTotals]
) -> tuple[int, int, int, int]:
    """What counts at `as_of_ms`; the previous cell, and how far into the current one that is; the next cell.

    The previous cell and how far are 0 when the instant of a request makes no difference: when the next cell has begun
    already, by another node's clock, what is added here weighs in full at its start, and that is more.
    """
    current = at_least(totals[0].total, request.cells[0].known) + totals[0].foreign
    previous = at_least(totals[1].total, request.cells[1].known) + totals[1].foreign
    elapsed_ms = request.as_of_ms - request.cells[0].sequence * request.duration_ms
    used = current + carried(previous, elapsed_ms, request.duration_ms)
    name = cell_name(request.cells[0].sequence + 1, request.generation, request.duration_ms)
    later = record.cells.get(name)
    following = 0 if later is None else later.total + later.foreign
    if following > 0 and following + current > used:
        return following + current, 0, 0, following
    return used, previous, elapsed_ms, following


def grant_runs(request: CreditRequest, room: int, previous: int, elapsed_ms: int) -> tuple[int, int]:
    """What the waiting requests get, in their order, each at its own instant; and the least cost that was refused."""
    firm = 0
    refused = 0
    duration_ms = request.duration_ms
    start_ms = request.cells[0].sequence * duration_ms
    for run in request.runs:
        free = room - firm
        if previous > 0:
            # An older request still sees more of the previous cell.
            then = carried(previous, run.at_ms - start_ms, duration_ms)
            free -= then - carried(previous, elapsed_ms, duration_ms)
        count = free // run.cost if free > 0 else 0
        if count >= run.requests:
            count = run.requests
        elif refused == 0 or run.cost < refused:
            refused = run.cost
        firm += count * run.cost
    return firm, refused


def was_recalled(record: SubjectRecord, now_ms: int, within_ms: int) -> bool:
    """Whether the last recall is that recent. One in the future does not count: the origin's clock was set back."""
    return record.recalled_at_ms != NEVER and 0 <= now_ms - record.recalled_at_ms < within_ms


def recall(record: SubjectRecord, writer: str, now_ms: int, rules: GrantRules) -> list[str]:
    """Ask all others for what they do not need at once, unless they were asked a moment ago."""
    if was_recalled(record, now_ms, rules.recall_gap_ms):
        return []
    record.recalled_at_ms = now_ms
    recalled: list[str] = []
    for name, hold in record.holds.items():
        firm = hold.firm if hold.firm_until_ms > now_ms else 0
        if name != writer and hold.spare > firm:
            if hold.recalled_at_ms == NEVER:
                hold.recalled_at_ms = now_ms
            recalled.append(name)
    return recalled
