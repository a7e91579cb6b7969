"""The first start: creates the embedded files, and with them the first root key.

A shared database is never changed here: an operator does that with `tidegate migrate` and `tidegate keys create`.
Law: a start that fails after the key was created (the port is in use, for example) does not lose the key. It was never
shown, so the next start creates another.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
from pathlib import Path
from typing import IO, Final, NamedTuple

from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.clock import now_ms
from tidegate.adapters.migrations import migrate, schema_version
from tidegate.adapters.sql_ledger import check_schema
from tidegate.errors import ConfigurationError
from tidegate.ports import Catalog, WorkspaceRow
from tidegate.server.catalog.keys import ALL, IdSource, key_row, new_key
from tidegate.server.process.config import ServerConfig

TIMEOUT_S: Final = 30.0
# In the data directory from before a first key is created until it has been shown. Holds the ids of such keys.
NOT_SHOWN_FILE: Final = "first-key-not-shown"
# Held by the server that uses the directory. Its content does not matter.
LOCK_FILE: Final = "lock"


class FirstKey(NamedTuple):
    """Created by the first start; shown once and never stored."""

    key: str
    workspace: str


def make_private_directory(directory: Path) -> None:
    """For this user only: the files hold digests of keys and counts of identifiers."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"data_dir: {directory} cannot be created: {error.strerror}; name another directory with --data-dir"
        ) from error


def make_directory(config: ServerConfig) -> IO[bytes] | None:
    """The data directory of a server that starts, and its lock, which lasts as long as the file is open.

    Two servers on one directory would count in one file, each without the counts of the other: each would allow a whole
    limit. With a shared counter (`origin`) they may share it.
    """
    # Also if the directory exists and is open to all: the files that this process creates in it are not.
    os.umask(os.umask(0o077) | 0o077)
    directory = Path(config.data_dir)
    make_private_directory(directory)
    if config.origin is not None:
        return None
    lock = (directory / LOCK_FILE).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigurationError(
            f"data_dir: {directory.absolute()} is used by another server; stop it, or give this one another --data-dir"
        ) from None
    except OSError as error:
        lock.close()
        raise ConfigurationError(
            f"data_dir: {directory.absolute()} cannot be locked: {error.strerror}"
        ) from error
    return lock


async def prepare(config: ServerConfig) -> FirstKey | None:
    """Create or update the embedded database; create a key if none has ever been shown."""
    if config.ledger is not None:
        return None
    await migrate(config.catalog_url, timeout_s=TIMEOUT_S)
    check_schema(await schema_version(config.catalog_url), config.catalog_url)
    catalog = open_catalog(config.catalog_url)
    try:
        await catalog.open(timeout_s=TIMEOUT_S)
        not_shown = Path(config.data_dir) / NOT_SHOWN_FILE
        unseen = not_shown.read_text(encoding="ascii").split() if not_shown.exists() else []
        rows = await catalog.changes(0, timeout_s=TIMEOUT_S)
        keys = rows.keys
        for row in keys:
            if row.id in unseen and row.revoked_at_ms is None:
                moment_ms = now_ms()
                await catalog.revoke_key(row.id, revoked_at_ms=moment_ms, timeout_s=TIMEOUT_S)
        # A catalog with rows that cannot be read is not new: its keys may be among them.
        if rows.unreadable or any(row.id not in unseen for row in keys):
            not_shown.unlink(missing_ok=True)
            return None
        key_id = f"key_{IdSource().take()}"
        not_shown.write_text("\n".join([*unseen, key_id]), encoding="ascii")
        key = await create_key(catalog, config.workspace, ALL, "first start", key_id)
        return FirstKey(key, config.workspace)
    finally:
        await catalog.close()


async def create_key(
    catalog: Catalog, workspace_id: str, permissions: tuple[str, ...], name: str, key_id: str
) -> str:
    """A new key of a workspace, which is created if it does not exist."""
    rows = await catalog.changes(0, timeout_s=TIMEOUT_S)
    if all(workspace.id != workspace_id for workspace in rows.workspaces):
        await catalog.put_workspace(
            WorkspaceRow(workspace_id, workspace_id, True, None, None), timeout_s=TIMEOUT_S
        )
    key = new_key()
    row = key_row(key_id, workspace_id, key, name, permissions, now_ms())
    await catalog.put_key(row, timeout_s=TIMEOUT_S)
    return key


def announce(out: IO[str], config: ServerConfig, bound: socket.socket, first: FirstKey | None) -> None:
    """Print where the server is, and at the first start how to use it; with JSON logs, as one JSON line."""
    host, port = bound.getsockname()[:2]
    scheme = "https" if config.tls.cert is not None else "http"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}"
    document = {"message": f"Tidegate is listening on {url}", "url": url}
    lines = [document["message"]]
    if config.serves_console:
        document["console"] = f"{callable_url(url)}/console"
        lines.append(f"Its console is at {document['console']}")
    if config.ledger is None:
        document["data_dir"] = str(Path(config.data_dir).resolve())
        lines.append(f"Its data is in {document['data_dir']}")
    if first is not None:
        curl = _curl(config, url, first.key)
        document |= {"workspace": first.workspace, "key": first.key, "curl": curl.replace("\\\n", "")}
        lines += [
            "",
            f"This is the root key of workspace {first.workspace!r}. It is shown only now:",
            "",
            f"    {first.key}",
            "",
            "Try it:",
            "",
            *(f"    {line}" for line in curl.splitlines()),
            "",
        ]
    out.write(json.dumps(document) + "\n" if config.log.format == "json" else "\n".join(lines) + "\n")
    out.flush()
    if first is not None:
        (Path(config.data_dir) / NOT_SHOWN_FILE).unlink(missing_ok=True)


def callable_url(url: str) -> str:
    """`url` with an address that can be called, where the server listens on all of them."""
    return url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")  # noqa: S104 - an address shown


def _curl(config: ServerConfig, url: str, key: str) -> str:
    """A command to try the server with, on two lines."""
    body = '{"namespace": "demo", "identifier": "user_1", "limit": 10, "duration": 60000}'
    trust = ""
    if config.tls.cert is not None:
        # Often self-signed, or signed by an authority that curl does not know.
        trust = f" --cacert {shlex.quote(str(Path(config.tls.cert).resolve()))}"
    return (
        f"curl -s{trust} {callable_url(url)}/v2/ratelimit.limit -H 'Content-Type: application/json' \\\n"
        f"  -H 'Authorization: Bearer {key}' -d {shlex.quote(body)}"
    )
