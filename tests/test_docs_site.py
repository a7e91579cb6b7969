"""The pages of the documentation site: prepared from the repository, and all in its navigation."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

import check_words
import docs_site
from tidegate.server.api.problems import DOCUMENTATION, problems_by_suffix

ROOT = Path(__file__).parent.parent


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose footer comes from the environment."""


Loader.add_constructor("!ENV", lambda _loader, _node: "from the environment")


def site() -> Any:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def pages_in(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(items, str)
    return [page for item in items for page in pages_in(item)]  # type: ignore[attr-defined]  # a list or a dict view


def test_every_page_is_in_the_navigation_once() -> None:
    shown = pages_in(site()["nav"])
    assert len(set(shown)) == len(shown)
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    # These are listed on another page: the index lists the decisions, the index of the runbooks lists the runbooks.
    patterns = site()["not_in_nav"].split()
    listed = {
        name for name in written - set(shown) if any(fnmatch(f"/{name}", pattern) for pattern in patterns)
    }
    assert {name.rpartition("/")[0] for name in listed} <= {"adr", "operations/runbooks"}
    assert set(shown) == (written - listed) | set(docs_site.MOUNTED.values())
    for name in listed:
        folder, _, page = name.rpartition("/")
        index = "index.md" if folder == "adr" else f"{folder}/index.md"
        link = name if folder == "adr" else page
        assert f"]({link})" in (ROOT / "docs" / index).read_text(encoding="utf-8"), name


def test_the_type_of_every_error_is_an_address_of_the_site() -> None:
    reference = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    pages = dict(docs_site.error_pages(reference))
    assert f"{site()['site_url']}errors/" == DOCUMENTATION
    assert set(pages) == {f"errors/{suffix}.md" for suffix in problems_by_suffix()}
    for path, page in pages.items():
        assert "What to do: " in page
        (back,) = re.findall(r"\[All errors\]\((.*)\)", page)
        assert os.path.normpath(PurePosixPath(path).parent / back) == "reference/errors.md"


def test_links_stay_on_the_site_or_lead_to_the_repository() -> None:
    page = "[a](../tutorial.md#one-region) [b](../../bench/RESULTS.md) [c](../../src/tidegate/core/windows.py) [d](https://x.y/z)"
    assert docs_site.prepared(PurePosixPath("docs/how-to/serve.md"), page) == (
        "[a](../tutorial.md#one-region) [b](../results.md) "
        f"[c]({docs_site.repository()}/blob/main/src/tidegate/core/windows.py) [d](https://x.y/z)"
    )
    results = "![plot](../docs/pictures/fleet.svg)"
    assert docs_site.prepared(PurePosixPath("bench/RESULTS.md"), results) == "![plot](pictures/fleet.svg)"


def test_code_is_left_alone_and_its_mark_is_shown() -> None:
    page = "```python no-run: needs Redis\nx = [f](../y.md)\n```\n\n```js sdk\nf();\n```\n"
    assert docs_site.prepared(PurePosixPath("docs/faq.md"), page) == (
        '```python title="Not run by the tests: needs Redis"\nx = [f](../y.md)\n```\n\n```js\nf();\n```\n'
    )


def test_files_that_a_browser_would_load_from_other_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(
        '<a href="https://x.y"><img src="a.svg"><script src="assets/b.js"></script>'
    )
    assert docs_site.external_assets(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://cdn.example/a.js"></script><link rel="stylesheet" href="//b/c.css">'
    )
    assert len(docs_site.external_assets(tmp_path)) == 2
    # With this attribute the script of the theme asks api.github.com for stars and releases.
    (tmp_path / "bad.html").write_text('<a href="https://x.y" class="md-source" data-md-component="source">')
    assert len(docs_site.external_assets(tmp_path)) == 1


def test_an_image_in_html_is_found_from_the_directory_of_its_page() -> None:
    text = '<img src="console/phone.png" width="240">'
    moved = '<img src="../console/phone.png" width="240">'
    assert docs_site.prepared(PurePosixPath("docs/operations/console.md"), text) == moved
    assert docs_site.prepared(PurePosixPath("docs/index.md"), text) == text


def test_a_page_that_loads_a_file_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "how-to").mkdir()
    (tmp_path / "a.svg").touch()
    page = tmp_path / "how-to" / "index.html"
    page.write_text(
        '<img alt="x" src="../a.svg"><script src="https://x.y/z.js"></script><link rel="icon" href="../a.svg">'
    )
    assert docs_site.missing_assets(tmp_path) == []
    page.write_text('<img src="a.svg" width="240"><link rel="stylesheet" href="../b.css">')
    assert docs_site.missing_assets(tmp_path) == ["how-to/index.html: a.svg", "how-to/index.html: ../b.css"]


def test_the_addresses_of_the_project_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source, documentation = project["urls"]["Source"], project["urls"]["Documentation"]
    assert (site()["repo_url"], site()["site_url"]) == (source, documentation)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["repository-code"], citation["url"]) == (source, documentation)
    owner = re.escape(source.rpartition("/")[2])
    for file in [*(ROOT / ".github").rglob("*.yml"), *ROOT.glob("*.md")]:
        for found in re.findall(rf"https://github\.com/[^/\s)]+/{owner}\b", file.read_text(encoding="utf-8")):
            assert found == source, file


def test_readme_and_the_page_have_the_same_comparison() -> None:
    def table(name: str) -> list[str]:
        return re.findall(
            r"^\| \| algorithm.*(?:\n\|.*)*", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
        )

    assert len(table("README.md")) == 1
    assert table("README.md") == table("docs/compare.md")


def test_install_lines_work_until_there_is_a_release() -> None:
    """Until the first release, Tidegate is installed from a clone. Then remove this test and change the lines."""
    assert re.search(r"^## [0-9]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE) is None
    pages = [ROOT / "README.md", *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lines = [
        f"{page.name}: {line}"
        for page in pages
        if page.parent.name != "adr"
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install.*\btidegate(\[|\s|\"|'|$)", line) and "/opt/tidegate" not in line
    ]
    assert lines == []


def test_the_figures_of_the_readme_and_of_other_pages_are_those_of_the_results() -> None:
    results = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(" *"): cells[2:] for line in results.splitlines() if len(cells := line.split("|")) > 5
    }
    compiled_ns = int(rows["Tidegate, compiled"][1])
    interpreted_ns = int(rows["Tidegate, interpreted"][1].replace(",", ""))
    times = [float(rows[name][2].split()[0]) for name in ("throttled-py", "limits", "pyrate-limiter")]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"**{compiled_ns / 1000:.2f} µs** of CPU" in readme
    assert f"[{min(times):.0f} times less](bench/RESULTS.md#the-embedded-limiter)" in readme
    assert round(interpreted_ns / compiled_ns) == 8 and "about eight times slower" in readme
    subject_bytes = re.search(r"bytes per subject at 1,000,000, identifier included \| (\d+) ", results)
    assert subject_bytes is not None
    for page in ("faq.md", "operations/tune.md"):
        shown = re.search(
            r"about (\d+) bytes", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.IGNORECASE
        )
        assert shown is not None and int(shown[1]) == round(int(subject_bytes[1]), -1), page


def test_an_avoided_word_is_found_with_its_place_and_a_better_one() -> None:
    (found,) = check_words.problems("page.md", "Fine.\nWhat nobody reads.\n")  # words: ok
    assert found.startswith("page.md:2: 'nobody': name who or what")  # words: ok
    (in_name,) = check_words.problems("module.py", "def mend_ledger(): ...")  # words: ok
    assert in_name.startswith("module.py:1: 'mend': fix")  # words: ok
    for fine in (
        "mendacious, recommended, breathalyser",
        'user "nobody"',
        "ftp://nobody:x@host",
        "nobody  words: ok",
    ):
        assert check_words.problems("page.md", fine) == []


def test_workflows_are_valid_yaml_and_name_their_permissions() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 4
    for workflow in workflows:
        document = yaml.safe_load(workflow.read_text(encoding="utf-8"))
        assert document["permissions"] == {"contents": "read"}, workflow.name


def test_the_version_is_written_once() -> None:
    import tidegate

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    holders = [
        name
        for name in listed
        if Path(name).suffix in {".toml", ".py", ".cff", ".cfg"}
        and not name.startswith("tests/")
        and re.search(
            rf'version(?:__)?["\']?\s*[:=]\s*["\']?{re.escape(tidegate.__version__)}\b',
            (ROOT / name).read_text(),
        )
    ]
    assert holders == ["src/tidegate/__init__.py"]
