"""A line on the terminal while a command takes longer than a second, to show that it still runs.

It is on stderr, and only if that is a terminal: scripts and pipes get none.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, Self

__all__ = ["Progress"]

# Faster commands show no line.
QUIET_S: Final = 1.0
INTERVAL_S: Final = 0.2


class Progress:
    """`with Progress("waiting for the database") as progress: …; progress.text = "deleted 5000 rows"`"""

    def __init__(self, text: str) -> None:
        self.text = text
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        started_s = time.monotonic()
        if self._ended.wait(QUIET_S):
            return
        while not self._ended.wait(INTERVAL_S):
            sys.stderr.write(f"\r\x1b[K{self.text} … {time.monotonic() - started_s:.0f} s")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
