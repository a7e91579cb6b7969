"""The last known catalog in a local file, for a node that starts while the database is away.

Holds what the database holds: digests of keys, never keys. Readable by its owner only, replaced in one step, and
refused when it is too old, belongs to another database, or is damaged: it is an aid, never a source of truth.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from tidegate.ports import CatalogChanges

__all__ = ["SnapshotFile"]

FORMAT: Final = 1


class _Content(msgspec.Struct):
    format: int
    source: bytes
    saved_at_ms: int
    catalog: CatalogChanges


class SnapshotFile:
    """The file at `path`. `source` names the database; what was saved for another one is not used."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        # A digest: the URL of a database holds its password.
        self._source = blake2b(source.encode(), digest_size=16).digest()
        self._decode = msgspec.msgpack.Decoder(_Content).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def save(self, catalog: CatalogChanges, now_ms: int) -> None:
        """Replace the file. Raises OSError. Blocks: call it from a thread."""
        data = self._encode(_Content(FORMAT, self._source, now_ms, catalog))
        # mkstemp makes it 0600 before there is anything to read in it.
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(self.path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def load(self, now_ms: int, age_max_ms: int) -> tuple[CatalogChanges | None, str]:
        """(what was saved, "") or (None, why it cannot be used)."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None, "there is none"
        except OSError as error:
            return None, str(error)
        try:
            content = self._decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            return None, f"it is damaged: {error}"
        if content.format != FORMAT or content.source != self._source:
            return None, "it was made for another database or by another version"
        age_ms = now_ms - content.saved_at_ms
        if age_ms > age_max_ms:
            return None, f"it is {age_ms // 1000} s old, and {age_max_ms // 1000} s are allowed"
        return content.catalog, ""
