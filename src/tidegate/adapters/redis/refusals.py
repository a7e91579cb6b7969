"""What an error reply of Redis means to a caller of the origin."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tidegate.adapters.redis.settings import Address
from tidegate.adapters.redis.wire import Reply
from tidegate.errors import DependencyUnavailable

__all__ = ["Redirection", "is_kept", "is_script_unknown", "parse_redirection", "refused", "server_is_wrong"]

# The answer to one command only; the others of the call are not concerned.
KEPT: Final = ("WRONGTYPE", "TRYAGAIN")
# This server does not accept the command, another one may: a master became a replica, a user was changed.
WRONG_SERVER: Final = ("READONLY", "NOAUTH", "MASTERDOWN", "UNBLOCKED")
# What to add to messages that do not say what to do.
HINTS: Final = {
    "READONLY": "it became a replica; the new master is looked for",
    "CROSSSLOT": "it is a Redis Cluster; use redis+cluster://",
    "MOVED": "it is a Redis Cluster; use redis+cluster://",
    "OOM": "it is out of memory; raise maxmemory",
    "MISCONF": "it cannot save its data and refuses writes",
}
# Where in a script it happened. It is of no use to a caller, and its "@" would be taken for the end of a password.
SCRIPT_PLACE: Final = re.compile(r"\s*(?:script: [0-9a-f]{40}, on )?@user_script:\s*\d+[.:]?")


class Redirection(NamedTuple):
    """MOVED or ASK: another master has the slot."""

    address: Address
    is_final: bool
    """MOVED: from now on. ASK: for this one command, while the slot is being moved."""


def is_kept(message: str) -> bool:
    return message.startswith(KEPT)


def is_script_unknown(message: str) -> bool:
    return message.startswith("NOSCRIPT")


def server_is_wrong(message: str) -> bool:
    return message.startswith(WRONG_SERVER)


def parse_redirection(message: str, asked: Address) -> Redirection | None:
    """`MOVED 3999 host:port`; an empty host is the one that was asked."""
    kind, _, rest = message.partition(" ")
    if kind not in ("MOVED", "ASK"):
        return None
    host, colon, port = rest.partition(" ")[2].rpartition(":")
    if not colon or not port.isdigit():
        return None
    return Redirection((host.strip("[]") or asked[0], int(port)), kind == "MOVED")


def refused(shown: str, message: Reply) -> DependencyUnavailable:
    text = SCRIPT_PLACE.sub("", str(message))
    hint = HINTS.get(text.partition(" ")[0])
    return DependencyUnavailable(f"{shown}: {text} ({hint})" if hint else f"{shown}: {text}")
