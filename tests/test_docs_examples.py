"""Examples in README and docs run, those of a page one after the other.

One that cannot, because it needs a server, begins with ```python no-run: and the reason; it is only compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    str(page.relative_to(ROOT)): found for page in PAGES if (found := list(BLOCK.finditer(page.read_text())))
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    program = []
    for match in EXAMPLES[page]:
        mark, code = match["mark"].strip(), match["code"]
        compile(code, page, "exec")
        if mark.startswith("no-run"):
            assert mark.removeprefix("no-run").strip(" :"), f"{page}: an example that does not run says why"
        else:
            program.append(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_has_an_example() -> None:
    assert "README.md" in EXAMPLES


def test_the_docstring_of_the_package_runs() -> None:
    import tidegate

    assert tidegate.__doc__ is not None
    lines = [line[4:] for line in tidegate.__doc__.splitlines() if line.startswith("    ")]
    exec(compile("\n".join(lines), "tidegate.__doc__", "exec"), {})
