"""Sessions of the console: a signed cookie that names a key, and the checks that a request comes from our own page.

A session is not stored: the cookie holds the id of a key, an expiry and a signature, so that every worker accepts it
and a restart ends no session. It depends on its key: when that is revoked, expires or loses the permission, the
session ends. The secret that signs is a file in the data directory. The digest of the key is signed too, but is
not the secret: a person who can read the database must not be able to make sessions from it.

A page of another site must not be able to act with the cookie. It is SameSite=Strict; but "site" ignores ports, and
another server on this machine is the same site. So a request with a cookie must also come from the same origin, by
Sec-Fetch-Site or Origin, and one that changes something must carry a header that no form can send.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tidegate.server.catalog.keys import CONSOLE_READ
from tidegate.server.catalog.view import Caller, CatalogView

logger = logging.getLogger(__name__)

SECRET_FILE: Final = "console.secret"  # noqa: S105 - the name of a file
SECRET_BYTES: Final = 32
# A working day.
SESSION_S: Final = 12 * 3_600
# The header of requests that change something.
MARKER: Final = "x-tidegate-console"

TOKEN: Final = re.compile(r"([0-9A-Za-z_]{1,80})\.([0-9]{1,12})\.([0-9a-f]{64})")


def load_secret(directory: Path) -> bytes:
    """The secret of this data directory, created if there is none. If it cannot be kept, sessions end with the
    process."""
    path = directory / SECRET_FILE
    try:
        if not path.exists():
            # mkstemp creates it with mode 0600; link fails if another process was faster.
            handle, name = tempfile.mkstemp(dir=directory, prefix=SECRET_FILE + ".")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(os.urandom(SECRET_BYTES))
                Path(path).hardlink_to(name)
            except FileExistsError:
                pass
            finally:
                Path(name).unlink()
        secret = path.read_bytes()
    except OSError as error:
        logger.warning("the secret of the console cannot be kept in %s: %s", path, error)
        return os.urandom(SECRET_BYTES)
    return secret if len(secret) >= SECRET_BYTES else os.urandom(SECRET_BYTES)


class Sessions:
    """Makes and reads cookies."""

    def __init__(
        self, secret: bytes, view: CatalogView, now_ms: Callable[[], int], *, is_secure: bool
    ) -> None:
        """`is_secure`: the server speaks TLS, so that the cookie never travels without it."""
        self._secret = secret
        self._view = view
        self._now_ms = now_ms
        self._attributes = "; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if is_secure else "")

    def create(self, caller: Caller, fields: Mapping[str, str]) -> bytes:
        """The header line that starts a session."""
        expires_s = self._now_ms() // 1000 + SESSION_S
        token = f"{caller.key_id}.{expires_s}.{self._signature(caller.key_id, expires_s)}"
        return self._line(fields, token, SESSION_S)

    def end(self, fields: Mapping[str, str]) -> bytes:
        """The header line that ends a session."""
        return self._line(fields, "", 0)

    def _line(self, fields: Mapping[str, str], token: str, max_age_s: int) -> bytes:
        cookie = f"{_cookie_name(fields)}={token}; Max-Age={max_age_s}{self._attributes}"
        return f"set-cookie: {cookie}\r\n".encode("ascii")

    def find(self, fields: Mapping[str, str]) -> str | None:
        """The id of the key that the cookie of a request names, if the signature is right and the time is not over."""
        wanted = _cookie_name(fields)
        for part in fields.get("cookie", "").split(";"):
            name, _, token = part.strip().partition("=")
            if name == wanted:
                return self._key_id(token)
        return None

    def _key_id(self, token: str) -> str | None:
        match = TOKEN.fullmatch(token)
        if match is None:
            return None
        key_id, expires_s = match[1], int(match[2])
        if not hmac.compare_digest(self._signature(key_id, expires_s), match[3]):
            return None
        return key_id if self._now_ms() // 1000 < expires_s else None

    def _signature(self, key_id: str, expires_s: int) -> str:
        row = self._view.key_by_id(key_id)
        digest = b"" if row is None else row.digest
        message = f"{key_id}.{expires_s}.".encode("ascii") + digest
        return blake2b(message, digest_size=32, key=self._secret[:64], person=b"tidegate-session").hexdigest()

    def caller(self, key_id: str) -> Caller | None:
        """The holder of a key, if it may use the console now."""
        caller = self._view.caller(key_id)
        if caller is None or not caller.is_enabled or not caller.workspace.is_enabled:
            return None
        if caller.expires_at_ms is not None and caller.expires_at_ms <= self._now_ms():
            return None
        return caller if CONSOLE_READ in caller.grants else None


def _cookie_name(fields: Mapping[str, str]) -> str:
    """With the port: cookies ignore ports, and several servers on one machine must not end each other's sessions."""
    _, _, port = fields.get("host", "").rpartition(":")
    return f"tidegate_console_{port}" if port.isascii() and port.isdigit() else "tidegate_console"


def is_from_elsewhere(fields: Mapping[str, str]) -> bool:
    """Whether a browser reports that a page of another origin made this request."""
    site = fields.get("sec-fetch-site")
    if site is not None:
        return site not in {"same-origin", "none"}
    origin = fields.get("origin")
    return origin is not None and urlsplit(origin).netloc != fields.get("host")
