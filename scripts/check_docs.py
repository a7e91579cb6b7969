#!/usr/bin/env python3
"""Fails if a link in the Markdown files of this repository is broken.

It checks relative links and their #anchors (headings of the target page), but not links to other sites, because those
depend on the network.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXCLUDED = frozenset({"build", "dist", "node_modules", "tidegate-data"})
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def markdown_files(directory: Path) -> Iterator[Path]:
    """All pages of the working tree, without environments, caches and builds."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name not in EXCLUDED:
            yield from markdown_files(path)
        elif path.suffix == ".md":
            yield path


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, words joined by hyphens."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    bare = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", text)) for text in headings)
    return {text.strip().lower().replace(" ", "-") for text in bare}


def broken_links(page: Path) -> list[str]:
    text = CODE.sub("", FENCE.sub("", page.read_text()))
    broken = []
    for found in LINK.finditer(text):
        link = found[1] or found[2]
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{page.relative_to(ROOT)}: {link}: {target.name} has no such heading")
    return broken


def main() -> None:
    pages = list(markdown_files(ROOT))
    broken = [problem for page in pages for problem in broken_links(page)]
    for problem in broken:
        print(problem, file=sys.stderr)
    print(f"docs: {len(pages)} pages, {len(broken)} broken links")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
