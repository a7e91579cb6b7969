"""The public names of `tidegate`: complete, sorted, and importable without any dependency."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import create_autospec

import pytest

import tidegate
from tests.untraced import run_untraced
from tidegate.testing import AllowingLimiter

# The packages of the extras, by the names under which they are imported.
OPTIONAL = {
    "aiohttp",
    "asgiref",
    "asyncmy",
    "asyncpg",
    "click",
    "cryptography",
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
# Parts that are not imported before they are used.
LAZY = {
    "tidegate.server",
    "tidegate.cli",
    "tidegate.integrations",
    "tidegate.sim",
    "tidegate.testing",
    "tidegate.telemetry",
    "sqlite3",
    # Only an AsyncLimiter and a limiter with Redis or a database need these: most of the time of an import.
    "asyncio",
    "logging",
    "socket",
    "tidegate.runtime.async_limiter",
    "tidegate.runtime.node",
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
        for name in dir(tidegate)
        if not isinstance(getattr(tidegate, name), ModuleType)
        and not (name.startswith("_") and name != "__version__")
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


def class_source(cls: type) -> ast.ClassDef:
    tree = source_of(sys.modules[cls.__module__])
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return found


def documented_names(cls: type) -> dict[str, str | None]:
    """Public methods, properties and their docstrings, as the sources of our classes have them: a compiled method has
    a signature at run time, and no docstring."""
    found: dict[str, str | None] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] != "tidegate":
            continue
        body = class_source(base).body
        body += [node for branch in body if isinstance(branch, ast.If) for node in branch.body]
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                found[node.name] = ast.get_docstring(node)
    return found


PUBLIC_CLASSES = sorted(
    (name for name in tidegate.__all__ if inspect.isclass(getattr(tidegate, name))), key=str.lower
)


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_every_public_class_and_method_has_a_docstring(name: str) -> None:
    cls = getattr(tidegate, name)
    assert ast.get_docstring(class_source(cls)), name
    documented = documented_names(cls)
    for method, docstring in documented.items():
        if hasattr(cls, method):
            assert docstring, f"{name}.{method}"
    seen = {
        method
        for method in dir(cls)
        if not method.startswith("_")
        and (inspect.isroutine(getattr(cls, method)) or inspect.isdatadescriptor(getattr(cls, method)))
    }
    inherited = {method for base in (Exception, tuple) if issubclass(cls, base) for method in dir(base)}
    fields = {
        name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
        for node in ast.walk(class_source(cls))
        if isinstance(node, ast.AnnAssign)
        for name in [node.target]
    }
    assert seen - inherited - fields - set(documented) == set(), "not seen in the sources"


SIGNATURES = {
    "limit": "(self, limit, identifier, cost=1, *, now_ms=None)",
    "limit_many": "(self, requests, *, now_ms=None)",
    "peek": "(self, limit, identifier, *, now_ms=None)",
    "wait": "(self, limit, identifier, cost=1, *, timeout=None)",
    "limited": "(self, *limits, key=None, cost=1, timeout=0)",
    "start": "(self)",
    "stop": "(self, timeout=None)",
    "health": "(self)",
    "statistics": "(self)",
}


def bare(signature: inspect.Signature) -> str:
    """Names, kinds and defaults, which a compiled function has too."""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("cls", [tidegate.Limiter, tidegate.AsyncLimiter])
@pytest.mark.parametrize("method", SIGNATURES)
def test_signatures_are_true_compiled_and_interpreted(cls: type, method: str) -> None:
    found = bare(inspect.signature(getattr(cls, method)))
    # A compiled method takes its own self by position only.
    assert found.replace("(self, /,", "(self,") == SIGNATURES[method]
    assert inspect.signature(cls).parameters.keys() == {"region", "origin", "ledger", "tuning"}
    for parameter in inspect.signature(cls).parameters.values():
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, None)


LIMIT = tidegate.Limit("2/minute", namespace="tests")


def test_limit_is_a_method_that_can_be_found_mocked_and_overridden() -> None:
    assert hasattr(tidegate.Limiter, "limit")
    assert "limit" not in vars(tidegate.Limiter())
    mock = create_autospec(tidegate.Limiter, instance=True)
    mock.limit(LIMIT, "user", 2, now_ms=5)
    mock.limit.assert_called_once_with(LIMIT, "user", 2, now_ms=5)
    with pytest.raises(TypeError):
        tidegate.Limiter().limit(LIMIT, "user", 1, 5)  # type: ignore[call-arg]  # now_ms is keyword-only

    class Doubling(tidegate.Limiter):
        def limit(
            self, limit: tidegate.Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
        ) -> tidegate.Decision:
            return super().limit(limit, identifier, 2 * cost, now_ms=now_ms)

    limiter = Doubling()
    assert limiter.limit(LIMIT, "a").effective == 2
    assert limiter.wait(LIMIT, "b").effective == 2
    assert limiter.limited(LIMIT, key=lambda: "c")(lambda: "done")() == "done"
    assert limiter.peek(LIMIT, "c").effective == 2


@pytest.mark.parametrize("cls", [tidegate.Limiter, tidegate.AsyncLimiter])
def test_a_wrong_call_of_a_constructor_names_the_class_that_was_called(cls: type) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\."):
        cls("redis://127.0.0.1")
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\..*'regoin'"):
        cls(regoin="fra")


def test_an_autospec_of_a_double_checks_the_arguments_of_limit() -> None:
    # That of a compiled Limiter does not: unittest.mock reads signatures of functions written in Python only.
    mock = create_autospec(AllowingLimiter, instance=True)
    mock.limit(LIMIT, "user", 2, now_ms=5)
    with pytest.raises(TypeError):
        mock.limit("user")


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_exports_what_it_has(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that is not installed is fine; a missing or misspelled module of Tidegate is not.
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"not checked on {error.name}, modules that need it: not installed")
    assert ast.get_docstring(source_of(module)), f"{name} does not say what it is for"
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), f"{name}.{exported}"


def test_importing_the_library_imports_nothing_optional_and_nothing_that_is_not_used() -> None:
    code = "import json, sys, tidegate; tidegate.Limiter(); print(json.dumps(sorted(sys.modules)))"
    answer = run_untraced(code)
    loaded = set(json.loads(answer.stdout))
    assert "tidegate.runtime.limiter" in loaded
    assert {name for name in loaded if name.partition(".")[0] in OPTIONAL} == set()
    assert loaded & LAZY == set()


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("tidegate")
    except PackageNotFoundError:
        pytest.skip("not checked on an installed package, its version: the tests run from the sources")
    assert tidegate.__version__ == installed
