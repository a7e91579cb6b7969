#!/usr/bin/env python3
"""Builds an sdist, and from it a compiled and a pure wheel, into a directory.

    python scripts/package.py [DIRECTORY]      dist by default; what is in it is replaced

It needs `build`, `setuptools`, `wheel` and mypy in its environment, and builds from a copy of the working tree without
leftovers of earlier builds. Both wheels are built from the sdist, as pip does for users without a matching wheel.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Final

from environment import run

__all__ = ["build_all"]

ROOT: Final = Path(__file__).resolve().parent.parent
PRIVATE: Final = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", ".gateways", "build", "dist", "tidegate-data", "__pycache__",
    "*.egg-info", "*.so", "*.pyd",
)  # fmt: skip


def build_all(directory: Path) -> list[Path]:
    """The sdist, the compiled wheel (pure where there is no compiler) and the pure wheel."""
    shutil.rmtree(directory, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-package-") as name:
        tree = Path(name) / "tree"
        shutil.copytree(ROOT, tree, ignore=PRIVATE)
        _build(tree, directory, "sdist", "the sdist")
        (sdist,) = directory.glob("*.tar.gz")
        for title, pure in (("the compiled wheel (about a minute)", "0"), ("the pure wheel", "1")):
            unpacked = Path(name) / f"pure-{pure}"
            with tarfile.open(sdist) as archive:
                archive.extractall(unpacked, filter="data")
            (source,) = unpacked.iterdir()
            _build(source, directory, "wheel", title, TIDEGATE_PURE=pure)
    return sorted(directory.iterdir())


def _build(tree: Path, directory: Path, kind: str, title: str, **variables: str) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        str(directory.resolve()),
    ]
    run([*command, str(tree)], f"building {title}", quiet=True, **variables)


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    began = time.monotonic()
    for path in build_all(directory):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    print(f"package: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
