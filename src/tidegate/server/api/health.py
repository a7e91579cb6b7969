"""What operators ask: /livez, /readyz, /metrics; and the pages /openapi.json, /docs and /docs/errors.

Live means that the process answers. Ready means that it can judge requests: it knows keys, and it is not stopping. A
dependency that is down makes a node degraded, not unready: decisions go on from memory, and taking all nodes out of
service because their database is gone would turn a small outage into a large one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from tidegate.runtime.statistics import Health
from tidegate.server.api import docs_page, openapi
from tidegate.server.api.problems import JSON_LINE, Answer, Problem, problems_by_suffix
from tidegate.server.messages import Head, Route
from tidegate.telemetry.metrics import Snapshot
from tidegate.telemetry.prometheus import CONTENT_TYPE, render

__all__ = ["HealthPages", "ready_lines"]

TEXT_LINE: Final = b"content-type: text/plain; charset=utf-8\r\ncache-control: no-store\r\n"
METRICS_LINE: Final = f"content-type: {CONTENT_TYPE}\r\ncache-control: no-store\r\n".encode("ascii")


def ready_lines(is_ready: bool, dependencies: Sequence[Health]) -> str:
    """One line for the node and one for each dependency: what it is, how it is, why."""
    degraded = [dependency for dependency in dependencies if not dependency.ok]
    state = "not ready" if not is_ready else "degraded" if degraded else "ready"
    lines = [f"{state}: tidegate"]
    for name, ok, detail in ((each.name, each.ok, each.detail) for each in dependencies):
        lines.append(f"{'ok' if ok else 'degraded'}: {name}: {' '.join(detail.split())}")
    return "\n".join(lines) + "\n"


class HealthPages:
    """The pages beside the API. `dependencies` and `snapshots` come from the service that assembled everything."""

    def __init__(
        self,
        is_ready: Callable[[], bool],
        dependencies: Callable[[], Sequence[Health]],
        snapshots: Callable[[], Awaitable[Sequence[Snapshot]]],
    ) -> None:
        self._is_ready = is_ready
        self._dependencies = dependencies
        self._snapshots = snapshots
        # Made when first asked for: neither is worth the time at the start of every process.
        self._openapi: bytes | None = None
        self._docs: bytes | None = None

    def routes(self) -> list[Route]:
        problems = problems_by_suffix()
        all_errors = partial(self.errors, "Errors", problems)
        return [
            Route("GET", "/livez", "livez", self.livez),
            Route("GET", "/readyz", "readyz", self.readyz),
            Route("GET", "/metrics", "metrics", self.metrics),
            Route("GET", "/openapi.json", "openapi", self.openapi),
            Route("GET", "/docs", "docs", self.docs),
            Route("GET", docs_page.ERRORS_PATH, "docs", all_errors),
            *(
                Route(
                    "GET",
                    f"{docs_page.ERRORS_PATH}/{suffix}",
                    "docs",
                    partial(self.errors, rows[0].title, {suffix: rows}),
                )
                for suffix, rows in problems.items()
            ),
        ]

    def livez(self, head: Head, body: bytes) -> Answer:
        return 200, TEXT_LINE, b"ok\n"

    def readyz(self, head: Head, body: bytes) -> Answer:
        is_ready = self._is_ready()
        text = ready_lines(is_ready, self._dependencies())
        return 200 if is_ready else 503, TEXT_LINE, text.encode()

    def metrics(self, head: Head, body: bytes) -> Coroutine[Any, Any, Answer]:
        return self._metrics()

    async def _metrics(self) -> Answer:
        return 200, METRICS_LINE, render(await self._snapshots())

    def openapi(self, head: Head, body: bytes) -> Answer:
        if self._openapi is None:
            self._openapi = msgspec.json.encode(openapi.document())
        return 200, JSON_LINE, self._openapi

    def docs(self, head: Head, body: bytes) -> Answer:
        if self._docs is None:
            self._docs = docs_page.render(openapi.document())
        return 200, docs_page.HEADERS, self._docs

    def errors(
        self, title: str, problems: Mapping[str, Sequence[Problem]], head: Head, body: bytes
    ) -> Answer:
        return 200, docs_page.HEADERS, docs_page.render_errors(title, problems)
