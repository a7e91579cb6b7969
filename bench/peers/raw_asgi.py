"""The minimum for ASGI: bearer look-up, decode, count, encode, and nothing else. `uvicorn bench.peers.raw_asgi:app`.

It limits nothing, knows no namespaces, permissions or overrides, and sends none of the RateLimit fields.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec


class Body(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A request of `limit`."""

    namespace: str
    identifier: str
    limit: int
    duration: int
    cost: int = 1


class Meta(msgspec.Struct, gc=False):
    """Of an answer."""

    requestId: str  # noqa: N815 - the field's name on the wire


class Data(msgspec.Struct, gc=False):
    """Of an answer."""

    success: bool
    limit: int
    remaining: int
    reset: int


class Answer(msgspec.Struct, gc=False):
    """The envelope."""

    meta: Meta
    data: Data


CALLERS = {b"Bearer " + os.environ.get("PEER_KEY", "none").encode(): "workspace"}
DECODE = msgspec.json.Decoder(Body).decode
ENCODE = msgspec.json.Encoder().encode
HEADERS = [(b"content-type", b"application/json")]
counts: dict[str, int] = {}


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """One request."""
    if scope["type"] != "http":
        return
    caller = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            caller = CALLERS.get(value)
            break
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    if caller is None:
        await send({"type": "http.response.start", "status": 401, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"{}"})
        return
    call = DECODE(body)
    count = counts[call.identifier] = counts.get(call.identifier, 0) + call.cost
    reset = (int(time.time() * 1000) // call.duration + 1) * call.duration
    answer = ENCODE(Answer(Meta("req_0"), Data(True, call.limit, max(0, call.limit - count), reset)))
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [*HEADERS, (b"content-length", b"%d" % len(answer))],
        }
    )
    await send({"type": "http.response.body", "body": answer})
