"""Root keys, the permissions that they carry, and the ids of everything that the server creates.

A root key is 32 random characters of 62 (190 bits) after `tg_`. Only its BLAKE2b-256 digest is stored. A slow or salted
hash would add nothing: those protect secrets that people choose, which can be guessed from a list; 190 random bits
cannot be guessed, even if the digest is known.

Three forms of permission grant something: `ratelimit.SCOPE.ACTION`, where SCOPE is `*` (all namespaces) or the id of
one; a URN that allows reading one override; and, for the web console, `console.read` and `console.manage`.
Permissions are compared as strings and never parsed by the server. A key may carry other strings, such as permissions
of another service: they are stored and grant nothing here.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import Final

from tidegate.errors import InvalidInput
from tidegate.ports import KeyRow

ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PREFIX: Final = "tg_"
KEY_LENGTH: Final = 32
HINT_LENGTH: Final = len(PREFIX) + 4

# 62^9 is about 2^53: enough to tell requests apart in a log, and rows apart in a table that checks uniqueness.
ID_LENGTH: Final = 9
# Ids are cut from batches: one system call for each request would cost more than its decision.
ID_BATCH: Final = 512
# 256 is not a multiple of 62, so eight characters come up 5 times in 256 instead of 4: harmless in an id, which is
# never a secret. Root keys are drawn without that bias (see new_key).
TO_ALPHABET: Final = bytes(ord(ALPHABET[byte % 62]) for byte in range(256))

# The actions that operations ask for, and the permissions for all of them.
ACTIONS: Final = ("limit", "create_namespace", "set_override", "read_override", "delete_override", "reset")
# The console: look at everything in the workspace; create and revoke keys, create, delete and restore namespaces.
CONSOLE_READ: Final = "console.read"
CONSOLE_MANAGE: Final = "console.manage"
ALL: Final = (*(f"ratelimit.*.{action}" for action in ACTIONS), CONSOLE_READ, CONSOLE_MANAGE)
# As long as any name; a permission holds one name at most.
PERMISSION_LENGTH_MAX: Final = 512
# Every node holds every key in memory, and the smallest column that stores them takes 16 MB of JSON.
PERMISSIONS_MAX: Final = 1_000

NAMESPACE_ID: Final = re.compile(r"rlns_[0-9A-Za-z]{1,64}")
URN: Final = re.compile(r"urn:tidegate:ratelimit:rlns_[0-9A-Za-z]{1,64}:override:rlor_[0-9A-Za-z]{1,64}")
FIELD: Final = "permissions"


def new_key() -> str:
    """A new root key. It is shown once, when it is created, and never stored."""
    return PREFIX + "".join(secrets.choice(ALPHABET) for _ in range(KEY_LENGTH))


def digest_of(key: str | bytes) -> bytes:
    """What is stored of a key."""
    token = key.encode() if isinstance(key, str) else key
    return blake2b(token, digest_size=32, person=b"tidegate-key").digest()


def hint_of(key: str) -> str:
    """The first characters, to recognise a key by: 24 of 190 bits, which leaves enough."""
    return key[:HINT_LENGTH]


def key_row(
    key_id: str, workspace_id: str, key: str, name: str, permissions: tuple[str, ...], now_ms: int
) -> KeyRow:
    """The row of a new key, which is enabled and does not expire."""
    return KeyRow(
        key_id, workspace_id, digest_of(key), name, hint_of(key), permissions, now_ms, None, True, None
    )


class IdSource:
    """`take()` gives nine random characters of [0-9A-Za-z]. Used by one thread."""

    __slots__ = ("take",)

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        def batches() -> Iterator[list[str]]:
            while True:
                text = bytearray(entropy((ID_LENGTH + 1) * ID_BATCH).translate(TO_ALPHABET))
                text[ID_LENGTH :: ID_LENGTH + 1] = b" " * ID_BATCH
                yield text.decode("ascii").split()  # a slice for each id would cost three times as much

        # Bound once: no frame of Python for each id.
        self.take = chain.from_iterable(batches()).__next__


def namespace_id(workspace_id: str, name: str) -> str:
    """The id that a namespace of this name gets when it is created, the same on every node.

    Derived, not drawn: while the database is down a node can count in a new namespace, and the row that is written
    later has the id that the counts already carry. If another namespace holds the id (one case in 2^53), the node
    that creates it draws a random one.
    """
    workspace = workspace_id.encode()
    digest = blake2b(len(workspace).to_bytes(4, "big") + workspace + name.encode(), digest_size=ID_LENGTH)
    return "rlns_" + digest.digest().translate(TO_ALPHABET).decode("ascii")


def override_urn(namespace_id: str, override_id: str) -> str:
    """The permission to read this one override and nothing else."""
    return f"urn:tidegate:ratelimit:{namespace_id}:override:{override_id}"


def checked_permissions(text: str) -> tuple[str, ...]:
    """The permissions in `A,B`, each once and in their order; `all` stands for every permission.

    Everything that can be stored and printed is accepted, whether it grants something or not; else `InvalidInput`.
    """
    wanted: dict[str, None] = {}
    for part in text.split(","):
        permission = part.strip()
        if not permission:
            continue
        if len(permission) > PERMISSION_LENGTH_MAX:
            raise InvalidInput(FIELD, permission, f"at most {PERMISSION_LENGTH_MAX} characters each")
        if not permission.isprintable():
            raise InvalidInput(FIELD, permission, "printable characters only")
        wanted.update(dict.fromkeys(ALL if permission == "all" else (permission,)))
    if len(wanted) > PERMISSIONS_MAX:
        raise InvalidInput(FIELD, len(wanted), f"at most {PERMISSIONS_MAX} of them")
    return tuple(wanted)


def why_without_effect(permission: str) -> str | None:
    """Why no operation will ever ask for `permission`, and which form grants something; None if one may ask."""
    if permission in {CONSOLE_READ, CONSOLE_MANAGE}:
        return None
    if permission.startswith("urn:"):
        if URN.fullmatch(permission) is not None:
            return None
        form = override_urn("NAMESPACE_ID", "OVERRIDE_ID")
        step = "`tidegate namespaces list` and `tidegate overrides list` show the ids"
        return f"the URN of an override is {form}; {step}"
    # The name of a namespace may hold dots. It is not a scope, but gets a message of its own.
    head, _, rest = permission.partition(".")
    scope, _, action = rest.rpartition(".")
    if head != "ratelimit" or not scope:
        return "these grant something: ratelimit.SCOPE.ACTION, console.read, console.manage, or the URN of an override"
    if action not in ACTIONS:
        return f"the ACTION at its end grants something if it is one of {', '.join(ACTIONS)}"
    if action == "create_namespace" and scope != "*":
        return "what does not exist yet has no id: ratelimit.*.create_namespace"
    if scope != "*" and NAMESPACE_ID.fullmatch(scope) is None:
        step = "`tidegate namespaces list` shows the ids"
        return f"the SCOPE is * or a namespace's id, rlns_…, not its name; {step}"
    return None
