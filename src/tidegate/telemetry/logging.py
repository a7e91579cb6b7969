"""Logging of the server: one line per record, as text or JSON, with the request id and without secrets.

A library must not configure logging: only `tidegate serve` calls `configure`. Other code uses
`logging.getLogger("tidegate.…")`, and may use the filter and the formatters on its own handlers.
Rules: a secret is masked anywhere in a record (message, arguments, exception, extra fields); one record is one line,
whatever its values contain; a record that cannot be formatted is still written, masked.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any, Final, Literal

from tidegate.adapters.secrets import Masker

__all__ = ["JSONFormatter", "MaskSecrets", "TextFormatter", "configure", "request_id", "set_level"]

request_id: ContextVar[str | None] = ContextVar("tidegate_request_id", default=None)
"""The request that the current task serves. Outside a task, pass `extra={"request_id": …}`."""

# The attributes of every record. All others come from `extra`.
STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

# Long enough for any message of ours; bounds the size of a line.
MESSAGE_CHARACTERS_MAX: Final = 16_384

# A value must not end a line or move the cursor of a terminal: that would allow forged log lines.
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

DEPTH_MAX: Final = 6


class MaskSecrets(logging.Filter):
    """Masks every record that passes: message and arguments, exception, stack, and extra fields.

    Add it to a handler, not to a logger: records of child loggers skip the filters of parent loggers.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._mask = Masker(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._message(record)
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = _exception_text(record.exc_info)
        # Formatters use exc_text if it is set; without exc_info they cannot create an unmasked one.
        record.exc_info = None
        for name, value in list(record.__dict__.items()):
            if name not in STANDARD:
                record.__dict__[name] = self._named(name, value, DEPTH_MAX)
            elif isinstance(value, str):
                record.__dict__[name] = self._mask(value)
        return True

    def _message(self, record: logging.LogRecord) -> str:
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001 - arguments can raise anything; logging would print them unmasked
            kind = type(error).__name__
            message = f"unformattable log message {_safe_repr(record.msg)} {_safe_repr(record.args)} ({kind})"
        # Masked before it is cut: part of a secret might not be recognised.
        message = self._mask(message)
        return (
            message if len(message) <= MESSAGE_CHARACTERS_MAX else message[:MESSAGE_CHARACTERS_MAX] + " (cut)"
        )

    def _named(self, name: object, value: object, depth: int) -> object:
        """`value` without secrets; its name may show that it is one: {"password": "x"}."""
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if isinstance(text, str):
            label = name.decode("latin-1") if isinstance(name, bytes) else str(name)
            masked = self._mask(f"{label}={text}")
            return self._mask(text) if masked == f"{label}={text}" else masked.partition("=")[2]
        return self._plain(value, depth)

    def _plain(self, value: object, depth: int) -> object:
        """`value` as plain data without secrets; objects of other types become their repr."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self._mask(value)
        if depth > 0 and isinstance(value, dict):
            return {self._mask(str(key)): self._named(key, inner, depth - 1) for key, inner in value.items()}
        if depth > 0 and isinstance(value, tuple | list) and len(value) == 2:
            # Header fields are pairs.
            return [self._plain(value[0], depth - 1), self._named(value[0], value[1], depth - 1)]
        if depth > 0 and isinstance(value, list | tuple | set | frozenset):
            return [self._plain(inner, depth - 1) for inner in value]
        return self._mask(_safe_repr(value))


class _Fields(logging.Filter):
    """Adds fields to every record that does not have them."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in self._fields.items():
            record.__dict__.setdefault(name, value)
        return True


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__ must not lose the line
        return f"<{type(value).__name__}>"


def _exception_text(exc_info: Any) -> str:
    try:
        return "".join(traceback.format_exception(*exc_info)).rstrip("\n")
    except Exception:  # noqa: BLE001 - an exception that cannot be formatted must not lose the line
        return f"{_safe_repr(exc_info)} (its traceback could not be formatted)"


def _escape_controls(text: str) -> str:
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in record.__dict__.items() if name not in STANDARD}
    current = extra.pop("request_id", None) or request_id.get()
    return {"request_id": current, **extra} if current else extra


class JSONFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _extra(record).items():
            fields.setdefault(name, value)
        if record.exc_info and not record.exc_text:
            record.exc_text = _exception_text(record.exc_info)
        if record.exc_text:
            fields["exception"] = record.exc_text
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, default=_safe_repr)


class TextFormatter(logging.Formatter):
    """`2026-11-15T22:14:26.123Z INFO tidegate.server: message name=value`; a traceback follows on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        for name, value in _extra(record).items():
            line += f" {name}={value if isinstance(value, str) and value.isalnum() else _safe_repr(value)}"
        line = _escape_controls(line)
        if record.exc_info and not record.exc_text:
            record.exc_text = _exception_text(record.exc_info)
        for text in (record.exc_text, record.stack_info):
            if text:
                # Indented, so that no line of the traceback looks like a record.
                line += "".join(f"\n    {_escape_controls(part)}" for part in text.splitlines())
        return line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(
    level: str = "info",
    line_format: Literal["text", "json"] = "text",
    *,
    secrets: Iterable[str] = (),
    fields: Mapping[str, object] | None = None,
    stream: IO[str] | None = None,
) -> logging.Handler:
    """Send all logs of this process to `stream` (stderr), masked; also warnings and uncaught exceptions.

    `fields` are added to every record: the process id of a worker, for example.
    For programs only: it replaces the handlers of the root logger. Returns the handler.
    """
    handler = logging.StreamHandler(stream)
    if fields:
        handler.addFilter(_Fields(fields))
    handler.addFilter(MaskSecrets(secrets))
    handler.setFormatter(JSONFormatter() if line_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    # Other libraries log from warning on; `level` applies to our own loggers.
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    set_level(level)
    return handler


def set_level(level: str) -> None:
    """Set the level of Tidegate's own loggers: debug, info, warning or error."""
    logging.getLogger("tidegate").setLevel(level.upper())


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), where)
        return
    logging.getLogger("tidegate").critical("uncaught exception", exc_info=(kind, error or kind(), where))
