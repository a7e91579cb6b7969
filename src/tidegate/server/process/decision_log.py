"""The log of decisions: JSON lines for `tidegate simulate replay`. Off unless `decisions.log_dir` names a directory.

A limiter that records is another class, so that a server without the log pays nothing. Bounds: so many records wait for
the disk, further ones are dropped and counted; each process has one file and one older one, together at most
`decisions.bytes_max`. A disk that is full or slow never delays a decision: another thread writes.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tidegate.adapters.clock import now_ms as wall_now_ms
from tidegate.core.model import Decision, Limit, Request
from tidegate.errors import ConfigurationError
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.telemetry.decisions import DecisionRecord, Sampling

logger = logging.getLogger(__name__)

WRITE_INTERVAL_S: Final = 0.5
# Records that wait for the disk: 40,000 decisions a second, at most some 30 MB.
PENDING_MAX: Final = 20_000
# Processes of one server that log into one directory; `workers` allows no more.
SLOTS_MAX: Final = 256
HASH_KEY_BYTES: Final = (16, 64)
NAMES_MAX: Final = 10_000

Pending = tuple[int, Limit, str, int, bool, int | None]
"""Time, limit, identifier, cost, whether it was allowed, and the number of its batch."""

NameOf = Callable[[str, str], str]
"""From a workspace and the id of a namespace to the name of the namespace."""


def read_hash_key(file: str | None) -> bytes | None:
    """The key of `decisions.hash_key_file`. Raises `ConfigurationError` if it cannot be used."""
    if file is None:
        return None
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"it cannot be read: {error.strerror}") from error
    least, most = HASH_KEY_BYTES
    if not least <= len(key) <= most:
        raise ConfigurationError(f"it has {len(key)} bytes, expected {least} to {most}")
    return key


class DecisionLog:
    """The records of one process. `add` is called by the limiter; `run` writes, until it is cancelled."""

    def __init__(self, directory: Path, sampling: Sampling, bytes_max: int, name_of: NameOf) -> None:
        self.written = 0
        self.dropped = 0
        self._directory = directory
        self._sampling = sampling
        self._file_bytes_max = bytes_max // 2
        self._name_of = name_of
        self._names: dict[tuple[str, str], str] = {}
        self._pending: list[Pending] = []
        # Random, because the logs of several nodes are read as one.
        self._batches = secrets.randbits(48)
        # Held while a file is written: a stop may come while `run` writes.
        self._writing = threading.Lock()
        self._lock_fd: int | None = None
        self._path = directory / "decisions-0.jsonl"
        self._is_failing = False

    # Called for every decision.

    def add(self, limit: Limit, identifier: str, cost: int, now_ms: int, decision: Decision) -> None:
        """Record one decision, if its identifier is chosen and it consumes something."""
        if cost and self._sampling.includes(identifier):
            self._append((now_ms, limit, identifier, cost, decision.allowed, None))

    def add_many(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, decisions: Sequence[Decision]
    ) -> None:
        """Record a batch."""
        self._batches += 1
        for (limit, identifier, cost), decision in zip(requests, decisions, strict=True):
            if cost and self._sampling.includes(identifier):
                self._append((now_ms, limit, identifier, cost, decision.allowed, self._batches))

    def _append(self, record: Pending) -> None:
        if len(self._pending) < PENDING_MAX:
            self._pending.append(record)
        else:
            self.dropped += 1

    # The file.

    def open(self) -> None:
        """Take the first pair of files that no other process has. Raises `ConfigurationError` if there is none."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(SLOTS_MAX):
                lock_fd = os.open(self._directory / f"decisions-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock_fd)
                    continue
                self._lock_fd = lock_fd
                self._path = self._directory / f"decisions-{number}.jsonl"
                return
        except OSError as error:
            raise ConfigurationError(
                f"decisions.log_dir: {self._directory} cannot be used: {error.strerror}; name another directory"
            ) from error
        raise ConfigurationError(
            f"decisions.log_dir: {SLOTS_MAX} processes write to {self._directory}; name another directory"
        )

    def close(self) -> None:
        """Write what is left, and give the files back."""
        self.write(self.take())
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def run(self) -> None:
        """Write twice a second."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            if self._pending:
                await asyncio.to_thread(self.write, self.take())

    def take(self) -> list[Pending]:
        """The records that wait. Called where they are added, so that none is added in between."""
        taken, self._pending = self._pending, []
        return taken

    def write(self, records: Sequence[Pending]) -> None:
        """Write records, in any thread. Those that cannot be written are dropped and counted."""
        with self._writing:
            lines = [self._line(*record) for record in records]
            done = 0
            try:
                while done < len(lines):
                    done += self._write_some(lines[done:])
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    logger.warning(
                        "the log of decisions cannot be written: %s; its records are dropped", error.strerror
                    )
                self._is_failing = True
            self.written += done
            self.dropped += len(lines) - done

    def _write_some(self, lines: Sequence[bytes]) -> int:
        """Append as many lines as the file takes, at least one; how many these were."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + len(lines[0]) > self._file_bytes_max and size > 0:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
            size = 0
        taken = 1
        size += len(lines[0])
        while taken < len(lines) and size + len(lines[taken]) <= self._file_bytes_max:
            size += len(lines[taken])
            taken += 1
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(file, "ab") as out:
            out.write(b"".join(lines[:taken]))
        return taken

    def _line(
        self, at_ms: int, limit: Limit, identifier: str, cost: int, allowed: bool, batch: int | None
    ) -> bytes:
        record = DecisionRecord(
            at_ms,
            limit.workspace,
            self._name(limit.workspace, limit.namespace),
            self._sampling.written(identifier),
            cost,
            limit.quota,
            limit.duration_ms,
            allowed,
            batch,
        )
        return record.to_line().encode("ascii")

    def _name(self, workspace: str, namespace_id: str) -> str:
        key = (workspace, namespace_id)
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            name = self._names[key] = self._name_of(workspace, namespace_id)
        return name


class RecordingLimiter(AsyncLimiter):
    """An `AsyncLimiter` whose decisions are recorded. Everything else is unchanged."""

    def __init__(self, log: DecisionLog, **settings: Any) -> None:
        super().__init__(**settings)
        self.log = log

    @property
    def attempt(self) -> Callable[[Limit, str, int, int | None], Decision | None]:
        inner, add = super().attempt, self.log.add

        def attempt(limit: Limit, identifier: str, cost: int, now_ms: int | None) -> Decision | None:
            decision = inner(limit, identifier, cost, now_ms)
            if decision is not None:
                add(limit, identifier, cost, decision.decided_at_ms, decision)
            return decision

        return attempt

    @property
    def attempt_many(self) -> Callable[[list[tuple[Limit, str, int]], int | None], list[Decision] | None]:
        inner, add_many = super().attempt_many, self.log.add_many

        def attempt_many(requests: list[tuple[Limit, str, int]], now_ms: int | None) -> list[Decision] | None:
            decisions = inner(requests, now_ms)
            if decisions:
                add_many(requests, decisions[0].decided_at_ms, decisions)
            return decisions

        return attempt_many

    async def limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        decision = await super().limit(limit, identifier, cost, now_ms=now_ms)
        self.log.add(limit, identifier, cost, wall_now_ms() if now_ms is None else now_ms, decision)
        return decision

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        decisions = await super().limit_many(requests, now_ms=now_ms)
        self.log.add_many(requests, wall_now_ms() if now_ms is None else now_ms, decisions)
        return decisions
