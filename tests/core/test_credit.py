from __future__ import annotations

from random import Random

import pytest

from tests.core.credit_world import (
    MS,
    Arrival,
    Broken,
    Faults,
    S,
    World,
    all_at_once,
    central,
    phases,
    poisson,
    round_robin,
)
from tidegate.adapters.sqlite.credit import CREDIT_RULES
from tidegate.core.credit import DENY_HELD
from tidegate.core.grants import GrantRules

# The rules of Redis, and those of a file that the workers of one machine share.
EVERY_RULES = pytest.mark.parametrize(
    "rules", [pytest.param(GrantRules(), id="Redis"), pytest.param(CREDIT_RULES, id="file")]
)

# The share of the quota that may be refused although it would have fitted.
UNDER_MAX = 0.005

# Messages and answers lost, doubled and late, and clocks that run slow.
CHAOS = Faults(lost=0.03, doubled=0.1, late=0.1, late_us=700 * MS, slow_clocks=0.05)


def check_exact(world: World, arrivals: list[Arrival], *, windows: float = 1) -> None:
    """Never more than a single counter, and at most half a percent of the quota less."""
    judge = world.judge
    world.run_until(world.last_us + 300 * MS)  # until no request waits
    assert judge.over == 0, f"{judge.over} accepted over the quota, by up to {judge.over_units}"
    allowed = int(world.quota * windows * UNDER_MAX)
    assert judge.falsely_denied_units <= allowed
    _, units = central(arrivals, world.quota, world.duration_ms)
    assert judge.units >= units - allowed


def check_quiet(world: World, after_us: int = S) -> None:
    """After a second without traffic any node gets all that is left, in one request."""
    at_us = world.last_us + after_us
    world.run_until(at_us)
    room = world.room(at_us)
    if room > 0:
        admitted, over = world.judge.admitted, world.judge.over
        world.play([Arrival(at_us, world.random.randrange(len(world.nodes)), room)], S)
        assert world.judge.admitted == admitted + 1
        assert world.judge.over == over


# -- invariant 11


@pytest.mark.parametrize(
    ("nodes", "quota", "gap_ms"),
    [(2, 6, 50), (4, 6, 50), (8, 6, 50), (8, 6, 300), (8, 20, 50), (16, 100, 10)],
)
def test_one_request_after_the_other_passes_exactly_the_quota(nodes: int, quota: int, gap_ms: int) -> None:
    arrivals = round_robin(nodes, gap_ms * MS, 3 * quota + nodes)
    world = World(nodes=nodes, quota=quota, duration_ms=3_600_000).play(arrivals, S)
    assert world.judge.units == quota
    check_exact(world, arrivals)


@pytest.mark.parametrize(
    ("nodes", "quota"), [(8, 5), (8, 100), (8, 1_000), (32, 1), (64, 1_000), (2, 100_000)]
)
def test_requests_at_the_same_instant_pass_exactly_the_quota(nodes: int, quota: int) -> None:
    arrivals = all_at_once(nodes, max(4, min(3 * quota, quota + 10_000) // nodes))
    world = World(nodes=nodes, quota=quota, duration_ms=3_600_000).play(arrivals, S)
    assert world.judge.units == quota
    check_exact(world, arrivals)


@EVERY_RULES
@pytest.mark.parametrize("quota", [1, 2, 5, 20, 100])
@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 64])
def test_small_quotas_are_exact_at_every_pace(nodes: int, quota: int, rules: GrantRules) -> None:
    for gap_ms in (1, 7, 50, 300, 2_000):
        arrivals = round_robin(nodes, gap_ms * MS, 2 * quota + 2 * nodes)
        world = World(nodes=nodes, quota=quota, duration_ms=3_600_000, seed=gap_ms, rules=rules)
        world.play(arrivals, S)
        assert world.judge.units == min(quota, len(arrivals))
        check_exact(world, arrivals)


@pytest.mark.parametrize("duration_ms", [1_000, 10_000])
@pytest.mark.parametrize("nodes", [1, 3, 8, 32])
@pytest.mark.parametrize("load", [0.5, 0.9, 1.0, 2.0, 10.0])
def test_windows_that_roll_over_under_load_stay_exact(duration_ms: int, nodes: int, load: float) -> None:
    for quota in (10, 100, 1_000):
        rate = quota * load * 1_000 / duration_ms
        seconds = min(3 * duration_ms / 1_000, 4_000 / rate)
        arrivals = poisson(nodes, rate, seconds, f"{quota} {nodes} {load} {duration_ms}")
        world = World(nodes=nodes, quota=quota, duration_ms=duration_ms).play(arrivals, 0)
        check_exact(world, arrivals, windows=seconds * 1_000 / duration_ms)
        check_quiet(world)


@pytest.mark.parametrize("nodes", [3, 8, 32])
def test_costs_above_one_are_exact(nodes: int) -> None:
    costs = (1,) * 9 + (50,)
    for load in (0.5, 0.9, 1.0, 2.0):
        arrivals = poisson(nodes, 100 * load / 5.9, 40, f"{nodes} {load}", costs=costs)
        world = World(nodes=nodes, quota=1_000, duration_ms=10_000).play(arrivals, 0)
        check_exact(world, arrivals, windows=4)
        check_quiet(world)


@pytest.mark.parametrize(("low", "high"), [(10, 20), (50, 200), (500, 1_000)])
def test_several_limits_on_one_counter_are_each_exact(low: int, high: int) -> None:
    for seed in range(4):
        arrivals = poisson(6, high / 10 * 1.5, 40, f"limits {seed}", quotas=(low, low, high, high, high))
        random = Random(seed)
        arrivals = [one for one in arrivals if (one.at_us // (2 * S)) % 3 or random.random() < 0.1]
        world = World(nodes=6, quota=high, duration_ms=10_000, seed=seed).play(arrivals, S)
        assert world.judge.over == 0
        assert world.judge.falsely_denied_units <= int(high * 4 * UNDER_MAX)


@EVERY_RULES
@pytest.mark.parametrize("seed", range(6))
def test_traffic_that_changes_from_moment_to_moment_is_exact(seed: int, rules: GrantRules) -> None:
    for quota, duration_ms, nodes in ((20, 1_000, 5), (200, 10_000, 8), (2_000, 2_000, 16)):
        arrivals = phases(nodes, quota, duration_ms, 8, seed)
        world = World(nodes=nodes, quota=quota, duration_ms=duration_ms, seed=seed, rules=rules)
        world.play(arrivals, 0)
        check_exact(world, arrivals, windows=8_000 / duration_ms)
        check_quiet(world)


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_network_is_as_exact_as_a_fast_one(seed: int) -> None:
    arrivals = phases(8, 200, 10_000, 10, seed)
    world = World(nodes=8, quota=200, duration_ms=10_000, seed=seed, latency_us=(4 * MS, 25 * MS)).play(
        arrivals, 0
    )
    check_exact(world, arrivals)
    check_quiet(world)


@pytest.mark.parametrize("seed", range(4))
def test_reports_that_rest_for_some_milliseconds_change_nothing(seed: int) -> None:
    arrivals = phases(8, 2_000, 10_000, 10, seed)
    world = World(nodes=8, quota=2_000, duration_ms=10_000, seed=seed, pace_us=10 * MS).play(arrivals, 0)
    check_exact(world, arrivals)
    check_quiet(world)


def test_a_busy_node_far_from_its_limit_never_waits() -> None:
    arrivals = poisson(1, 20_000, 1, "hot")
    world = World(nodes=1, quota=100_000_000, duration_ms=60_000, pace_us=10 * MS)
    world.play([one for one in arrivals if one.at_us < 100 * MS])
    waited = world.waited
    world.play([one for one in arrivals if one.at_us >= 100 * MS])
    assert world.waited == waited
    assert world.messages <= 0.01 * world.judge.admitted


# -- faults


@EVERY_RULES
@pytest.mark.parametrize("seed", range(8))
def test_lost_doubled_and_late_messages_never_let_more_pass(seed: int, rules: GrantRules) -> None:
    for quota, duration_ms in ((20, 1_000), (200, 10_000), (2_000, 2_000)):
        arrivals = phases(8, quota, duration_ms, 12, seed)
        world = World(
            nodes=8, quota=quota, duration_ms=duration_ms, seed=seed, faults=CHAOS, rules=rules
        ).play(arrivals, 0)
        assert world.judge.over == 0
        assert world.judge.units > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_credit_of_a_crashed_node_is_available_again_when_it_expires(seed: int) -> None:
    rules = GrantRules()
    arrivals = poisson(4, 200, 2, f"crash {seed}")
    world = World(nodes=4, quota=1_000, seed=seed, pace_us=10 * MS).play(arrivals)
    victim = max(range(4), key=lambda index: world.nodes[index].credit.spare)
    unreported = unreported_by(world, victim)
    world.crash(victim)
    stranded = world.origin.record.holds[f"node{victim}"].spare
    assert stranded > unreported
    # While that credit counts, a request for all that is left is denied with a retry time: first the time by which the
    # node must have answered, and finally the end of its credit.
    again_us = world.last_us + 100 * MS
    retries: list[int] = []
    while len(retries) < 3:
        world.run_until(again_us)
        world.play([Arrival(again_us, (victim + 1) % 4, world.room(again_us))], 100 * MS)
        if world.room(world.last_us) == 0:
            break
        denial = world.denials[-1]
        assert denial.verdict == DENY_HELD
        retries.append(denial.retry_ms)
        again_us = denial.at_us + denial.retry_ms * MS
    assert len(retries) == 2
    assert retries[0] <= 50
    assert retries[1] <= rules.life_ms + rules.margin_ms
    assert world.judge.over == 0


def unreported_by(world: World, index: int) -> int:
    node = world.nodes[index]
    cells = world.origin.record.cells
    return sum(own - cells[q].components.get(node.writer, 0) for q, own in node.own.items() if q in cells)


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_crash_join_and_leave_never_let_more_pass_than_they_reported(seed: int) -> None:
    random = Random(seed)
    world = World(nodes=6, quota=300, duration_ms=10_000, seed=seed)
    lost = 0
    for index, arrival in enumerate(phases(6, 300, 10_000, 30, f"churn {seed}")):
        world.play([arrival])
        if index % 60 == 59:
            victim = random.randrange(6)
            if random.random() < 0.5:
                lost += unreported_by(world, victim)
                world.crash(victim)
            else:
                world.leave(victim)
                world.run_until(world.last_us + 20 * MS)
                world.crash(victim)  # it has reported and given back; a new node replaces it
    # A crash loses what was not reported: that much may be accepted twice, and no more.
    assert world.judge.over_units <= lost
    check_quiet(world, 7 * S)


def test_a_node_that_leaves_gives_its_credit_back_at_once() -> None:
    world = World(nodes=2, quota=100).play(poisson(2, 200, 0.3, "leave"))
    world.leave(0)
    world.play([Arrival(world.last_us + 20 * MS, 1, world.room(world.last_us))], S)
    assert not [one for one in world.denials if one.was_false]
    assert world.room(world.last_us) == 0


@pytest.mark.parametrize("holds_only", [True, False])
def test_a_wipe_admits_at_most_the_credit_that_was_out_the_unknown_counts_and_what_came_until_repair(
    *, holds_only: bool
) -> None:
    worst = 0
    for seed in range(3 if holds_only else 12):
        arrivals = phases(8, 500, 10_000, 15, f"wipe {seed}")
        at_us = Random(seed).randrange(5 * S, 15 * S)
        world = World(nodes=8, quota=500, duration_ms=10_000, seed=seed)
        world.play([one for one in arrivals if one.at_us < at_us])
        world.run_until(at_us)
        unheard = max(world.unheard_by(node) for node in world.nodes)
        out = world.wipe(holds_only=holds_only)
        units = world.judge.units
        world.play([one for one in arrivals if at_us <= one.at_us < at_us + S])
        meanwhile = world.judge.units - units
        world.play([one for one in arrivals if one.at_us >= at_us + S], S)
        assert world.judge.over_units <= (out if holds_only else out + unheard + meanwhile)
        worst = max(worst, world.judge.over_units)
        over = world.judge.over
        world.play(poisson(8, 200, 3, f"after {seed}", start_us=60 * S), S)
        assert world.judge.over == over, "two windows later it is exact again"
    if not holds_only:
        assert worst > 0, "no wipe admitted too much: the bound was not tested"


@pytest.mark.parametrize("seed", range(4))
def test_a_holder_that_gets_no_recalls_delays_others_until_its_credit_expires_at_most(seed: int) -> None:
    world = World(nodes=4, quota=200, seed=seed)
    world.nodes[0].is_deaf = True
    arrivals = poisson(4, 100, 1.5, f"deaf {seed}")
    world.play(arrivals)
    assert world.judge.over == 0
    check_quiet(world, 7 * S)


@pytest.mark.parametrize("offset_ms", [10, 100])
def test_clocks_that_differ_cost_a_bounded_part(offset_ms: int) -> None:
    """Not exact, and documented: each node decides by its own time. The sketch of the design had 6 and 22 of 2,000."""
    worst = 0
    for seed in range(4):
        random = Random(seed)
        offsets_us = [random.randrange(-offset_ms, offset_ms) * MS for _ in range(8)]
        arrivals = [one for one in phases(8, 2_000, 2_000, 10, seed) if one.at_us > S]
        world = World(nodes=8, quota=2_000, duration_ms=2_000, seed=seed, offsets_us=offsets_us).play(
            arrivals, S
        )
        worst = max(worst, world.judge.over_units)
    assert worst <= 9 * offset_ms // 10


@pytest.mark.parametrize("seed", range(4))
def test_a_denial_because_of_credit_of_others_has_a_true_retry_time(seed: int) -> None:
    refused = 0
    for part in range(30):
        arrivals = phases(8, 100, 60_000, 2, f"{seed} {part}")
        world = World(
            nodes=8,
            quota=100,
            seed=f"{seed} {part}",
            patience_us=0,
            patience_round_trips=0,
            latency_us=(3 * MS, 9 * MS),
        )
        for arrival in arrivals:
            world.play([arrival])
            held = [one for one in world.denials if one.verdict == DENY_HELD]
            if held:
                refused += 1
                last = held[-1]
                at_us = max(world.last_us, last.at_us + last.retry_ms * MS)
                assert last.retry_ms <= 100
                world.run_until(at_us)
                count = len(world.denials)
                world.play([Arrival(at_us, last.node, last.cost)], S)
                assert len(world.denials) == count or world.room(at_us) < last.cost
                break
    assert refused > 0, "no world had such a refusal: the test has checked nothing"


# -- short lives


@pytest.mark.parametrize("seed", range(4))
def test_credit_with_a_short_life_is_as_exact_as_with_a_long_one(seed: int) -> None:
    """Several processes of one machine, as the SQLite origin has them."""
    for quota, duration_ms in ((6, 60_000), (100, 10_000), (2_000, 2_000)):
        arrivals = phases(4, quota, duration_ms, 10, seed)
        rules = GrantRules(life_ms=1_000)
        world = World(
            nodes=4, quota=quota, duration_ms=duration_ms, seed=seed, rules=rules, latency_us=(30, 300)
        )
        world.play(arrivals, 0)
        check_exact(world, arrivals, windows=max(1.0, 10_000 / duration_ms))
        check_quiet(world)


# -- broken rules are noticed


def check_moments(broken: Broken) -> None:
    """Nodes that need what others hold."""
    for seed in range(3):
        arrivals = phases(8, 200, 10_000, 8, seed)
        world = World(nodes=8, quota=200, duration_ms=10_000, seed=seed, broken=broken).play(arrivals, 0)
        check_exact(world, arrivals)
        check_quiet(world)


def check_crash(broken: Broken) -> None:
    world = World(nodes=4, quota=1_000, duration_ms=60_000, broken=broken).play(poisson(4, 200, 2, "crash"))
    victim = max(range(4), key=lambda index: world.nodes[index].credit.spare)
    world.crash(victim)
    check_quiet(world, 7 * S)


def check_limits(broken: Broken) -> None:
    for seed in range(6):
        arrivals = poisson(6, 30, 40, f"limits {seed}", quotas=(50, 200, 200))
        random = Random(seed)
        arrivals = [one for one in arrivals if (one.at_us // (2 * S)) % 3 or random.random() < 0.1]
        world = World(
            nodes=6, quota=200, duration_ms=10_000, seed=seed, broken=broken, latency_us=(MS, 40 * MS)
        )
        assert world.play(arrivals, S).judge.over == 0


def check_chaos(broken: Broken) -> None:
    for seed in range(6):
        arrivals = phases(8, 200, 2_000, 12, seed)
        world = World(nodes=8, quota=200, duration_ms=2_000, seed=seed, broken=broken, faults=CHAOS)
        assert world.play(arrivals, 0).judge.over == 0


def check_end_of_life(broken: Broken) -> None:
    """An answer that came late must not make credit live longer than the origin counts it."""
    world = World(nodes=2, quota=100, broken=broken, latency_us=(100, 100), rules=GrantRules(margin_ms=100))
    world.play([Arrival(MS + i, 0) for i in range(10)])  # builds up credit
    world.run_until(200 * MS)
    node = world.nodes[0]
    # The last message's answer takes 200 ms: longer than the margin.
    world.latency_us = (200 * MS, 200 * MS)
    world.play([Arrival(200 * MS, 0)])
    world.run_until(700 * MS)
    world.latency_us = (100, 100)
    sent_ms = node.credit.sent_at_ms
    spare = node.credit.spare
    assert spare > 0
    # Just after the origin has dropped the hold another node takes all that is left,
    end_us = (sent_ms + 200 + 5_000 + 100) * MS + 2 * MS
    world.run_until(end_us)
    world.play([Arrival(end_us, 1, world.room(end_us))])
    world.run_until(end_us + 2 * MS)
    # and the first one must not spend what it still remembers.
    world.play([Arrival(end_us + 2 * MS, 0, spare)], 100 * MS)
    assert world.judge.over == 0


def check_in_flight(broken: Broken) -> None:
    """A node that wants less than it holds gives back the rest with a message, and spends while that is under way;
    another asks for all that is left."""
    world = World(nodes=2, quota=100, broken=broken, latency_us=(100, 100))
    world.play([Arrival(MS + i, 0) for i in range(20)])
    world.play([Arrival(50 * MS, 1)])
    at_us = 3 * S + 60 * MS  # the burst is over, and its credit is still valid
    world.run_until(at_us)
    assert world.nodes[0].credit.spare > 20
    world.play([Arrival(at_us, 0)])  # the message leaves, and is answered in 200 µs
    world.play([Arrival(at_us + i, 0) for i in range(1, 40)])
    world.play([Arrival(at_us + 50, 1, 59)], 100 * MS)
    assert world.judge.over == 0


def check_quota_raised(broken: Broken) -> None:
    """A message under a higher quota was read, its answer was lost, and the node still holds credit of the lower."""
    world = World(nodes=2, quota=100, broken=broken, latency_us=(100, 100))
    world.play([Arrival(MS + i, 0, 1, 20) for i in range(5)])
    world.run_until(100 * MS)
    world.loses_answers = True
    world.play([Arrival(100 * MS, 0, 30, 100)])
    world.run_until(102 * MS)
    world.loses_answers = False
    world.play([Arrival(102 * MS, 1, 40, 100)])
    world.run_until(400 * MS + 500)  # the first one has given up, and has not asked again yet
    assert world.judge.units == 45
    world.play([Arrival(400 * MS + 500, 0, 1, 20)], 100 * MS)
    assert world.judge.over == 0


def check_clock(broken: Broken) -> None:
    """One clock is late: what its node adds to the old cell counts in full in the new one."""
    world = World(nodes=2, quota=100, duration_ms=1_000, broken=broken, offsets_us=(0, -50 * MS))
    world.play([Arrival(S + 5 * MS, 0, 60)])
    world.play([Arrival(S + 15 * MS, 1, 60)], 100 * MS)
    assert world.judge.effective(1_020) <= 100


CHECKS = (
    check_moments,
    check_crash,
    check_limits,
    check_chaos,
    check_end_of_life,
    check_in_flight,
    check_quota_raised,
    check_clock,
)


def catches(broken: Broken) -> list[str]:
    """The checks that notice that this rule is broken."""
    found = []
    for check in CHECKS:
        try:
            check(broken)
        except AssertionError:
            found.append(check.__name__)
    return found


@pytest.mark.parametrize("broken", [rule for rule in Broken if rule is not Broken.NOTHING])
def test_a_broken_rule_is_noticed(broken: Broken) -> None:
    assert catches(broken) != []


def test_the_rules_as_they_are_pass_every_check() -> None:
    assert catches(Broken.NOTHING) == []
