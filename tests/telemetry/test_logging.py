from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from tidegate.telemetry.logging import (
    JSONFormatter,
    MaskSecrets,
    TextFormatter,
    configure,
    request_id,
    set_level,
)

SECRET = "S3cretHunter2"
KEY = f"tg_{SECRET}"
URL = f"mysql://root:{SECRET}@db/tidegate"


class Book:
    """A logger with its own handler, and its output."""

    def __init__(self, formatter: logging.Formatter, secrets: tuple[str, ...] = ()) -> None:
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.addFilter(MaskSecrets(secrets))
        handler.setFormatter(formatter)
        self.logger = logging.Logger("book")  # noqa: LOG001 - a logger outside of the process-wide tree
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture(params=[TextFormatter, JSONFormatter, lambda: logging.Formatter("%(message)s %(name)s")])
def book(request: pytest.FixtureRequest) -> Book:
    return Book(request.param())


class Shy:
    def __repr__(self) -> str:
        return f"Shy({KEY})"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError(KEY)


def _log_nested(logger: logging.Logger) -> None:
    error = RuntimeError(f"outer {KEY}")
    error.add_note(f"note {KEY}")
    error.__cause__ = ValueError(f"inner {URL}")
    logger.error("failed", exc_info=error)


def _log_group(logger: logging.Logger) -> None:
    logger.error("failed", exc_info=ExceptionGroup("group", [ValueError(KEY), OSError(2, "no", URL)]))


def _log_loosely(logger: logging.Logger, message: object, *arguments: object) -> None:
    """Avoids the lint rules that would notice that message and arguments do not match."""
    logger.log(logging.WARNING, message, *arguments)


ATTEMPTS: dict[str, Callable[[logging.Logger], None]] = {
    "in the message": lambda log: log.warning(f"key {KEY}"),  # noqa: G004 - a careless caller is what is tested
    "as an argument": lambda log: log.warning("key %s", KEY),
    "split over two arguments": lambda log: log.warning("%s%s", "tg_", SECRET),
    "split over message and argument": lambda log: log.warning("tg_%s", SECRET),
    "as bytes": lambda log: log.warning("key %s", KEY.encode()),
    "in a repr": lambda log: log.warning("object %r", Shy()),
    "in a dict argument": lambda log: log.warning("%(key)s", {"key": KEY}),
    "in a list argument": lambda log: log.warning("%s", [URL, {"a": KEY}]),
    "as the message object": lambda log: log.warning(Shy()),
    "as an exception object": lambda log: log.warning(ValueError(URL)),
    "with too few arguments": lambda log: _log_loosely(log, "%s %s", KEY),
    "with too many arguments": lambda log: _log_loosely(log, "no place", KEY),
    "with a wrong placeholder": lambda log: log.warning("%d", KEY),
    "in an argument that cannot be shown": lambda log: log.warning("%s", Broken()),
    "in an exception": _log_nested,
    "in an exception group": _log_group,
    "in an extra field": lambda log: log.warning("x", extra={"url": URL}),
    "in an extra field named for it": lambda log: log.warning("x", extra={"password": SECRET}),
    "in a nested extra field": lambda log: log.warning("x", extra={"a": {"b": [{"token": SECRET}, KEY]}}),
    "in header pairs": lambda log: log.warning("x", extra={"headers": [(b"authorization", SECRET.encode())]}),
    "in an extra object": lambda log: log.warning("x", extra={"who": Shy()}),
    "in a deep extra field": lambda log: log.warning(
        "x", extra={"a": [[[[[[[[[{"password": f"'{SECRET}'"}]]]]]]]]]}
    ),
    "as a key of an extra dict": lambda log: log.warning("x", extra={"a": {KEY: 1}}),
    "in the stack": lambda log: log.warning("x", stack_info=True, extra={"request_id": KEY}),
    "in the logger's name": lambda log: log.handle(
        logging.makeLogRecord({"levelno": 30, "name": KEY, "msg": "x"})
    ),
    "in a prepared exception text": lambda log: log.handle(
        logging.makeLogRecord({"levelno": 30, "msg": "x", "exc_text": f"Boom {URL}"})
    ),
    "in a header line": lambda log: log.warning("Authorization: Bearer %s", SECRET),
    "after a very long text": lambda log: log.warning("%s mysql://u:%s@h", "x" * 16_370, SECRET),
    "on a line of its own": lambda log: log.warning("a\n%s\nb", URL),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_no_secret_is_written(
    book: Book, attempt: Callable[[logging.Logger], None], capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(book.logger)
    assert book.text
    assert SECRET not in book.text
    # What logging itself prints when a record cannot be formatted.
    assert SECRET not in "".join(capsys.readouterr())


def test_a_secret_without_a_pattern_is_masked_if_it_was_given() -> None:
    book = Book(TextFormatter(), ("correct horse",))
    book.logger.warning("the password is correct%%20horse, that is %s", "correct horse")
    assert "horse" not in book.text


def test_the_rest_of_a_message_with_a_secret_stays_readable() -> None:
    book = Book(JSONFormatter())
    _log_nested(book.logger)
    exception = json.loads(book.text)["exception"]
    assert "RuntimeError: outer" in exception
    assert "ValueError: inner mysql://root:****@db/tidegate" in exception


def test_a_json_line_has_time_level_logger_message_and_extra_fields() -> None:
    book = Book(JSONFormatter())
    book.logger.warning("origin %s", "slow", extra={"latency_ms": 12.5, "op": "cold", "cells": (1, 2, 3)})
    fields = json.loads(book.text)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "warning",
        "logger": "book",
        "message": "origin slow",
        "latency_ms": 12.5,
        "op": "cold",
        "cells": [1, 2, 3],
    }


def test_an_extra_field_cannot_replace_the_message() -> None:
    book = Book(JSONFormatter())
    book.logger.handle(
        logging.makeLogRecord(
            {"levelno": 30, "levelname": "WARNING", "msg": "real", "level": "forged", "time": "forged"}
        )
    )
    fields = json.loads(book.text)
    assert fields["level"] == "warning"
    assert fields["time"] != "forged"


def test_the_request_id_comes_from_the_task_or_from_the_record() -> None:
    book = Book(JSONFormatter())
    token = request_id.set("req_task")
    try:
        book.logger.warning("one")
        book.logger.warning("two", extra={"request_id": "req_record"})
    finally:
        request_id.reset(token)
    book.logger.warning("three")
    assert [json.loads(line).get("request_id") for line in book.lines] == ["req_task", "req_record", None]


@pytest.mark.parametrize("formatter", [TextFormatter, JSONFormatter])
def test_a_value_cannot_forge_a_line(formatter: type[logging.Formatter]) -> None:
    book = Book(formatter())
    book.logger.warning(
        "identifier %s", "a\r\n2026-01-01T00:00:00.000Z INFO forged\x1b[2J\u2028x\x85y", extra={"a": "b\nc"}
    )
    assert len(book.lines) == 1
    assert "\x1b" not in book.text


def test_no_line_of_an_exception_looks_like_a_record() -> None:
    book = Book(TextFormatter())
    book.logger.error("failed", exc_info=ValueError("x\n2026-01-01T00:00:00.000Z INFO forged"))
    assert len(book.lines) > 1
    assert [line.startswith("    ") for line in book.lines] == [False] + [True] * (len(book.lines) - 1)


@pytest.fixture
def process_logging() -> Iterator[None]:
    """`configure` is for programs; restore the logging of the test process afterwards."""
    root, own = logging.getLogger(), logging.getLogger("tidegate")
    before = (root.handlers[:], root.level, own.level, sys.excepthook, threading.excepthook)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root_level, own_level, sys.excepthook, threading.excepthook = before
    root.setLevel(root_level)
    own.setLevel(own_level)


def test_own_records_are_written_from_the_level_on_and_others_from_warning_on(
    process_logging: None,
) -> None:
    stream = io.StringIO()
    configure("info", "json", stream=stream)
    logging.getLogger("tidegate.server").info("own info")
    logging.getLogger("tidegate.server").debug("own debug")
    logging.getLogger("redis").info("other info")
    logging.getLogger("redis").warning("other warning")
    set_level("debug")
    logging.getLogger("tidegate.server").debug("own debug later")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["own info", "other warning", "own debug later"]


def test_uncaught_exceptions_and_warnings_are_logged_masked(process_logging: None) -> None:
    stream = io.StringIO()
    configure("info", "text", secrets=("whatever-it-is",), stream=stream)
    error = RuntimeError(f"{KEY} whatever-it-is")
    sys.excepthook(RuntimeError, error, None)
    thread = threading.Thread(target=lambda: (_ for _ in ()).throw(error))
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"careful {URL}", stacklevel=1)
    text = stream.getvalue()
    assert text.count("uncaught exception") == 2
    assert "careful mysql://root:****@db" in text
    assert SECRET not in text
    assert "whatever-it-is" not in text


def test_importing_tidegate_configures_no_logging() -> None:
    program = (
        "import logging, tidegate, tidegate.server.process.config\n"
        "import tidegate.telemetry.logging, tidegate.telemetry.prometheus\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('tidegate').handlers\n"
        "assert logging.getLogger('tidegate').level == logging.NOTSET"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
