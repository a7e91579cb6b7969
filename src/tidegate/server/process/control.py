"""The line between a supervisor and a worker: messages over a socket pair, so that neither needs a port or a file.

A message is its length in four bytes and JSON. The worker notices the end of its supervisor by the end of the line.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Final

import msgspec

from tidegate.server.process.config import ServerConfig

__all__ = ["Line", "ToSupervisor", "ToWorker"]

# A page of metrics is some 10 kB; anything near this is a fault.
MESSAGE_BYTES_MAX: Final = 16_777_216


class ToWorker(msgspec.Struct, omit_defaults=True):
    """From the supervisor. The first one carries the configuration; later ones a request or an answer."""

    config: ServerConfig | None = None
    port: int = 0
    log_format: str = "text"
    # Send your numbers; the answer carries the same number.
    report: int | None = None
    # The answer to `ToSupervisor.scrape`: snapshots of all workers, in their own JSON.
    scrape: int | None = None
    snapshots: list[str] = []
    # Read keys again, and log from this level on.
    reload: bool = False
    log_level: str | None = None


class ToSupervisor(msgspec.Struct, omit_defaults=True):
    """From a worker."""

    is_ready: bool = False
    node: str | None = None
    report: int | None = None
    snapshot: str = ""
    # Somebody asks this worker for the metrics of all: the answer carries the same number.
    scrape: int | None = None


class Line:
    """One end. Reads messages of one type and writes those of another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Line:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: ToWorker | ToSupervisor) -> None:
        """Without waiting: the other end reads all the time, and messages are few."""
        data = msgspec.json.encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)

    async def receive(self, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """The next message; None when the other end is gone."""
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            if length > MESSAGE_BYTES_MAX:
                return None
            return msgspec.json.decode(await self._reader.readexactly(length), type=kind)
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
