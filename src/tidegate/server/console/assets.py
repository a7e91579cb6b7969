"""The files of the page, from the package, with their header fields.

The policy lets the page load its own modules and style sheet and talk to its own server, and nothing else: no inline
script or style, no frame, no form target, no other host. Trusted Types turn a value that reaches an HTML sink into an
error, so that a mistake of ours cannot become markup.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final, NamedTuple

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
COMMON_LINES: Final = (
    f"content-security-policy: {POLICY}\r\n"
    "x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
    "cross-origin-opener-policy: same-origin\r\ncross-origin-resource-policy: same-origin\r\n"
    "permissions-policy: camera=(), geolocation=(), microphone=()\r\n"
).encode("ascii")
# Answers about identifiers must not be stored by a proxy or cache.
NO_STORE: Final = b"cache-control: no-store\r\n"
JSON_LINES: Final = b"content-type: application/json\r\n" + NO_STORE + COMMON_LINES

TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """One file."""

    lines: bytes
    body: bytes


def load_assets() -> dict[str, Asset]:
    """All files by name."""
    found: dict[str, Asset] = {}
    for file in files("tidegate.server.console").joinpath("static").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        body = file.read_bytes()
        # Not stored: the files are small, and after an upgrade the page and its modules must be of one version.
        lines = f"content-type: {kind}\r\n".encode("ascii")
        found[file.name] = Asset(lines + NO_STORE + COMMON_LINES, body)
    return found
