"""The examples of docs/libraries.md run, each with the model at the top of the page."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from conftest import TIMEOUT_SECS, environment

PAGE = Path(__file__).parent.parent / "docs/libraries.md"
FIRST, *SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def libraries_of(section):
    """Returns the libraries that a section imports."""
    return re.findall(r"^import (\w+)", "".join(CODE.findall(section)), re.MULTILINE)


def cases():
    """Returns a case for each section. Cases with libraries of the extra `slow` are of the second tier."""
    for section in SECTIONS:
        title, libraries = section.splitlines()[0], libraries_of(section)
        missing = [name for name in libraries if importlib.util.find_spec(name) is None]
        marks = [pytest.mark.slow] if libraries else []
        marks += [pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]
        yield pytest.param(section, marks=marks, id=title)


@pytest.mark.parametrize("section", cases())
def test_the_example_of_a_library_runs(section, tmp_path):
    program = tmp_path / "example.py"
    program.write_text("".join(CODE.findall(FIRST) + CODE.findall(section)), encoding="utf-8")
    result = processes.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment(), timeout=TIMEOUT_SECS,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
