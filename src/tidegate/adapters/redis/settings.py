"""What a Redis URL says, checked: `redis[s][+cluster|+sentinel]://[user:password@]host:port,…/…?option=value`.

`valkey` in place of `redis` means the same. Connects to nothing; refuses what can never work, with the URL masked.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import Final, Literal

from tidegate.adapters.urls import ServerURL, parse_server_url
from tidegate.errors import ConfigurationError

__all__ = ["Address", "RedisSettings", "parse_settings"]

Address = tuple[str, int]
Kind = Literal["single", "cluster", "sentinel"]

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379

# Braces would move the hash tag of every key; anything else unusual makes keys hard to read.
PREFIX: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")
TLS_OPTIONS: Final = frozenset(
    {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})


@dataclass(frozen=True)
class RedisSettings:
    """Everything an origin needs to know about its servers. `repr` shows no secret."""

    kind: Kind
    hosts: tuple[Address, ...]
    shown: str
    """The URL as messages may show it."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    service: str = ""
    """The name under which the sentinels know the master."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    prefix: str = "tg"
    """The prefix of every key. It separates other users of the same server."""


def parse_settings(url: str) -> RedisSettings:
    scheme = url.partition("://")[0].lower()
    base, _, variant = scheme.partition("+")
    kind: Kind = "cluster" if variant == "cluster" else "sentinel" if variant == "sentinel" else "single"
    parts = parse_server_url(url, default_port=SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
    secure = base.endswith("s") and base != "redis"
    known = {"prefix", "db"}
    if secure:
        known |= TLS_OPTIONS
    if kind == "sentinel":
        known |= SENTINEL_OPTIONS
    parts.refuse_unknown_options(known)
    if parts.username is not None and not parts.password:
        raise ConfigurationError(
            f"{parts.shown}: a user needs a password; a password alone is written redis://:password@host"
        )
    if kind == "single" and len(parts.hosts) > 1:
        raise ConfigurationError(
            f"{parts.shown}: several hosts are a Cluster or Sentinels; use redis+cluster:// or redis+sentinel://"
        )
    prefix = parts.options.get("prefix", "tg")
    if not PREFIX.match(prefix):
        raise ConfigurationError(f"{parts.shown}: prefix must be 1 to 64 letters, digits, '_', '.' or '-'")
    service, db = _service_and_db(parts, kind)
    return RedisSettings(
        kind=kind,
        hosts=parts.hosts,
        shown=parts.shown,
        username=parts.username,
        password=parts.password or None,
        db=db,
        service=service,
        sentinel_username=parts.options.get("sentinel_username"),
        sentinel_password=parts.options.get("sentinel_password"),
        tls=_tls(parts) if secure else None,
        prefix=prefix,
    )


def _service_and_db(parts: ServerURL, kind: Kind) -> tuple[str, int]:
    """`/0`, or with sentinels `/service` and `/service/0`; the database may also be the option `db`."""
    service, by_path = "", parts.path
    if kind == "sentinel":
        service, _, by_path = parts.path.partition("/")
        if not service:
            raise ConfigurationError(
                f"{parts.shown}: name the service that the sentinels watch: redis+sentinel://host:port/service"
            )
    by_option = parts.options.get("db", "")
    if by_path and by_option:
        raise ConfigurationError(f"{parts.shown}: the database is given twice, as path and as option db")
    text = by_path or by_option or "0"
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{parts.shown}: the database is a number, as in redis://host:6379/0")
    if kind == "cluster" and int(text) != 0:
        raise ConfigurationError(f"{parts.shown}: a Redis Cluster has no database but 0")
    return service, int(text)


def _tls(parts: ServerURL) -> ssl.SSLContext:
    options = parts.options
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if options.get("ssl_certfile"):
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{parts.shown}: cannot load the certificates it names: {error}") from error
    if not _choice(parts, "ssl_check_hostname", "true", "false"):
        context.check_hostname = False
    if not _choice(parts, "ssl_cert_reqs", "required", "none"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _choice(parts: ServerURL, name: str, yes: str, no: str) -> bool:
    value = parts.options.get(name, yes)
    if value not in (yes, no):
        raise ConfigurationError(f"{parts.shown}: {name} is {yes!r} or {no!r}")
    return value == yes
