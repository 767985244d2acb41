"""Types of the public names, as type checkers of a user's program read them."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import typing

import ctl
import pytest
from conftest import ROOT, TIMEOUT_SECS
from ctl.config import FIELDS, RUN_SETTINGS
from ctl.setting_types import RunSettings, TrainerSettings

PROGRAM = ROOT / "tests/programs/typed_model.py"
MYPY_SETTINGS = """
[mypy]
strict = True
ignore_missing_imports = True
follow_imports = silent
[mypy-models.*,readme.*]
allow_untyped_defs = True
allow_untyped_calls = True
allow_incomplete_defs = True
disallow_any_generics = False
disallow_subclassing_any = False
warn_return_any = False
"""
MISTAKES = [
    ("ctl.Decision(stop=True)", 'ctl.Decision(stop="now")'),
    ("trainer.train(10)", 'trainer.train("ten")'),
    ("rank: int = trainer.topology", "rank: str = trainer.topology"),
    ("    global_batch_size=4,", "    global_batch_sze=4,"),
    ("    global_batch_size=4,", '    global_batch_size="4",'),
    ("ctl.Config(train_steps=10,", "ctl.Config(train_step=10,"),
    ("ctl.Config(train_steps=10,", 'ctl.Config(train_steps="10",'),
    ('.with_settings(keep="5")', ".with_settings(kep=5)"),
    ("config=config, seed=1)", "config=config, sed=1)"),
    ("width=WIDTH, global_batch_size=8", 'width=WIDTH, global_batch_size="8"'),
    ("Typed(seed=1)", 'Typed(width="1")'),
    ("intervals=ctl.Intervals", "intervals=ctl.Every"),
    ("model_dir: str | None =", "model_dir: int ="),
    ("seed: int =", "seed: str ="),
    ("results: ctl.Results =", "results: ctl.Result ="),
    ("end: ctl.RunEnd | None =", "end: str ="),
]


def mypy(folder, *paths):
    """Checks programs with the settings of users, which are written into `folder`.

    The settings of ctl/ are the same each time, so it is analysed once.
    """
    settings = folder / "mypy.ini"
    settings.write_text(MYPY_SETTINGS)
    options = [f"--config-file={settings}", "--cache-dir=.mypy_cache/users", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, paths)]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)


@functools.cache
def can_run_pyright():
    """Returns False without the package, Node.js, or the files that its first start downloads."""
    command = [sys.executable, "-m", "pyright", "--version"]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    result = subprocess.run(
        command, check=False, capture_output=True, timeout=TIMEOUT_SECS, env=environment
    )
    return result.returncode == 0


def pyright(folder):
    """Returns the messages about each file of a folder, by file name."""
    settings = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT)],
        # TensorFlow and Keras have no types
        **{f"reportUnknown{name}Type": "none" for name in ("Member", "Variable", "Argument", "Parameter")},
        "reportMissingTypeStubs": "none",
        "reportMissingTypeArgument": "none",
        "reportUntypedBaseClass": "none",
        "reportPrivateImportUsage": "none",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", "."]
    result = subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECS
    )
    messages = {path.name: [] for path in folder.glob("*.py")}
    for message in json.loads(result.stdout)["generalDiagnostics"]:
        messages[message["file"].rpartition("/")[2]].append(message["message"])
    return messages


def write_mistakes(folder):
    """Writes the program with one mistake each. Returns the mistake by file name."""
    text = PROGRAM.read_text()
    for number, (correct, incorrect) in enumerate(MISTAKES):
        assert text.count(correct) == 1, correct
        (folder / f"wrong_{number}.py").write_text(text.replace(correct, incorrect))
    return {f"wrong_{number}.py": incorrect for number, (_, incorrect) in enumerate(MISTAKES)}


@pytest.mark.slow
def test_a_users_model_passes_the_strict_type_check_and_mistakes_are_errors(tmp_path):
    result = mypy(tmp_path, PROGRAM)
    assert result.returncode == 0, result.stdout + result.stderr
    incorrect_by_name = write_mistakes(tmp_path)
    errors = mypy(tmp_path, *(tmp_path / name for name in incorrect_by_name)).stdout
    for name, incorrect in incorrect_by_name.items():
        assert re.search(rf"{name}:\d+: error: ", errors), incorrect


@pytest.mark.slow
def test_pyright_accepts_a_users_model_and_rejects_mistakes(tmp_path):
    if not can_run_pyright():
        pytest.skip("pyright is not installed")
    incorrect_by_name = write_mistakes(tmp_path)
    (tmp_path / "right.py").write_text(PROGRAM.read_text())
    messages = pyright(tmp_path)
    assert messages.pop("right.py") == []
    assert not [incorrect for name, incorrect in incorrect_by_name.items() if not messages[name]]


@pytest.mark.slow
def test_the_models_and_the_example_of_the_readme_pass_the_type_check(tmp_path):
    readme = tmp_path / "readme.py"
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    readme.write_text("".join(block.partition("```")[0] for block in blocks))
    assert "class First(ctl.Trainer)" in readme.read_text()
    result = mypy(tmp_path, "models", readme)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_types_of_the_settings_are_those_of_the_fields():
    text = (ROOT / "ctl/setting_types.py").read_text(encoding="utf-8")
    script = ROOT / "docs/generate_setting_types.py"
    spec = importlib.util.spec_from_file_location("generate_setting_types", script)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert text == generator.module(), "write it again with: python docs/generate_setting_types.py"
    assert set(RunSettings.__annotations__) == set(FIELDS)
    assert set(TrainerSettings.__annotations__) == set(FIELDS) - {*RUN_SETTINGS, "writers"}
    options = set(ctl.TrainerOptions.__annotations__) - set(TrainerSettings.__annotations__)
    keywords = ctl.Trainer.__init__.__kwdefaults__
    assert options == set(keywords) and not ctl.TrainerOptions.__required_keys__


def test_a_constructor_with_options_works_without_a_type_checker():
    unpack = pytest.importorskip("typing_extensions").Unpack

    class Wide(ctl.Trainer):
        def __init__(self, config=None, *, width: int = 4, **options: unpack[ctl.TrainerOptions]):
            super().__init__(config, **options)
            self.width = width

    trainer = Wide(width=8, global_batch_size=16, writers=[])
    assert (trainer.width, trainer.global_batch_size) == (8, 16)
    assert "options" in typing.get_type_hints(Wide.__init__, include_extras=True)
    with pytest.raises(ctl.UsageError, match="global_batch_size"):
        Wide(global_batch_sze=8)


def test_the_marker_file_of_types_is_part_of_the_package():
    assert (ROOT / "ctl/py.typed").is_file()
    assert 'ctl = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
