"""Changes of keys and namespaces in the console: what is refused names the field, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.console.visitor import Visitor
from tests.server.harness import TidegateServer
from tidegate.core.model import TIME_MS_MAX

LIMIT = "ratelimit.*.limit"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"permissions": ""}, "/properties/permissions"),
        ({"permissions": "ratelimit.\0.limit"}, "/properties/permissions"),
        ({"expires_at_ms": 1}, "/properties/expires_at_ms"),
        ({"expires_at_ms": TIME_MS_MAX + 1}, "/properties/expires_at_ms"),
        ({"expires_at_ms": 2**53}, "/properties/expires_at_ms"),
        ({"expires_at_ms": 2**70}, "/properties/expires_at_ms"),
        ({"permissions": [LIMIT]}, "/"),
    ],
)
def test_a_key_that_cannot_work_is_refused_and_not_stored(
    visitor: Visitor, changed: dict[str, Any], field: str
) -> None:
    before = visitor.get("keys").json["total"]
    reply = visitor.post("keys.create", {"name": "new", "permissions": LIMIT} | changed)
    assert (reply.status, reply.error["errors"][0]["location"]) == (400, field), reply
    assert visitor.get("keys").json["total"] == before


def test_a_key_works_until_it_expires(server: TidegateServer, visitor: Visitor) -> None:
    created = visitor.post("keys.create", {"name": "new", "permissions": LIMIT}).json
    body = b'{"namespace":"one","identifier":"a","limit":5,"duration":60000}'

    def status() -> int:
        bearer = {"Authorization": f"Bearer {created['key']}", "Content-Type": "application/json"}
        return server.request("POST", "/v2/ratelimit.limit", body, bearer).status

    assert visitor.post("namespaces.create", {"namespace": "one"}).status == 200
    assert status() == 200
    later_ms = created["created_at_ms"] + 3_600_000
    changed = visitor.post("keys.expire", {"id": created["id"], "expires_at_ms": later_ms}).json
    assert changed["state"] == "active"
    assert status() == 200
    assert visitor.post("keys.expire", {"id": created["id"]}).json["state"] == "expired"
    assert status() == 403


def test_an_expiry_after_the_year_9999_is_refused_with_the_latest_one(visitor: Visitor) -> None:
    created = visitor.post("keys.create", {"name": "new", "permissions": LIMIT}).json
    refused = visitor.post("keys.expire", {"id": created["id"], "expires_at_ms": 2**53})
    assert (refused.status, refused.error["errors"]) == (
        400,
        [
            {
                "location": "/properties/expires_at_ms",
                "message": f"{2**53} is after the year 9999: give at most {TIME_MS_MAX}",
            }
        ],
    )
    (held,) = [each for each in visitor.get("keys").json["keys"] if each["id"] == created["id"]]
    assert held["expires_at_ms"] is None
    last = visitor.post("keys.expire", {"id": created["id"], "expires_at_ms": TIME_MS_MAX})
    assert last.json["expires_at_ms"] == TIME_MS_MAX


def test_the_name_of_a_deleted_namespace_is_not_given_again(visitor: Visitor) -> None:
    named = {"namespace": "once"}
    assert visitor.post("namespaces.create", named).json["is_deleted"] is False
    assert visitor.post("namespaces.create", named).status == 200, "it exists, which is what was wanted"
    assert visitor.post("namespaces.delete", named).json["is_deleted"] is True
    refused = visitor.post("namespaces.create", named)
    assert (refused.status, refused.error["errors"][0]["location"]) == (400, "/properties/namespace")
    assert "restore" in refused.error["errors"][0]["message"]
    assert visitor.post("namespaces.restore", named).json["is_deleted"] is False
