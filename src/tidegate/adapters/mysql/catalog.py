"""The catalog in MySQL or MariaDB."""

from __future__ import annotations

from tidegate.adapters.catalog_lane import LaneCatalog
from tidegate.adapters.mysql.connection import MySQLConnection, MySQLSession

__all__ = ["MySQLCatalog"]


class MySQLCatalog(LaneCatalog[MySQLSession]):
    """`mysql://user:password@host:port/database`, the same as the ledger's."""

    def __init__(self, url: str) -> None:
        super().__init__(lambda: MySQLConnection(url), str)
