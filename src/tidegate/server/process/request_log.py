"""The log of requests: at level debug one line for each request, with the id that its client got.

At higher levels it costs a request nothing: the handlers of the operations are replaced when the level changes, and put
back later. A line has operation, status and time taken; never a header, a body or a query, which may hold keys or
personal data.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

from tidegate.server.messages import Answer, Handler, Head, Operation, Router, Stream

logger = logging.getLogger(__name__)

# Every answer of the API begins with it.
REQUEST_ID: Final = re.compile(rb'\{"meta":\{"requestId":"(req_[A-Za-z0-9_]{1,64})"')


class RequestLog:
    """Call `follow_level` after the level may have changed; `time_s` is a monotonic clock."""

    def __init__(self, router: Router, time_s: Callable[[], float]) -> None:
        self._router = router
        self._time_s = time_s
        # The original handlers, while they are replaced.
        self._plain: list[tuple[Operation, Handler]] = []

    def follow_level(self) -> None:
        """Start or stop writing, if the level of the logger has changed."""
        is_wanted = logger.isEnabledFor(logging.DEBUG)
        if is_wanted and not self._plain:
            self._plain = [(operation, operation.handler) for operation in self._router.operations]
            for operation, handler in self._plain:
                operation.handler = self._logged(operation.name, handler)
        elif not is_wanted and self._plain:
            for operation, handler in self._plain:
                operation.handler = handler
            self._plain = []

    def write(self, name: str, answer: Answer, took_s: float) -> None:
        """One line."""
        status, _, body = answer
        found = REQUEST_ID.match(body)
        extra: dict[str, object] = {} if found is None else {"request_id": found[1].decode("ascii")}
        logger.debug("%s %d", name, status, extra={**extra, "took_ms": round(took_s * 1000, 3)})

    def _logged(self, name: str, handler: Handler) -> Handler:
        def logged(head: Head, body: bytes) -> Answer | Stream | Coroutine[Any, Any, Answer]:
            started_s = self._time_s()
            answer = handler(head, body)
            if isinstance(answer, Stream):
                self.write(name, (200, answer.lines, b""), self._time_s() - started_s)
                return answer
            if isinstance(answer, tuple):
                self.write(name, answer, self._time_s() - started_s)
                return answer
            return awaited(answer, started_s)

        async def awaited(work: Coroutine[Any, Any, Answer], started_s: float) -> Answer:
            answer = await work
            self.write(name, answer, self._time_s() - started_s)
            return answer

        return logged
