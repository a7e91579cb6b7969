"""The client of a running server: the options `--url`, `--key` and `--timeout`, and HTTP with the standard library.

It does not retry, because a repeated `limit` could count twice. It follows no redirect, so that the key is sent only to
the given URL.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click

from tidegate.adapters.secrets import mask_url
from tidegate.cli.progress import Progress

__all__ = ["Answer", "Client", "NoAnswer", "client_options"]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_URL: Final = "http://127.0.0.1:8080"


class Answer(NamedTuple):
    """A response: the JSON document and the header fields (lower case)."""

    document: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def data(self) -> Any:
        """The `data` member of the envelope."""
        return self.document["data"]


class ServerRefused(click.ClickException):
    """The server returned an error; the message is the server's."""


class NoAnswer(click.ClickException):
    """The server cannot be reached, or is not a Tidegate server."""


class Client:
    """One server, one key."""

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise click.BadParameter(
                f"{mask_url(url)!r} is not http://HOST:PORT or https://HOST:PORT", param_hint="--url"
            )
        try:
            self._port = parts.port
        except ValueError as error:
            raise click.BadParameter(f"{mask_url(url)!r}: {error}", param_hint="--url") from error
        if not key:
            raise click.UsageError(
                "no key: pass --key or set TIDEGATE_KEY (`tidegate keys create` creates one)"
            )
        if not key.isascii() or not key.isprintable():
            raise click.BadParameter("a key has only printable ASCII characters", param_hint="--key")
        self._host = parts.hostname
        self._is_tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._shown = mask_url(f"{parts.scheme}://{parts.netloc}{self._path}")
        self._key = key
        self._timeout_s = timeout_s

    def post(self, operation: str, body: object) -> Answer:
        """Call one operation of the API. Any response without `data` raises an error with the server's message."""
        with self._response("POST", f"v2/{operation}", json.dumps(body).encode()) as response:
            document = self._document(response)
            if response.status != http.HTTPStatus.OK or "data" not in document:
                raise ServerRefused(self._refusal(response.status, document))
            return Answer(document, {name.lower(): value for name, value in response.getheaders()})

    def get(self, path: str) -> Mapping[str, Any]:
        """A document of the console."""
        with self._response("GET", path) as response:
            return self._console_document(response)

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a stream of the console, until it ends."""
        with self._response("GET", path) as response:
            if response.status != http.HTTPStatus.OK:
                self._console_document(response)
            try:
                while line := response.readline():
                    yield line.decode("utf-8").rstrip("\n")
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(f"{self._shown} ended the stream: {error}") from error

    def _console_document(self, response: http.client.HTTPResponse) -> Mapping[str, Any]:
        document = self._document(response)
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise ServerRefused(
                f"{self._shown} does not serve its console: start the server with --console-enabled on"
            )
        if response.status != http.HTTPStatus.OK:
            raise ServerRefused(self._refusal(response.status, document))
        return document

    @contextmanager
    def _response(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with Progress(f"waiting for {self._shown}"):
                connection.request(method, f"{self._path}/{path}", body, headers)
                response = connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise NoAnswer(
                f"the certificate of {self._shown} is not trusted: {error.verify_message}; if this is your own server, "
                "set SSL_CERT_FILE to a PEM file with its certificate or with that of its CA"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._no_answer(error) from error
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def _no_answer(self, error: Exception) -> NoAnswer:
        reason = "timed out" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
        return NoAnswer(
            f"no response from {self._shown}: {reason}; start the server, or set --url or TIDEGATE_URL"
        )

    def _document(self, response: http.client.HTTPResponse) -> Mapping[str, Any]:
        try:
            document = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error
        except (ValueError, RecursionError) as error:
            raise NoAnswer(
                f"{self._shown} returned {response.status} without JSON: check that it is a Tidegate server (--url)"
            ) from error
        return document if isinstance(document, dict) else {}

    def _connect(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)

    def _refusal(self, status: int, document: object) -> str:
        error = document.get("error") if isinstance(document, dict) else None
        if not isinstance(error, dict):
            return f"{self._shown} returned {status} without an error: check that it is a Tidegate server (--url)"
        lines = [f"{status} {error.get('title', '')}: {error.get('detail', '')}"]
        for item in error.get("errors") or []:
            if isinstance(item, dict):
                fix = f" ({item['fix']})" if item.get("fix") else ""
                lines.append(f"  {item.get('location', '')}: {item.get('message', '')}{fix}")
        meta = document.get("meta") if isinstance(document, dict) else None
        if isinstance(meta, dict) and meta.get("requestId"):
            lines.append(f"  request {meta['requestId']}, {error.get('type', '')}")
        return "\n".join(lines)


def client_options(command: F) -> F:
    """`--url`, `--key` and `--timeout`; the command gets a `client`."""

    @click.option(
        "--url",
        envvar="TIDEGATE_URL",
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        help="URL of the server.",
    )
    @click.option(
        "--key",
        envvar="TIDEGATE_KEY",
        show_envvar=True,
        help="Root key. Use the variable to keep it out of `ps`.",
    )
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0.01, 3600),
        default=10.0,
        show_default=True,
        help="Seconds to wait for the response.",
    )
    @wraps(command)
    def wrapped(url: str, key: str | None, timeout_s: float, **rest: Any) -> Any:
        return command(client=Client(url, key, timeout_s), **rest)

    return wrapped  # type: ignore[return-value] # the command's signature, with the options in place of `client`
