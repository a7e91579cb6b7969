"""Raw HTTP/1.1, for tests that control which bytes are sent when."""

from __future__ import annotations

import json
import socket
from typing import Any, Self

from tests.server.harness import Reply, TidegateServer, eventually

# Windows this long do not end by chance while a test runs.
MONTH_MS = 2_592_000_000


def body(identifier: str = "user", *, namespace: str = "api", limit: int = 1_000_000, **more: Any) -> bytes:
    call = {"namespace": namespace, "identifier": identifier, "limit": limit, "duration": MONTH_MS, **more}
    return json.dumps(call).encode()


def post(key: str, content: bytes, *, operation: str = "limit", length: int | None = None) -> bytes:
    """The bytes of one request. `length` is the Content-Length to send, if not the real one."""
    head = (
        f"POST /v2/ratelimit.{operation} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


class Client:
    """One connection. Reads exactly one answer at a time, and keeps the bytes after it."""

    def __init__(self, server: TidegateServer) -> None:
        self.socket = server.socket()
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Reply:
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        status, *lines = head.decode("ascii").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self._buffer) < length:
            self._receive()
        content, self._buffer = self._buffer[:length], self._buffer[length:]
        return Reply(int(status.split()[1]), headers, content)

    def ask(self, data: bytes) -> Reply:
        self.send(data)
        return self.reply()

    def is_at_end(self) -> bool:
        """Waits until the server has closed its side; False if it sends something more."""
        return not self._buffer and self.socket.recv(1) == b""

    def close(self) -> None:
        self.socket.close()

    def _receive(self) -> None:
        data = self.socket.recv(65_536)
        if not data:
            raise ConnectionResetError(f"closed after {self._buffer!r}")
        self._buffer += data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def used(server: TidegateServer, key: str, identifier: str, limit: int = 1_000_000) -> int:
    """What the server counts for `identifier`, without adding to it."""
    data = server.call("limit", body(identifier, limit=limit, cost=0), key).data
    return int(data["limit"]) - int(data["remaining"])


def used_before(server: TidegateServer, key: str, identifier: str) -> int:
    """What a restarted server counts for an identifier from before the restart. On a busy machine, the answer to its
    first read may come too late, and until the next one it counts nothing."""
    eventually(lambda: used(server, key, identifier) > 0, f"the counts of {identifier!r} come back")
    return used(server, key, identifier)


def is_listening(server: TidegateServer) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((server.host, server.port)) == 0
