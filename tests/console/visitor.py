"""A user of the console without a browser: a key, a cookie, and a stream of events."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlencode

from tests.server.harness import TIMEOUT_S, Reply, TidegateServer

MARKER = {"X-Tidegate-Console": "1"}


class Visitor:
    """Signed in with a key."""

    def __init__(self, server: TidegateServer, key: str) -> None:
        self.server = server
        reply = sign_in(server, key)
        assert reply.status == 200, reply
        self.session = reply.json
        self.set_cookie = reply.headers["set-cookie"]
        self.cookie = self.set_cookie.partition(";")[0]

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        data = None if body is None else json.dumps(body).encode()
        fields = {"Cookie": self.cookie, **(MARKER if headers is None else headers)}
        return self.server.request(method, f"/console/{path}", data, fields)

    def get(self, path: str, **parameters: str) -> Reply:
        return self.ask("GET", f"{path}?{urlencode(parameters)}")

    def post(self, path: str, body: object) -> Reply:
        return self.ask("POST", path, body)

    def events(self, **parameters: str) -> Events:
        return Events(self.server, f"/console/events?{urlencode(parameters)}", {"Cookie": self.cookie})


def sign_in(server: TidegateServer, key: str, headers: Mapping[str, str] | None = None) -> Reply:
    body = json.dumps({"key": key}).encode()
    return server.request("POST", "/console/session", body, MARKER if headers is None else headers)


class Events:
    """An open stream."""

    def __init__(self, server: TidegateServer, path: str, headers: Mapping[str, str]) -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
        self.connection.request("GET", path, headers=dict(headers))
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def next(self, *kinds: str) -> tuple[str, Any]:
        """The next event, of one of these kinds if any are named; ("", None) at the end of the stream."""
        kind = ""
        while line := self.response.readline():
            name, _, value = line.decode("ascii").rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data" and (not kinds or kind in kinds):
                return kind, json.loads(value)
        return "", None

    def close(self) -> None:
        self.connection.close()
        self.response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
