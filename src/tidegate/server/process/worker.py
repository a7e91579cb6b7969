"""One worker of `tidegate serve --workers N`, and the line that connects it with its supervisor.

`python -m tidegate.server.process.worker FD` is started by the supervisor and is a node like any other. The line on
file descriptor FD brings its configuration and carries its metrics; when the line ends, the supervisor has ended. A
message is its length in four bytes and JSON, over a socket pair: neither side needs a port or a file.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
import uvloop

from tidegate.errors import ConfigurationError
from tidegate.server.console.local import Question
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.service import GC_THRESHOLDS, Service, reload_service, run_service
from tidegate.server.process.sockets import Sockets, bind_sockets
from tidegate.telemetry.logging import configure, set_level
from tidegate.telemetry.metrics import Snapshot

# By name: when it runs as a program this module is called __main__.
logger = logging.getLogger("tidegate.server.process.worker")

# The exit code after which the supervisor does not start another worker.
CANNOT_START: Final = 78
# A scrape, or a question of the console, waits this long for the other workers; then this one answers alone.
ANSWER_TIMEOUT_S: Final = 2.0
# The question for the metrics of a worker. All others are questions of the console.
METRICS: Final = ""
# A page of metrics has about 10 kB; a message near this size is a fault.
MESSAGE_BYTES_MAX: Final = 16_777_216


class ToWorker(msgspec.Struct, omit_defaults=True):
    """From the supervisor. The first one has the configuration; later ones a request or an answer."""

    config: ServerConfig | None = None
    ports: dict[str, int] = {}
    log_format: Literal["text", "json"] = "text"
    # Signs the sessions of the console; None if it is not served.
    console_secret: bytes | None = None
    # `METRICS`, or a question of the console from another worker; the answer has the same number.
    question: int | None = None
    asked: str = METRICS
    # The answers of all workers to `ToSupervisor.question`; to `METRICS`, snapshots in their own JSON.
    answered: int | None = None
    answers: list[str] = []
    # Read keys again, and set this log level.
    reload: bool = False
    log_level: str | None = None


class ToSupervisor(msgspec.Struct, omit_defaults=True):
    """From a worker."""

    is_ready: bool = False
    node: str | None = None
    # A question to all workers; the answer has the same number.
    question: int | None = None
    asked: str = METRICS
    # The answer of this worker to `ToWorker.question`; to `METRICS`, its snapshot.
    answered: int | None = None
    answer: str = ""
    snapshot: str = ""


class Line:
    """One end of the line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Line:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: ToWorker | ToSupervisor) -> None:
        """Does not wait: the other end reads all the time, and messages are few."""
        data = msgspec.json.encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)

    async def receive(self, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """The next message; None when the other end is closed."""
        try:
            while (length := int.from_bytes(await self._reader.readexactly(4), "big")) > MESSAGE_BYTES_MAX:
                # Metrics of a worker with very many rules, for example: its page lacks them, and it keeps serving.
                logger.warning("a message of %d bytes between supervisor and worker was dropped", length)
                while length > 0:
                    length -= len(await self._reader.readexactly(min(length, MESSAGE_BYTES_MAX)))
            return msgspec.json.decode(await self._reader.readexactly(length), type=kind)
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Worker:
    """The service, and this end of the line."""

    def __init__(self, line: Line, config: ServerConfig, console_secret: bytes | None) -> None:
        self._line = line
        self._config = config
        self._service = Service(
            config, snapshots=self._all_snapshots, console_secret=console_secret, ask=self._ask_all
        )
        # What this worker waits for, by number.
        self._questions: dict[int, asyncio.Future[list[str]]] = {}
        self._last_question = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    async def run(self, bound: Sockets) -> int:
        listening = asyncio.get_running_loop().create_task(self._listen())

        async def started() -> None:
            self._line.send(ToSupervisor(is_ready=True, node=self._service.snapshot().node))

        try:
            return await run_service(
                self._service, bound, self._config, started=started, stopped=self._stopped
            )
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await self._line.close()

    async def _listen(self) -> None:
        while True:
            message = await self._line.receive(ToWorker)
            if not isinstance(message, ToWorker):
                logger.warning("the supervisor has ended; stopping")
                self._stopped.set()
                return
            if message.answered is not None:
                waiting = self._questions.pop(message.answered, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.answers)
            if message.question is not None:
                task = asyncio.get_running_loop().create_task(self._answer(message.question, message.asked))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            if message.log_level is not None:
                set_level(message.log_level)
            if message.reload:
                await reload_service(self._service)

    async def _answer(self, number: int, asked: str) -> None:
        if asked == METRICS:
            snapshot = self._service.snapshot().to_json().decode("ascii")
            self._line.send(ToSupervisor(answered=number, snapshot=snapshot))
            return
        try:
            answer = await self._service.answer(asked)
        except Exception:
            logger.exception("a question of the console could not be answered")
            answer = ""
        self._line.send(ToSupervisor(answered=number, answer=answer))

    async def _ask(self, asked: str) -> list[str]:
        """The answers of all workers; none if the supervisor does not answer."""
        self._last_question += 1
        number = self._last_question
        waiting: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._questions[number] = waiting
        self._line.send(ToSupervisor(question=number, asked=asked))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            logger.warning("the supervisor does not answer; metrics and console show one worker only")
            return []
        finally:
            self._questions.pop(number, None)

    async def _ask_all(self, question: Question) -> list[Any]:
        """For the console; of this worker alone if the supervisor does not answer."""
        asked = json.dumps(question)
        return [
            json.loads(answer) for answer in await self._ask(asked) or [await self._service.answer(asked)]
        ]

    async def _all_snapshots(self, own: Snapshot) -> Sequence[Snapshot]:
        return [Snapshot.from_json(text.encode("ascii")) for text in await self._ask(METRICS)] or [own]


async def _main(end: socket.socket) -> int:
    line = await Line.open(end)
    first = await line.receive(ToWorker)
    if not isinstance(first, ToWorker) or first.config is None:
        return CANNOT_START
    config = first.config
    # Several workers write to one log.
    configure(config.log.level, first.log_format, secrets=config.secrets, fields={"pid": os.getpid()})
    try:
        return await Worker(line, config, first.console_secret).run(
            bind_sockets(config, shared=True, ports=first.ports)
        )
    except ConfigurationError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is for the operator, who needs no traceback
        return CANNOT_START


def main(arguments: Sequence[str]) -> int:
    gc.set_threshold(*GC_THRESHOLDS)
    exit_code: int = uvloop.run(_main(socket.socket(fileno=int(arguments[1]))))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
