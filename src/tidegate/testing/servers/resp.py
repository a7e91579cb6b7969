"""A minimal blocking RESP2 connection, for starting, flushing and inspecting a server, one command at a time.

Test servers must not need a Redis client library.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

from tidegate.testing.servers.process import ServerError

Reply: TypeAlias = "str | int | list[Reply] | None"


class RedisReplyError(ServerError):
    """The server replied with an error."""


class RespConnection:
    """A connection for one command at a time; a context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        password: str | None = None,
        ca_path: Path | None = None,
        timeout_s: float,
    ) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._replies: BinaryIO | None = None
        try:
            if ca_path is not None:
                context = ssl.create_default_context(cafile=ca_path)
                self._socket = context.wrap_socket(self._socket, server_hostname=host)
            self._replies = self._socket.makefile("rb")
            if password is not None:
                self.call("AUTH", password)
        except BaseException:
            self.close()
            raise

    def call(self, *words: str | int) -> Reply:
        encoded = [str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)]
        self._socket.sendall(b"".join(parts))
        return self._read_reply()

    def _read_reply(self) -> Reply:
        assert self._replies is not None, "set by the constructor"
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection in the middle of a reply")
        mark, text = line[:1], line[1:-2].decode(errors="replace")
        match mark:
            case b"+":
                return text
            case b"-":
                raise RedisReplyError(text)
            case b":":
                return int(text)
            case b"$":
                return self._read_bulk(int(text))
            case b"*":
                return None if int(text) < 0 else [self._read_reply() for _ in range(int(text))]
            case _:
                raise ServerError(f"not a RESP2 reply: {line[:80]!r}")

    def _read_bulk(self, length: int) -> str | None:
        if length < 0:
            return None
        assert self._replies is not None, "set by the constructor"
        body = self._replies.read(length + 2)
        if len(body) != length + 2:
            raise ConnectionError("the server closed the connection in the middle of a reply")
        return body[:-2].decode(errors="replace")

    def close(self) -> None:
        if self._replies is not None:
            self._replies.close()  # otherwise the socket would stay open
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
