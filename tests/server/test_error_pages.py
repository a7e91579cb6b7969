"""The type of an error is the address of a page, which exists on the server and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.harness import TidegateServer, Workspace
from tidegate.server.api import pages, problems
from tidegate.server.api.problems import BY_STATUS, DOCUMENTATION, PROBLEMS, Problem, problems_by_suffix
from tidegate.server.catalog.keys import new_key

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
SUFFIXES = list(problems_by_suffix())


def test_the_table_holds_every_problem_there_is() -> None:
    defined = [value for value in vars(problems).values() if isinstance(value, Problem)]
    assert sorted(defined) == sorted(PROBLEMS)
    for problem in PROBLEMS:
        assert problem.type == DOCUMENTATION + problem.suffix
        assert 400 <= problem.status < 600
        assert re.fullmatch(r"(unkey|user)/[a-z_]+/[a-z_]+", problem.suffix)
        for prose in (problem.title, problem.when, problem.remedy):
            assert prose
            assert prose.count("`") % 2 == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_type_has_its_section_on_the_page_and_in_the_documentation(
    server: TidegateServer, suffix: str
) -> None:
    everything = server.get("/docs/errors")
    assert everything.headers["content-type"] == "text/html; charset=utf-8"
    page = everything.body.decode()
    assert page.count(f'<h2 id="{suffix}">') == 1
    _, section = REFERENCE.read_text(encoding="utf-8").split(f"\n## {suffix}\n")
    section = section.partition("\n## ")[0]
    for problem in problems_by_suffix()[suffix]:
        assert f'<span class="method">{problem.status}</span> {problem.title}' in page
        assert f"**{problem.status} {problem.title}.** {problem.when}" in section
        assert problem.remedy in section


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_path_of_a_type_is_a_page_about_it_alone(server: TidegateServer, suffix: str) -> None:
    reply = server.get(f"/docs/errors/{suffix}")
    assert reply.status == 200
    assert re.findall(r'<h2 id="([^"]+)">', reply.body.decode()) == [suffix]
    assert DOCUMENTATION + suffix in reply.body.decode()


def test_the_type_of_a_real_error_leads_to_its_page(server: TidegateServer, workspace: Workspace) -> None:
    replies = [
        server.call("limit", {}, None),
        server.call("getOverride", {"namespace": "a", "identifier": "b"}, new_key()),
        workspace.call("getOverride", {"namespace": "never.made", "identifier": "b"}),
        server.get("/nowhere"),
        server.get("/v2/ratelimit.limit"),
    ]
    assert len({reply.error["type"] for reply in replies}) == len(replies)
    for reply in replies:
        path = "/docs/errors/" + reply.problem
        assert reply.error["title"] in server.get(path).body.decode()


@pytest.mark.parametrize("header", [{}, {"Authorization": ""}, {"Authorization": "Basic eA=="}])
def test_no_header_and_a_wrong_one_are_two_errors_and_both_have_their_page(
    server: TidegateServer, header: dict[str, str]
) -> None:
    body = {"namespace": "a", "identifier": "b", "limit": 1, "duration": 1_000}
    problem = server.call("limit", body, None, **header).problem
    assert problem == ("unkey/authentication/malformed" if header else "unkey/application/invalid_input")
    assert problem in SUFFIXES


def test_the_table_holds_nothing_that_is_never_sent() -> None:
    # Other descriptions of the API have these. Here, a missing header is invalid input, and a client that has
    # disconnected gets no answer.
    assert not {"unkey/authentication/missing", "user/bad_request/client_closed_request"}.intersection(
        SUFFIXES
    )
    server_source = "".join(
        file.read_text(encoding="utf-8")
        for file in sorted(Path(problems.__file__).parents[1].rglob("*.py"))
        if file.name != "problems.py"
    )
    for name, value in vars(problems).items():
        if isinstance(value, Problem):
            status = value.status if BY_STATUS.get(value.status) is value else "never"
            sends = rf"\b(Refusal\(\s*(problems\.)?{name}|(Rejection|_stop|_refuser|refuse)\(\s*{status})\b"
            assert re.search(sends, server_source), f"nothing sends {name}"


def test_the_page_about_the_api_leads_to_the_page_about_its_errors(server: TidegateServer) -> None:
    assert f'href="{pages.ERRORS_PATH[1:]}"' in server.get("/docs").body.decode()
    assert server.get("/docs/errors/unkey/no/such_error").status == 404


def test_a_page_about_errors_escapes_what_it_shows() -> None:
    problem = Problem(400, "<b>", "unkey/x/y", "<script>", "`a<b`")
    page = pages.render_errors("<i>", {problem.suffix: [problem]}, "/docs/errors/unkey/x/y").decode()
    for sent in ("<b>", "<script>", "<i>", "a<b"):
        assert sent not in page
    assert "<code>a&lt;b</code>" in page
