#!/usr/bin/env python3
"""Fails if prose uses a word that this project avoids: metaphors, personification, archaic words.

The list is short and has no false alarms: a word with an ordinary technical use is not on it. Pages and programs
are checked, with comments, docstrings, messages and names. A line that must name such a word ends with `words: ok`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["problems"]

ROOT: Final = Path(__file__).resolve().parent.parent
SUFFIXES: Final = frozenset(
    {".md", ".py", ".lua", ".sql", ".toml", ".yml", ".json", ".js", ".html", ".c", ".service", ""}
)
EXCLUDED: Final = frozenset({"scripts/check_words.py", "LICENSE", "constraints.txt"})

# What to avoid, and what to write instead.
AVOIDED: Final = {
    r"nobody|somebody|anybody|everybody|whoever|no one": "name who or what: no client, another process, the caller",
    r"mend(?:s|ed|ing)?": "fix, correct, repair",
    r"dearer|dearest": "more expensive, slower",
    r"spelt": "spelled, written",
    r"reckon(?:s|ed|ing)?": "compute, count, assume",
    r"homeless|orphan(?:s|ed)?": "without an owner, unused, left over",
    r"breath(?:e|es|ed|ing)?": "yield, pause",
    r"knock(?:s|ed|ing)?": "connect, call",
    r"at the door|rooms? of the house": "at the listener, packages",
    r"whilst|thereof|hither|betwixt|lest|seldom|forthwith": "the usual word",
    r"stampede(?:s|d)?": "all at once",
    r"befall(?:s|en)?|bespeak(?:s)?|heeds?|hearken(?:s)?": "the usual word",
}
# Not beside a quote, a slash, a colon or an at sign: that is a name in an example, such as a user or a host.
BEFORE: Final = r"(?<![\"'/:@=A-Za-z0-9])"
AFTER: Final = r"(?![A-Za-z0-9]|[\"/:@]|'(?!s\b))"
WORDS: Final = re.compile(
    "|".join(f"(?P<w{n}>{BEFORE}(?:{one}){AFTER})" for n, one in enumerate(AVOIDED)), re.IGNORECASE
)


def problems(name: str, text: str) -> list[str]:
    """Every avoided word of a file, with its place and what to write instead."""
    advice = list(AVOIDED.values())
    return [
        f"{name}:{number}: {found[0]!r}: {advice[int(found.lastgroup[1:])]}"
        for number, line in enumerate(text.splitlines(), 1)
        if not line.rstrip().endswith("words: ok")
        for found in WORDS.finditer(line)
        if found.lastgroup is not None
    ]


def _files() -> list[str]:
    """All files of the working tree that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        name
        for name in sorted(listed.stdout.splitlines())
        if Path(name).suffix in SUFFIXES and name not in EXCLUDED and (ROOT / name).is_file()
    ]


def main() -> None:
    names = _files()
    found = [line for name in names for line in problems(name, (ROOT / name).read_text(encoding="utf-8"))]
    for line in found:
        print(line, file=sys.stderr)
    print(f"words: {len(names)} files, {len(found)} to replace")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
