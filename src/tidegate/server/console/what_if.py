"""Who would have been denied in the last minutes with another limit?

The replay of `tidegate simulate replay`, with what all workers of this server have recorded.

Two replays are compared, one with the limits of the requests and one with the other limit, because what other servers
and regions accepted is not known here. The replay runs in steps, between which the event loop decides requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tidegate.core.quota import format_quota
from tidegate.telemetry.decisions import DecisionRecord
from tidegate.telemetry.what_if import Run, WhatIf, replay_runs

CALLERS_MAX: Final = 50


async def replayed(
    answers: Sequence[Mapping[str, Any]], workspace: str, namespace_id: str, quota: int, duration_ms: int
) -> dict[str, Any]:
    """The report of a replay of what the workers have recorded of a namespace."""
    result = WhatIf(namespace_id, {}, format_quota(quota, duration_ms))
    runs = list(_runs(answers, workspace, namespace_id))
    if runs:
        steps = replay_runs(runs, quota, duration_ms, against_replay=True)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result = done.value
                break
            await asyncio.sleep(0)
    return {
        **result.document(CALLERS_MAX),
        "identifiers": len(result.callers),
        "is_complete": not any(answer["has_left_out"] for answer in answers),
    }


def _runs(answers: Sequence[Mapping[str, Any]], workspace: str, namespace_id: str) -> Iterator[Run]:
    for answer in answers:
        for identifier, at_ms, cost, quota, duration_ms, allowed, count in answer["runs"]:
            yield (
                DecisionRecord(at_ms, workspace, namespace_id, identifier, cost, quota, duration_ms, allowed),
                count,
            )
