"""The catalog in PostgreSQL."""

from __future__ import annotations

from tidegate.adapters.catalog_lane import LaneCatalog
from tidegate.adapters.catalog_sql import dollars
from tidegate.adapters.postgres.connection import PostgresConnection, PostgresSession

__all__ = ["PostgresCatalog"]


class PostgresCatalog(LaneCatalog[PostgresSession]):
    """`postgres://user:password@host:port/database`, the same as the ledger's."""

    def __init__(self, url: str) -> None:
        super().__init__(lambda: PostgresConnection(url), dollars)
