"""Deliberately broken variants of Tidegate, to prove that the simulator finds them.

Each mutant breaks one rule of the design by replacing one function. `python -m tests.sim.mutants NAME...`, with src/ on
the path, applies each, runs simulations until one fails, and prints which; the same one must pass without the mutant.
Without names it reads them from stdin, one in a line. It needs a process of its own, because functions can only be
replaced in an interpreted core, and a fork of it for each mutant, because they must not stay replaced.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, cast

from tidegate.adapters import memory as memory_module
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.core import credit_sync as credit_sync_module
from tidegate.core import engine as engine_module
from tidegate.core import evaluation as evaluation_module
from tidegate.core import grants as grants_module
from tidegate.core import ledger_sync, pending, windows
from tidegate.core.cells import PINNED, Subject
from tidegate.core.credit import Credit
from tidegate.core.credit_sync import CreditSync
from tidegate.core.engine import Engine
from tidegate.core.evaluation import FITS, UNLIKELY
from tidegate.core.freshness import Freshness
from tidegate.core.grants import CellPart, CellRecord, CellTotals, CreditRequest, GrantRules, SubjectRecord
from tidegate.core.judge import Judge
from tidegate.core.ledger_sync import LedgerSync, Publication
from tidegate.core.model import ORIGIN, Component, Decision, LedgerRow, Limit, OriginReply
from tidegate.core.origin_sync import OriginSync
from tidegate.core.reservations import Claim, ClaimReply, Reservations
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, Mark
from tidegate.core.subjects import Subjects
from tidegate.core.sweep import Sweep
from tidegate.core.table import Table
from tidegate.core.views import GlobalView, Growth, OriginView
from tidegate.ports import Changes
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.exchange import Exchanges
from tidegate.runtime.importer import ImportLoop
from tidegate.runtime.node import Node
from tidegate.runtime.pulse import PulseLoop
from tidegate.runtime.reads import Reads
from tidegate.runtime.replay import ReplayLoop
from tidegate.runtime.reserving import Reserving
from tidegate.runtime.resets import ResetLoop
from tidegate.sim.plan import Options, Plan, draw_plan
from tidegate.sim.simulation import run_plan

# The line after the last one of a mutant: this and its exit code.
ENDED: Final = "ended with "

# The exit code of a search that finds nothing; of others, the number of the world that fails.
NOT_FOUND: Final = 255

# A mutant must be found by one of these seeds.
SEEDS: Final = range(1, 121)
# Plans that lead to the situation which a mutant gets wrong. If its own messages do not, others are tried: a change
# elsewhere changes their order in every simulation.
PLAN: Final = {
    "a_cell_of_the_future_is_taken_for_empty": 103,
    "a_client_that_disconnects_cancels_the_read_of_others": 4,
    "a_failed_chunk_is_dropped": 15,
    "a_failed_import_is_taken_for_a_good_one": 12,
    "a_failed_read_makes_the_cell_fresh": 12,
    "a_graceful_stop_flushes_nothing": 11,
    "a_grant_ignores_what_others_hold": 3,
    "a_guess_makes_the_subject_strict": 64,
    "a_guess_names_the_end_of_the_window": 64,
    "a_new_importer_leaves_resets_to_the_next_full_read": 30027,
    "a_lost_reset_is_noticed_by_the_pulse_alone": 61662,
    "a_node_keeps_reservations_beyond_their_life": 27,
    "a_node_keeps_what_it_is_asked_to_give_back": 27,
    "a_node_that_should_publish_is_waited_for_forever": 23,
    "a_read_may_take_ten_times_its_timeout": 5,
    "a_release_frees_nothing": 27,
    "a_repeated_settle_counts_again": 27,
    "a_replay_from_before_a_reset_is_merged": 18,
    "a_request_with_its_own_time_ages_the_memory": 5,
    "a_reservation_taken_without_an_answer_is_never_looked_up": 472,
    "a_reservation_that_another_node_has_ended_stays_taken": 37,
    "a_settle_counts_the_estimate": 12,
    "a_wiped_ledger_is_not_filled_again": 4,
    "a_wiped_origin_is_taken_for_one_that_has_imported": 226,
    "after_a_clock_stepped_back_old_answers_stay_fresh": 6,
    "an_answer_for_a_subject_that_was_evicted_is_taken_as_known": 103,
    "an_answer_from_before_a_reset_is_merged": 69,
    "an_end_that_got_no_answer_is_not_repeated": 27,
    "an_importer_that_is_gone_is_not_replaced": 16,
    "an_origin_that_refuses_counts_looks_healthy": 55,
    "anticipation_does_not_end_with_credit": 166,
    "anticipation_goes_on_after_growth_has_stopped": 12,
    "counts_are_acknowledged_when_they_are_sent": 6,
    "credit_of_a_subject_that_came_back_is_returned": 22003,
    "denied_subjects_are_always_evicted_first": 28,
    "denied_subjects_are_always_evicted_last": 34,
    "every_loss_merges_everything_again": 116,
    "evicted_foreign_counts_do_not_come_back": 34,
    "foreign_is_the_largest_region_instead_of_the_sum": 11,
    "memory_is_trusted_twice_as_long": 2,
    "messages_do_not_say_that_the_ledger_lost_rows": 22215,
    "nodes_do_not_ask_for_resets": 3,
    "other_regions_publishing_changes_nothing": 16,
    "others_are_replaced_instead_of_raised": 7,
    "published_is_committed_before_the_chunk_succeeded": 39,
    "rows_from_before_a_reset_are_imported": 27,
    "the_counts_of_an_evicted_subject_are_lost": 13,
    "the_last_message_wins_at_the_origin": 7,
    "the_origin_keeps_counts_under_their_old_names": 3,
    "the_origin_keeps_reservations_beyond_their_life": 27,
    "the_previous_cell_is_not_refreshed": 5,
    "the_smallest_table_is_evicted_first": 7,
    "the_threshold_does_not_know_the_regions": 15,
    "unreplayed_subjects_are_evicted_first": 13,
    "unreplayed_work_is_forgotten_after_a_failure": 17,
    "what_counts_in_the_next_window_is_not_reported": 53,
    "what_is_anticipated_is_stored": 13,
    "what_is_reserved_does_not_count_against_the_limit": 2,
    "what_others_hold_denies_and_says_retry_at_once": 5,
    "what_survivors_knew_before_a_wipe_is_not_restored": 5,
    "what_the_origin_does_not_know_is_not_counted": 37,
    "what_the_origin_does_not_know_yet_is_counted_at_once": 717,
    "what_was_used_beyond_the_estimate_is_not_counted": 2,
}

# Simulations of another size or length, for what takes several imports.
OPTIONS: Final = {
    # One node per region, so that it denies only because of other regions.
    "anticipation_does_not_end_with_credit": Options(regions=2, nodes=1),
    "evicted_foreign_counts_do_not_come_back": Options(regions=2, nodes=1, minutes=0.5),
}

MUTANTS: Final[dict[str, Callable[[], None]]] = {}
# Those that break a rule of credit; the others break what is decided without it.
CREDIT: Final[set[str]] = set()


def mutant(breaks: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[breaks.__name__] = breaks
    return breaks


def credit_mutant(breaks: Callable[[], None]) -> Callable[[], None]:
    CREDIT.add(breaks.__name__)
    return mutant(breaks)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function with `make(original)`, which must be callable as the original is.

    Otherwise it would fail at its first call, and be found because of that and not because of the rule that it breaks.
    """
    original = getattr(owner, name)
    broken = make(original)
    if inspect.isfunction(original) and inspect.isfunction(broken):
        arguments = inspect.signature(original).parameters.values()
        named = [one.name for one in arguments if one.kind is one.KEYWORD_ONLY]
        inspect.signature(broken).bind(*range(len(arguments) - len(named)), **dict.fromkeys(named))
    setattr(owner, name, broken)


# -- the origin


@mutant
def a_retry_counts_twice() -> None:
    def make(_original: Any) -> Any:
        def merge_nowait(self: MemoryOrigin, components: Sequence[Component]) -> list[OriginReply]:
            held = self.read_nowait(components)
            more = [
                one._replace(own=one.own + known.component)
                for one, known in zip(components, held, strict=True)
            ]
            result: list[OriginReply] = _original(self, more)
            return result

        return merge_nowait

    replace(MemoryOrigin, "merge_nowait", make)


@mutant
def the_last_message_wins_at_the_origin() -> None:
    def make(original: Any) -> Any:
        def merge_nowait(self: MemoryOrigin, components: Sequence[Component]) -> list[OriginReply]:
            for one in components:
                cell = self._store.find((one.digest, one.sequence))
                if cell is not None and one.own < cell.components.get(one.writer, 0):
                    cell.total += one.own - cell.components[one.writer]
                    cell.components[one.writer] = one.own
            result: list[OriginReply] = original(self, components)
            return result

        return merge_nowait

    replace(MemoryOrigin, "merge_nowait", make)


@mutant
def nodes_of_a_region_share_a_component() -> None:
    def make(original: Any) -> Any:
        def component(self: Subject, *args: Any) -> Component:
            result: Component = original(self, *args)
            return result._replace(writer="region")

        return component

    replace(Subject, "component", make)


@mutant
def a_restarted_node_keeps_its_old_id() -> None:
    def make(original: Any) -> Any:
        def component(self: Subject, *args: Any) -> Component:
            result: Component = original(self, *args)
            return result._replace(writer=result.writer.partition(".")[0])

        return component

    replace(Subject, "component", make)


@mutant
def a_wiped_origin_is_not_noticed() -> None:
    replace(OriginSync, "_detect_loss", lambda _original: lambda _self, *_args: None)
    replace(Sweep, "start_heal", lambda _original: lambda _self: None)


@mutant
def a_pulse_never_checks_for_a_wipe_and_replies_are_not_compared() -> None:
    replace(OriginSync, "_detect_loss", lambda _original: lambda _self, *_args: None)

    def make(original: Any) -> Any:
        async def run_once(self: PulseLoop) -> None:
            self._on_wiped = lambda: None
            self._sweep = _NoSweep()  # type: ignore[assignment]  # a mutant breaks types as well
            await original(self)

        return run_once

    replace(PulseLoop, "run_once", make)


class _NoSweep:
    origin_ahead_ms = 0

    def start_heal(self) -> None:
        """Does nothing."""

    def resume(self, _now_ms: int) -> bool:
        return False


# -- replay


@mutant
def unreplayed_work_is_forgotten_after_a_failure() -> None:
    replace(OriginSync, "fail_replay", lambda _original: lambda _self, _replay: None)


@mutant
def counts_are_acknowledged_when_they_are_sent() -> None:
    def make(original: Any) -> Any:
        def plan_replay(self: OriginSync, *args: Any) -> Any:
            plan = original(self, *args)
            for cell in () if plan is None else plan.cells:
                cell.origin.acked = cell.own
            return plan

        return plan_replay

    replace(OriginSync, "plan_replay", make)


@mutant
def own_counts_come_back_as_others() -> None:
    def make(original: Any) -> Any:
        def apply_replay(self: OriginSync, plan: Any, replies: Sequence[OriginReply], now_ms: int) -> None:
            original(self, plan, replies, now_ms)
            for cell, reply in zip(plan.cells, replies, strict=True):
                cell.others = max(cell.others, reply.total)

        return apply_replay

    replace(OriginSync, "apply_replay", make)


@mutant
def others_are_replaced_instead_of_raised() -> None:
    def make(original: Any) -> Any:
        def merge_others(self: OriginSync, subject: Subject, cell: Any, others: int, now_ms: int) -> None:
            original(self, subject, cell, others, now_ms)
            cell.others = max(0, others)

        return merge_others

    replace(OriginSync, "_merge_others", make)


@mutant
def own_counts_are_maxed_with_the_total_instead_of_added() -> None:
    def make(original: Any) -> Any:
        def merge_others(self: OriginSync, subject: Subject, cell: Any, others: int, now_ms: int) -> None:
            original(self, subject, cell, max(0, others - cell.own), now_ms)

        return merge_others

    replace(OriginSync, "_merge_others", make)


@mutant
def the_replay_loop_waits_before_it_sends() -> None:
    def make(original: Any) -> Any:
        async def run_once(self: ReplayLoop) -> int:
            await asyncio.sleep(1.5)
            result: int = await original(self)
            return result

        return run_once

    replace(ReplayLoop, "run_once", make)


@mutant
def a_graceful_stop_flushes_nothing() -> None:
    def make(_original: Any) -> Any:
        async def flush(self: Node) -> bool:
            self._engine.pending.dirty.clear()
            return True

        return flush

    replace(Node, "_flush_origin", make)


# -- decisions


@mutant
def the_previous_cell_weighs_nothing() -> None:
    replace(windows, "carried", lambda _original: lambda *_args: 0)


@mutant
def carried_is_rounded_up() -> None:
    replace(windows, "carried", lambda original: lambda *args: original(*args) + 1)


@mutant
def a_denied_request_is_counted() -> None:
    def make(original: Any) -> Any:
        def deny(self: Engine, item: Any) -> Any:
            answer = original(self, item)
            item.cell.own += item.demand
            return answer

        return deny

    replace(Engine, "_deny", make)


@mutant
def cost_zero_is_counted() -> None:
    def make(original: Any) -> Any:
        def decide(self: Engine, limit: Limit, identifier: str, cost: int, *rest: Any) -> Any:
            return original(self, limit, identifier, max(1, cost), *rest)

        return decide

    replace(Engine, "decide", make)


@mutant
def one_more_than_the_limit_passes() -> None:
    def make(original: Any) -> Any:
        def decide(self: Engine, limit: Limit, *rest: Any) -> Any:
            more = Limit(
                limit.quota + 1,
                duration_ms=limit.duration_ms,
                namespace=limit.namespace,
                workspace=limit.workspace,
            )
            return original(self, more, *rest)

        return decide

    replace(Engine, "decide", make)


@mutant
def a_failed_batch_keeps_the_items_that_fit() -> None:
    def make(original: Any) -> Any:
        def answer(self: Engine, item: Any, verdict: int) -> Decision:
            decision: Decision = original(self, item, verdict)
            if decision.allowed and verdict != FITS:
                item.cell.own += item.cost
            return decision

        return answer

    replace(Engine, "_answer", make)


@mutant
def a_batch_commits_only_its_first_item() -> None:
    def make(original: Any) -> Any:
        def verdict_of_all(self: Judge, items: Any) -> int:
            verdict: int = original(self, items)
            if verdict == FITS:
                for item in items[1:]:
                    item.cell.own -= item.cost
            return verdict

        return verdict_of_all

    replace(Judge, "verdict_of_all", make)


# -- freshness


@mutant
def strict_mode_is_lost_at_rollover() -> None:
    def make(original: Any) -> Any:
        def new_cell(self: Subjects, subject: Subject, *rest: Any) -> Any:
            subject.strict_until_ms = 0
            return original(self, subject, *rest)

        return new_cell

    replace(Subjects, "new_cell", make)


@mutant
def a_denial_sets_no_strict_deadline() -> None:
    def make(original: Any) -> Any:
        def deny(self: Engine, item: Any) -> Any:
            until_ms = item.subject.strict_until_ms
            answer = original(self, item)
            item.subject.strict_until_ms = until_ms
            return answer

        return deny

    replace(Engine, "_deny", make)


@mutant
def a_failed_read_makes_the_cell_fresh() -> None:
    def make(_original: Any) -> Any:
        def apply_read_failure(self: OriginSync, need: Any, now_ms: int) -> None:
            for cell in need.cells:
                cell.origin.fresh_until_ms = now_ms + self._fresh_ms

        return apply_read_failure

    replace(OriginSync, "apply_read_failure", make)


@mutant
def an_import_makes_the_cell_fresh() -> None:
    def make(original: Any) -> Any:
        def import_cell(
            self: LedgerSync, subject: Subject, row: LedgerRow, sequence: int, now_ms: int
        ) -> Any:
            cell = original(self, subject, row, sequence, now_ms)
            cell.origin.fresh_until_ms = cell.origin.previous_until_ms = now_ms + self._tuning.fresh_ms
            return cell

        return import_cell

    replace(LedgerSync, "_import_cell", make)


@mutant
def memory_is_trusted_twice_as_long() -> None:
    def make(original: Any) -> Any:
        def merge_others(self: OriginSync, subject: Subject, cell: Any, others: int, now_ms: int) -> None:
            original(self, subject, cell, others, now_ms + self._fresh_ms)

        return merge_others

    replace(OriginSync, "_merge_others", make)


@mutant
def an_answer_for_a_subject_that_was_evicted_is_taken_as_known() -> None:
    replace(Freshness, "source_after_read", lambda _original: lambda _self, _cell, _wall_ms: ORIGIN)


@mutant
def a_client_that_disconnects_cancels_the_read_of_others() -> None:
    def make(_original: Any) -> Any:
        async def fetch(self: Reads, needs: Sequence[Any]) -> bool:
            heard = True
            for future in [self._join(need) for need in needs]:
                heard = await future and heard
            return heard

        return fetch

    replace(Reads, "fetch", make)


@mutant
def a_request_waits_for_the_ledger() -> None:
    def make(original: Any) -> Any:
        async def limit(self: AsyncLimiter, *args: Any, **kwargs: Any) -> Decision:
            node = self._parts.node
            if node is not None and node.importer is not None:
                await node.importer.run_once()
            decision: Decision = await original(self, *args, **kwargs)
            return decision

        return limit

    replace(AsyncLimiter, "limit", make)


@mutant
def a_read_may_take_ten_times_its_timeout() -> None:
    def make(original: Any) -> Any:
        def init(self: Reads, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self._timeout_s *= 10

        return init

    replace(Reads, "__init__", make)


# -- publish


@mutant
def foreign_counts_are_published() -> None:
    def make(original: Any) -> Any:
        def row(self: LedgerSync, subject: Subject, cell: Any, *rest: Any) -> LedgerRow | None:
            found: LedgerRow | None = original(self, subject, cell, *rest)
            return found and found._replace(regional=found.regional + cell.foreign)

        return row

    replace(LedgerSync, "_row", make)


@mutant
def a_failed_chunk_is_dropped() -> None:
    replace(LedgerSync, "fail_publish", lambda _original: lambda _self, *_args: None)


@mutant
def published_is_committed_before_the_chunk_succeeded() -> None:
    def make(original: Any) -> Any:
        def init(self: Publication, found: Any) -> None:
            original(self, found)
            for row, cell in zip(self.rows, self.cells, strict=True):
                assert cell is not None and cell.ledger is not None
                cell.ledger.published = row.regional

        return init

    replace(Publication, "__init__", make)


@mutant
def short_windows_are_published() -> None:
    def make(original: Any) -> Any:
        def init(self: Subjects, tuning: Any, **kwargs: Any) -> None:
            original(self, tuning, **kwargs)
            object.__setattr__(self, "_ledger_duration_ms_min", 0)

        return init

    replace(Subjects, "__init__", make)


@mutant
def the_threshold_does_not_know_the_regions() -> None:
    for module in (pending, ledger_sync):
        replace(module, "publish_threshold", lambda original: lambda limit, _regions: original(limit, 1))


@mutant
def other_regions_publishing_changes_nothing() -> None:
    def make(original: Any) -> Any:
        def row(self: LedgerSync, subject: Subject, cell: Any, *rest: Any) -> LedgerRow | None:
            foreign, cell.foreign = cell.foreign, 0
            found: LedgerRow | None = original(self, subject, cell, *rest)
            cell.foreign = foreign
            return found

        return row

    replace(LedgerSync, "_row", make)


# -- import


@mutant
def imported_rows_are_added_each_time() -> None:
    def make(original: Any) -> Any:
        def apply_foreign_row(
            self: LedgerSync, subject: Subject, cell: Any, ledger: Any, row: LedgerRow, *rest: Any
        ) -> None:
            known = 0 if ledger.components is None else ledger.components.get(row.region, 0)
            original(self, subject, cell, ledger, row._replace(regional=row.regional + known), *rest)

        return apply_foreign_row

    replace(LedgerSync, "_apply_foreign_row", make)


@mutant
def foreign_is_the_largest_region_instead_of_the_sum() -> None:
    def make(original: Any) -> Any:
        def apply_foreign_row(self: LedgerSync, subject: Subject, cell: Any, ledger: Any, *rest: Any) -> None:
            original(self, subject, cell, ledger, *rest)
            cell.foreign = max(ledger.components.values(), default=0)

        return apply_foreign_row

    replace(LedgerSync, "_apply_foreign_row", make)


@mutant
def a_late_lower_row_replaces_a_higher_one() -> None:
    def make(original: Any) -> Any:
        def publish_nowait(self: MemoryLedger, rows: Sequence[LedgerRow]) -> None:
            for row in rows:
                held = self._held.get(row[:6])
                if held is not None and held.row.regional > row.regional:
                    held.row = row
            original(self, rows)

        return publish_nowait

    replace(MemoryLedger, "publish_nowait", make)


@mutant
def the_own_row_counts_as_foreign() -> None:
    def make(_original: Any) -> Any:
        def apply_own_row(
            self: LedgerSync, subject: Subject, cell: Any, ledger: Any, row: LedgerRow, *_rest: Any
        ) -> None:
            self._apply_foreign_row(subject, cell, ledger, row, 0, 0)

        return apply_own_row

    replace(LedgerSync, "_apply_own_row", make)


@mutant
def the_own_row_is_taken_for_own_counts() -> None:
    def make(original: Any) -> Any:
        def apply_own_row(
            self: LedgerSync, subject: Subject, cell: Any, ledger: Any, row: LedgerRow, *rest: Any
        ) -> None:
            original(self, subject, cell, ledger, row, *rest)
            cell.own = max(cell.own, row.regional)

        return apply_own_row

    replace(LedgerSync, "_apply_own_row", make)


@mutant
def a_cursor_skips_what_commits_late() -> None:
    def make(original: Any) -> Any:
        def changes_nowait(self: MemoryLedger, cursor: str | None, *, now_ms: int) -> Any:
            changes = original(self, cursor, now_ms=now_ms)
            position, _, wipes = changes.cursor.partition("/")
            return changes._replace(cursor=f"{int(position) + 1}/{wipes}")

        return changes_nowait

    replace(MemoryLedger, "changes_nowait", make)


@mutant
def a_failed_import_is_taken_for_a_good_one() -> None:
    def make(original: Any) -> Any:
        async def run_once(self: ImportLoop, **kwargs: Any) -> Any:
            imported = await original(self, **kwargs)
            if not imported.ok and self._cursor is not None:
                self._cursor = "1000000/" + self._cursor.partition("/")[2]
            return imported

        return run_once

    replace(ImportLoop, "run_once", make)


@mutant
def what_is_anticipated_is_stored() -> None:
    def make(original: Any) -> Any:
        def decide(self: Engine, limit: Limit, identifier: str, cost: int, now_ms: int, *rest: Any) -> Any:
            subject = self.subjects.find((limit.workspace, limit.namespace, limit.duration_ms), identifier)
            if subject is not None and subject.current.ledger is not None:
                subject.current.foreign += self.global_view.probable(subject.current.ledger, now_ms)
            return original(self, limit, identifier, cost, now_ms, *rest)

        return decide

    replace(Engine, "decide", make)


@mutant
def rows_are_imported_after_they_expired() -> None:
    def make(original: Any) -> Any:
        def apply_import(self: LedgerSync, rows: Sequence[LedgerRow], _now_ms: int, **kwargs: Any) -> None:
            original(self, rows, 0, **kwargs)

        return apply_import

    replace(LedgerSync, "apply_import", make)
    replace(
        MemoryLedger,
        "changes_nowait",
        lambda original: lambda self, cursor, *, now_ms: original(self, cursor, now_ms=0 * now_ms),
    )


# -- memory


@mutant
def unreplayed_subjects_are_evicted_first() -> None:
    def make(original: Any) -> Any:
        def victim(self: Subjects, now_ms: int, keep: Subject | None) -> Subject | None:
            for subject in self.slots:
                if subject is not None and subject.queue == PINNED and subject is not keep:
                    return subject
            found: Subject | None = original(self, now_ms, keep)
            return found

        return victim

    replace(Subjects, "_victim", make)


@mutant
def denied_subjects_are_always_evicted_last() -> None:
    def victim_of(self: Subjects, table: Table, _now_ms: int, keep: Subject | None) -> Subject | None:
        queues = (table.clean, table.blocked, table.pinned)
        return next((one for queue in queues if (one := self._oldest(queue, keep)) is not None), None)

    replace(Subjects, "_victim_of", lambda _original: victim_of)


@mutant
def denied_subjects_are_always_evicted_first() -> None:
    def victim_of(self: Subjects, table: Table, _now_ms: int, keep: Subject | None) -> Subject | None:
        queues = (table.blocked, table.clean, table.pinned)
        return next((one for queue in queues if (one := self._oldest(queue, keep)) is not None), None)

    replace(Subjects, "_victim_of", lambda _original: victim_of)


@mutant
def the_smallest_table_is_evicted_first() -> None:
    def make(original: Any) -> Any:
        def victim(self: Subjects, now_ms: int, keep: Subject | None) -> Subject | None:
            for table in sorted(self.tables.values(), key=lambda one: one.count):
                found: Subject | None = self._victim_of(table, now_ms, keep)
                if found is not None:
                    return found
            return cast("Subject | None", original(self, now_ms, keep))

        return victim

    replace(Subjects, "_victim", make)


@mutant
def nothing_is_ever_forgotten() -> None:
    replace(Subjects, "expire", lambda _original: lambda _self, *_args: False)


# -- time


@mutant
def a_request_with_its_own_time_ages_the_memory() -> None:
    def make(original: Any) -> Any:
        def decide(
            self: Engine, limit: Limit, identifier: str, cost: int, now_ms: int, source: int = 0, *rest: int
        ) -> Any:
            return original(self, limit, identifier, cost, now_ms, source, rest[0] if rest else 0, now_ms)

        return decide

    replace(Engine, "decide", make)


@mutant
def after_a_clock_stepped_back_old_answers_stay_fresh() -> None:
    def make(_original: Any) -> Any:
        def is_stale(self: OriginView, clock_ms: int, _fresh_ms: int, _retry_ms: int) -> bool:
            return clock_ms >= self.fresh_until_ms or clock_ms >= self.previous_until_ms

        return is_stale

    replace(OriginView, "is_stale", make)


@mutant
def the_previous_cell_is_not_refreshed() -> None:
    def make(_original: Any) -> Any:
        def is_stale(self: OriginView, clock_ms: int, _fresh_ms: int, _retry_ms: int) -> bool:
            return clock_ms >= self.fresh_until_ms

        return is_stale

    replace(OriginView, "is_stale", make)


@mutant
def a_cell_of_the_future_is_taken_for_empty() -> None:
    def make(original: Any) -> Any:
        def new_cell(self: Subjects, subject: Subject, sequence: int, *rest: int) -> Any:
            return original(self, subject, sequence, *rest[:-1], 1 << 60)

        return new_cell

    replace(Subjects, "new_cell", make)


# -- answers


@mutant
def a_guess_names_the_end_of_the_window() -> None:
    replace(GlobalView, "until_import_ms", lambda _original: lambda _self, _clock_ms: 1 << 60)


@mutant
def a_guess_makes_the_subject_strict() -> None:
    def make(original: Any) -> Any:
        def deny(self: Engine, item: Any) -> Any:
            if item.verdict == UNLIKELY:
                item.subject.strict_until_ms = item.now_ms + item.limit.duration_ms
            return original(self, item)

        return deny

    replace(Engine, "_deny", make)


@mutant
def anticipation_goes_on_after_growth_has_stopped() -> None:
    def make(_original: Any) -> Any:
        def expected(self: Growth, now_ms: int, _age_ms_max: int, _since_ms: int) -> int:
            age_ms = max(0, now_ms - self.measured_at_ms)
            return self.amount * age_ms // self.over_ms if self.over_ms else 0

        return expected

    replace(Growth, "expected", make)


@mutant
def retry_after_is_a_millisecond_short() -> None:
    for module in (engine_module, evaluation_module):
        replace(module, "wait_ms", lambda original: lambda *args: max(0, original(*args) - 1))


@mutant
def reset_is_a_window_late() -> None:
    def make(original: Any) -> Any:
        return property(lambda self: original.fget(self) + self.limit.duration_ms)

    replace(Decision, "reset_at_ms", make)


@mutant
def a_failed_batch_reports_what_it_would_have_left() -> None:
    def make(original: Any) -> Any:
        def answer(self: Engine, item: Any, verdict: int) -> Decision:
            if verdict not in (FITS, item.verdict):
                self.allowed += 1
                left = item.limit.quota - item.used - item.demand
                needed = item.used + item.demand
                return Decision(True, item.limit, left, item.now_ms, needed, 0, item.source, 0, 0)
            decision: Decision = original(self, item, verdict)
            return decision

        return answer

    replace(Engine, "_answer", make)


# -- knowledge


@mutant
def an_answer_is_ignored_while_the_cell_is_fresh() -> None:
    def make(original: Any) -> Any:
        def merge_others(self: OriginSync, subject: Subject, cell: Any, others: int, now_ms: int) -> None:
            is_known = now_ms < cell.origin.fresh_until_ms
            original(self, subject, cell, cell.others if is_known else others, now_ms)

        return merge_others

    replace(OriginSync, "_merge_others", make)


@mutant
def a_new_cell_makes_the_node_forget_others_in_the_previous_one() -> None:
    def make(original: Any) -> Any:
        def new_cell(self: Subjects, subject: Subject, sequence: int, *rest: int) -> Any:
            earlier = subject.cell(sequence - 1)
            if earlier is not None:
                earlier.others = 0
            return original(self, subject, sequence, *rest)

        return new_cell

    replace(Subjects, "new_cell", make)


@mutant
def evicted_foreign_counts_do_not_come_back() -> None:
    replace(LedgerSync, "wants_full_import", lambda _original: property(lambda _self: False))


@mutant
def rows_are_imported_only_into_new_cells() -> None:
    def make(original: Any) -> Any:
        def apply_foreign_row(
            self: LedgerSync, subject: Subject, cell: Any, ledger: Any, row: LedgerRow, *rest: Any
        ) -> None:
            if cell.own == 0:
                original(self, subject, cell, ledger, row, *rest)

        return apply_foreign_row

    replace(LedgerSync, "_apply_foreign_row", make)


@mutant
def only_cells_under_pressure_are_published() -> None:
    def make(original: Any) -> Any:
        def collect_publish(self: LedgerSync, found: Any, now_ms: int, count: int, **kwargs: Any) -> None:
            if kwargs.get("pressed_only"):
                original(self, found, now_ms, count, **kwargs)

        return collect_publish

    replace(LedgerSync, "collect_publish", make)


@mutant
def a_wiped_ledger_is_not_filled_again() -> None:
    replace(Sweep, "start_republish_lost", lambda _original: lambda _self: None)


# -- background


@mutant
def every_loss_merges_everything_again() -> None:
    def make(_original: Any) -> Any:
        def suspect(self: Sweep, _subject: Subject, _now_ms: int) -> None:
            self.start_heal()

        return suspect

    replace(Sweep, "suspect", make)

    def make_run_once(original: Any) -> Any:
        async def run_once(self: PulseLoop) -> None:
            await original(self)
            self._sweep.origin_ahead_ms = -(10**12)

        return run_once

    replace(PulseLoop, "run_once", make_run_once)


@mutant
def an_origin_that_refuses_counts_looks_healthy() -> None:
    for carrier in (ReplayLoop, Exchanges):
        replace(carrier, "is_failing", lambda _original: property(lambda _self: False))


@mutant
def an_origin_that_answers_is_reported_as_degraded() -> None:
    for carrier in (ReplayLoop, Exchanges):
        replace(carrier, "is_failing", lambda _original: property(lambda _self: True))


# -- credit


@credit_mutant
def a_grant_ignores_what_others_hold() -> None:
    def make(original: Any) -> Any:
        def grant(record: SubjectRecord, request: CreditRequest, *rest: Any) -> Any:
            alone = SubjectRecord()
            alone.cells = record.cells
            alone.holds = {writer: hold for writer, hold in record.holds.items() if writer == request.writer}
            answer = original(alone, request, *rest)
            record.holds.update(alone.holds)
            return answer

        return grant

    replace(memory_module, "grant", make)


@credit_mutant
def a_node_accepts_without_credit() -> None:
    replace(Credit, "covers", lambda _original: lambda _self, *_args: True)


@credit_mutant
def credit_never_ends() -> None:
    def make(original: Any) -> Any:
        def covers(self: Credit, cost: int, quota: int, now_ms: int, _clock_ms: int) -> Any:
            if self.before_ms > 0:
                self.before_ms = 1 << 60  # the clock of requests ends it too
            return original(self, cost, quota, now_ms, 0)

        return covers

    replace(Credit, "covers", make)


@credit_mutant
def a_node_keeps_what_it_is_asked_to_give_back() -> None:
    replace(CreditSync, "recall", lambda _original: lambda _self, _digest, _writer: None)


@credit_mutant
def what_others_hold_denies_and_says_retry_at_once() -> None:
    replace(credit_sync_module, "retry_held_ms", lambda _original: lambda *_args: 0)


@credit_mutant
def what_counts_in_the_next_window_is_not_reported() -> None:
    def make(original: Any) -> Any:
        def usage(*args: Any) -> tuple[int, int, int, int]:
            used, previous, elapsed_ms, _ = original(*args)
            return used, previous, elapsed_ms, 0

        return usage

    replace(grants_module, "usage", make)


@credit_mutant
def credit_of_a_subject_that_came_back_is_returned() -> None:
    def make(original: Any) -> Any:
        def plan_releases(self: CreditSync, exchange: Any) -> None:
            holders = dict(self._holders)
            self._holders.clear()
            original(self, exchange)
            self._holders.update(holders)

        return plan_releases

    replace(CreditSync, "_plan_releases", make)


@credit_mutant
def a_report_carries_only_the_current_cell() -> None:
    def make(original: Any) -> Any:
        def add_cell(self: CreditSync, parts: Any, acked: Any, sequence: int, oldest: int, cell: Any) -> None:
            original(self, parts, acked, sequence, oldest, None if parts else cell)

        return add_cell

    replace(CreditSync, "_add_cell", make)


@credit_mutant
def an_answer_brings_no_counts_of_others() -> None:
    def make(_original: Any) -> Any:
        def merge_others(self: OriginSync, _subject: Subject, cell: Any, _others: int, now_ms: int) -> None:
            cell.origin.answer(now_ms, self._fresh_ms)

        return merge_others

    replace(OriginSync, "_merge_others", make)


# -- the base


@credit_mutant
def what_survivors_knew_before_a_wipe_is_not_restored() -> None:
    replace(grants_module, "claim", lambda _original: lambda _cell, _known: None)

    def make(original: Any) -> Any:
        def merge_part(cell: CellRecord, part: CellPart, writer: str, now_ms: int, is_late: bool) -> int:
            before: int = original(cell, part._replace(known=part.own), writer, now_ms, is_late)
            return before

        return merge_part

    replace(grants_module, "merge_part", make)


@credit_mutant
def what_is_reported_again_after_a_wipe_is_counted_twice() -> None:
    replace(grants_module, "give_back", lambda _original: lambda _cell, _count: None)


@credit_mutant
def the_counts_of_an_evicted_subject_are_lost() -> None:
    def make(original: Any) -> Any:
        def adopt(cell: CellRecord, writer: str) -> int:
            held = sum(cell.components.values())
            before: int = original(cell, writer)
            cell.total -= held - sum(cell.components.values())
            return before

        return adopt

    replace(grants_module, "adopt", make)


@credit_mutant
def messages_do_not_say_that_the_ledger_lost_rows() -> None:
    def make(original: Any) -> Any:
        def merge(
            record: SubjectRecord, request: CreditRequest, now_ms: int, rules: GrantRules
        ) -> list[CellTotals]:
            totals: list[CellTotals] = original(record, request._replace(epoch=0), now_ms, rules)
            return totals

        return merge

    replace(grants_module, "merge", make)


@credit_mutant
def a_new_importer_leaves_resets_to_the_next_full_read() -> None:
    replace(ResetLoop, "on_importer", lambda _original: lambda _self: None)


@credit_mutant
def an_importer_that_is_gone_is_not_replaced() -> None:
    def make(original: Any) -> Any:
        def take_lease(lease: Lease | None, node_id: str, *rest: Any) -> Lease:
            if lease is not None and lease.holder not in ("", node_id):
                now_ms = rest[-1]
                lease = lease._replace(until_ms=now_ms + 1)
            result: Lease = original(lease, node_id, *rest)
            return result

        return take_lease

    replace(memory_module, "take_lease", make)


@credit_mutant
def a_node_that_should_publish_is_waited_for_forever() -> None:
    def make(original: Any) -> Any:
        def assign(
            self: Mark, total: int, _step: int, owner: str, now_ms: int, life_ms: int, pace_ms: int
        ) -> int:
            if self.until_ms > 0:
                self.until_ms = now_ms + life_ms
            result: int = original(self, total, 0, owner, now_ms, life_ms, pace_ms)
            return result

        return assign

    replace(Mark, "assign", make)


@credit_mutant
def an_importer_keeps_what_other_regions_counted_to_itself() -> None:
    def make(original: Any) -> Any:
        async def share(self: ImportLoop, changes: Changes, start: int, now_ms: int) -> None:
            rows = [row for row in changes.rows if row.region == self._region]
            await original(self, changes._replace(rows=rows), start, now_ms)

        return share

    replace(ImportLoop, "_share", make)


@credit_mutant
def an_importer_takes_its_own_row_for_that_of_another_region() -> None:
    def make(original: Any) -> Any:
        async def share(self: ImportLoop, changes: Changes, start: int, now_ms: int) -> None:
            rows = [row._replace(region=f"{row.region}.") for row in changes.rows]
            await original(self, changes._replace(rows=rows), start, now_ms)

        return share

    replace(ImportLoop, "_share", make)


@credit_mutant
def a_wiped_origin_is_taken_for_one_that_has_imported() -> None:
    def make(original: Any) -> Any:
        def take_lease(
            lease: Lease | None,
            node_id: str,
            life_ms: int,
            state: ImportState | None,
            has_lost: bool,
            now_ms: int,
        ) -> Lease:
            if lease is None and state is not None:
                lease = Lease(node_id, now_ms, now_ms + life_ms, now_ms, -1, state._replace(since_ms=now_ms))
            result: Lease = original(lease, node_id, life_ms, state, False, now_ms)
            return result

        return take_lease

    replace(memory_module, "take_lease", make)


@credit_mutant
def anticipation_does_not_end_with_credit() -> None:
    replace(Growth, "stop", lambda _original: lambda _self, _now_ms, _shortest_ms, _longest_ms: None)


# -- resets


@credit_mutant
def the_origin_keeps_counts_under_their_old_names() -> None:
    replace(grants_module, "cell_name", lambda _original: lambda sequence, generation, duration_ms: sequence)


@credit_mutant
def an_answer_from_before_a_reset_is_merged() -> None:
    replace(
        credit_sync_module, "cell_name", lambda _original: lambda sequence, generation, duration_ms: sequence
    )


@mutant
def rows_from_before_a_reset_are_imported() -> None:
    def make(original: Any) -> Any:
        def is_counted(self: LedgerSync, row: LedgerRow, now_ms: int) -> bool:
            original(self, row, now_ms)
            is_short = row.duration_ms < self._tuning.ledger_duration_ms_min
            return now_ms < row.expires_at_ms and row.sequence != -1 and not is_short

        return is_counted

    replace(LedgerSync, "is_counted", make)


@mutant
def a_replay_from_before_a_reset_is_merged() -> None:
    replace(OriginSync, "_is_reset", lambda _original: lambda self, subject, sequence, name: False)


@credit_mutant
def a_lost_reset_is_noticed_by_the_pulse_alone() -> None:
    def make(original: Any) -> Any:
        def keep_resets(self: Any, known: Sequence[Reset], since: int, now_ms: int) -> ResetsReply:
            reply: ResetsReply = original(self, known, since, now_ms)
            return reply._replace(number=max(reply.number, since))

        return keep_resets

    replace(memory_module._OriginStore, "keep_resets", make)


@credit_mutant
def nodes_do_not_ask_for_resets() -> None:
    replace(ResetLoop, "on_pulse", lambda _original: lambda self, number, was_empty: None)


# -- reservations


@credit_mutant
def a_repeated_settle_counts_again() -> None:
    def make(original: Any) -> Any:
        def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
            if was_ended and entry.is_final and entry.amount > 0:
                cell = record.cell(entry.sequence)
                cell.components["+"] = cell.components.get("+", 0) + entry.amount
                cell.total += entry.amount
            return cast("ClaimReply", original(record, entry, was_ended, now_ms))

        return claim

    replace(memory_module, "claim", make)


@credit_mutant
def a_release_frees_nothing() -> None:
    def make(original: Any) -> Any:
        def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
            hold = record.holds.get(entry.holder)
            reply: ClaimReply = original(record, entry, was_ended, now_ms)
            if entry.is_final and entry.amount == 0 and hold is not None:
                record.holds[entry.holder] = hold
            return reply

        return claim

    replace(memory_module, "claim", make)


@credit_mutant
def the_origin_keeps_reservations_beyond_their_life() -> None:
    def make(original: Any) -> Any:
        def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
            return cast("ClaimReply", original(record, entry._replace(life_ms=10**9), was_ended, now_ms))

        return claim

    replace(memory_module, "claim", make)


@credit_mutant
def a_node_keeps_reservations_beyond_their_life() -> None:
    replace(Reservations, "expire", lambda _original: lambda _self, _wall_ms: None)


@credit_mutant
def what_is_reserved_does_not_count_against_the_limit() -> None:
    def make(original: Any) -> Any:
        def others_of(record: SubjectRecord, *rest: Any) -> Any:
            visible = SubjectRecord()
            visible.holds = {writer: hold for writer, hold in record.holds.items() if "+" not in writer}
            return original(visible, *rest)

        return others_of

    replace(grants_module, "others_of", make)


@credit_mutant
def what_was_used_beyond_the_estimate_is_not_counted() -> None:
    def make(original: Any) -> Any:
        def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
            hold = record.holds.get(entry.holder)
            if entry.is_final and hold is not None:
                entry = entry._replace(amount=min(entry.amount, hold.spare))
            return cast("ClaimReply", original(record, entry, was_ended, now_ms))

        return claim

    replace(memory_module, "claim", make)


@credit_mutant
def a_settle_counts_the_estimate() -> None:
    def make(original: Any) -> Any:
        def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
            hold = record.holds.get(entry.holder)
            if entry.is_final and entry.amount > 0 and hold is not None:
                entry = entry._replace(amount=max(entry.amount, hold.spare))
            return cast("ClaimReply", original(record, entry, was_ended, now_ms))

        return claim

    replace(memory_module, "claim", make)


@credit_mutant
def an_end_that_got_no_answer_is_not_repeated() -> None:
    def make(_original: Any) -> Any:
        async def run_once(self: Reserving, *, is_last: bool = False) -> int:
            return len(self._waiting)

        return run_once

    replace(Reserving, "run_once", make)


@credit_mutant
def what_the_origin_does_not_know_is_not_counted() -> None:
    replace(Engine, "count_spent", lambda _original: lambda _self, requests, now_ms, clock_ms, wall_ms: None)


@credit_mutant
def what_the_origin_does_not_know_yet_is_counted_at_once() -> None:
    def make(original: Any) -> Any:
        async def finish(self: Reserving, name: str, *, is_last: bool = False) -> Any:
            return await original(self, name, is_last=True)

        return finish

    replace(Reserving, "_finish", make)


@credit_mutant
def a_reservation_that_another_node_has_ended_stays_taken() -> None:
    def make(original: Any) -> Any:
        def add(
            self: Reservations, name: str, requests: Any, until_ms: int, _is_shared: bool = False
        ) -> None:
            original(self, name, requests, until_ms)

        return add

    replace(Reservations, "add", make)


@credit_mutant
def a_reservation_taken_without_an_answer_is_never_looked_up() -> None:
    def make(_original: Any) -> Any:
        async def look_up(self: Reserving, name: str) -> None:
            del self._unsure[name]

        return look_up

    replace(Reserving, "_look_up", make)


# -- the search


def world(seed: int, name: str) -> Plan:
    return draw_plan(seed, OPTIONS.get(name, Options())).with_tuning(credit=name in CREDIT)


def worlds(name: str) -> Iterator[tuple[str, Plan]]:
    """Where to look: the known plan, then the same one with other orders and losses of messages, or all plans."""
    if name not in PLAN:
        yield from ((f"seed {seed}", world(seed, name)) for seed in SEEDS)
        return
    plan = world(PLAN[name], name)
    yield f"seed {plan.seed}", plan
    yield from (
        (f"plan {plan.seed}, messages {messages}", dataclasses.replace(plan, seed=messages))
        for messages in SEEDS
    )


def search(name: str) -> int:
    """The number of the world that fails, or NOT_FOUND."""
    for number, (title, plan) in enumerate(worlds(name)):
        report = run_plan(plan)
        if not report.ok:
            sys.stdout.write(f"{name}: {title}: {report.violations[0]}\n")
            return number
    sys.stdout.write(f"{name}: not found\n")
    return NOT_FOUND


class Raised(logging.Handler):
    """Exceptions in callbacks of the loop: a variant that raises is found because of that, not because of its rule."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append(repr(record.exc_info[1]))


def apply_and_search(name: str) -> int:
    raised = Raised()
    logging.getLogger("asyncio").addHandler(raised)
    MUTANTS[name]()
    found = search(name)
    if raised.texts:
        sys.stdout.write(f"{name} raises {raised.texts[0]}\n")
        return NOT_FOUND
    return found


def passes_unbroken(name: str, number: int) -> bool:
    """The world that found the mutant finds nothing without it."""
    title, plan = next(islice(worlds(name), number, None))
    report = run_plan(plan)
    if not report.ok:
        sys.stdout.write(f"not broken: {title}: {report.violations[0]}\n")
    return report.ok


def main(names: Iterable[str]) -> int:
    worst = 0
    for line in names:
        name = line.strip()
        pid = os.fork()
        if pid == 0:
            found = NOT_FOUND
            try:
                found = apply_and_search(name)
            except BaseException:  # noqa: BLE001 - a fork must not continue with the loop of its parent
                traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(found)
        found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = 0 if 0 <= found < NOT_FOUND and passes_unbroken(name, found) else 1
        sys.stdout.write(f"{ENDED}{code}\n")
        sys.stdout.flush()
        worst = worst or code
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or sys.stdin))
