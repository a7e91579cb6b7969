from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import PROGRAM, Invoke, InvokeJSON, Program
from tidegate.cli.catalogs import Place, all_rows
from tidegate.ports import Catalog, CatalogChanges
from tidegate.server.catalog.keys import (
    ACTIONS,
    ALL,
    PERMISSION_LENGTH_MAX,
    PERMISSIONS_MAX,
    digest_of,
    override_urn,
)
from tidegate.server.process.config import CATALOG_FILE

NOW_AND_THEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_create_prints_a_key_as_json_before_any_server_runs(tidegate: Program, data_dir: Path) -> None:
    permissions = "ratelimit.*.limit,ratelimit.*.set_override"
    done = tidegate(
        "keys",
        "create",
        "--data-dir",
        data_dir,
        "--workspace",
        "acme",
        "--permissions",
        permissions,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert re.fullmatch(r"tg_[0-9A-Za-z]{32}", made["key"])
    assert made["workspace"] == "acme"
    assert made["permissions"] == permissions.split(",")
    assert data_dir.stat().st_mode & 0o077 == 0


def test_without_json_only_the_key_is_on_stdout(invoke: Invoke, data_dir: Path) -> None:
    result = invoke("keys", "create", "--data-dir", data_dir)
    assert re.fullmatch(r"tg_[0-9A-Za-z]{32}\n", result.stdout)
    assert "workspace default" in result.stderr


def test_a_key_is_stored_only_as_a_digest(invoke_json: InvokeJSON, data_dir: Path) -> None:
    key = invoke_json("keys", "create", "--data-dir", data_dir)["key"]
    stored = b"".join(file.read_bytes() for file in data_dir.iterdir())
    assert key.encode() not in stored
    assert key[7:].encode() not in stored
    assert digest_of(key) in stored


def test_list_shows_keys_without_the_key(invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path) -> None:
    one = invoke_json("keys", "create", "--data-dir", data_dir, "--workspace", "a", "--name", "ci")
    two = invoke_json(
        "keys",
        "create",
        "--data-dir",
        data_dir,
        "--workspace",
        "b",
        "--permissions",
        "all",
        "--expires",
        "30d",
    )
    listed = invoke_json("keys", "list", "--data-dir", data_dir)["keys"]
    assert [key["id"] for key in listed] == [one["id"], two["id"]]
    assert listed[0]["name"] == "ci"
    assert listed[0]["expires"] is None
    assert NOW_AND_THEN.fullmatch(listed[1]["expires"])
    assert listed[1]["permissions"] == list(ALL)
    text = invoke("keys", "list", "--data-dir", data_dir).output
    for made in (one, two):
        assert made["key"] not in text
        assert made["key"] not in json.dumps(listed)
        assert made["hint"] in text
    only = invoke_json("keys", "list", "--data-dir", data_dir, "--workspace", "b")["keys"]
    assert [key["id"] for key in only] == [two["id"]]


def test_revoke_and_expire_take_a_key_out_of_the_list(invoke_json: InvokeJSON, data_dir: Path) -> None:
    made = [invoke_json("keys", "create", "--data-dir", data_dir) for _ in range(4)]
    assert invoke_json("keys", "revoke", made[0]["id"], "--data-dir", data_dir)["state"] == "revoked"
    # Someone who finds a leaked key knows the key, not its id.
    assert invoke_json("keys", "revoke", made[1]["key"], "--data-dir", data_dir)["state"] == "revoked"
    assert invoke_json("keys", "expire", made[2]["id"], "--data-dir", data_dir)["state"] == "expired"
    later = invoke_json("keys", "expire", made[3]["id"], "--at", "2999-01-01", "--data-dir", data_dir)
    assert (later["state"], later["expires"]) == ("active", "2999-01-01T00:00:00Z")
    assert [key["id"] for key in invoke_json("keys", "list", "--data-dir", data_dir)["keys"]] == [
        made[3]["id"]
    ]
    states = {
        key["id"]: key["state"]
        for key in invoke_json("keys", "list", "--all", "--data-dir", data_dir)["keys"]
    }
    assert [states[key["id"]] for key in made] == ["revoked", "revoked", "expired", "active"]


def test_revoking_twice_is_harmless_and_a_revoked_key_does_not_come_back(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path
) -> None:
    key_id = invoke_json("keys", "create", "--data-dir", data_dir)["id"]
    first = invoke_json("keys", "revoke", key_id, "--data-dir", data_dir)
    assert invoke_json("keys", "revoke", key_id, "--data-dir", data_dir) == first
    result = invoke("keys", "expire", key_id, "--at", "30d", "--data-dir", data_dir)
    assert result.exit_code == 2
    assert "was revoked" in result.stderr


def test_a_key_that_is_revoked_while_it_is_being_expired_stays_revoked(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = invoke_json("keys", "create", "--data-dir", data_dir)["id"]

    async def rows_and_then_a_revocation(catalog: Catalog, place: Place) -> CatalogChanges:
        rows = await all_rows(catalog, place)
        await catalog.put_key(rows.keys[0]._replace(revoked_at_ms=1_000), timeout_s=place.timeout_s)
        return rows

    with monkeypatch.context() as patch:
        patch.setattr("tidegate.cli.keys.all_rows", rows_and_then_a_revocation)
        result = invoke("keys", "expire", key_id, "--at", "30d", "--data-dir", data_dir)
        assert result.exit_code == 2
        assert f"{key_id} was revoked 1970-01-01T00:00:01Z" in result.stderr
        assert (
            invoke_json("keys", "revoke", key_id, "--data-dir", data_dir)["revoked"] == "1970-01-01T00:00:01Z"
        )
    (listed,) = invoke_json("keys", "list", "--all", "--data-dir", data_dir)["keys"]
    assert (listed["state"], listed["expires"]) == ("revoked", None)


# Permissions that grant nothing, including names of namespaces and permissions of other services, with their warnings.
WITHOUT_EFFECT = [
    ("limit", "ratelimit.SCOPE.ACTION"),
    ("*", "ratelimit.SCOPE.ACTION"),
    ("api.*.create_key", "ratelimit.SCOPE.ACTION"),
    ("ratelimit.limit", "ratelimit.SCOPE.ACTION"),
    ("ratelimit..limit", "ratelimit.SCOPE.ACTION"),
    ("ratelimit.*.everything", "set_override"),
    ("ratelimit.*.*", "set_override"),
    ("ratelimit.*.list_overrides", "read_override"),
    ("ratelimit.a b.limit", "tidegate namespaces list"),
    ("ratelimit.email.send.limit", "tidegate namespaces list"),
    ("ratelimit.rlns_1.create_namespace", "ratelimit.*.create_namespace"),
    ("urn:tidegate:ratelimit:rlns_1", "tidegate overrides list"),
    ("urn:tidegate:ratelimit:*:override:*", "tidegate overrides list"),
    ("ünï🎈", "ratelimit.SCOPE.ACTION"),
    ("x" * PERMISSION_LENGTH_MAX, "ratelimit.SCOPE.ACTION"),
]


@pytest.mark.parametrize(("permission", "step"), WITHOUT_EFFECT)
def test_a_permission_that_grants_nothing_is_stored_with_a_warning_that_names_a_valid_one(
    invoke: Invoke, data_dir: Path, permission: str, step: str
) -> None:
    given = f"ratelimit.*.limit,{permission}"
    result = invoke("keys", "create", "--data-dir", data_dir, "--permissions", given, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["permissions"] == given.split(",")
    (warning,) = json.loads(result.stderr)["warnings"]
    assert warning.startswith(f"{permission!r} grants nothing: ")
    assert step in warning
    text = invoke("keys", "create", "--data-dir", data_dir, "--permissions", permission)
    assert re.fullmatch(r"tg_[0-9A-Za-z]{32}\n", text.stdout)
    assert f"warning: {warning}\n" in text.stderr
    listed = json.loads(invoke("keys", "list", "--data-dir", data_dir, "--json").stdout)["keys"]
    assert sorted(key["permissions"] for key in listed) == sorted([given.split(","), [permission]])


@pytest.mark.parametrize("permissions", ["", ",", " , "])
def test_a_key_may_have_no_permissions_at_all(invoke: Invoke, data_dir: Path, permissions: str) -> None:
    result = invoke("keys", "create", "--data-dir", data_dir, "--permissions", permissions, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["permissions"] == []
    assert "no permissions" in json.loads(result.stderr)["warnings"][0]
    assert "  -\n" in invoke("keys", "list", "--data-dir", data_dir).stdout


@pytest.mark.parametrize(
    ("permissions", "step"),
    [
        ("ratelimit.*.limit,a\x07b", "printable"),
        ("a\nb", "printable"),
        ("a\u200eb", "printable"),
        ("a\udcffb", "printable"),
        ("x" * (PERMISSION_LENGTH_MAX + 1), f"at most {PERMISSION_LENGTH_MAX} characters"),
        (",".join(map(str, range(PERMISSIONS_MAX + 1))), f"at most {PERMISSIONS_MAX} of them"),
    ],
    ids=["bell", "newline", "invisible", "not text", "long", "many"],
)
def test_a_permission_that_cannot_be_stored_or_printed_is_an_error(
    invoke: Invoke, data_dir: Path, permissions: str, step: str
) -> None:
    result = invoke("keys", "create", "--data-dir", data_dir, "--permissions", permissions)
    assert result.exit_code == 2
    assert "--permissions" in result.stderr
    assert step in result.stderr
    assert len(result.stderr) < 1_000
    assert not data_dir.exists()


# Every form that an operation asks for.
FORMS = [
    *(f"ratelimit.*.{action}" for action in ACTIONS),
    *(f"ratelimit.rlns_Ab1.{action}" for action in ACTIONS if action != "create_namespace"),
    override_urn("rlns_Ab1", "rlor_Cd2"),
]


@pytest.mark.parametrize("permission", FORMS)
def test_every_valid_permission_is_accepted_without_a_warning(
    invoke: Invoke, data_dir: Path, permission: str
) -> None:
    given = f" {permission} , {permission}"
    result = invoke("keys", "create", "--data-dir", data_dir, "--permissions", given, "--json")
    assert json.loads(result.stdout)["permissions"] == [permission]
    assert result.stderr == ""


def test_all_grants_everything_even_next_to_other_permissions(
    invoke_json: InvokeJSON, data_dir: Path
) -> None:
    made = invoke_json("keys", "create", "--data-dir", data_dir, "--permissions", "api.*.read_key,all")
    assert made["permissions"] == ["api.*.read_key", *ALL]


@pytest.mark.parametrize("moment", ["2001-01-01", "yesterday", "5", "0s"])
def test_an_expiry_in_the_past_or_not_a_time_is_an_error(invoke: Invoke, data_dir: Path, moment: str) -> None:
    result = invoke("keys", "create", "--data-dir", data_dir, "--expires", moment)
    assert result.exit_code == 2
    assert "--expires" in result.stderr


@pytest.mark.parametrize("moment", ["99999999999d", "300000000000000w", "9999-12-31T23:59:59-12:00"])
def test_an_expiry_after_the_year_9999_is_an_error_and_changes_nothing(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path, moment: str
) -> None:
    made = invoke_json("keys", "create", "--data-dir", data_dir)
    for arguments in (["create", "--expires", moment], ["expire", made["id"], "--at", moment]):
        result = invoke("keys", *arguments, "--data-dir", data_dir)
        assert result.exit_code == 2
        assert arguments[-2] in result.stderr
        assert f"{moment!r} is after the year 9999: give an earlier time" in result.stderr
    (listed,) = invoke_json("keys", "list", "--data-dir", data_dir)["keys"]
    assert (listed["id"], listed["expires"]) == (made["id"], None)


def test_the_last_moment_of_the_year_9999_is_an_expiry(invoke_json: InvokeJSON, data_dir: Path) -> None:
    made = invoke_json("keys", "create", "--data-dir", data_dir, "--expires", "9999-12-31T23:59:59.999")
    assert made["expires"] == "9999-12-31T23:59:59Z"


@pytest.mark.parametrize(
    ("stored_ms", "shown"),
    [
        (2**53, "9999-12-31T23:59:59Z"),
        (2**63 - 1, "9999-12-31T23:59:59Z"),
        (-(2**63), "1970-01-01T00:00:00Z"),
    ],
)
def test_a_stored_expiry_that_no_date_can_name_is_listed(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path, stored_ms: int, shown: str
) -> None:
    made = [invoke_json("keys", "create", "--data-dir", data_dir)["id"] for _ in range(2)]
    with closing(sqlite3.connect(data_dir / CATALOG_FILE)) as other, other:
        other.execute("UPDATE ratelimit_keys SET expires_at = ? WHERE id = ?", (stored_ms, made[0].encode()))
    listed = invoke_json("keys", "list", "--all", "--data-dir", data_dir)["keys"]
    assert {key["id"]: key["expires"] for key in listed} == {made[0]: shown, made[1]: None}
    assert shown in invoke("keys", "list", "--all", "--data-dir", data_dir).stdout


def test_an_unknown_key_or_workspace_is_an_error(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path
) -> None:
    invoke_json("keys", "create", "--data-dir", data_dir)
    for arguments in (
        ["revoke", "key_none"],
        ["expire", "tg_nobodyhasthiskeyatall"],
        ["list", "--workspace", "none"],
    ):
        result = invoke("keys", *arguments, "--data-dir", data_dir)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: no ")
        assert "tg_nobody" not in result.stderr


def test_listing_creates_nothing(invoke: Invoke, data_dir: Path) -> None:
    for arguments in (
        ["keys", "list"],
        ["keys", "revoke", "key_x"],
        ["namespaces", "list"],
        ["workspaces", "list"],
    ):
        result = invoke(*arguments, "--data-dir", data_dir)
        assert result.exit_code == 2
        assert "has no catalog" in result.stderr
    assert not data_dir.exists()


def test_many_processes_create_keys_at_once(data_dir: Path, invoke_json: InvokeJSON) -> None:
    command = [*PROGRAM, "keys", "create", "--data-dir", str(data_dir), "--workspace", "shared", "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert [process.returncode for process in running] == [0] * 4
    listed = invoke_json("keys", "list", "--data-dir", data_dir, "--workspace", "shared")["keys"]
    assert {key["id"] for key in listed} == {key["id"] for key in made}


def test_a_workspace_gets_a_quota_and_is_disabled(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path
) -> None:
    def listed() -> Any:
        return invoke_json("workspaces", "list", "--data-dir", data_dir)["workspaces"]

    invoke_json("keys", "create", "--data-dir", data_dir, "--workspace", "acme")
    assert listed() == [{"id": "acme", "name": "acme", "enabled": True, "quota": None}]
    invoke_json("workspaces", "set", "acme", "--quota", "1000/minute", "--data-dir", data_dir)
    assert listed()[0]["quota"] == {"limit": 1000, "duration": 60_000}
    invoke_json("workspaces", "set", "acme", "--disabled", "--data-dir", data_dir)
    assert listed()[0] == {
        "id": "acme",
        "name": "acme",
        "enabled": False,
        "quota": {"limit": 1000, "duration": 60_000},
    }
    invoke_json("workspaces", "set", "acme", "--quota", "none", "--enabled", "--data-dir", data_dir)
    assert listed()[0] == {"id": "acme", "name": "acme", "enabled": True, "quota": None}
    invoke_json("workspaces", "set", "new", "--quota", "5/s", "--data-dir", data_dir)
    assert [workspace["id"] for workspace in listed()] == ["acme", "new"]
    assert invoke("workspaces", "set", "acme", "--quota", "much", "--data-dir", data_dir).exit_code == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("5 per 99999999999999h", "expected at most 36525 days, e.g. 1000/minute"),
        ("9223372036854775808/minute", "expected at most 9223372036854775807 calls, e.g. 1000/minute"),
    ],
)
def test_a_quota_that_cannot_be_stored_is_an_error_and_changes_nothing(
    invoke_json: InvokeJSON, data_dir: Path, quota: str, expected: str
) -> None:
    before = invoke_json("workspaces", "set", "acme", "--quota", "5 per 36525 days", "--data-dir", data_dir)
    refused = invoke_json("workspaces", "set", "acme", "--quota", quota, "--data-dir", data_dir, exit_code=2)
    assert refused["error"] == {"type": "InvalidInput", "message": f"quota: got {quota!r}, {expected}"}
    assert invoke_json("workspaces", "list", "--data-dir", data_dir)["workspaces"] == [before]


def test_rows_that_cannot_be_read_are_reported_and_never_replaced(
    invoke: Invoke, invoke_json: InvokeJSON, data_dir: Path
) -> None:
    for name in ("acme", "other"):
        invoke_json("keys", "create", "--data-dir", data_dir, "--workspace", name)
    invoke_json("workspaces", "set", "acme", "--quota", "5/s", "--disabled", "--data-dir", data_dir)
    with closing(sqlite3.connect(data_dir / CATALOG_FILE)) as other, other:
        other.execute("UPDATE ratelimit_workspaces SET quota = -5 WHERE id = ?", (b"acme",))
    listed = invoke("keys", "list", "--data-dir", data_dir, "--json")
    assert len(json.loads(listed.stdout)["keys"]) == 2
    text = "rows of the catalog cannot be read and are skipped: 1 of ratelimit_workspaces (acme)"
    assert json.loads(listed.stderr) == {"warnings": [text]}
    for arguments in (
        ["keys", "create", "--workspace", "acme"],
        ["workspaces", "set", "acme", "--quota", "none"],
    ):
        refused = invoke(*arguments, "--data-dir", data_dir)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"warning: {text}\n" in refused.stderr
        assert "repair or delete the rows of ratelimit_workspaces" in refused.stderr
    assert invoke("keys", "create", "--workspace", "other", "--data-dir", data_dir).exit_code == 0
    with closing(sqlite3.connect(data_dir / CATALOG_FILE)) as other:
        found = other.execute("SELECT enabled, quota FROM ratelimit_workspaces WHERE id = ?", (b"acme",))
        assert found.fetchall() == [(0, -5)]


@pytest.mark.parametrize("url_of", ["mariadb_url", "mysql_url", "postgres_url"])
@pytest.mark.server
def test_keys_are_stored_in_the_shared_database_with_ledger(
    request: pytest.FixtureRequest, invoke: Invoke, invoke_json: InvokeJSON, url_of: str
) -> None:
    url = request.getfixturevalue(url_of)
    without = invoke("keys", "create", "--ledger", url)
    assert without.exit_code == 2
    # It can be pasted, except for a password.
    shown = re.escape(url).replace(":secret@", r":\*+@")
    assert re.search(rf"tidegate migrate --ledger {shown}\n", without.stderr)
    invoke_json("migrate", "--ledger", url)
    made = invoke_json(
        "keys", "create", "--ledger", url, "--workspace", "acme", "--permissions", "all", "--name", "ünï 🎈"
    )
    (listed,) = invoke_json("keys", "list", "--ledger", url)["keys"]
    assert listed["id"] == made["id"]
    assert listed["name"] == "ünï 🎈"
    assert invoke_json("keys", "revoke", made["id"], "--ledger", url)["state"] == "revoked"
    assert invoke_json("keys", "list", "--ledger", url)["keys"] == []
    assert invoke_json("namespaces", "list", "--ledger", url)["namespaces"] == []


def test_a_data_dir_that_cannot_be_created_is_an_error_with_the_next_step(
    invoke_json: InvokeJSON, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    error = invoke_json("keys", "create", "--data-dir", tmp_path / "file" / "data", exit_code=2)["error"]
    assert error["type"] == "ConfigurationError"
    assert error["message"].startswith(f"data_dir: {tmp_path}/file/data cannot be created")
    assert "--data-dir" in error["message"]
