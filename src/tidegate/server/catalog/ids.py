"""Identifiers that are made here: requests, keys, namespaces, overrides. Opaque to everybody else.

Random ids are cut from batches, because a system call for each request would cost more than its decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

__all__ = ["ALPHABET", "IdSource", "namespace_id"]

ALPHABET: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

# 62^9 is about 2^53: enough to tell requests apart in a log and rows apart in a table that checks uniqueness.
LENGTH: Final = 9
BATCH: Final = 512

# 256 is no multiple of 62, so eight characters come up 5 times in 256 instead of 4: harmless in an id, which is
# never a secret. Root keys are drawn without that bias (see auth.new_key).
TO_ALPHABET: Final = bytes(ALPHABET[byte % 62] for byte in range(256))


class IdSource:
    """`take()` gives nine random characters of [0-9A-Za-z]. Used by one thread."""

    __slots__ = ("_entropy", "_pool")

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy
        # Filled by _refill, emptied from the end by take.
        self._pool: list[str] = []

    def take(self) -> str:
        try:
            return self._pool.pop()
        except IndexError:
            return self._refill()

    def _refill(self) -> str:
        text = self._entropy(LENGTH * BATCH).translate(TO_ALPHABET).decode("ascii")
        self._pool = [text[start : start + LENGTH] for start in range(0, len(text), LENGTH)]
        return self._pool.pop()


def namespace_id(workspace_id: str, name: str) -> str:
    """The id that a namespace of this name gets when it is created, the same on every node.

    Derived, not drawn: while the database is away a node can go on counting in a namespace that nobody has seen
    yet, and the row that is written later has the id that the counts already carry. Should another namespace hold
    the id (one in 2^53), the creator draws a random one.
    """
    workspace = workspace_id.encode()
    digest = blake2b(len(workspace).to_bytes(4, "big") + workspace + name.encode(), digest_size=LENGTH)
    return "rlns_" + digest.digest().translate(TO_ALPHABET).decode("ascii")
