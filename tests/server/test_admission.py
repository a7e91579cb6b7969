"""An operation runs synchronously to its first wait and then continues in a task, without repeating a step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import MONTH_MS, TidegateServer
from tidegate import AsyncLimiter
from tidegate.adapters.catalogs import open_catalog
from tidegate.errors import DependencyUnavailable
from tidegate.server.api.admission import Admission, Call, Steps, wait
from tidegate.server.api.problems import NAMESPACE_GONE, Refusal
from tidegate.server.catalog.keys import IdSource
from tidegate.server.catalog.sync import CatalogFull, CatalogSync
from tidegate.server.catalog.view import CatalogView
from tidegate.server.messages import Head


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    catalog = open_catalog(f"sqlite:///{tmp_path / 'catalog.db'}")
    ids = IdSource()
    sync = CatalogSync(catalog, CatalogView(), ids, now_ms=lambda: 1)
    return Admission(AsyncLimiter(), sync, ids.take, lambda: 1)


class Operation:
    """Counts each of its steps; waits before the steps that are given."""

    def __init__(self, waits: set[int], error: Exception | None = None) -> None:
        self.waits = waits
        self.error = error
        self.done: list[int] = []

    async def _later(self, number: int) -> int:
        await asyncio.sleep(0)
        return number

    def __call__(self, call: Call, body: bytes) -> Steps[None]:
        call.lines = b"x: y\r\n"
        for number in range(3):
            found = number
            if number in self.waits:
                found = yield from wait(self._later, number)
            self.done.append(found)
        if self.error is not None:
            raise self.error
        call.answer = 200, call.lines, body


@pytest.mark.parametrize("waits", [set(), {0}, {1}, {2}, {0, 2}, {0, 1, 2}])
async def test_every_step_is_done_once_wherever_it_waits(admission: Admission, waits: set[int]) -> None:
    operation = Operation(waits)
    answer: Any = admission.handler("test", operation)(Head(), b"body")
    assert isinstance(answer, tuple) == (not waits), "without a wait the answer is there at once"
    if waits:
        assert operation.done == list(range(min(waits)))
        answer = await asyncio.create_task(answer)
    assert answer == (200, b"x: y\r\n", b"body")
    assert operation.done == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refusal(NAMESPACE_GONE, "gone"), 410),
        (CatalogFull("full"), 403),
        (DependencyUnavailable("down"), 500),
    ],
)
async def test_what_is_raised_after_a_wait_is_an_answer_with_the_lines_of_the_quota(
    admission: Admission, error: Exception, status: int
) -> None:
    answer = await_answer(admission, Operation({1}, error))
    got, lines, body = await answer
    assert (got, json.loads(body)["error"]["status"]) == (status, status)
    assert b"x: y\r\n" in lines


async def await_answer(admission: Admission, operation: Operation) -> Any:
    answer: Any = admission.handler("test", operation)(Head(), b"")
    return await asyncio.create_task(answer)


async def test_a_task_that_is_cancelled_before_it_begins_leaves_nothing_behind(admission: Admission) -> None:
    # Warnings are errors here: a coroutine that was made and never awaited would be one.
    operation = Operation({0})
    answer: Any = admission.handler("test", operation)(Head(), b"")
    task = asyncio.create_task(answer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.done == []


def test_a_call_that_waits_uses_the_quota_of_its_workspace_once(server: TidegateServer) -> None:
    workspace = server.workspace(quota=10, quota_duration_ms=MONTH_MS)
    item = {"namespace": "newest", "identifier": "x", "limit": 5, "duration": 60_000}
    replies = [
        *(
            workspace.limit(name) for name in ("new", "new", "newer")
        ),  # one to create, a warm one, one to create
        workspace.call("multiLimit", [item]),
        workspace.call("getOverride", {"namespace": "new", "identifier": "x"}),
    ]
    assert [reply.headers["ratelimit-remaining"] for reply in replies] == ["9", "8", "7", "6", "5"]
