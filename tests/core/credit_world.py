"""One subject, many nodes, one origin: a simulation with discrete events that tests the rules of credit.

Time is virtual and in microseconds; randomness is seeded. Nodes and the origin run the real rules (`Credit`, `grant`);
the world adds what the engine and the drivers do around them: cells, one message in flight, timeouts, paced replays.
The judge knows every accepted request of all nodes, and counts two kinds of errors:

- over: accepted although a single counter, asked in the order in which the nodes decided, would have refused;
- falsely denied: denied although a single counter would have allowed it, including what the origin has granted to
  requests whose answer is in flight.

`Broken` names a rule to break: the checks must notice each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from tidegate.core.credit import (
    ACCEPT,
    ASK_AGAIN,
    DENY,
    DENY_HELD,
    GROWTH,
    WAIT,
    Credit,
    Waiter,
    retry_held_ms,
    stuck_of,
)
from tidegate.core.grants import CellPart, CreditReply, CreditRequest, GrantRules, SubjectRecord, grant
from tidegate.core.windows import carried

MS = 1_000
S = 1_000_000


class Broken(Enum):
    """A rule of the protocol that is not kept."""

    NOTHING = auto()
    OTHERS_NOT_COUNTED = auto()  # the origin grants what others hold
    NO_NUMBERS = auto()  # old messages set holds, old answers grant
    EXPIRY_IGNORED = auto()  # a node spends credit whose life is over
    LIFE_FROM_ANSWER = auto()  # life counts from when the answer came
    HOLD_NEVER_ENDS = auto()  # the origin keeps a crashed node's hold
    RECALL_IGNORED = auto()  # a node does not give back what it is asked for
    QUOTA_IGNORED = auto()  # credit of a higher quota is spent under a lower one
    LOWERED_BY_ANSWER = auto()  # credit falls when the answer comes, not when the message leaves
    HELD_TAKEN_AWAY = auto()  # the origin grants less than a node keeps
    QUOTA_RAISED_LATE = auto()  # a message under a higher quota leaves, and a lower one is still served
    NEXT_CELL_IGNORED = auto()  # a late clock's cell is filled although the next one builds on it
    UNSPENT_COUNTED_TWICE = auto()  # what was spent since the message left is not taken off the grant


class Arrival(NamedTuple):
    at_us: int
    node: int
    cost: int = 1
    quota: int = 0
    """0: the world's."""


@dataclass(frozen=True)
class Faults:
    """Network faults, as shares of messages and of answers."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_us: int = 0
    pushes_lost: float = 0.0
    slow_clocks: float = 0.0
    """Nodes' clocks run slower by up to this share."""

    @property
    def any(self) -> bool:
        return bool(self.lost or self.doubled or self.late)


class Denial(NamedTuple):
    at_us: int
    node: int
    cost: int
    quota: int
    verdict: int
    retry_ms: int
    """For a denial that unspent credit of other nodes caused; 0 for all others."""
    was_false: bool


class Judge:
    """The truth."""

    def __init__(self, duration_ms: int) -> None:
        self.duration_ms = duration_ms
        self.cells: dict[int, int] = {}
        self.over = 0
        self.over_units = 0
        self.admitted = 0
        self.units = 0
        self.falsely_denied_units = 0

    def effective(self, now_ms: int) -> int:
        sequence, elapsed_ms = divmod(now_ms, self.duration_ms)
        before = self.cells.get(sequence - 1, 0)
        return self.cells.get(sequence, 0) + carried(before, elapsed_ms, self.duration_ms)

    def accept(self, at_ms: int, decided_ms: int, cost: int, quota: int) -> None:
        """Judge an accepted request at the time of its decision, in its own cell and in the current one."""
        sequence = at_ms // self.duration_ms
        end_ms = (sequence + 1) * self.duration_ms - 1
        effective = self.effective(min(max(at_ms, decided_ms), end_ms)) + cost
        self.cells[sequence] = self.cells.get(sequence, 0) + cost
        if decided_ms > end_ms:
            effective = max(effective, self.effective(decided_ms))
        if effective > quota:
            self.over += 1
            self.over_units = max(self.over_units, effective - quota)
        self.admitted += 1
        self.units += cost

    def deny(self, at_ms: int, cost: int, quota: int, pending: int) -> bool:
        was_false = self.effective(at_ms) + cost + pending <= quota
        if was_false:
            self.falsely_denied_units += cost
        return was_false


class Origin:
    """The record of the one subject, and the step that answers a message."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.record = SubjectRecord()
        self.arrived = 0

    def answer(self, now_us: int, request: CreditRequest) -> CreditReply:
        world = self.world
        broken = world.broken
        self.arrived += 1
        record = self.record
        if broken is Broken.NO_NUMBERS:
            request = request._replace(number=self.arrived)
        elif broken is Broken.HELD_TAKEN_AWAY:
            request = request._replace(held=0)
        elif broken is Broken.HOLD_NEVER_ENDS:
            for hold in record.holds.values():
                hold.expires_at_ms = 10**15
        elif broken is Broken.OTHERS_NOT_COUNTED:
            record = SubjectRecord()
            record.cells = self.record.cells
            record.holds = {w: h for w, h in self.record.holds.items() if w == request.writer}
        elif broken is Broken.NEXT_CELL_IGNORED:
            record = SubjectRecord()
            next_sequence = request.cells[0].sequence + 1
            hidden = self.record.cells.pop(next_sequence, None)
            record.cells, record.holds = self.record.cells, self.record.holds
            reply, recalled = grant(record, request, now_us // MS, world.rules)
            if hidden is not None:
                self.record.cells[next_sequence] = hidden
            world.push(now_us, recalled)
            return reply
        reply, recalled = grant(record, request, now_us // MS, world.rules)
        if broken is Broken.OTHERS_NOT_COUNTED:
            self.record.holds[request.writer] = record.holds[request.writer]
        world.push(now_us, recalled)
        return reply

    def firm_of(self, request: CreditRequest) -> int:
        hold = self.record.holds.get(request.writer)
        return hold.firm if hold is not None and hold.number == request.number else 0


class Node:
    """A node with one subject: what the engine and the driver do about credit, and nothing else."""

    def __init__(self, world: World, index: int, life: int, offset_us: int, speed: float) -> None:
        self.world = world
        self.index = index
        self.writer = f"node{index}" if life == 0 else f"node{index}-{life}"
        self.offset_us = offset_us
        self.speed = speed
        self.credit = Credit()
        self.own: dict[int, int] = {}
        self.others: dict[int, int] = {}
        self.acked: dict[int, int] = {}
        self.numbers = 0
        self.rtt_us = 2 * world.latency_us[1]
        self.sent_us = 0
        self.timer = False
        self.is_dead = False
        self.is_deaf = False
        self.arrived: dict[int, int] = {}  # id of a waiter -> when it arrived

    # -- time

    def now_ms(self, at_us: int) -> int:
        return (at_us + self.offset_us) // MS

    def clock_ms(self, at_us: int) -> int:
        return int(at_us * self.speed) // MS

    def spend_clock_ms(self, at_us: int) -> int:
        if self.world.broken is Broken.EXPIRY_IGNORED:
            self.credit.before_ms = 10**15  # the clock of requests ends it too
            return -1
        return self.clock_ms(at_us)

    # -- requests

    def effective(self, now_ms: int) -> int:
        duration_ms = self.world.duration_ms
        sequence, elapsed_ms = divmod(now_ms, duration_ms)
        before = self.own.get(sequence - 1, 0) + self.others.get(sequence - 1, 0)
        current = self.own.get(sequence, 0) + self.others.get(sequence, 0)
        return current + carried(before, elapsed_ms, duration_ms)

    def arrive(self, at_us: int, cost: int, quota: int) -> None:
        now_ms = self.now_ms(at_us)
        if self.effective(now_ms) + cost > quota:
            self.world.deny(at_us, self, now_ms, cost, quota, DENY, 0, 0)
            return
        shown = 10**15 if self.world.broken is Broken.QUOTA_IGNORED else quota
        if self.credit.can_spend(cost, shown, now_ms, self.spend_clock_ms(at_us)):
            self.accept(at_us, now_ms, cost, quota, 0)
        else:
            waiter = Waiter(now_ms, cost, quota, at_us)
            self.credit.wait(waiter)
        self.kick(at_us)

    def accept(self, at_us: int, now_ms: int, cost: int, quota: int, waited_us: int) -> None:
        sequence = now_ms // self.world.duration_ms
        self.own[sequence] = self.own.get(sequence, 0) + cost
        self.credit.spend(cost, self.clock_ms(at_us))
        self.world.accept(at_us, self, now_ms, cost, quota, waited_us)

    # -- messages

    def kick(self, at_us: int) -> None:
        """Send what is due, or set a timer for what may wait."""
        credit = self.credit
        if self.timer and credit.waiting is not None:
            return
        if self.is_due(self.clock_ms(at_us), self.world.pace_us // MS):
            self.send(at_us)
        elif credit.is_dirty and not credit.in_flight and not self.timer:
            self.timer = True
            self.world.at(max(at_us, self.sent_us + self.world.pace_us), self.on_timer)

    def on_timer(self, at_us: int) -> None:
        self.timer = False
        if not self.is_dead:
            self.kick(at_us)

    def send(self, at_us: int) -> None:
        world, credit = self.world, self.credit
        now_ms = self.now_ms(at_us)
        sequence = credit.sequence_of(now_ms, world.duration_ms)
        cells = [self.part(sequence), self.part(sequence - 1)]
        for other, own in self.own.items():
            if other not in (sequence, sequence - 1) and own > self.acked.get(other, 0):
                cells.append(self.part(other))
        self.numbers += 1
        spare = credit.spare
        quota_before = credit.quota
        request = credit.plan_message(
            world.digest, self.writer, self.numbers, world.duration_ms, tuple(cells), now_ms, self.clock_ms(at_us),
            world.rules,
        )  # fmt: skip
        if world.broken is Broken.LOWERED_BY_ANSWER:
            credit.spare = spare
        elif world.broken is Broken.QUOTA_RAISED_LATE:
            credit.quota = quota_before
        self.sent_us = at_us
        world.send(at_us, self, request)
        number = self.numbers
        if world.faults.any or world.loses_answers:
            world.at(at_us + world.timeout_us, lambda t: self.on_timeout(t, number))

    def part(self, sequence: int) -> CellPart:
        own = self.own.get(sequence, 0)
        return CellPart(sequence, own, own + self.others.get(sequence, 0))

    def on_timeout(self, at_us: int, number: int) -> None:
        credit = self.credit
        if self.is_dead or credit.number != number or not credit.in_flight:
            return
        credit.fail_message(number)
        kept = []
        for waiter in credit.waiting or ():
            if at_us - waiter.since_ms >= self.world.wait_max_us:
                # `on_outage="deny"`: if nodes decided by themselves, the test would prove nothing.
                self.world.deny(
                    at_us,
                    self,
                    waiter.at_ms,
                    waiter.cost,
                    waiter.quota,
                    DENY_HELD,
                    0,
                    at_us - waiter.since_ms,
                )
            else:
                kept.append(waiter)
        credit.keep_waiting(kept)
        self.world.at(at_us + MS, self.on_retry)

    def on_retry(self, at_us: int) -> None:
        if not self.is_dead:
            self.kick(at_us)

    def on_answer(self, at_us: int, request: CreditRequest, reply: CreditReply) -> None:
        if self.is_dead:
            return
        credit, broken = self.credit, self.world.broken
        for part, totals in zip(request.cells, reply.cells, strict=True):
            others = totals.total - max(totals.component, part.own)
            if others > self.others.get(part.sequence, 0):
                self.others[part.sequence] = others
            self.acked[part.sequence] = max(self.acked.get(part.sequence, 0), part.own)
        if broken is Broken.NO_NUMBERS:
            request = request._replace(number=credit.number)
            credit.in_flight = True
        if broken is Broken.UNSPENT_COUNTED_TWICE:
            credit.spent = 0
        if not credit.apply_reply(request, reply):
            return
        if broken is Broken.LIFE_FROM_ANSWER:
            credit.until_ms = self.clock_ms(at_us) + request.life_ms
            credit.before_ms = self.now_ms(at_us) + request.life_ms
        self.rtt_us += (at_us - self.sent_us - self.rtt_us) // 8
        self.serve(at_us, reply)
        self.kick(at_us)

    def is_due(self, clock_ms: int, pace_ms: int) -> bool:
        """Whether to send a message now. A report that no request waits for is delayed by `pace_ms`."""
        credit = self.credit
        if credit.in_flight:
            return False
        if credit.waiting is not None or credit.is_recalled:
            return True
        if not credit.is_dirty:
            return False
        want = credit.want(clock_ms, self.world.quota, self.world.rules.advance)
        return clock_ms - credit.sent_at_ms >= pace_ms or GROWTH * credit.spare < want

    def heal(self, at_us: int) -> None:
        """The origin lost counts: report everything again."""
        if not self.is_dead:
            self.acked.clear()
            self.credit.is_dirty = True
            self.kick(at_us)

    def serve(self, at_us: int, reply: CreditReply) -> None:
        credit, world = self.credit, self.world
        patience_us = max(world.patience_us, world.patience_round_trips * self.rtt_us)
        kept: list[Waiter] = []
        pause = False
        for waiter in credit.waiting or ():
            waited_us = at_us - waiter.since_ms
            if world.broken is Broken.QUOTA_IGNORED:
                credit.quota = 0
            effective = self.effective(waiter.at_ms) + waiter.cost
            stuck = stuck_of(reply, world.rules, patience_us // MS)
            verdict = credit.judge(
                waiter, effective, reply, self.spend_clock_ms(at_us), waited_us < patience_us, stuck
            )
            if verdict == ACCEPT:
                self.accept(at_us, waiter.at_ms, waiter.cost, waiter.quota, waited_us)
            elif verdict in (WAIT, ASK_AGAIN):
                pause = pause or verdict == WAIT
                kept.append(waiter)
            else:
                retry_ms = 0
                if verdict == DENY_HELD:
                    retry_ms = retry_held_ms(reply, world.rules, max(5, 4 * self.rtt_us // MS))
                world.deny(at_us, self, waiter.at_ms, waiter.cost, waiter.quota, verdict, retry_ms, waited_us)
        credit.keep_waiting(kept)
        if pause and not self.timer:
            self.timer = True
            world.at(at_us + max(self.rtt_us // 2, 50), self.on_timer)

    def on_recall(self, at_us: int) -> None:
        if self.is_dead or self.is_deaf or self.world.broken is Broken.RECALL_IGNORED:
            return
        self.credit.recall()
        if not self.credit.in_flight:
            self.send(at_us)


class World:
    """N nodes, one origin, and the network between them."""

    def __init__(
        self,
        *,
        nodes: int,
        quota: int,
        duration_ms: int = 60_000,
        seed: object = 1,
        latency_us: tuple[int, int] = (100, 1_000),
        rules: GrantRules | None = None,
        faults: Faults | None = None,
        broken: Broken = Broken.NOTHING,
        offsets_us: Sequence[int] = (),
        pace_us: int = 0,
        patience_us: int = 5 * MS,
        patience_round_trips: int = 4,
        timeout_us: int = 300 * MS,
        wait_max_us: int = 300 * MS,
    ) -> None:
        self.random = Random(f"credit {seed}")
        self.digest = bytes(16)
        self.quota = quota
        self.duration_ms = duration_ms
        self.latency_us = latency_us
        self.rules = rules or GrantRules()
        self.faults = faults or Faults()
        self.broken = broken
        self.pace_us = pace_us
        self.patience_us = patience_us
        self.patience_round_trips = patience_round_trips
        self.timeout_us = timeout_us
        self.wait_max_us = wait_max_us
        self.loses_answers = False
        self.judge = Judge(duration_ms)
        self.origin = Origin(self)
        self.nodes: list[Node] = []
        for index in range(nodes):
            speed = 1 - self.random.random() * self.faults.slow_clocks
            offset_us = offsets_us[index] if offsets_us else 0
            self.nodes.append(Node(self, index, 0, offset_us, speed))
        self.by_writer = {node.writer: node for node in self.nodes}
        self.events: list[tuple[int, int, Callable[[int], None]]] = []
        self.event_count = 0
        self.pending = 0
        self.messages = 0
        self.decided = 0
        self.waited = 0
        self.waited_us_max = 0
        self.denials: list[Denial] = []
        self.last_us = 0

    # -- events

    def at(self, at_us: int, action: Callable[[int], None]) -> None:
        self.event_count += 1
        heappush(self.events, (at_us, self.event_count, action))

    def run_until(self, at_us: int) -> None:
        while self.events and self.events[0][0] <= at_us:
            then_us, _, action = heappop(self.events)
            self.last_us = then_us
            action(then_us)
        self.last_us = at_us

    def play(self, arrivals: Iterable[Arrival], tail_us: int = 0) -> World:
        for arrival in arrivals:
            self.run_until(arrival.at_us)
            node = self.nodes[arrival.node]
            if not node.is_dead:
                node.arrive(arrival.at_us, arrival.cost, arrival.quota or self.quota)
        self.run_until(self.last_us + tail_us)
        return self

    def latency(self) -> int:
        return self.random.randint(*self.latency_us)

    def extra(self) -> int:
        late = self.faults.late and self.random.random() < self.faults.late
        return self.random.randrange(self.faults.late_us) if late else 0

    def is_lost(self, share: float) -> bool:
        return bool(share) and self.random.random() < share

    def send(self, at_us: int, node: Node, request: CreditRequest) -> None:
        self.messages += 1
        copies = 2 if self.is_lost(self.faults.doubled) else 1
        for _ in range(copies):
            if not self.is_lost(self.faults.lost):
                self.at(at_us + self.latency() + self.extra(), lambda t: self.on_message(t, node, request))

    def on_message(self, at_us: int, node: Node, request: CreditRequest) -> None:
        reply = self.origin.answer(at_us, request)
        if self.loses_answers or self.is_lost(self.faults.lost):
            return
        firm = 0 if self.faults.any else self.origin.firm_of(request)
        self.pending += firm

        def arrived(t: int) -> None:
            self.pending -= firm
            node.on_answer(t, request, reply)

        self.at(at_us + self.latency() + self.extra(), arrived)

    def push(self, at_us: int, writers: Iterable[str]) -> None:
        for writer in writers:
            if not self.is_lost(self.faults.pushes_lost or self.faults.lost):
                self.at(at_us + self.latency(), self.by_writer[writer].on_recall)

    # -- outcomes

    def accept(self, at_us: int, node: Node, now_ms: int, cost: int, quota: int, waited_us: int) -> None:
        self.judge.accept(now_ms, node.now_ms(at_us), cost, quota)
        self.note(waited_us)

    def deny(
        self,
        at_us: int,
        node: Node,
        now_ms: int,
        cost: int,
        quota: int,
        verdict: int,
        retry_ms: int,
        waited_us: int,
    ) -> None:
        was_false = self.judge.deny(now_ms, cost, quota, self.pending)
        self.denials.append(Denial(at_us, node.index, cost, quota, verdict, retry_ms, was_false))
        self.note(waited_us)

    def note(self, waited_us: int) -> None:
        self.decided += 1
        if waited_us:
            self.waited += 1
            self.waited_us_max = max(self.waited_us_max, waited_us)

    # -- faults

    def leave(self, index: int) -> None:
        """The node stops gracefully: it reports its counts, gives its credit back, and ends when that is sent."""
        node = self.nodes[index]
        node.credit.recall()
        if not node.credit.in_flight:
            node.send(self.last_us)
        self.at(self.last_us + 10 * MS, lambda t: self._gone(node))

    def _gone(self, node: Node) -> None:
        node.is_dead = True

    def crash(self, index: int) -> None:
        """The node crashes, with its credit and what it has not reported. A new node takes its place."""
        node = self.nodes[index]
        node.is_dead = True
        life = int(node.writer.partition("-")[2] or 0) + 1
        self.nodes[index] = Node(self, index, life, node.offset_us, node.speed)
        self.by_writer[self.nodes[index].writer] = self.nodes[index]

    def wipe(self, *, holds_only: bool = False) -> int:
        """The origin loses everything. Returns how much credit nodes held.

        Nodes notice within a second, as a pulse does, and report all their cells again.
        """
        out = sum(hold.spare for hold in self.origin.record.holds.values())
        if holds_only:
            self.origin.record.holds.clear()
        else:
            self.origin.record = SubjectRecord()
            for node in self.nodes:
                self.at(self.last_us + self.random.randrange(S), node.heal)
        return out

    def unheard_by(self, node: Node) -> int:
        """What others have accepted, in the running cell and the one before, that this node does not know of."""
        sequence = node.now_ms(self.last_us) // self.duration_ms
        return sum(
            self.judge.cells.get(q, 0) - node.own.get(q, 0) - node.others.get(q, 0)
            for q in (sequence, sequence - 1)
        )

    def room(self, at_us: int) -> int:
        """What a single counter has left at that time."""
        return self.quota - self.judge.effective(at_us // MS)


def central(arrivals: Iterable[Arrival], quota: int, duration_ms: int) -> tuple[int, int]:
    """A single counter on the same arrivals: requests and units admitted."""
    judge = Judge(duration_ms)
    for at_us, _, cost, own_quota in arrivals:
        if judge.effective(at_us // MS) + cost <= (own_quota or quota):
            judge.accept(at_us // MS, at_us // MS, cost, own_quota or quota)
    return judge.admitted, judge.units


# -- workloads. Time begins at a boundary of cells.


def round_robin(nodes: int, gap_us: int, count: int, start_us: int = 3 * MS, cost: int = 1) -> list[Arrival]:
    return [Arrival(start_us + i * gap_us, i % nodes, cost) for i in range(count)]


def all_at_once(nodes: int, each: int, at_us: int = S, spread_us: int = 0, seed: object = 7) -> list[Arrival]:
    random = Random(f"burst {seed}")
    found = [
        Arrival(at_us + (random.randrange(spread_us) if spread_us else 0), node)
        for node in range(nodes)
        for _ in range(each)
    ]
    return sorted(found, key=lambda arrival: arrival.at_us)


def poisson(
    nodes: int,
    per_s: float,
    seconds: float,
    seed: object,
    *,
    weights: Sequence[float] | None = None,
    costs: Sequence[int] = (1,),
    quotas: Sequence[int] = (0,),
    start_us: int = 0,
) -> list[Arrival]:
    random = Random(f"poisson {seed}")
    found: list[Arrival] = []
    at_us = float(start_us)
    while True:
        at_us += random.expovariate(per_s / S)
        if at_us >= start_us + seconds * S:
            return found
        node = random.choices(range(nodes), weights)[0] if weights else random.randrange(nodes)
        found.append(Arrival(int(at_us), node, random.choice(costs), random.choice(quotas)))


def phases(nodes: int, quota: int, duration_ms: int, seconds: float, seed: object) -> list[Arrival]:
    """Light traffic on all nodes, a burst on one, fast traffic on some, perhaps a pause; repeated."""
    random = Random(f"phases {seed}")
    found: list[Arrival] = []
    per_s = quota * 1_000 / duration_ms
    at_us = 0
    while at_us < seconds * S:
        length_us = random.randrange(200, 1_500) * MS
        rate = per_s * random.choice((0.3, 0.6, 1.0))
        found += poisson(nodes, rate, length_us / S, random.random(), start_us=at_us)
        at_us += length_us
        busy, length_us = random.randrange(nodes), random.randrange(5, 200) * MS
        weights = [1.0 if node == busy else 0.02 for node in range(nodes)]
        rate = quota * random.choice((0.2, 0.5, 1.0)) / (length_us / S)
        found += poisson(nodes, rate, length_us / S, random.random(), start_us=at_us, weights=weights)
        at_us += length_us
        length_us = random.randrange(5, 400) * MS
        weights = [random.choice((0.0, 1.0, 3.0)) for _ in range(nodes - 1)] + [1.0]
        rate = quota * 0.3 / (length_us / S)
        found += poisson(nodes, rate, length_us / S, random.random(), start_us=at_us, weights=weights)
        at_us += length_us + random.choice((0, 0, 500, 3_000, 6_000)) * MS
    return sorted(found, key=lambda arrival: arrival.at_us)
