"""A raw HTTP connection for tests, and requests as bytes."""

from __future__ import annotations

import socket

from tests.server.harness import Workspace

LIVENESS = b"GET /v2/liveness HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    """A raw connection that can read answers one by one."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def _more(self) -> bool:
        try:
            data = self.connection.recv(65_536)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def answer(self, *, to_head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The next answer: (status, headers, body)."""
        while b"\r\n\r\n" not in self._buffer:
            assert self._more(), f"the connection ended within a head: {self._buffer!r}"
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("ascii").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = 0 if to_head or status == 100 else int(headers["content-length"])
        while len(self._buffer) < length:
            assert self._more(), "the connection ended within a body"
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return status, headers, body

    def is_closed(self) -> bool:
        """Wait for the end of the connection; nothing more may come before it."""
        while self._more():
            pass
        return self._buffer == b""


def post(workspace: Workspace, body: bytes, *headers: bytes, operation: bytes = b"limit") -> bytes:
    lines = [
        b"POST /v2/ratelimit." + operation + b" HTTP/1.1",
        b"Host: x",
        b"Authorization: Bearer " + workspace.key.secret.encode(),
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def limit_body(identifier: str, limit: int = 10) -> bytes:
    return b'{"namespace":"api","identifier":"%s","limit":%d,"duration":2592000000}' % (
        identifier.encode(),
        limit,
    )
