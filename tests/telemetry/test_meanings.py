"""Each metric means what its help says: one test for each, and a table that lists those which are elsewhere."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import (
    EPOCH_MS,
    HUNDRED_A_MINUTE,
    MILLION_AN_HOUR,
    Member,
    Region,
    clock,
    on_virtual_time,
    turns,
)
from tidegate import Limit, Tuning
from tidegate.adapters.memory import MemoryLedger
from tidegate.adapters.migrations import migrate
from tidegate.adapters.sqlite.ledger import SQLiteLedger
from tidegate.core.model import LedgerRow
from tidegate.errors import DependencyTimeout
from tidegate.telemetry.collecting import collect
from tidegate.telemetry.metrics import METRICS
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter

ROOT = Path(__file__).parents[2]
THOUSAND_A_MINUTE = Limit("1000/minute", namespace="tests")

Test = TypeVar("Test", bound=Callable[[], Coroutine[Any, Any, None]])

MEANT: set[str] = set()

# Tests of the server's own metrics, which need a server.
ELSEWHERE = {
    "http_requests_total": "tests/server/test_service.py::test_requests_and_decisions_are_counted",
    "top_workspace_decisions": "tests/server/test_service.py::test_requests_and_decisions_are_counted",
    "top_identifier_denials": "tests/server/test_service.py::test_requests_and_decisions_are_counted",
    "build_info": "tests/server/test_service.py::test_the_metrics_and_health_of_the_server_itself",
    "origin_file_bytes": "tests/server/test_service.py::test_the_metrics_and_health_of_the_server_itself",
    "http_connections": "tests/server/test_service.py::test_the_metrics_and_health_of_the_server_itself",
    "http_connections_evicted_total": "tests/server/test_service.py::test_the_metrics_and_health_of_the_server_itself",
    "decision_log_records_total": "tests/server/test_decision_log.py",
    "workers": "tests/server/test_service.py::test_the_metrics_and_health_of_the_server_itself",
    **dict.fromkeys(
        [
            "rls_requests_total",
            "rls_shadow_verdicts_total",
            "rls_descriptors_without_rule_total",
            "rls_rule_decisions",
            "rls_calls_total",
            "rls_reloads_total",
            "rls_rules_faulty",
            "rls_connections",
        ],
        "tests/e2e/server/test_gateway_listeners.py",
    ),
    "rls_connections_ended_total": "tests/server/http2/test_bounds.py",
    # The requests of a node to its origin are tested with the code that sends them.
    "origin_operations_total": "tests/runtime/test_statistics.py",
    "strict_activations_total": "tests/runtime/test_statistics.py",
}


def means(*names: str) -> Callable[[Test], Callable[[], None]]:
    """A test of the meaning of these metrics, in virtual time."""

    def register(test: Test) -> Callable[[], None]:
        MEANT.update(names)
        return on_virtual_time(test)

    return register


def value(node: Member, name: str, *labels: str) -> float:
    return collect(node.limiter).values[name, labels]


def row(identifier: str, regional: int, region: str = "ams") -> LedgerRow:
    sequence = EPOCH_MS // 60_000
    expires_at_ms = (sequence + 2) * 60_000
    return LedgerRow("default", "tests", identifier, 60_000, sequence, region, regional, expires_at_ms)


def loops(node: Member) -> Any:
    found = node.limiter._parts.node
    assert found is not None
    return found


def test_every_metric_has_a_test_of_its_meaning() -> None:
    assert MEANT | ELSEWHERE.keys() == {entry.name for entry in METRICS}
    for name, place in ELSEWHERE.items():
        path, _, function = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"def {function}\(" if function else "def test_", text), name


@means("decisions_total")
async def test_decisions_are_counted_by_outcome_and_by_whether_they_waited() -> None:
    region = Region()
    node = region.node()
    await node.accept("x", 3, Limit("2/minute", namespace="tests"))
    assert value(node, "decisions_total", "allowed", "origin") == 1, "the first one had to read"
    assert value(node, "decisions_total", "allowed", "local") == 1
    assert value(node, "decisions_total", "denied", "local") == 1
    await region.stop()


@means("subjects_bytes")
async def test_bytes_of_subjects_grow_with_their_names_and_end_with_them() -> None:
    region = Region()
    node = region.node()
    await node.accept("x")
    short = value(node, "subjects_bytes")
    await node.accept("y" * 512)
    assert value(node, "subjects_bytes") - short >= 512
    await asyncio.sleep(4 * 3_600)
    await turns()
    assert value(node, "subjects_bytes") == 0
    await region.stop()


@means("subjects", "cells", "cells_created_total")
async def test_subjects_and_cells_are_those_in_memory_and_a_cell_has_one_cause() -> None:
    ledger = MemoryLedger(clock=clock())
    ledger.publish_nowait([row("imported", 5)])
    region = Region(ledger=ledger)
    node = region.node()
    await node.limiter.start()
    await turns()
    for number in range(3):
        await node.accept(f"user {number}")
    assert value(node, "subjects") == 4
    assert value(node, "cells") >= 4
    assert value(node, "cells_created_total", "import") >= 1
    assert value(node, "cells_created_total", "traffic") >= 3
    await asyncio.sleep(4 * 3_600)
    await turns()
    assert (value(node, "subjects"), value(node, "cells")) == (0, 0), "aged out"
    assert value(node, "cells_created_total", "traffic") >= 3, "a counter stays"
    await region.stop()


@means("subjects_evicted_total")
async def test_evictions_are_those_of_the_bound_and_not_of_age() -> None:
    region = Region(subjects_max=10)
    node = region.node()
    for number in range(25):
        await node.accept(f"user {number}")
        await turns()
    evicted = sum(
        value(node, "subjects_evicted_total", reason) for reason in ("lru", "blocked", "unreplayed")
    )
    assert evicted == 15
    await region.stop()


@means("origin_errors_total", "origin_latency_seconds")
async def test_errors_have_a_reason_and_the_histogram_holds_what_succeeded() -> None:
    region = Region()
    node = region.node()
    await node.accept("a")
    node.faults.fail("read", error=DependencyTimeout("late"), times=1)
    await node.accept("b")
    node.faults.fail("read", times=1)
    await node.accept("c")
    await node.accept("d")
    assert value(node, "origin_errors_total", "cold", "timeout") == 1
    assert value(node, "origin_errors_total", "cold", "other") == 1
    histogram = collect(node.limiter).histograms["origin_latency_seconds", ("cold",)]
    assert sum(histogram.counts) == 2, "a and d"
    await region.stop()


@means("origin_dirty_subjects", "replay_lag_seconds")
async def test_dirty_subjects_are_subjects_and_the_lag_is_the_age_of_the_oldest_count() -> None:
    region = Region()
    node = region.node()
    await node.accept("x")
    await turns()
    assert (value(node, "origin_dirty_subjects"), value(node, "replay_lag_seconds")) == (0, 0)
    node.faults.fail("merge")
    await node.accept("x", 5)
    await node.accept("y", 2)
    await asyncio.sleep(2)
    assert value(node, "origin_dirty_subjects") == 2, "not cells, and not requests"
    assert 1.9 <= value(node, "replay_lag_seconds") <= 2.1
    node.faults.heal("merge")
    await asyncio.sleep(10)
    assert (value(node, "origin_dirty_subjects"), value(node, "replay_lag_seconds")) == (0, 0)
    node.faults.hang("merge")
    await node.accept("x")
    await turns()
    assert value(node, "origin_dirty_subjects") == 1, "on its way is not acknowledged"
    await node.accept("x")
    assert value(node, "origin_dirty_subjects") == 1, "the same subject, dirty again"
    node.faults.heal("merge")
    await region.stop()


@on_virtual_time
async def test_dirty_subjects_are_also_those_with_counts_in_messages_of_credit() -> None:
    region = Region(credit=True)
    node = region.node()
    await node.accept("x", 5)
    await asyncio.sleep(2)
    assert value(node, "origin_dirty_subjects") == 0
    node.faults.hang("exchange")
    await node.accept("x")
    await asyncio.sleep(0.1)
    assert node.faults.fired["exchange"] == 1
    assert value(node, "origin_dirty_subjects") == 1, "on its way is not acknowledged"
    node.faults.heal("exchange")
    await asyncio.sleep(2)
    assert value(node, "origin_dirty_subjects") == 0
    await region.stop()


def credit_value(fleet: CreditFleet, node: int, name: str) -> float:
    return collect(fleet.limiters[node]).values[name, ()]


@means("credit_messages_total")
async def test_messages_are_counted_for_each_subject_when_they_are_sent() -> None:
    fleet = CreditFleet(1)
    await fleet.start()
    sent = fleet.origins[0].messages
    await asyncio.gather(*(fleet.ask(0, 100, identifier=f"user {number}") for number in range(10)))
    assert credit_value(fleet, 0, "credit_messages_total") == len(sent) >= 10
    assert fleet.origins[0].commands < 10, "one command has the messages of many subjects"
    await asyncio.sleep(10)
    await fleet.ask(0, 100, identifier="user 1")
    assert credit_value(fleet, 0, "credit_messages_total") == len(sent), "reports are counted too"
    fleet.origins[0].is_down = True
    for number in range(100):
        await fleet.ask(0, 100, identifier=f"new {number}")
    assert fleet.limiters[0].statistics().breaker_states["origin"] == 2
    assert credit_value(fleet, 0, "credit_messages_total") == len(sent), "an open breaker sends nothing"
    await fleet.stop()


@means("credit_waits_total", "credit_wait_seconds")
async def test_waits_are_requests_and_batches_that_needed_an_answer_and_the_histogram_has_their_time() -> (
    None
):
    fleet = CreditFleet(1, latency_ms=(10, 10))
    await fleet.start()
    await fleet.ask(0, 1_000)
    assert fleet.spare(0) == 1
    await fleet.ask(0, 1_000)
    assert credit_value(fleet, 0, "credit_waits_total") == 1, "the second one had credit"
    await fleet.ask_batch(0, [(1_000, "a", 1), (1_000, "b", 1)])
    assert credit_value(fleet, 0, "credit_waits_total") == 2, "a batch is one"
    await fleet.ask(0, 1_000, 0, "c")
    assert credit_value(fleet, 0, "credit_waits_total") == 3, "with cost 0 it waits for counts"
    waited = collect(fleet.limiters[0]).histograms["credit_wait_seconds", ()]
    assert sum(waited.counts) == 3
    assert 0.06 <= waited.total <= 0.063, "to the origin and back, three times"
    await fleet.stop()


@means("credit_denied_held_total", "credit_recalls_received_total")
async def test_a_denial_is_held_if_credit_of_another_node_caused_it_and_only_a_recall_that_arrived_counts() -> (
    None
):
    fleet = CreditFleet(2)
    await fleet.start()
    for _ in range(100):
        await fleet.ask(0, 1_000)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert fleet.spare(0) > 0
    fleet.origins[0].loses_recalls = True
    assert not await fleet.ask(1, 1_000, 900), "it would fit"
    assert credit_value(fleet, 1, "credit_denied_held_total") == 1
    assert credit_value(fleet, 0, "credit_recalls_received_total") == 0
    fleet.origins[0].loses_recalls = False
    await asyncio.sleep(6.1)
    for _ in range(10):
        await fleet.ask(0, 1_000)
    assert fleet.spare(0) > 0
    assert await fleet.ask(1, 1_000, 890), "all that is left: node 0 gives its credit back"
    assert credit_value(fleet, 0, "credit_recalls_received_total") == 1
    assert not await fleet.ask(1, 1_000), "the limit is used"
    assert not await fleet.ask(0, 1_000)
    for node, denied in enumerate([0, 1]):
        assert credit_value(fleet, node, "credit_denied_held_total") == denied
    assert credit_value(fleet, 1, "credit_recalls_received_total") == 0, "it held nothing"
    await fleet.stop()


@means("credit_releases_total")
async def test_releases_are_messages_for_subjects_that_were_evicted_with_credit() -> None:
    fleet = CreditFleet(1, subjects_max=2, touch_ms=1)
    await fleet.start()
    for number in range(6):
        await fleet.ask(0, 100, identifier=f"user {number}")
        await asyncio.sleep(0.1)
    evicted = collect(fleet.limiters[0]).values["subjects_evicted_total", ("lru",)]
    only_returned = [one for one in fleet.origins[0].messages if one.cells[1].sequence == -1]
    assert credit_value(fleet, 0, "credit_releases_total") == len(only_returned) == evicted == 4
    assert credit_value(fleet, 0, "credit_messages_total") == len(fleet.origins[0].messages) - 4
    await fleet.stop()


@means("credit_subjects")
async def test_subjects_with_credit_are_those_used_in_the_last_seconds() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    for number in range(50):
        await fleet.ask(0, 100, identifier=f"user {number}")
    assert credit_value(fleet, 0, "credit_subjects") == 50
    assert credit_value(fleet, 1, "credit_subjects") == 0
    await asyncio.sleep(5)
    for number in range(10):
        await fleet.ask(0, 100, identifier=f"user {number}")
    await asyncio.sleep(5)
    assert credit_value(fleet, 0, "credit_subjects") == 10
    await asyncio.sleep(5)
    assert (credit_value(fleet, 0, "credit_subjects"), credit_value(fleet, 0, "subjects")) == (0, 50)
    await fleet.stop()


@means("credit_listening")
async def test_a_node_listens_from_its_start_to_its_stop_and_asks_for_nothing_in_advance_otherwise() -> None:
    fleet = CreditFleet(2)
    assert credit_value(fleet, 0, "credit_listening") == 0
    await fleet.start()
    await turns()
    assert [credit_value(fleet, node, "credit_listening") for node in (0, 1)] == [1, 1]
    fleet.origins[0].inner.can_be_recalled = False
    for _ in range(5):
        await fleet.ask(0, 1_000)
        await fleet.ask(1, 1_000, identifier="y")
    assert [credit_value(fleet, node, "credit_listening") for node in (0, 1)] == [0, 1]
    assert credit_value(fleet, 0, "credit_waits_total") == 5
    assert credit_value(fleet, 1, "credit_waits_total") < 5
    await fleet.limiters[1].stop()
    assert credit_value(fleet, 1, "credit_listening") == 0
    await fleet.stop()


@means("origin_heals_total")
async def test_heals_are_cells_that_were_merged_again_after_a_loss() -> None:
    region = Region()
    node = region.node()
    for number in range(3):
        await node.accept(f"user {number}")
    await turns()
    assert value(node, "origin_heals_total") == 0
    region.store.wipe()
    await asyncio.sleep(30)
    await turns()
    assert value(node, "origin_heals_total") >= 3
    await region.stop()


@means("global_publish_rows_total", "global_publish_errors_total", "global_rows_set_aside_total")
async def test_publishes_that_got_no_answer_are_errors_and_rejected_rows_are_set_aside() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger)
    node = region.node()
    await node.limiter.start()
    await turns()
    await node.accept("x", 400, THOUSAND_A_MINUTE)
    await loops(node).publish.run_once()
    assert value(node, "global_publish_rows_total") == len(ledger.rows()) == 1
    assert value(node, "global_publish_errors_total") == 0
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail("publish", times=1)
    await node.accept("x", 1, THOUSAND_A_MINUTE)
    await loops(node).publish.run_once()
    assert value(node, "global_publish_errors_total") == 1
    ledger.rejects = lambda row: row.identifier == "bad"
    await node.accept("bad", 400, THOUSAND_A_MINUTE)
    await loops(node).publish.run_once()
    assert value(node, "global_rows_set_aside_total") == 1
    assert value(node, "global_publish_errors_total") == 1, "the ledger answered"
    await region.stop()


@means(
    "global_import_rows_total",
    "global_import_rows_last",
    "global_import_errors_total",
    "global_lag_seconds",
)
async def test_imports_count_rows_and_failures_and_heartbeats_are_not_imports() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger)
    node = region.node(with_origin=False)
    await node.limiter.start()
    await turns()
    assert node.failing_ledger is not None
    ledger.publish_nowait([row("x", 5), row("y", 6)])
    await asyncio.sleep(0.5)  # the loop itself imports each second
    before = value(node, "global_import_rows_total")
    await loops(node).importer.run_once()
    assert value(node, "global_import_rows_total") - before == 2
    assert value(node, "global_import_rows_last") == 2
    assert 0.4 <= value(node, "global_lag_seconds", "ams") <= 0.6
    await loops(node).importer.run_once()
    assert value(node, "global_import_rows_last") == 0
    node.failing_ledger.faults.fail("heartbeat", times=1)
    await loops(node).importer.beat_once()
    assert value(node, "global_import_errors_total") == 0
    node.failing_ledger.faults.fail("changes", times=1)
    await loops(node).importer.run_once()
    assert value(node, "global_import_errors_total") == 1
    await region.stop()


MEANT.add("global_import_rows_unreadable_total")


async def test_unreadable_rows_are_those_that_an_import_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await migrate(f"sqlite:///{path}")
    ledger = SQLiteLedger(path, cleans_itself=False)
    await ledger.open(timeout_s=20)
    await ledger.publish([row("x", 5), row("y", 6), row("z", 7)], timeout_s=20)
    with closing(sqlite3.connect(path, isolation_level=None)) as another_program:
        another_program.execute(
            "UPDATE ratelimit_window_counts SET identifier = x'ff' WHERE identifier = CAST('y' AS BLOB)"
        )
        another_program.execute(
            "UPDATE ratelimit_window_counts SET duration_ms = 0 WHERE identifier = CAST('z' AS BLOB)"
        )
    limiter = make_async_limiter(
        region="fra", ledger=ledger, clock=ManualClock(EPOCH_MS), tuning=Tuning(credit=False), run_loops=False
    )
    node = limiter._parts.node
    assert node is not None and node.importer is not None
    for _ in range(2):
        await node.importer.run_once()
        values = collect(limiter).values
        assert values["global_import_rows_unreadable_total", ()] == 2
        assert values["global_import_rows_total", ()] == 1
        assert values["global_import_errors_total", ()] == 0
    assert (await limiter.peek(HUNDRED_A_MINUTE, "x")).effective == 5
    await limiter.stop()
    await ledger.close()


@means("regions")
async def test_regions_are_those_with_a_recent_heartbeat() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger)
    node = region.node(with_origin=False)
    await node.limiter.start()
    await turns()
    assert value(node, "regions") == 1
    ledger.heartbeat_nowait("ams")
    await loops(node).importer.beat_once()
    assert value(node, "regions") == 2
    await asyncio.sleep(region.tuning.region_live_ms / 1000 * 2)
    assert value(node, "regions") == 1, "ams is silent"
    await region.stop()


@means("importer", "importer_seconds", "import_age_seconds")
async def test_one_node_of_a_region_is_its_importer_and_all_know_for_how_long() -> None:
    region = Region(ledger=MemoryLedger(clock=clock()), credit=True)
    nodes = [region.node() for _ in range(3)]
    for node in nodes:
        await node.limiter.start()
    await asyncio.sleep(20)
    assert sum(value(node, "importer") for node in nodes) == 1
    assert all(19 <= value(node, "importer_seconds") <= 21 for node in nodes)
    assert all(value(node, "import_age_seconds") < 1 for node in nodes)
    for node in nodes:
        node.faults.fail()
    await asyncio.sleep(10)
    assert sum(value(node, "importer") for node in nodes) == 0
    for node in nodes:
        node.faults.heal()
    await region.stop()


@means("breaker_state")
async def test_a_breaker_is_2_while_it_is_open_and_0_when_it_is_closed() -> None:
    region = Region()
    node = region.node()
    await node.accept("x")
    assert value(node, "breaker_state", "origin_read") == 0
    node.faults.fail("read")
    for number in range(60):
        await node.accept(f"user {number}")
    assert value(node, "breaker_state", "origin_read") == 2
    await region.stop()


@means("loop_stall_seconds")
async def test_the_stall_histogram_holds_how_late_timers_were() -> None:
    region = Region()
    node = region.node()
    await node.accept("x")
    await asyncio.sleep(5)
    histogram = collect(node.limiter).histograms["loop_stall_seconds", ()]
    assert sum(histogram.counts) >= 20
    assert histogram.total < 0.001, "virtual time is never late"
    await region.stop()


@means("clock_offset_seconds")
async def test_the_offset_is_positive_when_this_node_is_ahead_of_its_origin() -> None:
    region = Region()
    region.clock.offset_ms = 250
    region.store._clock = clock()
    node = region.node()
    await node.accept("x", 1, HUNDRED_A_MINUTE)
    await asyncio.sleep(10)
    assert value(node, "clock_offset_seconds") == 0.25
    assert await node.accept("y", 1, MILLION_AN_HOUR) == 1
    await region.stop()


@means("resets_total")
async def test_a_reset_is_counted_once_on_each_node_where_it_was_requested_and_where_it_was_received() -> (
    None
):
    region = Region(ledger=MemoryLedger(clock=clock()), credit=True)
    first, second = region.node(), region.node()
    for node in (first, second):
        await node.limiter.start()
    await first.limiter.limit(HUNDRED_A_MINUTE, "x")
    await first.limiter.reset(HUNDRED_A_MINUTE, "x")
    await second.limiter.reset(HUNDRED_A_MINUTE, "no request has used it")
    await asyncio.sleep(10)
    for node in (first, second):
        assert (value(node, "resets_total", "request"), value(node, "resets_total", "node")) == (1, 1)
    await first.limiter.reset(HUNDRED_A_MINUTE, "x")
    await asyncio.sleep(10)
    assert (value(first, "resets_total", "request"), value(first, "resets_total", "node")) == (2, 1)
    assert (value(second, "resets_total", "request"), value(second, "resets_total", "node")) == (1, 2)
    await region.stop()


@means("shadow_exceeded_total")
async def test_what_limits_in_shadow_mode_would_have_denied_counts_as_allowed() -> None:
    region = Region()
    node = region.node()
    trial = Limit("2/minute", namespace="tests", shadow=True)
    for _ in range(5):
        assert await node.limiter.limit(trial, "x")
    assert value(node, "shadow_exceeded_total") == 3
    statistics = node.limiter.statistics()
    assert (statistics.allowed, statistics.denied) == (5, 0)
    await region.stop()
