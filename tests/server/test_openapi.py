from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.server.harness import TidegateServer, Workspace
from tidegate.server.api import openapi, pages
from tidegate.server.api.problems import PROBLEMS

# The API answers 400, not 401, to a request without an Authorization header: existing clients expect that.
NOT_OUR_CONTRACT = "missing_required_header,ignored_auth"

# `settle` takes one cost, or as many as the reservation has limits: another number is a 400, and no schema can say so.
NOT_IN_A_SCHEMA = """
[[operations]]
include-path-regex = "ratelimit\\\\.settle$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "429", "5xx"]
"""


@pytest.mark.slow
def test_schemathesis_finds_no_fault(tmp_path: Path) -> None:
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(NOT_IN_A_SCHEMA)
    # Counts in memory: a file that does not answer in time, on a busy machine, is a 500, and a fault to schemathesis.
    with TidegateServer("--test-mode", "--origin", "memory://") as server:
        workspace = server.workspace()
        for name in ("0", "api"):
            workspace.limit(name)
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "schemathesis"),
                *("--config-file", str(settings)),
                *("run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {workspace.key.secret}"),
                *("--checks", "all", "--exclude-checks", NOT_OUR_CONTRACT, "--max-examples", "50"),
                *("--generation-deterministic", "--no-color"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8_000:]
    assert f"Tested: {len(openapi.OPERATIONS) + 1}" in done.stdout, "all operations, and liveness"


def test_the_document_describes_every_route_of_the_api(server: TidegateServer) -> None:
    document = server.get("/openapi.json").json
    assert document["openapi"] == "3.1.0"
    operations = [
        "limit",
        "multiLimit",
        "usage",
        "reset",
        "reserve",
        "settle",
        "release",
        "setOverride",
        "getOverride",
        "listOverrides",
        "deleteOverride",
    ]
    assert list(document["paths"]) == [*(f"/v2/ratelimit.{name}" for name in operations), "/v2/liveness"]


def test_every_schema_of_the_document_is_a_json_schema() -> None:
    document = openapi.document()
    for name in document["components"]["schemas"]:
        jsonschema_rs.validator_for(
            {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        )


def test_real_answers_fit_the_document(workspace: Workspace) -> None:
    document = openapi.document()
    body = {"namespace": "api", "identifier": "user", "limit": 1, "duration": 1_000}
    pair = {"namespace": "api", "identifier": "user"}
    calls: list[tuple[str, Any]] = [
        ("limit", body),
        ("setOverride", body),
        ("limit", body),
        ("multiLimit", [body, body]),
        ("getOverride", pair),
        ("listOverrides", {"namespace": "api"}),
        ("deleteOverride", pair),
        ("deleteOverride", pair),
        ("limit", {}),
    ]
    for operation, sent in calls:
        reply = workspace.call(operation, sent)
        responses = document["paths"][f"/v2/ratelimit.{operation}"]["post"]["responses"]
        content = responses[str(reply.status)]["content"][reply.headers["content-type"]]
        validator = jsonschema_rs.validator_for({**content["schema"], "components": document["components"]})
        validator.validate(reply.json)


def test_the_bounds_in_the_document_are_those_of_the_api_page() -> None:
    schemas = openapi.document()["components"]["schemas"]
    limit = schemas["LimitBody"]
    assert limit["additionalProperties"] is False
    assert limit["required"] == ["namespace", "identifier", "limit", "duration"]
    assert (limit["properties"]["duration"]["minimum"], limit["properties"]["duration"]["maximum"]) == (
        1_000,
        2_592_000_000,
    )
    assert limit["properties"]["limit"]["minimum"] == 1
    assert limit["properties"]["cost"] | {"minimum": 0, "default": 1} == limit["properties"]["cost"]
    assert (schemas["MultiLimitBody"]["minItems"], schemas["MultiLimitBody"]["maxItems"]) == (1, 100)
    assert schemas["SetOverrideBody"]["properties"]["limit"]["minimum"] == 0
    assert schemas["SetOverrideBody"]["properties"]["duration"]["maximum"] == 3_155_760_000_000
    assert (
        schemas["ListOverridesBody"]["properties"]["limit"]
        | {
            "minimum": 1,
            "maximum": 100,
            "default": 10,
        }
        == schemas["ListOverridesBody"]["properties"]["limit"]
    )
    for schema in ("LimitBody", "SetOverrideBody", "OverrideBody"):
        for field in ("namespace", "identifier"):
            found = schemas[schema]["properties"][field]
            assert (found["minLength"], found["maxLength"]) == (1, 512)


def test_the_page_is_made_of_the_document_and_escapes_it() -> None:
    document = openapi.document()
    document["info"]["description"] = "<script>alert(1)</script>"
    page = pages.render_docs(document).decode()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    for operation in openapi.OPERATIONS:
        assert operation.summary in page


def test_the_document_names_every_type_of_error_and_every_status_of_an_operation() -> None:
    document = openapi.document()
    described = document["components"]["schemas"]["ErrorBody"]["properties"]["type"]
    assert set(described["examples"]) == {problem.type for problem in PROBLEMS}
    # For every operation, except where they cannot occur: unknown paths and methods, overrides, deleted namespaces.
    of_all = {problem.status for problem in PROBLEMS} - {404, 405, 410}
    for operation in openapi.OPERATIONS:
        responses = document["paths"][f"/v2/ratelimit.{operation.name}"]["post"]["responses"]
        assert of_all <= {int(status) for status in responses} - {200}
