"""What happens once, before the first request: the embedded files are made, and with them the first root key.

A shared database is never changed here: `tidegate migrate` and `tidegate keys create` do that, when somebody says so.
"""

from __future__ import annotations

import shlex
import socket
import time
from pathlib import Path
from typing import IO, Final, NamedTuple

from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.errors import ConfigurationError
from tidegate.ports import Catalog, KeyRow, WorkspaceRow
from tidegate.server.auth import digest_of, hint_of, new_key
from tidegate.server.config import ServerConfig
from tidegate.server.ids import IdSource
from tidegate.server.permissions import ALL

__all__ = ["FirstKey", "announce", "create_key", "make_directory", "prepare"]

TIMEOUT_S: Final = 30.0


class FirstKey(NamedTuple):
    """Made by the first start; shown once and forgotten."""

    key: str
    workspace: str


def make_directory(config: ServerConfig) -> None:
    """For this user only: digests of keys and counts of identifiers are nobody else's business."""
    directory = Path(config.data_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"data_dir: {directory} cannot be made: {error.strerror}; name another directory with --data-dir"
        ) from error


async def prepare(config: ServerConfig) -> FirstKey | None:
    """Make or update the embedded database; make a key if there has never been one."""
    if config.ledger is not None:
        return None
    await migrate(config.catalog_url, timeout_s=TIMEOUT_S)
    catalog = open_catalog(config.catalog_url)
    try:
        await catalog.open(timeout_s=TIMEOUT_S)
        if (await catalog.changes(0, timeout_s=TIMEOUT_S)).keys:
            return None
        return FirstKey(await create_key(catalog, config.workspace, ALL, "first start"), config.workspace)
    finally:
        await catalog.close()


async def create_key(catalog: Catalog, workspace_id: str, permissions: tuple[str, ...], name: str) -> str:
    """A new key of a workspace, which is made if it is not there."""
    rows = await catalog.changes(0, timeout_s=TIMEOUT_S)
    if all(workspace.id != workspace_id for workspace in rows.workspaces):
        await catalog.put_workspace(
            WorkspaceRow(workspace_id, workspace_id, True, None, None), timeout_s=TIMEOUT_S
        )
    key = new_key()
    row = KeyRow(
        f"key_{IdSource().take()}",
        workspace_id,
        digest_of(key),
        name,
        hint_of(key),
        permissions,
        time.time_ns() // 1_000_000,
        None,
        True,
        None,
    )
    await catalog.put_key(row, timeout_s=TIMEOUT_S)
    return key


def announce(out: IO[str], config: ServerConfig, bound: socket.socket, first: FirstKey | None) -> None:
    """Tell people where the server is, and at the first start how to use it."""
    host, port = bound.getsockname()[:2]
    scheme = "https" if config.tls.cert is not None else "http"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}"
    lines = [f"Tidegate is listening on {url}"]
    if config.ledger is None:
        lines.append(f"Its data is in {Path(config.data_dir).resolve()}")
    if first is not None:
        callable_url = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")  # noqa: S104 - an address shown
        body = '{"namespace": "demo", "identifier": "user_1", "limit": 10, "duration": 60000}'
        lines += [
            "",
            f"This is the root key of workspace {first.workspace!r}. It is shown only now:",
            "",
            f"    {first.key}",
            "",
            "Try it:",
            "",
            f"    curl -s {callable_url}/v2/ratelimit.limit -H 'Content-Type: application/json' \\",
            f"      -H 'Authorization: Bearer {first.key}' -d {shlex.quote(body)}",
            "",
        ]
    out.write("\n".join(lines) + "\n")
    out.flush()
