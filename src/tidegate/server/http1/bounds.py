"""The bounds of the HTTP side: what one client, and all clients together, may cost a node.

`HttpConfig` is a section of the server's configuration; `Intake` counts the bodies that are being received.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

# Bodies that are being received take at most this much memory together, or eight times the largest body.
BUFFERED_BYTES_MIN: Final = 67_108_864
# Bodies up to this size are accepted even then: a few clients with large bodies must not exclude all others. The bound
# on connections bounds what small bodies add up to.
SMALL_BODY_BYTES: Final = 16_384

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Rejection(NamedTuple):
    """Why a request is not served."""

    status: int
    detail: str


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the HTTP side. They protect one node from its clients and change no decision."""

    body_bytes_max: Annotated[
        int, Meta(ge=1_024, le=1_073_741_824, description="Largest request body, in bytes; above it: 413.")
    ] = 10_485_760
    header_bytes_max: Annotated[
        int,
        Meta(ge=1_024, le=1_048_576),
        Meta(description="Largest request line and headers together, in bytes; above: 431."),
    ] = 32_768
    headers_max: Annotated[
        int, Meta(ge=8, le=10_000, description="Most header fields in one request; above it: 431.")
    ] = 100
    connections_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        Meta(
            description="Most open connections in one worker; above it the longest idle one is closed for a new one."
        ),
    ] = 10_000
    header_timeout_s: Annotated[
        Seconds, Meta(description="Longest time from the first byte of a request to the end of its headers.")
    ] = 10.0
    request_timeout_s: Annotated[
        Seconds, Meta(description="Longest time for a whole request, body included; then: 408.")
    ] = 60.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="How long an idle keep-alive connection stays open.")
    ] = 75.0
    stop_timeout_s: Annotated[
        Seconds,
        Meta(description="Deadline of a graceful stop: finish requests, flush the last counts, exit."),
    ] = 10.0


class Intake:
    """The bounds of what may be received, and the bytes of all bodies that are being received now."""

    __slots__ = ("body_too_large", "buffered_bytes", "buffered_bytes_max", "config", "headers_too_large")

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.body_too_large = Rejection(413, f"The body of a request may have {config.body_bytes_max} bytes.")
        fields, size = config.headers_max, config.header_bytes_max
        self.headers_too_large = Rejection(
            431, f"The headers of a request may have {fields} fields and {size} bytes."
        )
        self.buffered_bytes_max = max(BUFFERED_BYTES_MIN, 8 * config.body_bytes_max)
        # Of bodies that are not complete yet. Readers add with `take` and subtract when a body is complete or dropped.
        self.buffered_bytes = 0

    def take(self, length: int, received: int) -> Rejection | None:
        """Count `length` more bytes of a body that has `received` with them; why it is refused, or None."""
        self.buffered_bytes += length
        if received > self.config.body_bytes_max:
            return self.body_too_large
        if received > SMALL_BODY_BYTES and self.buffered_bytes > self.buffered_bytes_max:
            return Rejection(503, "Too many large bodies are being received at once. Try again.")
        return None
