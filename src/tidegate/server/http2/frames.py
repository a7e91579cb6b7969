"""HTTP/2 frames (RFC 9113): numbers, layouts and the two kinds of faults.

Only functions of their arguments. A frame is nine bytes of header (length, type, flags, stream) and a payload; the
header is read and written as one 32-bit word (length and type), one byte and one 32-bit word, which takes a single
call of `struct`.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

# What every peer may send and must accept before settings say otherwise. We never offer more.
FRAME_BYTES_MAX: Final = 16_384
FRAME_BYTES_CEILING: Final = 16_777_215
DEFAULT_WINDOW: Final = 65_535
WINDOW_MAX: Final = 2_147_483_647
STREAM_ID_MAX: Final = 2_147_483_647

# (length << 8 | type), flags, stream.
FRAME_HEADER: Final = Struct(">IBI")
FRAME_HEADER_BYTES: Final = 9
SETTING: Final = Struct(">HI")
WORD: Final = Struct(">I")


class ErrorCode(IntEnum):
    """RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """RFC 9113 section 6.5.2: the settings that we send or follow."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ConnectionFault(Exception):
    """The peer violated the protocol, or a bound, in a way that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFault(Exception):
    """The peer violated the protocol in one stream; the others continue."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(settings: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([SETTING.pack(key, value) for key, value in settings.items()]))


def window_frame(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, WORD.pack(increment))


def reset_frame(stream_id: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream_id, WORD.pack(code))


def goaway_frame(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    return frame(
        GOAWAY, 0, 0, WORD.pack(last_stream_id) + WORD.pack(code) + reason.encode("ascii", "replace")
    )


def unpadded(payload: bytes, flags: int) -> bytes:
    """The payload of DATA or HEADERS without its padding."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """The (setting, value) pairs of a SETTINGS payload, checked; unknown settings included."""
    if len(payload) % SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a length that is not a multiple of 6")
    pairs: list[tuple[int, int]] = list(SETTING.iter_unpack(payload))
    for key, value in pairs:
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH must be 0 or 1")
        if key == Setting.INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
        if key == Setting.MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value <= FRAME_BYTES_CEILING:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
    return pairs
