"""The published Python SDK, unchanged, against a running server: a base URL and a key are all it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unkey.py import Unkey, errors, models

from tests.server.harness import TIMEOUT_S, TidegateServer, Workspace, eventually

# Long enough that no window ends during a test.
MONTH_MS = 2_592_000_000


@pytest.fixture
def sdk(workspace: Workspace) -> Iterator[Unkey]:
    with Unkey(root_key=workspace.key.secret, server_url=workspace.server.url) as client:
        yield client


def test_limit(sdk: Unkey) -> None:
    answers = [
        sdk.ratelimit.limit(namespace="email", identifier="u", limit=2, duration=MONTH_MS).data
        for _ in range(3)
    ]
    assert [answer.success for answer in answers] == [True, True, False]
    assert [answer.remaining for answer in answers] == [1, 0, 0]
    assert answers[0].limit == 2
    assert answers[0].reset % MONTH_MS == 0
    assert answers[0].override_id is None


async def test_limit_asynchronously(workspace: Workspace) -> None:
    async with Unkey(root_key=workspace.key.secret, server_url=workspace.server.url) as sdk:
        answer = await sdk.ratelimit.limit_async(
            namespace="email", identifier="u", limit=2, duration=MONTH_MS, cost=2
        )
    assert (answer.data.success, answer.data.remaining) == (True, 0)
    assert answer.meta.request_id.startswith("req_")


def test_multi_limit(sdk: Unkey) -> None:
    def item(identifier: str, cost: int) -> models.V2RatelimitLimitRequestBody:
        return models.V2RatelimitLimitRequestBody(
            namespace="email", identifier=identifier, limit=5, duration=MONTH_MS, cost=cost
        )

    passed = sdk.ratelimit.multi_limit(request=[item("a", 1), item("b", 2)]).data
    assert passed.passed is True
    assert [(each.identifier, each.remaining, each.passed) for each in passed.limits] == [
        ("a", 4, True),
        ("b", 3, True),
    ]
    failed = sdk.ratelimit.multi_limit(request=[item("a", 1), item("b", 9)]).data
    assert failed.passed is False
    assert [each.passed for each in failed.limits] == [True, False]


def test_overrides(sdk: Unkey) -> None:
    sdk.ratelimit.limit(namespace="email", identifier="u", limit=2, duration=MONTH_MS)
    created = sdk.ratelimit.set_override(namespace="email", identifier="vip_*", limit=50, duration=MONTH_MS)
    found = sdk.ratelimit.get_override(namespace="email", identifier="vip_7").data
    assert (found.override_id, found.identifier, found.limit) == (created.data.override_id, "vip_*", 50)
    limited = sdk.ratelimit.limit(namespace="email", identifier="vip_7", limit=2, duration=MONTH_MS).data
    assert (limited.limit, limited.override_id) == (50, created.data.override_id)
    sdk.ratelimit.delete_override(namespace="email", identifier="vip_*")
    with pytest.raises(errors.NotFoundErrorResponse):
        sdk.ratelimit.get_override(namespace="email", identifier="vip_7")


def test_pages_are_followed_to_their_end(sdk: Unkey) -> None:
    sdk.ratelimit.limit(namespace="email", identifier="u", limit=2, duration=MONTH_MS)
    created = {
        sdk.ratelimit.set_override(
            namespace="email", identifier=f"user_{number}", limit=number, duration=MONTH_MS
        ).data.override_id
        for number in range(23)
    }
    found: list[str] = []
    page = sdk.ratelimit.list_overrides(namespace="email")
    pages = 0
    while page is not None:
        pages += 1
        found += [each.override_id for each in page.result.data]
        page = page.next()
    assert pages == 3, "ten on a page"
    assert found == sorted(created)


def test_a_body_that_violates_the_schema_is_a_bad_request(sdk: Unkey) -> None:
    with pytest.raises(errors.BadRequestErrorResponse) as caught:
        sdk.ratelimit.limit(namespace="email", identifier="u", limit=0, duration=MONTH_MS)
    assert caught.value.data.error.status == 400
    assert caught.value.data.error.errors[0].location == "/properties/limit/minimum"
    assert caught.value.data.error.type.endswith("unkey/application/invalid_input")


def test_a_wrong_key_is_unauthorized(server: TidegateServer) -> None:
    with (
        Unkey(root_key="tg_wrong", server_url=server.url) as sdk,
        pytest.raises(errors.UnauthorizedErrorResponse),
    ):
        sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)


def test_a_missing_permission_is_forbidden(server: TidegateServer, workspace: Workspace) -> None:
    key = server.key(workspace.id, ["ratelimit.*.read_override"])
    with Unkey(root_key=key.secret, server_url=server.url) as sdk:
        with pytest.raises(errors.ForbiddenErrorResponse) as caught:
            sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)
        assert "Missing" in caught.value.data.error.detail


def test_an_unknown_namespace_is_not_found(sdk: Unkey) -> None:
    with pytest.raises(errors.NotFoundErrorResponse) as caught:
        sdk.ratelimit.get_override(namespace="nowhere", identifier="u")
    assert caught.value.data.error.type.endswith("unkey/data/ratelimit_namespace_not_found")


def test_a_deleted_namespace_is_gone(sdk: Unkey, workspace: Workspace) -> None:
    sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)
    namespace_id = workspace.namespace_id("email")
    workspace.server.with_catalog(
        lambda catalog: catalog.delete_namespace(namespace_id, deleted_at_ms=1, timeout_s=TIMEOUT_S)
    )
    eventually(lambda: workspace.limit("email").status == 410, "the deletion is seen", timeout_s=5)
    with pytest.raises(errors.GoneErrorResponse):
        sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)


def test_a_workspace_over_its_quota_is_too_many_requests(server: TidegateServer) -> None:
    workspace = server.workspace(quota=1, quota_duration_ms=3_600_000)
    with Unkey(root_key=workspace.key.secret, server_url=server.url) as sdk:
        sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)
        with pytest.raises(errors.TooManyRequestsErrorResponse) as caught:
            sdk.ratelimit.limit(namespace="email", identifier="u", limit=1, duration=MONTH_MS)
        assert caught.value.data.error.status == 429
