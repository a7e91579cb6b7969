"""Logs of the server: one line a record, for people or as JSON, with the request's id and without secrets.

A library must not configure logging: only `tidegate serve` calls `configure`. Everything else asks for a logger with
`logging.getLogger("tidegate.…")` and may use the filter and the formatters on handlers of its own.
Laws: a secret is masked wherever it stands in a record (message, arguments, exception, extra fields); one record is
one line, whatever its values hold; a record that cannot be formatted is still written, masked.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any, Final, Literal

from tidegate.adapters.secrets import Masker

__all__ = ["JSONFormatter", "MaskSecrets", "TextFormatter", "configure", "request_id", "set_level"]

request_id: ContextVar[str | None] = ContextVar("tidegate_request_id", default=None)
"""The request that the current task works for; `extra={"request_id": …}` says it where there is no task."""

# What every record has. Whatever else stands in its dictionary was given with `extra`.
STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

# A message longer than this was not meant to be read.
MESSAGE_CHARACTERS_MAX: Final = 16_384

# A value may not end a line or move the cursor of a terminal: that is how log lines are forged.
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

DEPTH_MAX: Final = 6


class MaskSecrets(logging.Filter):
    """Masks every record that passes: message and arguments, exception, stack, and extra fields.

    Put it on a handler, not on a logger: records of child loggers pass by a parent logger's filters.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._mask = Masker(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._message(record)
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = _exception_text(record.exc_info)
        # Formatters take exc_text when it is there; without exc_info none can make an unmasked one.
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
        except Exception as error:  # noqa: BLE001 - arguments of all kinds; logging would print them unmasked
            kind = type(error).__name__
            message = f"unformattable log message {_safe_repr(record.msg)} {_safe_repr(record.args)} ({kind})"
        # Masked before it is cut: half a secret has no end by which it could be recognised.
        message = self._mask(message)
        return (
            message if len(message) <= MESSAGE_CHARACTERS_MAX else message[:MESSAGE_CHARACTERS_MAX] + " (cut)"
        )

    def _named(self, name: object, value: object, depth: int) -> object:
        """`value` without secrets, where its name may tell that it is one: {"password": "x"}."""
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if isinstance(text, str):
            label = name.decode("latin-1") if isinstance(name, bytes) else str(name)
            masked = self._mask(f"{label}={text}")
            return self._mask(text) if masked == f"{label}={text}" else masked.partition("=")[2]
        return self._plain(value, depth)

    def _plain(self, value: object, depth: int) -> object:
        """`value` as plain data without secrets; what is neither data nor text becomes its repr."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self._mask(value)
        if depth > 0 and isinstance(value, dict):
            return {self._mask(str(key)): self._named(key, inner, depth - 1) for key, inner in value.items()}
        if depth > 0 and isinstance(value, tuple | list) and len(value) == 2:
            # Headers come as pairs.
            return [self._plain(value[0], depth - 1), self._named(value[0], value[1], depth - 1)]
        if depth > 0 and isinstance(value, list | tuple | set | frozenset):
            return [self._plain(inner, depth - 1) for inner in value]
        return self._mask(_safe_repr(value))


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a broken __repr__ must not cost the line
        return f"<{type(value).__name__}>"


def _exception_text(exc_info: Any) -> str:
    try:
        return "".join(traceback.format_exception(*exc_info)).rstrip("\n")
    except Exception:  # noqa: BLE001 - also of an exception that cannot be shown a line must remain
        return f"{_safe_repr(exc_info)} (its traceback could not be formatted)"


def _escape_controls(text: str) -> str:
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in record.__dict__.items() if name not in STANDARD}
    current = extra.pop("request_id", None) or request_id.get()
    return {"request_id": current, **extra} if current else extra


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the extra fields, then the exception."""

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
    """`2026-11-15T22:14:26.123Z INFO tidegate.server: message name=value`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        for name, value in _extra(record).items():
            line += f" {name}={value if isinstance(value, str) and value.isalnum() else _safe_repr(value)}"
        line = _escape_controls(line)
        if record.exc_info and not record.exc_text:
            record.exc_text = _exception_text(record.exc_info)
        for text in (record.exc_text, record.stack_info):
            if text:
                # Indented, so that no line of an exception's text can pass for a record.
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
    stream: IO[str] | None = None,
) -> logging.Handler:
    """Send all logs of this process to `stream` (stderr), masked; also warnings and uncaught exceptions.

    For programs only: it replaces the handlers of the root logger. Returns the handler.
    """
    handler = logging.StreamHandler(stream)
    handler.addFilter(MaskSecrets(secrets))
    handler.setFormatter(JSONFormatter() if line_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    # Others' libraries speak up from warning on; the level that was asked for is that of our own loggers.
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    set_level(level)
    return handler


def set_level(level: str) -> None:
    """The least severe record of Tidegate's own loggers that is written: debug, info, warning or error."""
    logging.getLogger("tidegate").setLevel(level.upper())


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, where: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), where)
        return
    logging.getLogger("tidegate").critical("uncaught exception", exc_info=(kind, error or kind(), where))
