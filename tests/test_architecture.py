"""Structure of the code: layers, budgets, public names, and side effects of imports."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import ctl
import pytest
import tensorflow as tf
from conftest import ROOT, TIMEOUT_SECS, environment, some_of
from measures import tree_of

# Layers of folders and root modules: each imports lower layers only. Imports within a folder have no cycle.
LAYERS = [
    ["errors", "version", "setting_types"],
    ["tensorflow_patches", "setting_names", "setting_values", "trainer_checks"],
    ["io"],
    ["supervision"],
    ["collectives"],
    ["distribute"],
    ["launch", "config"],
    ["deploy", "callbacks", "config_flags", "fast_dev_run"],
    ["step", "data", "checkpoints", "metrics"],
    ["hvd", "profiling", "evaluator", "parameter_server", "trackers", "trainer_options"],
    ["elastic"],
    ["training"],
    ["trainer", "tools"],
    ["keras", "testing", "learning_rate_search"],
    ["app", "cli"],
    ["__init__", "__main__"],
]
LAYER_BY_NAME = {name: layer for layer, names in enumerate(LAYERS) for name in names}
FILES = sorted((ROOT / "ctl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
PURE = (
    "deploy", "launch", "cli", "errors", "version", "io.log_filter", "io.paths", "io.directories",
    "io.authenticated_channel", "tools.doctor", "tools.inspect", "tools.profile", "tools.sweep",
    "tools.wrapping_command", "tools.random_search", "tools.median_rule", "tools.sweep_plan",
    "callbacks.schedule", "supervision.signals", "supervision.lease", "supervision.heartbeat",
    "distribute.platforms", "distribute.own_port", "distribute.topology", "distribute.job_fingerprint",
    "distribute.startup_barrier",
)  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "ctl").with_suffix("").parts)


@functools.cache
def imported(path: Path) -> list[str]:
    """Returns the modules of ctl that a file imports, also for types alone, as "metrics.protocol"."""
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                deep = f"{node.module}.{alias.name}"
                is_module = (ROOT / (deep.replace(".", "/") + ".py")).exists()
                names.append(deep if is_module else node.module)
    return [n.removeprefix("ctl.") for n in names if n.startswith("ctl.")]


def test_folders_import_lower_layers_only():
    for path in FILES:
        module = name_of(path)
        folder = module.partition(".")[0]
        for other in imported(path):
            other_folder = other.partition(".")[0]
            assert other_folder == folder or LAYER_BY_NAME[other_folder] < LAYER_BY_NAME[folder], (
                f"{module} imports {other}"
            )


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {name_of(p): set(imported(p)) for p in FILES if p.stem not in ("__init__", "__main__")}
    sorter = TopologicalSorter({name: imports & set(graph) for name, imports in graph.items()})
    sorter.prepare()  # raises CycleError, which contains the names


def test_every_folder_has_a_docstring():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT / "ctl":
            docstring = ast.get_docstring(tree_of(path))
            assert docstring, f"{path} has no docstring"


def test_no_module_imports_the_package_s_own_init():
    modules = {p.stem for p in FILES} | {p.parent.name for p in FILES}
    for path in FILES:
        for node in ast.walk(tree_of(path)) if name_of(path) != "__init__" else ():
            if isinstance(node, ast.Import):
                assert "ctl" not in [a.name for a in node.names], path
            if isinstance(node, ast.ImportFrom) and node.module == "ctl":
                assert {a.name for a in node.names} <= modules, path


def test_files_are_within_budget():
    sizes = {path: len(path.read_text().splitlines()) for path in [*FILES, *MODELS, *TESTS]}
    assert not {str(path): size for path, size in sizes.items() if size > 400}


def test_functions_and_classes_are_within_budget():
    for path in [*FILES, *MODELS]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0] if ast.get_docstring(node, clean=False) else None
                docstring = first.end_lineno - first.lineno + 1 if first else 0
                size = node.end_lineno - node.lineno + 1 - docstring
                assert size <= 60, f"{path}: {node.name} is too long"
                if node.name == "__init__":
                    flags = path in MODELS  # a keyword of a model is a flag of its program
                    count = len(node.args.args) - 1 + (0 if flags else len(node.args.kwonlyargs))
                    assert count <= 8, f"{path}: a constructor of {count} arguments"
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                assert len(methods) <= 20, f"{path}: {node.name} has {len(methods)} methods"


def test_folders_of_tests_are_those_of_the_code():
    other_folders = {
        "benchmarks", "cluster", "faults", "golden", "gpu", "mutation", "programs", "simulation", "workers"
    }  # fmt: skip
    folders = {p.relative_to(ROOT / "tests").parts[0] for p in TESTS if p.parent != ROOT / "tests"}
    assert folders - other_folders <= {p.relative_to(ROOT / "ctl").parts[0] for p in FILES}
    names = [p.name for p in TESTS if p.name.startswith("test_")]
    assert sorted(set(names)) == sorted(names)  # pytest imports them by their names


def test_no_module_has_a_generic_name():
    generic_names = {"utils", "util", "common", "misc", "helpers"}
    files = [p for p in FILES if name_of(p) != "hvd.util"]  # a name of Horovod that users import
    assert not generic_names & {p.stem for p in files} | generic_names & {p.parent.name for p in files}


# names that several modules define on purpose, because modules of the same type share an interface
SAME_EVERYWHERE = {
    "main",  # of a command line
    "read",  # of a platform: its variables -> Topology
    "parser", "write",  # of `ctl deploy <platform>`
    "T",  # a type variable
    # Horovod's names, which users import: in hvd, hvd.keras and hvd.elastic, and beside ctl's own
    "DistributedOptimizer", "allgather", "allreduce", "broadcast", "broadcast_global_variables",
    "reducescatter", "predict", "run", "scale_learning_rate", "shard", "__all__", "__getattr__", "_log",
}  # fmt: skip


def top_level(path):
    """Yields (name, node) of every definition and assignment at the top level of a module."""
    for node in tree_of(path).body:
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            name = getattr(target, "name", getattr(target, "id", None))
            if name is not None:
                yield name, node


def test_no_public_name_is_defined_twice():
    modules_by_name = {}
    for path in FILES:
        for name, _ in top_level(path):
            modules_by_name.setdefault(name, set()).add(name_of(path))
    assert {"ProcessGroup", "Topology", "Config"} <= set(modules_by_name)
    duplicates = {n: sorted(p) for n, p in modules_by_name.items() if len(p) > 1 and not n.startswith("_")}
    assert set(duplicates) <= SAME_EVERYWHERE, {n: duplicates[n] for n in set(duplicates) - SAME_EVERYWHERE}


def test_no_helper_is_written_twice():
    """Compares the arguments and bodies of all functions."""
    bodies = {}
    for path in FILES:
        for name, node in top_level(path):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 3:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                definition = ast.dump(node.args) + "".join(map(ast.dump, body))
                bodies.setdefault(definition, []).append(f"{name_of(path)}.{name}")
    duplicates = [function_names for function_names in bodies.values() if len(function_names) > 1]
    assert not duplicates, duplicates


# Underscore attributes outside of tensorflow_patches that are not private to TensorFlow or Keras: owners
OTHER_PRIVATE_ATTRIBUTES = {
    "_exit": "os, and the C library in io.exit_hook",
    "_getframe": "sys", "_current_frames": "sys", "_run_exitfuncs": "atexit",
    "_replace": "NamedTuple", "_fields": "NamedTuple",
    "_run_options": "Trainer, for ctl.run",
    "_prepare_trainer": "Trainer, for ctl.run, ctl.testing and ctl.find_learning_rate",
    "_prepared_trainer": "Trainer, for ctl.fit", "_checkpoints": "Trainer, for ctl.run",
    "_rows_may_vary": "Trainer, for training.task",
    "_repr_mimebundle_": "IPython, in metrics.console_screens",
    "_explicit_names": "Config",
    "_moments": "overridden in a subclass: hvd.sync_batch_norm",
    "_compute_gradients": "overridden in a subclass: hvd.tf_keras_optimizers",
}  # fmt: skip
OWN_PREFIXES = ("_ctl_", "_hvd_", "_of_hvd")  # attributes that ctl adds to objects of TensorFlow
PRIVATE_MODULES = ("tensorflow.python", "keras.src", "tf_keras.src")
ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "delattr", "attribute", "object.__setattr__"}


def private_parts(tree):
    """Yields the private modules and attributes of other packages that a module names, with their lines."""
    for node in ast.walk(tree):
        names, attributes = [], []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            names = [node.value]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            attributes = [node.attr]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ATTRIBUTE_FUNCTIONS
            and len(node.args) > 1
        ):
            attributes = [ast.unparse(node.args[1]).lstrip("f").strip("'")]
        yield from ((name, node.lineno) for name in names if name.startswith(PRIVATE_MODULES))
        for name in attributes:
            if re.fullmatch(r"_[a-z{].*", name) and not name.startswith(OWN_PREFIXES):
                yield name, node.lineno


def test_private_parts_of_tensorflow_are_used_in_tensorflow_patches_only():
    uses_by_name = {}
    for path in FILES:
        if path.parent.name != "tensorflow_patches":
            for name, line in private_parts(tree_of(path)):
                uses_by_name.setdefault(name, []).append(f"{name_of(path)}:{line}")
    assert uses_by_name.keys() == OTHER_PRIVATE_ATTRIBUTES.keys(), {
        name: uses_by_name.get(name, "is not used")
        for name in uses_by_name.keys() ^ OTHER_PRIVATE_ATTRIBUTES.keys()
    }


def test_models_use_only_the_public_names():
    for path in MODELS:
        for name in imported(path):
            public = ("errors", "hvd", "hvd.keras")
            assert name in public, f"{path.name} imports ctl.{name}; use `import ctl`"


def test_the_public_names_are_fixed():
    assert sorted(ctl.__all__) == sorted([
        "Audio", "BackupCheckpoints", "Callback", "CheckpointError", "CheckpointManager",
        "ChiefOnlyCheckpoints", "Config", "ConsoleWriter", "CtlError", "Decision", "EarlyStopping", "Every",
        "Gradients", "History", "HostAllReduce", "Intervals", "JsonlWriter", "Keep", "KerasTrainer",
        "LossSpike", "Matrix", "MlflowWriter", "PrCurve", "WandbWriter",
        "Manifest", "MemoryCallback", "MemoryCheckpoints", "MemoryWriter", "NonFiniteError",
        "NullCallback", "NullCheckpoints", "NullWriter", "OutOfMemory", "PeerLostError",
        "MetricWriter", "ReduceOnPlateau", "Results", "RunEnd", "SaveBest", "Stopped", "TensorBoardWriter",
        "Topology", "Trainer", "TrainerOptions", "UsageError", "__version__", "evaluate",
        "example_numbers", "find_learning_rate", "fit", "from_arrays", "from_source", "make_strategy",
        "predict", "run", "scale_learning_rate", "shard", "synchronize_batch_norm",
    ])  # fmt: skip
    for name in ctl.__all__:
        assert getattr(ctl, name) is not None
    with pytest.raises(AttributeError, match="Trainer"):
        _ = ctl.Trainr


def test_no_module_has_a_public_name():
    """The import of such a module would replace the public function."""
    assert not {p.stem for p in (ROOT / "ctl").glob("*.py")} & (set(ctl.__all__) - {"__version__"})


def test_importing_ctl_or_its_pure_parts_does_not_import_tensorflow():
    modules = [
        "ctl",
        *(f"ctl.{m}" for m in PURE),
        "ctl.launch.cli",
        "ctl.launch.horovodrun_cli",
        "ctl.deploy.command",
        "ctl.deploy.docker.command",
        "ctl.deploy.vertex.command",
        "ctl.deploy.kubernetes.command",
        "ctl.launch.run_function",
        "ctl.checkpoints.commit",
        "ctl.collectives.engine",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('tensorflow' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment(), timeout=TIMEOUT_SECS, check=False)
    assert result.returncode == 0


VARIANTS = "one step", "a loop", "until the end", "parts", "compiled", "program"


@pytest.mark.parametrize("variant", some_of(VARIANTS, "one step", "a loop", "parts"))
def test_the_step_is_at_most_six_frames_below_train(variant):
    """Frames of AutoGraph count too, because tracebacks contain them. Frames of TensorFlow do not."""
    import traceback

    from small_models import Small, every_step, examples

    frames = []

    class Watched(Small):
        def build(self):
            super().build()
            self.jit_compile = "loop" if variant == "program" else variant == "compiled"
            if variant == "parts":
                self.gradients = ctl.Gradients(accumulate_steps=2)

        def train_data(self, batch_size):
            if variant == "program":
                return ctl.from_arrays(examples(), batch_size)
            batches = tf.data.Dataset.from_tensor_slices(examples()).batch(batch_size, True)
            return batches.filter(lambda *_: True) if variant == "until the end" else batches.repeat()

        def train_step(self, batch):
            stack[:] = traceback.extract_stack()
            return super().train_step(batch)

    stack = []
    intervals = every_step() if variant == "one step" else ctl.Intervals(steps_per_loop=2)
    Watched(strategy="default", intervals=intervals, writers=[]).train(2)
    ctl_frames = [f for f in stack if f.filename.startswith(str(ROOT / "ctl"))]
    autograph = [f for f in stack if "__autograph_generated_file" in f.filename]
    frames = [f.name for f in stack if f in ctl_frames or f in autograph]
    below = frames[frames.index("train") + 1 :]
    last = below.index("tf__train_step") if "tf__train_step" in below else len(below)
    assert 3 <= last <= 6, below


SIDE_EFFECTS = """
import atexit, importlib, json, logging, os, pkgutil, signal, sys, threading, warnings
import tensorflow, keras, absl.flags, absl.logging  # their side effects do not count

def state():
    loggers = [logging.getLogger(name) for name in ("", "ctl", "tensorflow", "absl")]
    return {
        "environment": dict(os.environ), "excepthooks": repr((sys.excepthook, threading.excepthook)),
        "exit functions": atexit._ncallbacks(), "threads": [t.name for t in threading.enumerate()],
        "descriptors": sorted(os.listdir("/proc/self/fd")), "warnings": len(warnings.filters),
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "loggers": repr([(logger.handlers, logger.filters, logger.level) for logger in loggers]),
        "flags": sorted(absl.flags.FLAGS), "streams": repr((sys.stdout, sys.stderr)),
        "import hooks": repr(sys.meta_path), "methods": repr((
            tensorflow.compat.v1.Session.run, keras.Model._resolve_auto_jit_compile)),
    }

import ctl  # hides TensorFlow's start-up lines where TensorFlow is imported later, and does nothing else
changes_by_module, before = {}, state()
names = [module.name for module in pkgutil.walk_packages(ctl.__path__, "ctl.")]
for name in (n for n in names if not n.endswith("__main__")):
    importlib.import_module(name)
    after = state()
    changed = [key for key in after if after[key] != before[key]]
    if changed:
        changes_by_module[name] = changed
    before = after
print(json.dumps(changes_by_module))
"""


def test_importing_a_module_does_nothing_but_define_names():
    result = subprocess.run(
        [sys.executable, "-c", SIDE_EFFECTS], env=environment(), capture_output=True, text=True,
        timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert result.stdout.strip() == "{}", result.stdout + result.stderr[-2000:]
