"""What `make package` builds: each artefact is installed in a fresh environment and runs the examples of README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import package
import tidegate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# `-P` and no PYTHONPATH: nothing but the installed package can be imported.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDEGATE"))}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package") / "dist"
    package.build_all(directory)
    return directory


def artefact(dist: Path, kind: str) -> Path:
    pattern = {"sdist": "*.tar.gz", "compiled": "*-cp*-cp*-*.whl", "pure": "*-py3-none-any.whl"}[kind]
    (found,) = dist.glob(pattern)
    return found


def run(python: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [str(python), *arguments],
        env=CLEAN | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["sdist", "compiled", "pure"])
def test_an_artefact_installs_alone_and_runs_the_examples_of_the_readme(
    kind: str, dist: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    this = Path(sys.executable)  # its pip, which installs into the other
    pip = ["-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    flags: list[str] = []
    if kind == "sdist":
        # The sdist was built compiled for the wheel. Here it is built as on a machine without a compiler.
        run(this, *install, "setuptools", "wheel")
        flags = ["--no-build-isolation"]
    run(
        this,
        *install,
        *flags,
        f"tidegate[fastapi,cli] @ {artefact(dist, kind).as_uri()}",
        TIDEGATE_PURE="1",
    )
    run(this, *pip, "check")

    seen = run(
        python,
        "-P",
        "-c",
        "import tidegate; print(tidegate.compiled, tidegate.__version__, tidegate.__file__)",
    )
    compiled, version, file = seen.split()
    assert compiled == str(kind == "compiled")
    assert version == tidegate.__version__
    assert Path(file).is_relative_to(tmp_path)
    examples = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(examples) >= 2
    run(python, "-P", "-W", "error", "-c", "\n".join(examples))
    assert version in run(tmp_path / "venv" / "bin" / "tidegate", "version")


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def test_the_readme_of_a_wheel_has_no_relative_links(dist: Path) -> None:
    text = metadata(artefact(dist, "pure"))
    assert "Description-Content-Type: text/markdown" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"/raw/v{tidegate.__version__}/docs/pictures/overview.svg" in text


def test_the_metadata_names_the_supported_pythons_and_the_addresses(dist: Path) -> None:
    for kind in ("compiled", "pure"):
        text = metadata(artefact(dist, kind))
        assert f"\nVersion: {tidegate.__version__}\n" in text
        assert re.findall(r"Classifier: Programming Language :: Python :: (3\.\d+)\n", text) == [
            "3.11", "3.12", "3.13", "3.14"
        ]  # fmt: skip
        assert re.findall(r"\nRequires-Dist: (?![^\n]*extra ==)", text) == [], (
            "the library has no dependencies"
        )
        assert len(re.findall(r"\nProject-URL: ", text)) == 5


def files_of(path: Path) -> Iterator[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield from archive.namelist()
    else:
        with tarfile.open(path) as archive:
            yield from (name.partition("/")[2] for name in archive.getnames())


def test_the_artefacts_hold_what_belongs_into_them_and_nothing_else(dist: Path) -> None:
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "tidegate").rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }
    pure = {name for name in files_of(artefact(dist, "pure")) if ".dist-info/" not in name}
    assert pure == sources
    compiled = {name for name in files_of(artefact(dist, "compiled")) if ".dist-info/" not in name}
    extra = compiled - sources
    assert sources <= compiled
    assert all(name.endswith((".so", ".pyd")) for name in extra)
    assert any(name.startswith("tidegate/core/engine.") for name in extra)
    sdist = set(files_of(artefact(dist, "sdist")))
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
        "tests/conftest.py",
        "docs/index.md",
        "Makefile",
    ):
        assert name in sdist
    assert not [
        name
        for name in sdist
        if name.startswith((".git", ".venv", "build/")) or name.endswith((".so", ".pyc"))
    ]


def test_this_python_builds_wheels_for_itself(dist: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in artefact(dist, "compiled").name
