"""Limits of the figures of measures.py, and rules for the core of ctl."""

import ast
import re
import subprocess

import ctl
import measures
import pytest
from ctl.profiling.loop_observer import LoopObserver
from ctl.step.reducers.reducer import GradientReducer
from measures import BUILT_ON, ROOT, docstrings, files_of, tree_of

CORE_FILES = [ROOT / "ctl" / "trainer.py", *files_of(*BUILT_ON)]
ALLOWED_ASSIGNMENTS = {  # of objects of users, Python, TensorFlow and protocol buffers
    "__init__.__signature__", "callback.state", "optimizer.learning_rate", "trainer.gradients",
    "trainer.step_variable", "self._wrapped.state", "options.autotune.enabled",
    "options.experimental_optimization.apply_default_optimizations",
    "options.experimental_distribute.auto_shard_policy", "extra.values", "failure.errno", "error.exit_code",
    "weakref.finalize(self, release.release, release.register(self.iterator)).atexit",
    "called.name", "node.attr['deterministic'].s", "node.attr[name].i",
    "entry.bool_value", "entry.number_value", "entry.string_value",
}  # fmt: skip
BASES = (ctl.CheckpointManager, ctl.MetricWriter, ctl.Callback, LoopObserver, GradientReducer, ctl.Trainer)
SHARED_WITH_KERAS = {
    "name", "state", "model", "optimizer", "build", "train_step", "predict", "evaluate", "log",
}  # fmt: skip
LIMITS = {  # unclear phrases by folder, which may only become fewer
    "": 5, "callbacks": 2, "checkpoints": 7, "collectives": 51, "data": 4, "deploy": 45,
    "distribute": 8, "elastic": 0, "evaluator": 0, "hvd": 48, "io": 5, "keras": 3, "launch": 46,
    "metrics": 3, "parameter_server": 2,
    "profiling": 2, "step": 9, "supervision": 4, "tensorflow_patches": 29, "tools": 15, "trackers": 0,
    "training": 9,
}  # fmt: skip


def test_no_code_assigns_attributes_of_objects_of_the_core_from_outside():
    assigned = {name for path in CORE_FILES for name in measures.outside_assignments(path)}
    assert assigned == ALLOWED_ASSIGNMENTS


def test_only_the_preparation_and_programs_have_a_parameter_trainer():
    paths = [ROOT / "ctl" / "trainer.py", ROOT / "ctl" / "app.py", *files_of("training")]
    assert len(measures.functions_with("trainer", paths)) <= 12
    modules = {path.name for path in files_of("training") if measures.functions_with("trainer", [path])}
    assert modules == {"callback_runner.py", "preparation.py", "task.py", "user_methods.py"}


def test_members_of_own_base_classes_are_not_looked_up_by_name():
    members = {name for base in BASES for name in dir(base) if not name.startswith("_")} - SHARED_WITH_KERAS
    for path in CORE_FILES:
        for node in ast.walk(tree_of(path)):
            is_lookup = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
            if is_lookup and isinstance(node.args[1], ast.Constant) and path.name != "adapter.py":
                assert node.args[1].value not in members, f"{path}:{node.lineno}"


def test_the_core_imports_no_program_and_not_horovod():
    for path in CORE_FILES:
        for node in ast.walk(tree_of(path)):  # includes imports for types only
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                forbidden = {f"ctl.{folder}" for folder in ("hvd", "deploy", "launch", "tools")}
                assert not any(name.startswith(tuple(forbidden)) for name in names), f"{path}:{node.lineno}"


def test_files_that_docstrings_name_exist():
    folders = ("ctl", "models", "docs", "tests")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    paths = {str(path.relative_to(ROOT.parent)) for path in (ROOT / "ctl").rglob("*.py")}
    for path in sorted((ROOT / "ctl").rglob("*.py")):
        for text in docstrings(path):
            for name in re.findall(r"(?<![\w/.-])((?:[a-z_]+/)*[a-z_0-9]+\.py)\b", text):
                is_path = any(module_path.endswith(f"/{name}") for module_path in paths)
                assert is_path or name in names or name in EXAMPLE_FILES, f"{path} names {name}"


def test_the_picture_of_the_objects_is_drawn_from_files_that_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate_architecture as architecture

    assert architecture.FILE.read_text() == architecture.picture()
    for box in architecture.BOXES:
        name = box.title.partition(",")[0]
        text = (ROOT / "ctl" / box.file).read_text()
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), box.title
    stations = [(walk, number) for box in architecture.BOXES for walk, number in box.stations.items()]
    for walk in architecture.WALKS:
        numbers = sorted(number for name, number in stations if name == walk)
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 1


# examples of programs
EXAMPLE_FILES = {"train.py", "t.py", "conftest.py", "job.py", "script.py", "main.py"}


@pytest.mark.parametrize("folder", sorted(LIMITS))
def test_sentences_and_names_do_not_become_less_clear(folder):
    assert measures.unclear_by_folder()[folder] <= LIMITS[folder]


def test_no_other_files_are_beside_the_folders():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    names = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == {
        "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "ctl", "docs", "models",
        "pyproject.toml", "tests",
    }  # fmt: skip


def test_every_folder_has_a_limit_and_the_core_does_not_grow():
    assert measures.unclear_by_folder().keys() <= LIMITS.keys()
    core = [ROOT / "ctl" / "trainer.py", *files_of(*measures.CORE)]
    assert measures.num_lines(core) <= 20_450
