"""One worker of `tidegate serve --workers N`: `python -m tidegate.server.process.worker FD`, started by the supervisor.

It is a node like any other. The line on file descriptor FD brings its configuration, carries its numbers, and by its
end says that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Sequence
from typing import Final, Literal

import uvloop

from tidegate.errors import ConfigurationError
from tidegate.server.http1.listener import bind
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.control import Line, ToSupervisor, ToWorker
from tidegate.server.process.service import GC_THRESHOLDS, Service, run_service
from tidegate.telemetry.logging import configure, set_level
from tidegate.telemetry.metrics import Snapshot

__all__ = ["CANNOT_START", "main"]

# By name: run as a program this module is called __main__, whose level nobody sets.
logger = logging.getLogger("tidegate.server.process.worker")

# The exit code that tells the supervisor not to try again.
CANNOT_START: Final = 78
# How long a scrape waits for the other workers before it answers with its own numbers alone.
SCRAPE_TIMEOUT_S: Final = 2.0


class Worker:
    """This process's end of the line, and the service."""

    def __init__(self, line: Line, config: ServerConfig) -> None:
        self._line = line
        self._config = config
        self._service = Service(config, snapshots=self._all_snapshots)
        self._scrapes: dict[int, asyncio.Future[list[str]]] = {}
        self._last_scrape = 0
        self._stopped = asyncio.Event()

    async def run(self, bound: socket.socket) -> int:
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
                logger.warning("the supervisor is gone")
                self._stopped.set()
                return
            if message.report is not None:
                self._line.send(
                    ToSupervisor(
                        report=message.report, snapshot=self._service.snapshot().to_json().decode("ascii")
                    )
                )
            if message.scrape is not None:
                waiting = self._scrapes.pop(message.scrape, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.snapshots)
            if message.log_level is not None:
                set_level(message.log_level)
            if message.reload:
                await self._reload()

    async def _reload(self) -> None:
        try:
            await self._service.reload()
        except Exception:
            logger.exception("reading the configuration again failed; going on with the old one")

    async def _all_snapshots(self, own: Snapshot) -> Sequence[Snapshot]:
        self._last_scrape += 1
        number = self._last_scrape
        waiting: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._scrapes[number] = waiting
        self._line.send(ToSupervisor(scrape=number))
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                return [Snapshot.from_json(text.encode("ascii")) for text in await waiting]
        except TimeoutError:
            logger.warning("the supervisor does not answer; these metrics are of one worker only")
            return [own]
        finally:
            self._scrapes.pop(number, None)


async def _main(end: socket.socket) -> int:
    line = await Line.open(end)
    first = await line.receive(ToWorker)
    if not isinstance(first, ToWorker) or first.config is None:
        return CANNOT_START
    config = first.config
    line_format: Literal["text", "json"] = "json" if first.log_format == "json" else "text"
    configure(config.log.level, line_format, secrets=config.secrets)
    try:
        return await Worker(line, config).run(bind(config.host, first.port, shared=True))
    except ConfigurationError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message is for the operator; a traceback tells him nothing
        return CANNOT_START


def main(arguments: Sequence[str]) -> int:
    gc.set_threshold(*GC_THRESHOLDS)
    exit_code: int = uvloop.run(_main(socket.socket(fileno=int(arguments[1]))))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
