"""The supervisor of `tidegate serve --workers N`: starts N workers on the same ports, replaces those that die, adds up
their metrics, forwards signals, and ends after them. It serves nothing itself.

Workers are new processes, not forks: a fork would share what must not be shared (sockets, threads, random state). The
ports are bound here first, without listening, so that port 0 means the same port for all of them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final, Literal

import msgspec

from tidegate.adapters.backoff import Backoff
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.first_start import FirstKey, announce
from tidegate.server.process.sockets import Sockets, bind_sockets, close_sockets, ports_of
from tidegate.server.process.worker import CANNOT_START, METRICS, Line, ToSupervisor, ToWorker
from tidegate.telemetry.logging import JSONFormatter, set_level
from tidegate.telemetry.metrics import Snapshot
from tidegate.telemetry.totals import Totals

logger = logging.getLogger(__name__)

# Metrics are collected this often even without a scrape, so that a crash does not lose what a worker counted.
REPORT_INTERVAL_S: Final = 1.0
# How long workers may take to answer.
ANSWER_TIMEOUT_S: Final = 1.0
# Answers to one question of the console. Identifiers may be long and workers many; a line takes 16 MB, and text within
# text grows to twice its size at most. Workers whose answers come after this are left out.
ANSWER_BYTES_MAX: Final = 4_194_304
# A worker that dies is replaced at once; one that keeps dying, after a pause that doubles.
RESTART_FIRST_S: Final = 0.1
RESTART_LAST_S: Final = 10.0
STEADY_S: Final = 10.0
# If a worker dies this often before all were ready once, the server cannot start.
STARTS_MAX: Final = 5
# Workers are killed this long after their own deadline.
KILL_AFTER_S: Final = 2.0


class _Worker:
    """One child process and the line to it."""

    def __init__(self, process: asyncio.subprocess.Process, line: Line) -> None:
        self.process = process
        self.line = line
        self.node: str | None = None
        # What it has not answered yet, by number.
        self.questions: dict[int, asyncio.Future[str]] = {}


class Supervisor:
    """`await run()` returns the exit code."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        reload: Callable[[], ServerConfig] | None = None,
        first: FirstKey | None = None,
        console_secret: bytes | None = None,
    ) -> None:
        self._config = config
        self._reload = reload
        self._first = first
        self._console_secret = console_secret
        self._totals = Totals()
        self._workers: set[_Worker] = set()
        self._ready = 0
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._last_question = 0
        self._exit_code = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        bound = bind_sockets(self._config, shared=True)
        try:
            keepers = [loop.create_task(self._keep(bound)) for _ in range(self._config.workers)]
            reporting = loop.create_task(self._report())
            announcing = loop.create_task(self._announce(bound))
            await self._stopping.wait()
            for task in (announcing, reporting):
                task.cancel()
            await self._stop_workers(keepers)
            await asyncio.gather(announcing, reporting, return_exceptions=True)
        finally:
            close_sockets(bound)
        return self._exit_code

    async def _announce(self, bound: Sockets) -> None:
        await self._all_ready.wait()
        announce(sys.stdout, self._config, bound["listen"], self._first)

    # Workers.

    async def _keep(self, bound: Sockets) -> None:
        """Keep one worker running."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(RESTART_FIRST_S, RESTART_LAST_S, Random())
        starts = 0
        while not self._stopping.is_set():
            starts += 1
            started_at = loop.time()
            worker = await self._start(bound)
            if self._stopping.is_set():
                # It was started while the others were being stopped.
                with suppress(ProcessLookupError):
                    worker.process.terminate()
            code = await self._follow(worker)
            if self._stopping.is_set():
                return
            if not self._all_ready.is_set() and (code == CANNOT_START or starts >= STARTS_MAX):
                if code != CANNOT_START:
                    logger.error("a worker ended %d times before it could serve; the server stops", starts)
                self._exit_code = 1
                self._stopping.set()
                return
            if loop.time() - started_at > STEADY_S:
                backoff.succeeded()
            pause_s = backoff.pause_s()
            logger.error("a worker ended with code %s; starting another in %.1f s", code, pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _start(self, bound: Sockets) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tidegate.server.process.worker",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
            )
        worker = _Worker(process, await Line.open(ours))
        self._workers.add(worker)
        worker.line.send(
            ToWorker(
                config=self._config,
                ports=ports_of(bound),
                log_format=_log_format(),
                console_secret=self._console_secret,
            )
        )
        return worker

    async def _follow(self, worker: _Worker) -> int:
        """Read the messages of a worker until it ends; its exit code."""
        while True:
            message = await worker.line.receive(ToSupervisor)
            if not isinstance(message, ToSupervisor):
                break
            self._on_message(worker, message)
        code = await worker.process.wait()
        self._workers.discard(worker)
        if worker.node is not None:
            self._totals.retire(worker.node)
        for asked in worker.questions.values():
            asked.cancel()
        await worker.line.close()
        return code

    def _on_message(self, worker: _Worker, message: ToSupervisor) -> None:
        if message.is_ready:
            worker.node = message.node
            self._ready += 1
            if self._ready >= self._config.workers:
                self._all_ready.set()
        if message.snapshot:
            # Also one that comes too late for the page that asked for it.
            snapshot = Snapshot.from_json(message.snapshot.encode("ascii"))
            worker.node = snapshot.node
            self._totals.update(snapshot)
        if message.answered is not None:
            asked = worker.questions.pop(message.answered, None)
            if asked is not None and not asked.done():
                asked.set_result(message.answer)
        if message.question is not None:
            task = asyncio.get_running_loop().create_task(
                self._answer(worker, message.question, message.asked)
            )
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _stop_workers(self, keepers: list[asyncio.Task[None]]) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.process.terminate()
        timeout_s = self._config.http.stop_timeout_s + KILL_AFTER_S
        _, late = await asyncio.wait(keepers, timeout=timeout_s)
        if late:
            logger.error("%d workers did not stop within %s s; killing them", len(late), timeout_s)
            self._exit_code = 1
            for worker in list(self._workers):
                with suppress(ProcessLookupError):
                    worker.process.kill()
            await asyncio.wait(late)

    # Metrics, and questions of the console.

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self._ask(METRICS)

    async def _ask(self, asked: str) -> list[str]:
        """The answers of all workers that answer in time."""
        self._last_question += 1
        number = self._last_question
        waiting: list[asyncio.Future[str]] = []
        for worker in self._workers:
            if worker.node is not None:
                answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                worker.questions[number] = answer
                worker.line.send(ToWorker(question=number, asked=asked))
                waiting.append(answer)
        if waiting:
            await asyncio.wait(waiting, timeout=ANSWER_TIMEOUT_S)
        for worker in self._workers:
            worker.questions.pop(number, None)
        return [answer.result() for answer in waiting if answer.done() and not answer.cancelled()]

    async def _answer(self, worker: _Worker, number: int, asked: str) -> None:
        """Ask all workers, and send their answers to the one that asked."""
        found = await self._ask(asked)
        answers: list[str] = []
        if asked == METRICS:
            answers = [snapshot.to_json().decode("ascii") for snapshot in self._totals.snapshots()]
        else:
            size = 0
            for text in found:
                size += len(text)
                if text and size <= ANSWER_BYTES_MAX:
                    answers.append(text)
        worker.line.send(ToWorker(answered=number, answers=answers))

    # Signals.

    def _on_hangup(self) -> None:
        level = None
        if self._reload is not None:
            try:
                level = self._reload().log.level
            except Exception:
                logger.exception("the configuration could not be read again; the old one stays in force")
                return
            set_level(level)
            # Also for workers that replace another one later.
            log = msgspec.structs.replace(self._config.log, level=level)
            self._config = msgspec.structs.replace(self._config, log=log)
        for worker in self._workers:
            worker.line.send(ToWorker(reload=True, log_level=level))


def _log_format() -> Literal["text", "json"]:
    """The format that `tidegate serve` has set for this process."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(handler.formatter, JSONFormatter) for handler in handlers) else "text"
