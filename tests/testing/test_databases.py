from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar
from urllib.parse import urlsplit

import asyncmy
import asyncpg
import pytest

from tidegate.testing import MariaDBServer, MySQLServer, PostgresServer, ServerError
from tidegate.testing.servers.mysql_family import MySQLFamilyServer

pytestmark = pytest.mark.server

Server = MySQLFamilyServer | PostgresServer


class Session:
    """A driver's connection, reduced to one query."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str) -> Session:
        parts = urlsplit(url)
        if parts.scheme == "postgres":
            return cls(await asyncpg.connect(url, timeout=10))
        connection = await asyncmy.connect(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            password=parts.password or "",
            database=parts.path.strip("/"),
        )
        return cls(connection)

    async def ask(self, statement: str) -> object:
        if isinstance(self._connection, asyncpg.Connection):
            return await self._connection.fetchval(statement)
        async with self._connection.cursor() as cursor:
            await cursor.execute(statement)
            (value,) = await cursor.fetchone()
            return value

    def abandon(self) -> None:
        if isinstance(self._connection, asyncpg.Connection):
            self._connection.terminate()
        else:
            self._connection.close()


class DatabaseVerbs:
    """Tests of what MariaDB, MySQL and PostgreSQL have in common, run on each."""

    scheme: ClassVar[str]

    def test_every_database_is_new_and_its_url_leads_to_it(self, server: Server) -> None:
        first, second = server.create_database(), server.create_database()
        assert first != second
        assert first.startswith(f"{self.scheme}@127.0.0.1:{server.port}/")
        name = first.rpartition("/")[2]
        server.sql("CREATE TABLE t (a INT)", name)
        assert asyncio.run(count_rows(first)) == 0
        server.drop_database(first)
        with pytest.raises(ServerError):
            server.sql("SELECT 1", name)
        server.drop_database(second)

    def test_what_was_committed_survives_a_kill_at_the_same_port(self, server: Server, url: str) -> None:
        port, name = server.port, url.rpartition("/")[2]
        server.sql("CREATE TABLE t (a INT); INSERT INTO t VALUES (1), (2)", name)
        server.kill()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, port), timeout=10)
        server.start()
        assert server.port == port
        assert server.sql("SELECT a FROM t ORDER BY a", name) == [["1"], ["2"]]

    def test_a_restart_keeps_the_data_and_an_empty_restart_does_not(self, server: Server, url: str) -> None:
        port, name = server.port, url.rpartition("/")[2]
        server.sql("CREATE TABLE t (a INT); INSERT INTO t VALUES (1)", name)
        server.restart()
        assert asyncio.run(count_rows(url)) == 1
        server.restart(empty=True)
        assert server.port == port
        with pytest.raises(ServerError):
            server.sql("SELECT 1", name)

    async def test_a_frozen_server_answers_neither_old_nor_new_connections_until_the_thaw(
        self, server: Server, url: str
    ) -> None:
        old = await Session.open(url)
        server.freeze()
        question = asyncio.ensure_future(old.ask("SELECT 41 + 1"))
        newcomer = asyncio.ensure_future(Session.open(url))
        answered, _ = await asyncio.wait({question, newcomer}, timeout=0.2)
        assert answered == set()
        server.thaw()
        assert await asyncio.wait_for(question, 20) == 42
        new = await asyncio.wait_for(newcomer, 20)
        old.abandon()
        new.abandon()

    @pytest.mark.parametrize("hurt", ["stop", "kill", "freeze"])
    def test_recover_makes_it_answer_whatever_was_done_to_it(self, server: Server, hurt: str) -> None:
        getattr(server, hurt)()
        server.recover()
        assert server.sql("SELECT 1") == [["1"]]

    def test_stop_ends_a_frozen_server_too(self, server: Server) -> None:
        server.freeze()
        server.stop()
        assert not server.is_running

    async def test_a_database_in_use_is_dropped(self, server: Server) -> None:
        url = server.create_database()
        name = url.rpartition("/")[2]
        server.sql("CREATE TABLE t (a INT)", name)
        user = await Session.open(url)
        await user.ask("SELECT COUNT(*) FROM t")  # asyncmy leaves the transaction open
        await asyncio.to_thread(server.drop_database, url)
        with pytest.raises(ServerError):
            server.sql("SELECT 1", name)
        user.abandon()


class TestMariaDB(DatabaseVerbs):
    scheme = "mysql://root"

    @pytest.fixture
    def server(self, mariadb_server: MariaDBServer) -> MariaDBServer:
        mariadb_server.recover()
        return mariadb_server

    @pytest.fixture
    def url(self, mariadb_url: str) -> str:
        return mariadb_url

    def test_options_reach_the_server(self) -> None:
        with MariaDBServer(arguments=("--max-connections=17",)) as server:
            assert server.sql("SELECT @@max_connections") == [["17"]]


class TestMySQL(DatabaseVerbs):
    scheme = "mysql://tidegate:secret"

    @pytest.fixture
    def server(self, mysql_server: MySQLServer) -> MySQLServer:
        mysql_server.recover()
        return mysql_server

    @pytest.fixture
    def url(self, mysql_url: str) -> str:
        return mysql_url


class TestPostgres(DatabaseVerbs):
    scheme = "postgres://postgres"

    @pytest.fixture
    def server(self, postgres_server: PostgresServer) -> PostgresServer:
        postgres_server.recover()
        return postgres_server

    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    def test_settings_reach_the_server(self) -> None:
        with PostgresServer(settings=("max_connections=17",)) as server:
            assert server.sql("SHOW max_connections") == [["17"]]


async def count_rows(url: str) -> object:
    session = await Session.open(url)
    try:
        return await session.ask("SELECT COUNT(*) FROM t")
    finally:
        session.abandon()
