"""Rules that follow their files.

`poll` checks whether files were added, removed or changed, and reads them again if so. Faulty new files change nothing:
the rules that were valid continue to apply, the log and `statistics` say what is wrong, and the next valid files are
used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tidegate.server.rls.rules import RuleSet
from tidegate.server.rls.rules_file import RulesError, load_rules, rule_files

logger = logging.getLogger(__name__)

# How soon a change applies. Looking costs one stat per file.
POLL_S: Final = 1.0
# A file that was changed this recently may change once more within the same time stamp: it is read again.
SETTLED_NS: Final = 2_000_000_000

Signature = tuple[tuple[str, int, int, int], ...]


class RulesWatch:
    """The rules of a file or a directory. Made with valid rules, or not at all."""

    def __init__(self, place: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.place = place
        self._now_ns = now_ns
        self._looks = 0
        self._signature = self._look()
        self.rules = load_rules(place)
        # What is wrong with the files as they are now; None when they apply.
        self.error: str | None = None
        self.reloads = 0
        self.reloads_failed = 0
        self._on_change: list[Callable[[RuleSet], None]] = []

    def on_change(self, callback: Callable[[RuleSet], None]) -> None:
        """Call `callback` with new rules, in the event loop that polls."""
        self._on_change.append(callback)

    def _look(self) -> Signature:
        found: list[tuple[str, int, int, int]] = []
        try:
            for path in rule_files(self.place):
                status = path.stat()
                found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
        except (OSError, RulesError):
            return ()
        newest_ns = max(mtime_ns for _, mtime_ns, _, _ in found)
        if newest_ns + SETTLED_NS > self._now_ns():
            # Never equal to a later look.
            self._looks += 1
            found.append(("unsettled", self._looks, 0, 0))
        return tuple(found)

    async def run_once(self) -> bool:
        """Look once. True if other rules apply now."""
        signature = await asyncio.to_thread(self._look)
        if signature == self._signature:
            return False
        # Remembered before reading: what changes meanwhile is seen by the next look.
        self._signature = signature
        try:
            rules = await asyncio.to_thread(load_rules, self.place)
        except (RulesError, OSError) as error:
            if str(error) != self.error:
                self.error = str(error)
                self.reloads_failed += 1
                # The message is enough: a traceback would hide it.
                logger.error("rules not reloaded, the old ones still apply: %s", error)  # noqa: TRY400
            return False
        has_recovered, self.error = self.error is not None, None
        if rules.outline() == self.rules.outline():
            if has_recovered:
                logger.info("rules files are valid again, and the same as those that apply")
            return False
        rules.take_counts(self.rules)
        self.rules = rules
        self.reloads += 1
        logger.info("rules reloaded from %s", self.place)
        for callback in self._on_change:
            callback(rules)
        return True

    async def run(self, poll_s: float = POLL_S) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.run_once()
            except Exception:
                logger.exception("looking at the rules files failed; trying again in %s s", poll_s)
