"""From a URL to a catalog: `open_catalog("mysql://…")`. The same URLs as a ledger's, and the same laws as `urls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.adapters.secrets import mask_url
from tidegate.adapters.urls import MYSQL_SCHEMES, POSTGRES_SCHEMES, scheme_of, sqlite_path
from tidegate.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from tidegate.ports import Catalog

__all__ = ["open_catalog"]

EXAMPLES: Final = "mysql://, postgres:// or sqlite:///path"


def open_catalog(url: str) -> Catalog:
    """The catalog at `url`, not yet connected."""
    scheme = scheme_of(url, EXAMPLES)
    if scheme == "sqlite":
        from tidegate.adapters.sqlite.catalog import SQLiteCatalog

        return SQLiteCatalog(sqlite_path(url))
    try:
        if scheme in MYSQL_SCHEMES:
            from tidegate.adapters.mysql.catalog import MySQLCatalog

            return MySQLCatalog(url)
        if scheme in POSTGRES_SCHEMES:
            from tidegate.adapters.postgres.catalog import PostgresCatalog

            return PostgresCatalog(url)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tidegate":
            raise
        raise MissingExtra("mysql" if scheme in MYSQL_SCHEMES else "postgres", mask_url(url)) from error
    raise ConfigurationError(f"{mask_url(url)}: no catalog has the scheme {scheme!r}; expected {EXAMPLES}")
