"""Compiles the core, and what a warm request of the server passes through, with mypyc where that is possible.

Where it is not, it builds plain Python.

Everything that can be data is in pyproject.toml. Rules of this file:

- The sources are the same either way: a build without a C compiler, without mypy, or with TIDEGATE_PURE=1
  installs the modules as they are.
- All compiled modules are one group, so that calls between them are C calls. All of it or none of it: half a group
  cannot be imported.
- A compiled module imports nothing but the standard library and Tidegate: the environment of a build has nothing else.
- An editable install is never compiled: the extension modules would lie beside the sources and hide every edit.
- TIDEGATE_OPT_LEVEL replaces the optimization of 3: 0 compiles in half of the time, for tests.
- A type error in them fails the build. Only what the machine lacks falls back to Python.

It also makes the readme: README.md has relative links, which work in the repository and not on PyPI.
"""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import cast

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/tidegate")
CORE = PACKAGE / "core"
# What a warm `limit` or `multiLimit` over HTTP passes through beside the core (docs/adr/0029-compiled-request-path.md).
REQUEST_PATH = (
    "server/api/plans.py",
    "server/api/recording.py",
    "server/api/warm.py",
    "server/catalog/view.py",
    "server/http1/repeats.py",
    "server/messages.py",
    "server/schedule.py",
    "telemetry/topk.py",
)

# setuptools also runs this file to ask for requirements and metadata, for an sdist and for an editable install.
# Compiling then would triple the time of a build, or hide edits behind extension modules.
COMPILING_COMMANDS = frozenset({"bdist_wheel", "build", "build_ext", "install"})

# Modules of the core that stay interpreted, each with its reason.
NOT_COMPILED = frozenset(
    {
        "_native.py",  # its run-time branch is dead code to the type checker, and mypyc compiles dead code to a trap
    }
)


class BuildCore(build_ext):
    """Builds all extension modules, or leaves none behind."""

    def build_extensions(self) -> None:
        super().build_extensions()
        files = [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            for file in files:
                file.unlink(missing_ok=True)
            print(f"tidegate: not compiled ({', '.join(missing)} could not be built): installing pure Python")


def core_extensions() -> list[Extension]:
    """The extension modules of the core; an empty list if it must not or cannot be compiled."""
    if os.environ.get("TIDEGATE_PURE", "") not in ("", "0"):
        print("tidegate: not compiled (TIDEGATE_PURE is set)")
        return []
    if COMPILING_COMMANDS.isdisjoint(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("tidegate: not compiled (mypy is not installed)")
        return []
    core = [path for path in CORE.glob("*.py") if path.name not in NOT_COMPILED]
    modules = sorted(str(path) for path in [*core, *(PACKAGE / name for name in REQUEST_PATH)])
    # An empty config file: the settings of `make check` are for people, and must not change what is compiled.
    # Silent about what the core does not compile: the package's root imports adapters, whose drivers may be absent.
    options = ["--config-file=", "--strict", "--follow-imports=silent"]
    level = os.environ.get("TIDEGATE_OPT_LEVEL", "3")
    compiled = mypycify([*options, *modules], opt_level=level, debug_level="0", group_name="tidegate_core")
    extensions = cast("list[Extension]", compiled)  # declared as possibly those of distutils
    for extension in extensions:
        extension.optional = True  # no compiler is a warning; BuildCore then removes what was built
        if sys.platform == "linux":
            # Functions of the group may be inlined into one another: nothing replaces them when they are loaded.
            extension.extra_compile_args.append("-fno-semantic-interposition")
    return extensions


def readme() -> str:
    """README.md with its relative links made absolute: to the files of this version in the repository."""
    source = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    init = Path("src/tidegate/__init__.py").read_text(encoding="utf-8")
    version = init.partition('__version__ = "')[2].partition('"')[0]

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({source}/{kind}/v{version}/{found[3]})"

    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z][a-z0-9+.-]*:|#)([^)]+)\)", link, text)


setup(
    ext_modules=core_extensions(),
    cmdclass={"build_ext": BuildCore},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
