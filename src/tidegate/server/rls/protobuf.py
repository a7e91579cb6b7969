"""The wire format of protocol buffers, as far as a few small messages need it.

Functions over bytes and positions. Every read is bounded by the end of its message; whatever is malformed raises
`DecodeError`. Unknown fields are skipped, groups included.
"""

from __future__ import annotations

from typing import Final

# Nesting of groups in unknown fields. No message that we know of has any.
GROUPS_MAX: Final = 64
# Field number (29 bits) and wire type.
TAG_MAX: Final = 0xFFFF_FFFF


class DecodeError(ValueError):
    """These bytes are not the message that they should be."""


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# Lengths, seconds, remaining quotas: nearly all are small.
_SMALL: Final = tuple([_encoded(value) for value in range(4_096)])


def varint(value: int) -> bytes:
    """An unsigned number."""
    return _SMALL[value] if value < 4_096 else _encoded(value)


def length_delimited(tag: int, data: bytes) -> bytes:
    """A field that is a string, bytes or a message. `tag` is the whole tag, below 128."""
    return bytes([tag]) + varint(len(data)) + data


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """(the number, where it ends). At most 10 bytes; 64 bits are kept."""
    result = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise DecodeError("a number is cut off")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, position
    raise DecodeError("a number of more than 10 bytes")


def read_tag(data: bytes, position: int, end: int) -> tuple[int, int]:
    """(the tag, where it ends)."""
    tag, position = read_varint(data, position, end)
    if tag > TAG_MAX or tag < 8:
        raise DecodeError("a field number that is not allowed")
    return tag, position


def skip_field(data: bytes, tag: int, position: int, end: int) -> int:
    """Where a field ends whose tag has been read."""
    groups: list[int] = []
    while True:
        kind = tag & 7
        if kind == 0:
            _, position = read_varint(data, position, end)
        elif kind == 1:
            position += 8
        elif kind == 2:
            length, position = read_varint(data, position, end)
            position += length
        elif kind == 5:
            position += 4
        elif kind == 3:
            groups.append(tag >> 3)
            if len(groups) > GROUPS_MAX:
                raise DecodeError("groups are nested too deeply")
        elif kind == 4:
            if not groups or groups.pop() != tag >> 3:
                raise DecodeError("a group ends that did not begin")
        else:
            raise DecodeError(f"wire type {kind} does not exist")
        if position > end:
            raise DecodeError("a field is cut off")
        if not groups:
            return position
        tag, position = read_tag(data, position, end)
