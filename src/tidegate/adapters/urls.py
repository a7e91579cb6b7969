"""From a URL to an origin or a ledger: `open_origin("redis://…")`, `open_ledger("mysql://…")`.

Laws: nothing is connected here; the driver of a scheme is imported when that scheme is asked for and not before;
every refusal is a `ConfigurationError` that shows the URL with its secrets masked. That holds for malformed URLs
too, where it is not certain which part was meant to be the password: messages show `mask_url(url)` and no other part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote

from tidegate.adapters.secrets import mask_url
from tidegate.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from tidegate.ports import Ledger, Origin

__all__ = [
    "ServerURL",
    "check_directory",
    "open_ledger",
    "open_origin",
    "parse_server_url",
    "sqlite_path",
]

REDIS_SCHEMES: Final = frozenset(
    f"{name}{secure}{kind}"
    for name in ("redis", "valkey")
    for secure in ("", "s")
    for kind in ("", "+cluster", "+sentinel")
)
MYSQL_SCHEMES: Final = frozenset({"mysql", "mariadb"})
POSTGRES_SCHEMES: Final = frozenset({"postgres", "postgresql"})

ORIGIN_EXAMPLES: Final = (
    "redis://, rediss://, redis+cluster://, redis+sentinel://, valkey://, sqlite:///path or memory://"
)
LEDGER_EXAMPLES: Final = "mysql://, postgres://, sqlite:///path or memory://"

SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


@dataclass(frozen=True)
class ServerURL:
    """The parts of a URL that names one or more servers. `repr` shows no secret."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    username: str | None
    password: str | None = field(repr=False)
    path: str
    """What follows the first "/", decoded; "" if nothing does."""
    options: Mapping[str, str] = field(repr=False)
    shown: str
    """The URL as messages may show it."""

    def refuse_unknown_options(self, known: Collection[str]) -> None:
        """A misspelled option would silently have no effect."""
        for name in self.options:
            if name not in known:
                offered = ", ".join(sorted(known)) if known else "none"
                raise ConfigurationError(f"{self.shown}: unknown option {name!r}; options are: {offered}")


def scheme_of(url: str, examples: str) -> str:
    """The scheme in lower case, or a `ConfigurationError` for what is not a URL."""
    match = SCHEME.match(url)
    if match is None:
        raise ConfigurationError(f"{mask_url(url)!r} is not a URL; expected {examples}")
    return match.group(1).lower()


def parse_server_url(url: str, *, default_port: int) -> ServerURL:
    """`scheme://[user[:password]@]host[:port][,host[:port]…][/path][?option=value&…]`."""
    scheme = scheme_of(url, "scheme://host:port")
    shown = mask_url(url)
    rest, _, fragment = url[len(scheme) + 3 :].partition("#")
    if fragment:
        raise ConfigurationError(f"{shown}: has a part after '#'; write a '#' of a password as %23")
    address, _, query = rest.partition("?")
    authority, _, path = address.partition("/")
    userinfo, _, hostlist = authority.rpartition("@")
    if "@" in rest[len(authority) :]:
        # Most likely a password that was cut in two: what follows would be taken for a host, and shown.
        raise ConfigurationError(
            f"{shown}: write '/', '?', '#' and '@' of a user, password or option as %2F, %3F, %23 and %40"
        )
    username, colon, password = userinfo.partition(":")
    hosts = tuple(_host(part, default_port, shown) for part in hostlist.split(","))
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ConfigurationError(f"{shown}: option {name!r} is given twice")
        options[name] = value
    return ServerURL(
        scheme=scheme,
        hosts=hosts,
        username=unquote(username) or None,
        password=unquote(password) if colon else None,
        path=unquote(path),
        options=options,
        shown=shown,
    )


def _host(part: str, default_port: int, shown: str) -> tuple[str, int]:
    if part.startswith("["):
        host, bracket, port = part[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ConfigurationError(f"{shown}: an IPv6 address is written [address]:port")
        colon, port = port[:1], port[1:]
    else:
        host, colon, port = part.partition(":")
    if not host:
        raise ConfigurationError(f"{shown}: a host is missing; expected scheme://host:port")
    if not colon:
        return host, default_port
    # isascii: isdigit alone is also true of digits of other scripts
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ConfigurationError(f"{shown}: a port is a number from 1 to 65535")
    return host, int(port)


def sqlite_path(url: str) -> str:
    """What follows `sqlite:///` is the path: `sqlite:///counts.db` is relative, `sqlite:////var/counts.db` is not."""
    rest = url[len("sqlite://") :]
    if not rest.startswith("/"):
        raise ConfigurationError(f"{url}: a SQLite URL has three slashes before its path: sqlite:///path")
    path = unquote(rest[1:])
    if "?" in rest or "#" in rest:
        raise ConfigurationError(f"{url}: a SQLite URL takes no options")
    if path in ("", ":memory:"):
        raise ConfigurationError(f"{url}: name a file, sqlite:///path, or use memory:// to keep nothing")
    return path


def check_directory(url: str) -> None:
    """Refuse a SQLite URL whose directory does not exist. Nothing creates it later."""
    if SCHEME.match(url) is not None and scheme_of(url, "") == "sqlite":
        check_file(Path(sqlite_path(url)).absolute())


def check_file(path: Path) -> None:
    """Refuse a path at which no file can be."""
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"{path}: the directory {path.parent} does not exist; create it or correct the URL"
        )
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory; name a file in it")


def _refuse_more_than_scheme(url: str) -> None:
    if url.partition("://")[2].strip("/"):
        raise ConfigurationError(f"{mask_url(url)}: memory:// takes nothing after it")


def open_origin(url: str) -> Origin:
    """The origin at `url`, not yet connected."""
    scheme = scheme_of(url, ORIGIN_EXAMPLES)
    if scheme == "memory":
        from tidegate.adapters.memory import MemoryOrigin

        _refuse_more_than_scheme(url)
        return MemoryOrigin()
    if scheme == "sqlite":
        from tidegate.adapters.sqlite.origin import SQLiteOrigin

        return SQLiteOrigin(sqlite_path(url))
    if scheme in REDIS_SCHEMES:
        try:
            from tidegate.adapters.redis.origin import RedisOrigin
        except ModuleNotFoundError as error:
            raise _missing(error, "redis", url) from error
        return RedisOrigin(url)
    raise ConfigurationError(
        f"{mask_url(url)}: no origin has the scheme {scheme!r}; expected {ORIGIN_EXAMPLES}"
    )


def open_ledger(url: str) -> Ledger:
    """The ledger at `url`, not yet connected."""
    scheme = scheme_of(url, LEDGER_EXAMPLES)
    if scheme == "memory":
        from tidegate.adapters.memory import MemoryLedger

        _refuse_more_than_scheme(url)
        return MemoryLedger(cleans_itself=True)
    if scheme == "sqlite":
        from tidegate.adapters.sqlite.ledger import SQLiteLedger

        return SQLiteLedger(sqlite_path(url))
    if scheme in MYSQL_SCHEMES:
        try:
            from tidegate.adapters.mysql.ledger import MySQLLedger
        except ModuleNotFoundError as error:
            raise _missing(error, "mysql", url) from error
        return MySQLLedger(url)
    if scheme in POSTGRES_SCHEMES:
        try:
            from tidegate.adapters.postgres.ledger import PostgresLedger
        except ModuleNotFoundError as error:
            raise _missing(error, "postgres", url) from error
        return PostgresLedger(url)
    raise ConfigurationError(
        f"{mask_url(url)}: no ledger has the scheme {scheme!r}; expected {LEDGER_EXAMPLES}"
    )


def _missing(error: ModuleNotFoundError, extra: str, url: str) -> Exception:
    """A driver that is not installed is for the user to fix; a module of ours that is missing is a broken install."""
    if (error.name or "").partition(".")[0] == "tidegate":
        return error
    return MissingExtra(extra, mask_url(url))
