"""A database that a newer version of Tidegate has migrated."""

from __future__ import annotations

import pytest

from tidegate.adapters.migrations import load_migrations
from tidegate.adapters.sql_ledger import NEWEST_SCHEMA_VERSION, check_schema
from tidegate.errors import SchemaMissing


@pytest.mark.parametrize("dialect", ["mysql", "postgres", "sqlite"])
def test_the_newest_schema_is_that_of_the_last_migration(dialect: str) -> None:
    assert load_migrations(dialect)[-1].version == NEWEST_SCHEMA_VERSION


def test_a_newer_schema_is_a_warning_and_a_missing_one_an_error(caplog: pytest.LogCaptureFixture) -> None:
    check_schema(NEWEST_SCHEMA_VERSION, "mysql://h/db")
    assert caplog.text == ""
    check_schema(NEWEST_SCHEMA_VERSION + 1, "mysql://h/db")
    assert f"schema version {NEWEST_SCHEMA_VERSION + 1}" in caplog.text
    assert "update this node" in caplog.text
    with pytest.raises(SchemaMissing, match="tidegate migrate"):
        check_schema(0, "mysql://h/db")
