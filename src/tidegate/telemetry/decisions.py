"""One recorded decision, as a line of JSON: what the server writes and `tidegate simulate replay` reads.

A log may hold all identifiers or a sample of them, never a sample of requests: every request of a chosen identifier is
there, so that its counter can be replayed exactly. Which identifiers are chosen depends on their digest alone, so that
the logs of all nodes hold the same ones. An identifier may be written as a keyed hash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

from tidegate.core.model import DURATION_MS_MIN
from tidegate.errors import ConfigurationError

__all__ = ["DecisionRecord", "Sampling", "read_records"]

# The longest line that a server writes is far shorter: names and identifiers have at most 512 characters.
LINE_BYTES_MAX: Final = 65_536
# The largest count for which the arithmetic of the windows is specified.
NUMBER_MAX: Final = 2**53
SCALE: Final = 2**64


class DecisionRecord(NamedTuple):
    """One decision. Several with the same `batch` in a row were one all-or-nothing request."""

    at_ms: int
    workspace: str
    namespace: str
    identifier: str
    cost: int
    quota: int
    duration_ms: int
    allowed: bool
    batch: int | None = None

    def to_line(self) -> str:
        """One line of JSON, with its end."""
        fields = self._asdict()
        if self.batch is None:
            del fields["batch"]
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> DecisionRecord:
        """Raises ValueError, which names the field that is wrong."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError("not a line of JSON") from error
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for all that a line can have
        values: dict[str, Any] = {name: fields.get(name) for name in cls._fields}
        for name in ("workspace", "namespace", "identifier"):
            if not isinstance(values[name], str) or not values[name]:
                raise ValueError(f"{name}: got {values[name]!r:.80}, expected text")
        least = {"at_ms": 0, "cost": 0, "quota": 0, "duration_ms": DURATION_MS_MIN}
        for name, minimum in least.items():
            value = values[name]
            if type(value) is not int or not minimum <= value <= NUMBER_MAX:
                raise ValueError(f"{name}: got {value!r:.80}, expected a whole number of at least {minimum}")
        if type(values["allowed"]) is not bool:
            raise ValueError(f"allowed: got {values['allowed']!r:.80}, expected true or false")
        if values["batch"] is not None and type(values["batch"]) is not int:
            raise ValueError(f"batch: got {values['batch']!r:.80}, expected a whole number, or nothing")
        return cls(**values)


class Sampling:
    """Which identifiers are logged, and how they are written."""

    def __init__(self, share: float, hash_key: bytes | None = None) -> None:
        """`share`: above 0, at most 1. With `hash_key`, at most 64 bytes, identifiers are written as hashes."""
        self._below = round(share * SCALE)
        self._hash_key = hash_key

    def includes(self, identifier: str) -> bool:
        """Whether this identifier is logged."""
        if self._below >= SCALE:
            return True
        digest = blake2b(
            identifier.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tidegate-sample"
        )
        return int.from_bytes(digest.digest(), "big") < self._below

    def written(self, identifier: str) -> str:
        """The identifier as the log has it."""
        if self._hash_key is None:
            return identifier
        text = identifier.encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16, key=self._hash_key, person=b"tidegate-hidden").hexdigest()


def read_records(paths: Iterable[Path]) -> Iterator[DecisionRecord]:
    """The records of files, and of all `*.jsonl` files in directories, one file after the other.

    A last line without an end is left out: its writer was interrupted. Any other fault is a `ConfigurationError` that
    names the file and the line.
    """
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"{path}: no *.jsonl file in this directory; name a log of decisions")
        for file in files:
            yield from _read_file(file)


def _read_file(file: Path) -> Iterator[DecisionRecord]:
    try:
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(LINE_BYTES_MAX):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) == LINE_BYTES_MAX:
                        raise ConfigurationError(f"{file}:{number}: longer than {LINE_BYTES_MAX} bytes")
                    return
                try:
                    yield DecisionRecord.from_line(line)
                except ValueError as error:
                    raise ConfigurationError(
                        f"{file}:{number}: {error}; this is not a log of decisions, or it was edited"
                    ) from error
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}; name another file") from error
