#!/usr/bin/env python3
"""Builds the documentation site, or serves it while pages are edited.

    python scripts/docs_site.py build      the site, strictly, into build/site
    python scripts/docs_site.py serve      the same on http://127.0.0.1:8000, following edits

The pages of the repository are prepared in build/docs first: pages from outside docs/ are added, links that leave the
site become links to the repository, and a code block that no test runs says so. mkdocs.yml then needs no hooks
(docs/adr/0023-documentation-site.md).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["MOUNTED", "error_pages", "external_assets", "missing_assets", "prepare", "prepared"]

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build"
# Pages of the site that are not in docs/.
MOUNTED: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/RESULTS.md": "results.md",
    "examples/README.md": "examples.md",
}
BRANCH: Final = "main"
FENCE: Final = re.compile(r"^( *)(```|~~~)[^\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
# An image in HTML, for its width: MkDocs changes addresses in Markdown only, and a page is a directory of the site.
HTML_IMAGE: Final = re.compile(r'(<img src=")(?![a-z]+:|/)')
MARK: Final = re.compile(r"^( *```\w+) no-run: *([^\n]+)$", re.MULTILINE)
OTHER_MARKS: Final = re.compile(r"^( *```\w+) [a-z-]+$", re.MULTILINE)
# What a browser would load from another host, unlike a link that a reader may follow.
EXTERNAL: Final = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link(?=[^>]*rel=[\"']?(?:stylesheet|preload|preconnect|icon))[^>]*href=[\"']?(?:https?:)?//[^>]*>"
    # The script of the theme asks api.github.com about an element with this attribute.
    r"|<a(?=[^>]*data-md-component=[\"']?source\b)[^>]*>"
)

# What a browser loads from the site itself, by a relative address.
LOCAL: Final = re.compile(
    r"<(?:script|img|source)[^>]*\ssrc=[\"']?(?![a-z]+:|/)([^\"'\s>?#]+)|<link[^>]*\shref=[\"']?(?![a-z]+:|/)([^\"'\s>?#]+)"
)


def repository() -> str:
    found = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def version() -> str:
    text = (ROOT / "src" / "tidegate" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def _place(path: PurePosixPath) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if str(path) in MOUNTED:
        return MOUNTED[str(path)]
    if path.parts[:1] == ("docs",):
        return str(PurePosixPath(*path.parts[1:]))
    return None


def prepared(source: PurePosixPath, text: str) -> str:
    """A page as the site needs it. `source` is its path in the repository."""
    here = _place(source)
    assert here is not None, source

    def link(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            return found[0]
        path = PurePosixPath(os.path.normpath(source.parent / target))
        place = _place(path)
        if place is not None:
            relative = os.path.relpath(place, PurePosixPath(here).parent)
            return f"{found[1]}{relative}{anchor}{found[4]}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{found[1]}{repository()}/{kind}/{BRANCH}/{path}{anchor}{found[4]}"

    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    parts.append(LINK.sub(link, text[end:]))
    whole = MARK.sub(lambda found: f'{found[1]} title="Not run by the tests: {found[2]}"', "".join(parts))
    if PurePosixPath(here).name != "index.md":
        whole = HTML_IMAGE.sub(r"\1../", whole)
    return OTHER_MARKS.sub(r"\1", whole)


def _sources() -> Iterator[Path]:
    yield from sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file())
    yield from (ROOT / name for name in MOUNTED)


def error_pages(reference: str) -> Iterator[tuple[str, str]]:
    """A page for each error of the HTTP API, at the path of its type, which is an address of the site."""
    for section in reference.split("\n## ")[1:]:
        path, _, text = section.partition("\n")
        back = "../" * (path.count("/") + 1) + "reference/errors.md"
        yield f"errors/{path}.md", f"# {path}\n{text.rstrip()}\n\n[All errors]({back})\n"


def _files() -> Iterator[tuple[str, bytes]]:
    """Every file of the site, by its place."""
    for path in _sources():
        source = PurePosixPath(path.relative_to(ROOT).as_posix())
        place = _place(source)
        assert place is not None
        content = path.read_bytes()
        yield place, prepared(source, content.decode()).encode() if path.suffix == ".md" else content
    errors = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    for place, page in error_pages(errors):
        yield place, page.encode()


def prepare() -> None:
    """Write the pages to build/docs. A file that did not change is left alone, so that it is not built again."""
    wanted: set[Path] = set()
    for place, content in _files():
        target = BUILD / "docs" / place
        wanted.add(target)
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    for path in (BUILD / "docs").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def external_assets(site: Path) -> list[str]:
    """What pages of a built site would load from another host."""
    return [
        f"{page.relative_to(site)}: {found[0]}"
        for page in sorted(site.rglob("*.html"))
        for found in EXTERNAL.finditer(page.read_text(encoding="utf-8"))
    ]


def missing_assets(site: Path) -> list[str]:
    """Files that pages of a built site load from the site and that do not exist. MkDocs checks Markdown, not HTML in a
    page."""
    return [
        f"{page.relative_to(site)}: {target}"
        for page in sorted(site.rglob("*.html"))
        for found in LOCAL.finditer(page.read_text(encoding="utf-8"))
        if not (page.parent / (target := found[1] or found[2])).exists()
    ]


def _mkdocs(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mkdocs", *arguments, "--config-file", str(ROOT / "mkdocs.yml")]


def _environ() -> dict[str, str]:
    # The version is shown in the footer. The theme prints a notice about MkDocs 2 unless told not to.
    footer = f"Tidegate {version()} · Apache-2.0"
    return os.environ | {"TIDEGATE_FOOTER": footer, "NO_MKDOCS_2_WARNING": "1"}


def build() -> int:
    prepare()
    # Not --quiet: MkDocs would then hide warnings before it counts them, and strict would mean nothing.
    done = subprocess.run(_mkdocs("build", "--strict", "--clean"), cwd=ROOT, env=_environ(), check=False)
    if done.returncode != 0:
        return done.returncode
    site = BUILD / "site"
    problems = [f"loads from another host: {line}" for line in external_assets(site)]
    problems += [f"loads a file that does not exist: {line}" for line in missing_assets(site)]
    for line in problems:
        print(line, file=sys.stderr)
    if not problems:
        print(f"docs: {sum(1 for _ in site.rglob('*.html'))} pages in {BUILD.name}/site")
    return int(bool(problems))


def serve() -> int:
    prepare()
    stopped = threading.Event()

    def follow() -> None:
        while not stopped.wait(1):
            prepare()

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    try:
        return subprocess.run(_mkdocs("serve"), cwd=ROOT, env=_environ(), check=False).returncode
    except KeyboardInterrupt:
        return 0
    finally:
        stopped.set()
        watcher.join()


def main() -> int:
    if sys.argv[1:] == ["build"]:
        shutil.rmtree(BUILD / "docs", ignore_errors=True)
        return build()
    if sys.argv[1:] == ["serve"]:
        return serve()
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
