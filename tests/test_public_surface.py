"""What `import tidegate` promises: complete, sorted, importable, and nothing but Python needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tidegate

# What the extras bring, by the names under which they are imported.
OPTIONAL = {
    "aiohttp",
    "asgiref",
    "asyncmy",
    "asyncpg",
    "click",
    "django",
    "fastapi",
    "flask",
    "grpc",
    "hiredis",
    "httptools",
    "httpx",
    "litestar",
    "matplotlib",
    "msgspec",
    "opentelemetry",
    "prometheus_client",
    "pytest",
    "redis",
    "requests",
    "starlette",
    "uvloop",
}
# Parts that a library user does not pay for before asking.
LAZY = {
    "tidegate.server",
    "tidegate.cli",
    "tidegate.integrations",
    "tidegate.sim",
    "tidegate.testing",
    "tidegate.telemetry",
    "sqlite3",
}

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(tidegate.__path__, "tidegate.")
    if "__main__" not in found.name
)


def test_the_export_list_is_sorted_complete_and_importable() -> None:
    names = tidegate.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    public = {
        name
        for name, value in vars(tidegate).items()
        if not isinstance(value, ModuleType) and not (name.startswith("_") and name != "__version__")
    }
    assert public - {"__version__"} == set(names) - {"__version__"}
    namespace: dict[str, object] = {}
    exec("from tidegate import *", namespace)
    assert set(names) <= set(namespace)


def source_of(module: ModuleType) -> ast.Module:
    """The module's source, which is installed beside the compiled one: mypyc keeps no docstrings of its own."""
    assert module.__file__ is not None
    folder, _, file = module.__file__.rpartition("/")
    return ast.parse((Path(folder) / (file.partition(".")[0] + ".py")).read_text())


def class_doc(cls: type) -> str | None:
    tree = source_of(sys.modules[cls.__module__])
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return ast.get_docstring(found)


def test_every_public_name_says_what_it_is() -> None:
    for name in tidegate.__all__:
        value = getattr(tidegate, name)
        if inspect.isclass(value):
            assert class_doc(value), name
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    assert function.__doc__, f"{name}.{method}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_exports_what_it_has(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Not installed here is fine, misspelt or missing of our own is not.
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}, which is not installed: not checked")
    assert ast.get_docstring(source_of(module)), f"{name} does not say what it is for"
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), f"{name}.{exported}"


def test_importing_the_library_imports_nothing_optional_and_nothing_that_is_not_used() -> None:
    code = "import json, sys, tidegate; tidegate.Limiter(); print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(json.loads(answer.stdout))
    assert "tidegate.runtime.limiter" in loaded
    assert {name for name in loaded if name.partition(".")[0] in OPTIONAL} == set()
    assert loaded & LAZY == set()


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("tidegate")
    except PackageNotFoundError:
        pytest.skip("not installed, run from its source: the version of the package was not compared")
    assert tidegate.__version__ == installed
