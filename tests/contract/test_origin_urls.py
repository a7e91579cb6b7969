from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.untraced import run_untraced
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.adapters.redis.settings import parse_settings
from tidegate.adapters.secrets import mask_url
from tidegate.adapters.sqlite.origin import SQLiteOrigin
from tidegate.adapters.urls import (
    REDIS_SCHEMES,
    open_ledger,
    open_origin,
    parse_server_url,
    sqlite_path,
)
from tidegate.errors import ConfigurationError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", MemoryOrigin),
        ("sqlite:///origin.db", SQLiteOrigin),
        ("redis://localhost", RedisOrigin),
        ("REDIS://localhost", RedisOrigin),
        ("rediss://user:pass@localhost:6380/2?ssl_cert_reqs=none", RedisOrigin),
        ("valkey://localhost", RedisOrigin),
        ("valkeys://localhost", RedisOrigin),
        ("redis+cluster://a:1,b:2", RedisOrigin),
        ("redis+sentinel://a:1,b:2/service?db=3", RedisOrigin),
    ],
)
def test_a_url_finds_its_origin_and_connects_to_nothing(url: str, kind: type[object]) -> None:
    assert type(open_origin(url)) is kind


def test_every_call_opens_an_origin_of_its_own() -> None:
    assert open_origin("memory://") is not open_origin("memory://")


def test_a_memory_ledger_that_is_opened_by_url_cleans_itself() -> None:
    assert isinstance(open_ledger("memory://"), MemoryLedger)


@pytest.mark.parametrize(
    "url",
    [
        "", "redis", "localhost:6379", "http://localhost", "redis:/localhost", "mysql://localhost/db", "memory://x",
        "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://relative.db", "sqlite:///a.db?mode=ro",
        "redis://", "redis://:6379", "redis://localhost:port", "redis://localhost:0", "redis://localhost:65536",
        "redis://localhost:-1", "redis://localhost:6379:6379", "redis://localhost:١", "redis://[::1", "redis://[::1]6379",
        "redis://localhost/db", "redis://localhost/-1", "redis://localhost/1?db=2", "redis://localhost/0#fragment",
        "redis://localhost?colour=red", "redis://localhost?prefix=a&prefix=b", "redis://localhost?prefix={a}",
        "redis://localhost?prefix=", "redis://localhost?ssl_ca_certs=x", "redis://a,b", "redis://user@localhost",
        "redis://user:@localhost", "redis+cluster://a/1", "redis+sentinel://a", "redis+sentinel://a/",
        "redis+sentinel://a/service/db", "redis://localhost?sentinel_password=x", "redis+sentinel://a,/service",
        "rediss://localhost?ssl_ca_certs=/nowhere/ca.pem", "rediss://localhost?ssl_certfile=/nowhere/me.pem",
        "rediss://localhost?ssl_check_hostname=perhaps", "rediss://localhost?ssl_cert_reqs=optional",
    ],
)  # fmt: skip
def test_a_url_that_cannot_work_is_a_configuration_error_that_shows_it(url: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        open_origin(url)
    assert mask_url(url) in str(refusal.value)


@pytest.mark.parametrize("url", ["", "redis://localhost", "mysql", "sqlite://x", "memory://y"])
def test_a_ledger_url_that_cannot_work_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_ledger(url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@localhost:bad",
        f"redis://user:{SECRET}@localhost/nodb",
        f"redis://user:{SECRET}@",
        f"redis://user:{SECRET}/with/slashes@localhost",
        f"redis://user:a@b{SECRET}/x@localhost",
        f"redis://user:{SECRET}?and#more@localhost",
        f"redis://user:a@b?{SECRET}@localhost",
        f"redis://user:{SECRET}@a,b",
        f"redis://{SECRET}@localhost",
        f"gopher://user:{SECRET}@localhost",
        f"user:{SECRET}@localhost",
        f"redis+sentinel://a/service?sentinel_password={SECRET}&colour=red",
        f"redis+sentinel://a?sentinel_password={SECRET}",
        f"rediss://:{SECRET}@localhost?ssl_ca_certs=/nowhere",
        f"redis://:{SECRET}@localhost?prefix={{}}",
    ],
)
def test_no_refusal_shows_a_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        open_origin(url)
    chain: BaseException | None = refusal.value
    while chain is not None:
        assert SECRET not in str(chain)
        chain = chain.__cause__
    assert SECRET not in mask_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost", "redis://:****@localhost"),
        ("redis://user:secret@localhost/0?prefix=a", "redis://user:****@localhost/0?prefix=a"),
        ("mysql://user:s@c/r:t@host/db", "mysql://user:****@host/db"),
        ("redis://token@localhost", "redis://****@localhost"),
        ("mysql://user@host/db", "mysql://user@host/db"),
        ("postgresql://user@host/db?ssl=require", "postgresql://user@host/db?ssl=require"),
        ("mysql://user%3Asecret@host/db", "mysql://user:****@host/db"),
        ("mysql://user:@host/db", "mysql://user:****@host/db"),
        ("mysql://se/cret@host/db", "mysql://****@host/db"),
        ("mysql://se@cret@host/db", "mysql://****@host/db"),
        ("user@host", "****@host"),
        ("mysql://user@host/db?pwd=secret", "mysql://user@host/db?pwd=****"),
        (
            "mysql://user@host/db?PassWord=secret&ssl=require",
            "mysql://user@host/db?PassWord=****&ssl=require",
        ),
        ("mysql://user@host/db?password=sec#ret", "mysql://user@host/db?password=****"),
        (
            "mysql://user@host/db?ssl=require;password=secret",
            "mysql://user@host/db?ssl=require;password=****",
        ),
        ("mysql://user@host/db?p%61ssword=secret", "mysql://user@host/db?p%61ssword=****"),
        ("mysql://host/db#password=secret", "mysql://host/db#password=****"),
        ("redis+sentinel://a/s?sentinel_password=x&db=1", "redis+sentinel://a/s?sentinel_password=****&db=1"),
        ("sqlite:///file.db", "sqlite:///file.db"),
    ],
)
def test_masking_hides_the_secret_and_nothing_else(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@given(
    password=st.text(st.characters(codec="utf-8"), min_size=1).map(lambda text: f"{text}{SECRET}{text}"),
    scheme=st.sampled_from(sorted(REDIS_SCHEMES)),
)
def test_a_password_is_masked_however_it_is_written(password: str, scheme: str) -> None:
    assert SECRET not in mask_url(f"{scheme}://user:{password}@localhost:6379/0")


def test_all_parts_of_a_url_are_decoded() -> None:
    parts = parse_server_url("redis://us%40er:p%2Fa%23s@[::1]:7000,b/a%20b?prefix=x%20y", default_port=1)
    assert parts.hosts == (("::1", 7000), ("b", 1))
    assert (parts.username, parts.password, parts.path) == ("us@er", "p/a#s", "a b")
    assert dict(parts.options) == {"prefix": "x y"}
    assert "p/a#s" not in repr(parts)


def test_the_parts_of_a_redis_url() -> None:
    single = parse_settings("redis://:pw@h/5")
    assert (single.kind, single.hosts, single.password, single.db) == ("single", (("h", 6379),), "pw", 5)
    assert single.tls is None
    cluster = parse_settings("valkeys+cluster://user:pw@a:1,b?ssl_check_hostname=false&prefix=eu")
    assert (cluster.kind, cluster.hosts, cluster.prefix) == ("cluster", (("a", 1), ("b", 6379)), "eu")
    assert cluster.tls is not None
    assert (cluster.tls.check_hostname, cluster.tls.verify_mode) == (False, ssl.CERT_REQUIRED)
    sentinel = parse_settings("redis+sentinel://a,b:7/main/2?sentinel_username=s&sentinel_password=t")
    assert (sentinel.kind, sentinel.hosts) == ("sentinel", (("a", 26379), ("b", 7)))
    assert (sentinel.service, sentinel.db, sentinel.sentinel_password) == ("main", 2, "t")
    assert "pw" not in repr(cluster)


def test_a_certificate_is_checked_unless_the_url_says_otherwise() -> None:
    tls = parse_settings("rediss://localhost").tls
    assert tls is not None
    assert (tls.check_hostname, tls.verify_mode) == (True, ssl.CERT_REQUIRED)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a.db", "a.db"),
        ("sqlite:////var/a.db", "/var/a.db"),
        ("sqlite:///my%20file.db", "my file.db"),
    ],
)
def test_what_follows_three_slashes_is_the_path_of_a_sqlite_file(url: str, path: str) -> None:
    assert sqlite_path(url) == path


def _run(program: str) -> str:
    """What a Python of its own prints: its modules are not those of the other tests."""
    return run_untraced(program).stdout


@pytest.mark.parametrize(
    ("call", "driver", "extra"),
    [
        ("open_origin('redis://:hunter2@localhost')", "hiredis", "redis"),
        ("open_ledger('mysql://u:hunter2@localhost/db')", "asyncmy", "mysql"),
        ("open_ledger('postgres://u:hunter2@localhost/db')", "asyncpg", "postgres"),
    ],
)
def test_a_missing_driver_names_the_extra_to_install(call: str, driver: str, extra: str) -> None:
    said = _run(f"""
import sys
sys.modules[{driver!r}] = None  # importing it now fails as if it were not installed
from tidegate.adapters.urls import open_ledger, open_origin
from tidegate.errors import MissingExtra
try:
    {call}
except MissingExtra as error:
    print(error)
""")
    assert f"pip install 'tidegate[{extra}]'" in said
    assert SECRET not in said


def test_opening_by_url_imports_no_driver_that_is_not_asked_for() -> None:
    said = _run("""
import sys
from tidegate.adapters.urls import open_ledger, open_origin
open_origin("memory://")
open_ledger("memory://")
print([name for name in ("hiredis", "redis", "asyncmy", "asyncpg", "sqlite3") if name in sys.modules])
""")
    assert said.strip() == "[]"
