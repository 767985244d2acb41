"""Types of the public names, as a type checker of a user's program reads them."""

import subprocess
import sys

import pytest
from conftest import ROOT

OPTIONS = ["--strict", "--ignore-missing-imports", "--follow-imports=silent", "--no-error-summary"]


def mypy(path):
    command = [sys.executable, "-m", "mypy", "--config-file=", *OPTIONS, str(path)]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_users_model_passes_the_strict_type_check_and_mistakes_are_errors(tmp_path):
    program = ROOT / "tests/programs/typed_model.py"
    result = mypy(program)
    assert result.returncode == 0, result.stdout + result.stderr
    path = tmp_path / "wrong.py"
    text = program.read_text()
    for correct, incorrect in (
        ("ctl.Decision(stop=True)", 'ctl.Decision(stop="now")'),
        ("trainer.train(10)", 'trainer.train("ten")'),
        ("rank: int = trainer.topology", "rank: str = trainer.topology"),
    ):
        assert correct in text
        path.write_text(text.replace(correct, incorrect))
        assert "error: " in mypy(path).stdout, incorrect


def test_the_marker_file_of_types_is_part_of_the_package():
    assert (ROOT / "ctl/py.typed").is_file()
    assert 'ctl = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
