"""The shape of the code: levels, budgets, public names, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import ctl
import pytest
from conftest import ROOT, environment

# A module imports strictly lower levels. Everything in a folder has the folder's level, unless named.
LEVELS = {
    "version": 0, "errors": 0, "quiet": 0,
    "platforms": 1,
    "every": 2, "signals": 2, "cluster": 2, "optimizers": 2, "keras_losses": 2, "shares": 2,
    "watchers": 2, "lease": 2, "files": 0, "collective_order": 2,
    "update_lock": 2, "communication": 2, "devices": 2, "heartbeat": 2, "facts": 2, "pipelines": 2,
    "io": 1, "supervision": 1, "distribute": 3, "positions": 3,
    "placement": 3, "directories": 2, "doctor": 4, "own_port": 3,
    "finiteness": 2, "gradients": 3, "spikes": 3,
    "preflight": 3,
    "making": 4, "parameter_servers": 3, "metrics": 3,  "arrays": 3,
    "flags_help": 3, "launch": 3, "runner": 4, "hvd": 5,
    "randomness": 4, "cli": 4, "deploy": 4,
    "strategies": 5,
    "averaging": 6, "agreement": 6, "sharding": 6, "batches": 6, "state": 6, "export": 6, "__main__": 6,
    "data": 7, "reports": 7, "checkpoints": 7,
    "causes": 8, "checks": 8, "resuming": 9, "worker_data": 8,
    "inspect_command": 8,
    "loops": 9,
    "telling": 10, "feeding": 10, "following": 10, "pictures": 10, "watching": 10,
    "training": 10,
    "session": 11,
    "evaluator": 12,
    "trainer": 13, "platform_hooks": 13,
    "keras_training": 14,
    "fitting": 15, "app": 15,
    "__init__": 16,
}  # fmt: skip
WITHIN = {
    "distribute": ["exit_barrier", "connection"],
    "supervision": ["process_identity"],
    "training": ["evaluation"],
    "io": ["exit_hook", "authenticated_channel", "json_lines"],
    "reports": ["publishing", "protocol", "parameters", "summaries", "event_files", "hypertune", "pace",
                "console_text",
                "console_plain", "console_live", "tensorboard_log", "group", "memory", "jsonl",
                "tensorboard", "console"],
    "checkpoints": ["checksums", "protocol", "retention", "memory", "commit",
                    "restoring", "snapshot", "saving", "chief_only", "backup", "watched", "name_matching",
                    "warm_start"],
    "loops": ["pace", "skipping", "step", "graph", "synchronous", "asynchronous"],
    "platforms": ["job", "vertex", "tf_config", "listed", "slurm", "mpi", "sagemaker"],
    "preflight": ["messages", "watchdog", "worker", "chief"],
    "launch": ["saying", "memory", "groups", "guard", "remote", "ports", "logs", "roles", "log_files",
               "hosts", "ssh", "discovery", "progress", "heartbeats", "attempts", "retrying", "layout",
               "processes", "gang", "watching", "supervisor", "options", "command"],
    "runner": ["saying", "values", "flags", "options", "config_file", "environment", "builds",
               "streams", "placing", "ranks", "jobs", "heartbeats", "static", "service", "machines",
               "roster", "lookout", "elastic", "elastic_options", "command", "call", "function"],
    "deploy": ["secret_words", "words", "doubts", "forms", "texts", "output", "slurm", "docker.project",
               "docker.dockerfile", "docker.command", "vertex.machines", "vertex.tuning", "vertex.job",
               "vertex.rules", "vertex.options", "vertex.submit", "vertex.command",
               "kubernetes.setting", "kubernetes.pods", "kubernetes.around", "kubernetes.flavors",
               "kubernetes.rules", "kubernetes.options", "kubernetes.command", "command"],
    "hvd": [
        "errors", "engine.frames", "engine.arithmetic", "engine.requests", "engine.inline",
        "engine.settings", "engine.table", "engine.timeline", "engine.lines", "engine.agreement",
        "engine.coordinator", "engine.contents", "engine.failures", "engine.meeting", "engine.mesh",
        "engine.rings", "engine.transfers", "engine.engine", "process_sets", "rendezvous",
        "keras_compilation", "process", "advice", "aggregation", "built", "graph_errors", "calls",
        "compression",
        "packing", "objects", "run_time", "ops", "variables", "elastic", "hooks", "keras.rates",
        "reducing", "keras.callbacks", "keras.elastic", "keras3_optimizers", "tf1_optimizers",
        "tf_keras_optimizers", "optimizers", "keras.optimizers", "keras.loading",
        "keras.values", "sync_batch_norm", "tapes", "util", "keras2_spellings", "as_horovod",
    ],
}  # fmt: skip
FILES = sorted((ROOT / "ctl").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
PURE = ("deploy", "launch", "runner", "cli", "cluster", "platforms", "directories", "doctor", "own_port",
        "errors",
        "every", "quiet", "version", "signals",
        "lease", "placement", "files", "inspect_command", "heartbeat", "facts", "preflight",
        "io")  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "ctl").with_suffix("").parts)


def imported(path: Path) -> list[str]:
    """Modules of ctl that a file imports, as "reports.protocol"; type-checking blocks are left out."""
    names = []
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                deep = f"{node.module}.{alias.name}"
                is_module = (ROOT / (deep.replace(".", "/") + ".py")).exists()
                names.append(deep if is_module else node.module)
    return [n.removeprefix("ctl.") for n in names if n.startswith("ctl.")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_lower_levels_only(path):
    me = name_of(path)
    folder, _, inner = me.partition(".")
    for other in imported(path):
        other_folder, _, other_inner = other.partition(".")
        if folder == other_folder:
            order = WITHIN[folder]
            if inner.rpartition(".")[2] in ("__init__", "__main__"):
                continue
            assert order.index(other_inner) < order.index(inner), f"{me} imports {other}"
        else:
            assert LEVELS[other_folder] < LEVELS[folder], f"{me} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_relies_on_the_package_s_own_init(path):
    if name_of(path) == "__init__":
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert "ctl" not in [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom) and node.module == "ctl":
            modules = {p.stem for p in FILES} | {p.parent.name for p in FILES}
            assert {a.name for a in node.names} <= modules


@pytest.mark.parametrize("path", [*FILES, *MODELS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_functions_and_classes_are_within_budget(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno + 1 <= 60, f"{node.name} is too long"
            if node.name == "__init__":
                count = len(node.args.args) - 1 + len(node.args.kwonlyargs)
                assert count <= 7, f"a constructor of {count} arguments"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            assert len(methods) <= 20, f"{node.name} has {len(methods)} methods"


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_of_tests_are_within_budget(path):
    assert len(path.read_text().splitlines()) <= 400


def test_no_module_is_called_after_what_did_not_fit_elsewhere():
    bad = {"utils", "util", "common", "misc", "helpers"}
    files = [p for p in FILES if name_of(p) != "hvd.util"]  # whose name Horovod's users import
    assert not bad & {p.stem for p in files} | bad & {p.parent.name for p in files}


def test_models_use_only_the_public_names():
    for path in MODELS:
        for name in imported(path):
            public = ("errors", "hvd", "hvd.keras")
            assert name in public, f"{path.name} imports ctl.{name}; use `import ctl`"


def test_the_public_names_are_a_promise():
    assert sorted(ctl.__all__) == sorted([
        "Agreement", "BackupCheckpoints", "CheckpointError", "CheckpointManager",
        "ChiefOnlyCheckpoints", "ConsoleReport", "CtlError", "EarlyStopping", "Every",
        "Gradients", "History", "Intervals", "JsonlReport", "Keep", "KerasTrainer", "LossSpike",
        "Manifest", "MemoryCheckpoints", "MemoryReport", "NonFiniteError", "NullCheckpoints",
        "NullReport", "OutOfMemory",
        "PeerLostError", "ReduceOnPlateau", "Report", "SaveBest", "Stopped", "TensorBoardReport",
        "Trainer", "UsageError", "__version__", "evaluate", "example_numbers", "fit",
        "from_arrays", "make_strategy", "run", "scale_learning_rate", "shard",
    ])  # fmt: skip
    for name in ctl.__all__:
        assert getattr(ctl, name) is not None
    with pytest.raises(AttributeError, match="Trainer"):
        _ = ctl.Trainr


def test_no_module_has_the_name_of_something_public():
    """Importing it would put the module in the place of the function."""
    assert not {p.stem for p in (ROOT / "ctl").glob("*.py")} & (set(ctl.__all__) - {"__version__"})


def test_importing_ctl_or_its_pure_parts_does_not_import_tensorflow():
    modules = [
        "ctl",
        *(f"ctl.{m}" for m in PURE),
        "ctl.launch.command",
        "ctl.runner.command",
        "ctl.deploy.command",
        "ctl.deploy.docker.command",
        "ctl.deploy.vertex.command",
        "ctl.deploy.kubernetes.command",
        "ctl.runner.function",
        "ctl.checkpoints.commit",
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=60, check=False)
    assert done.returncode == 0


def test_the_step_is_at_most_five_frames_below_train():
    import traceback

    from small_models import Small, every_step

    frames = []

    class Watched(Small):
        def train_step(self, batch):
            frames[:] = [
                f.name
                for f in traceback.extract_stack()
                if f.filename.startswith(str(ROOT / "ctl"))
            ]
            return super().train_step(batch)

    Watched(strategy="default", intervals=every_step(), reports=[]).train(1)
    below = frames[frames.index("train") + 1 :]
    assert len(below) <= 5, below
