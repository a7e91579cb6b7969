"""A stock MySQL, as it is after installing: caching_sha2_password, no certificate of ours, a user with a password."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import asyncmy.auth
import pytest

from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.errors import ConfigurationError
from tidegate.testing.contracts.ledger import TIMEOUT_S, held, publish, rows_of
from tidegate.testing.servers import MySQLServer

PASSWORD = "p@ss:wörd/%?#& x"
# What docs/how-to/ledger.md asks for, `migrate` included.
RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, REFERENCES"


@pytest.fixture
def stock_url(mysql_server: MySQLServer, mysql_url: str) -> Iterator[str]:
    """The URL of a new user: the server has no digest of the password in memory, so it asks for the password itself."""
    database = mysql_url.rpartition("/")[2]
    mysql_server.sql(
        f"CREATE USER 'stock'@'%' IDENTIFIED BY '{PASSWORD}'; GRANT {RIGHTS} ON `{database}`.* TO 'stock'@'%'"
    )
    yield f"mysql://stock:{quote(PASSWORD, safe='')}@127.0.0.1:{mysql_server.port}/{database}"
    mysql_server.recover()
    mysql_server.sql("DROP USER 'stock'@'%'")


async def test_a_user_with_a_password_logs_in_without_tls_and_regions_converge(
    mysql_server: MySQLServer, stock_url: str
) -> None:
    used = mysql_server.sql("SELECT plugin FROM mysql.user WHERE user = 'stock'")
    assert used == [["caching_sha2_password"]]
    await migrate(stock_url)
    ledger = open_ledger(stock_url)
    await ledger.open(timeout_s=TIMEOUT_S)
    await publish(ledger, rows_of(10))
    assert await held(ledger) == sorted(rows_of(10))
    await ledger.close()


async def test_a_wrong_password_is_refused_and_not_shown(stock_url: str) -> None:
    with pytest.raises(ConfigurationError, match="Access denied") as refusal:
        await migrate(stock_url.replace(quote(PASSWORD, safe=""), "hunter2"))
    assert "hunter2" not in str(refusal.value)


async def test_a_missing_cryptography_is_named_with_the_extra_that_has_it(
    stock_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncmy.auth, "_have_cryptography", False)
    with pytest.raises(ConfigurationError, match=r"pip install 'tidegate\[mysql\]'"):
        await migrate(stock_url)
