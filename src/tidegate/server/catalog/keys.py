"""Who calls: root keys and what is stored of them.

A root key is 32 random characters of 62 (190 bits) behind `tg_`. Only its BLAKE2b-256 digest is stored. A slow or
salted hash would add nothing: those protect secrets that people choose, which can be guessed from a list; 190 random
bits cannot, not even with the digest at hand and all the computers there are.

A key is looked up by its digest, so that how much of a wrong key is right makes no difference to the time it takes:
every bit of the digest changes with every bit of the key.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b
from typing import Final

from tidegate.server.api.problems import (
    FORBIDDEN,
    INVALID_INPUT,
    KEY_DISABLED,
    KEY_NOT_FOUND,
    MALFORMED_AUTHORIZATION,
    WORKSPACE_DISABLED,
    FieldError,
    Refusal,
)
from tidegate.server.catalog.ids import ALPHABET
from tidegate.server.catalog.view import Caller, CatalogView
from tidegate.server.messages import Head

__all__ = ["Authenticator", "digest_of", "hint_of", "new_key"]

PREFIX: Final = "tg_"
KEY_LENGTH: Final = 32
HINT_LENGTH: Final = len(PREFIX) + 4

# Digests of keys that are known not to exist. Two generations of this many: an attacker who sprays keys replaces
# his own entries and costs 3 MB.
UNKNOWN_MAX: Final = 10_000


def new_key() -> str:
    """A fresh root key. It is shown once, to whoever asked for it, and never stored."""
    letters = ALPHABET.decode("ascii")
    return PREFIX + "".join(secrets.choice(letters) for _ in range(KEY_LENGTH))


def digest_of(key: str) -> bytes:
    """What is stored of a key."""
    return blake2b(key.encode(), digest_size=32, person=b"tidegate-key").digest()


def hint_of(key: str) -> str:
    """The first characters, so that people can tell keys apart: 24 of 190 bits, which leaves enough."""
    return key[:HINT_LENGTH]


class Authenticator:
    """Finds the caller of a request in the catalog's view."""

    __slots__ = ("_known_unknown", "_known_unknown_before", "_unknown_epoch", "_view")

    def __init__(self, view: CatalogView) -> None:
        self._view = view
        self._known_unknown: set[bytes] = set()
        self._known_unknown_before: set[bytes] = set()
        self._unknown_epoch = -1

    def caller(self, head: Head, now_ms: int) -> Caller | None:
        """The caller, a `Refusal`, or None when the key is unknown and the catalog should be asked once more.

        What was found stays with the head: a client that sends the same head again is known at once, until a key
        or a workspace changes. Expiry needs no change to happen, so it is looked at each time.
        """
        caller: Caller
        if head.caller_epoch == self._view.epoch:
            caller = head.caller
        else:
            found = self._look_up(head)
            if found is None:
                return None
            caller = found
            head.caller = caller
            head.caller_epoch = self._view.epoch
        if caller.expires_at_ms is not None and caller.expires_at_ms <= now_ms:
            raise Refusal(FORBIDDEN, "The key has expired.")
        return caller

    def _look_up(self, head: Head) -> Caller | None:
        digest = self._digest(head)
        view = self._view
        caller = view.caller(digest)
        if caller is None or not hmac.compare_digest(caller.digest, digest):
            if self.is_known_unknown(digest):
                raise self.not_found()
            return None
        if not caller.is_enabled:
            raise Refusal(KEY_DISABLED, "The key is disabled.")
        workspace = view.workspaces.get(caller.workspace_id)
        if workspace is None:
            return None
        if not workspace.is_enabled:
            raise Refusal(WORKSPACE_DISABLED, "The workspace of this key is disabled.")
        caller.workspace = workspace
        return caller

    @staticmethod
    def not_found() -> Refusal:
        # RFC 9110, 15.5.2: a 401 says which scheme would do.
        return Refusal(KEY_NOT_FOUND, "The key was not found.", headers=b"www-authenticate: Bearer\r\n")

    @staticmethod
    def _digest(head: Head) -> bytes:
        value = head.authorization
        if value is None:
            raise Refusal(
                INVALID_INPUT,
                f"POST request for '/v2/ratelimit.{head.operation.name}' has no Authorization header",
                errors=[
                    FieldError(
                        "/security/bearerAuth",
                        "header 'Authorization' is missing",
                        "Send 'Authorization: Bearer KEY'.",
                    )
                ],
            )
        token = value[7:].strip()
        if not value.startswith(b"Bearer ") or not token:
            raise Refusal(MALFORMED_AUTHORIZATION, "The Authorization header must read 'Bearer KEY'.")
        return blake2b(token, digest_size=32, person=b"tidegate-key").digest()

    def remember_unknown(self, head: Head) -> None:
        """The catalog was asked after this request came, and has no such key."""
        if self._unknown_epoch != self._view.epoch:
            self._unknown_epoch = self._view.epoch
            self._known_unknown = set()
            self._known_unknown_before = set()
        if len(self._known_unknown) >= UNKNOWN_MAX:
            self._known_unknown_before = self._known_unknown
            self._known_unknown = set()
        self._known_unknown.add(self._digest(head))

    def is_known_unknown(self, digest: bytes) -> bool:
        """Asked for before, and no key has changed since. A new key is a change, so that it is found at once."""
        if self._unknown_epoch != self._view.epoch:
            return False
        return digest in self._known_unknown or digest in self._known_unknown_before
