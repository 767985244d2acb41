"""Execution of the commands of README.md and docs/, in order, in one directory per page, with fewer steps.

Absolute paths become paths in that directory, and hosts become localhost.
Two sets contain the excluded programs.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import photos
import processes
import pytest
from conftest import ROOT, environment, free_ports, some_of
from test_docs import GENERATED_MARKER, PAGES, blocks, label

CLOUD_COMMANDS = {"gcloud", "kubectl", "docker", "sbatch", "tail"}  # need a cloud or a cluster
SETUP_COMMANDS = {"pip", ".", "make", ".venv/bin/python", ".venv/bin/ruff"}  # CI itself, and its commands
STEPS = 2
EXTRA_FLAGS = {
    "": [f"--train_steps={STEPS}", "--global_batch_size=8", "--eval_every_steps=0"],
    "models.mnist": ["--export="],
    "models.language": ["--context=16", "--layers=1", "--width=8", "--heads=2", "--length=5"],
    "models.resnet": ["--width=2", "--blocks=1", "--export="],
    "models.recommender": ["--rows=1000"],
    "models.simclr": ["--features=8"],
    "models.cartpole": ["--game_steps=20"],
    "models.flowers": ["--image_size=32"],
}
PREPARATION = {  # commands that a reader of the page has run before
    "docs/checkpoints.md": ["python -m models.mnist --model_dir=runs/c"],
    "docs/metrics.md": ["python -m models.mnist --model_dir=/tmp/mnist"],
}
SCRIPT_OPTIONS = {
    "overhead": ["--strategy=default"], "xla": ["--model=tiny"],
    "host_cost": ["--only=metrics", "--rounds=1", "--steps=20"],
    "communication": ["--steps=4", "--variants", "tutorial", "tcp"],
    "saving": ["--rounds=1", "--every=4"], "sparse": ["--case=50,000 x 8, 512 rows"], "hvd": ["--calls=2"],
    "simulated_scaling": ["--steps=4", "--rounds=1", "--workers=8,64"],
    "simulation_errors": ["--ranks=2,3", "--bytes=131072", "--rounds=1", "--calls=5"],
    "sync_every": ["--steps=32", "--every", "16", "--outer", "0.7,0.5"],
}  # fmt: skip
EXECUTABLES = {
    "ctl": [sys.executable, "-m", "ctl"], "ctlrun": [sys.executable, "-m", "ctl.launch.horovodrun_cli"],
    "tensorboard": [sys.executable, "-m", "tensorboard.main"],
}  # fmt: skip


def lines_of(page: Path) -> list[str]:
    """Returns the commands of a page. Commands that display the results of others come last."""
    texts = [re.sub(r"\\\n", " ", text) for _, text in blocks(page, "sh")]
    texts = [re.sub(r"^export (.*)\n", r"\1 ", text, flags=re.MULTILINE) for text in texts]
    if page.stem == "parameter_servers":  # "Run the same command in every process"
        texts = [f"TF_CONFIG='{blocks(page, 'json')[0][1].strip()}' {text}" for text in texts]
    lines = [line for text in texts for line in text.splitlines() if shlex.split(line, comments=True)]
    return sorted(lines, key=lambda line: line.startswith("tensorboard"))


def is_run(line: str) -> bool:
    return (
        shlex.split(line, comments=True)[0] not in CLOUD_COMMANDS | SETUP_COMMANDS and "-m venv" not in line
    )


def is_slow(line: str) -> bool:
    """Returns whether the line runs a script that measures or plots."""
    return re.match(r"python (tests/benchmarks|docs)/", line) is not None


def prepare_files(page: Path, directory: Path) -> None:
    """Creates the files that the commands of a page use."""
    if page.stem == "first_model":
        below = page.read_text("utf-8").split("## As a command")[1]
        code = [text for _, text in blocks(page, "python")[:2]]
        main = re.search(r"```python no-run\n(.*?)```", below, re.DOTALL)
        (directory / "first.py").write_text("\n".join([*code, main[1]]))
    if page.stem in ("several_machines", "elastic"):
        (directory / "hosts.sh").write_text("#!/bin/sh\necho 127.0.0.1:2\n")
        (directory / "hosts.sh").chmod(0o755)
    if page.parent.name == "deploy":
        (directory / "tf_ctl-0.1.0-py3-none-any.whl").touch()
        (directory / "trainer").mkdir()
        (directory / "trainer" / "task.py").touch()
    (directory / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    if page.stem in ("flowers", "models"):
        photos_directory = photos.make(directory, per_class=4)
        shutil.copytree(photos_directory, directory / "PHOTOS")
        shutil.copytree(photos_directory / "china", directory / "new")


def localize(line: str, directory: Path) -> str:
    """Returns the line with paths and hosts of this machine."""
    if not line.startswith("ctl deploy"):  # its paths belong to the cluster
        line = re.sub(r"(?<=[= ])/(tmp|data|shared)/", f"{directory}/", line)
    line = line.replace("host1:2,host2:2 ", "127.0.0.1:2 ")
    hosts = sorted(set(re.findall(r"host\d:2222", line)))
    for host, port in zip(hosts, free_ports(len(hosts)), strict=True):
        line = line.replace(host, f"127.0.0.1:{port}")
    return line


def command_to_run(line: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command with fewer steps, and the environment variables that precede it."""
    command, variables = shlex.split(line, comments=True), {}
    while re.match(r"[A-Z_]+=", command[0]):
        name, _, value = command.pop(0).partition("=")
        variables[name] = value
    model = next((w for w in command if re.match(r"models\.\w+|first\.py", w)), None)
    if model is not None and "horovod" in model:
        command = [re.sub(r"^--steps=\d+$", f"--steps={STEPS}", w) for w in command]
    elif model is not None and "deploy" not in command:
        command = [w for w in command if not w.startswith("--epochs")] + [
            *EXTRA_FLAGS[""],
            *EXTRA_FLAGS.get(model, []),
        ]
    command = [re.sub(r"^--random=\d+$", "--random=2", w) for w in command]
    if command[0] == "tensorboard":
        command.append("--inspect")
    if command[1] != "deploy":
        command = [sys.executable if w == "python" else w for w in command]
    return [*EXECUTABLES.get(command[0], []), *command[command[0] in EXECUTABLES :]], variables


def task_configs(config: str) -> list[str]:
    """Returns a TF_CONFIG for each process of the job. The last one is that of the given task."""
    cluster, own_task = (json.loads(config)[key] for key in ("cluster", "task"))
    tasks = [
        {"type": task_type, "index": i} for task_type, hosts in cluster.items() for i in range(len(hosts))
    ]
    tasks.sort(key=lambda task: task == own_task)
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def run_line(line: str, directory: Path) -> None:
    command, variables = command_to_run(localize(line, directory))
    *other_configs, own_config = task_configs(variables["TF_CONFIG"]) if "TF_CONFIG" in variables else [""]
    if own_config:
        variables["TF_CONFIG"] = own_config
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    other_processes = [
        processes.start(command, cwd=directory, env=environment(TF_CONFIG=c), **silent)
        for c in other_configs
    ]
    try:
        result = processes.run(
            command, cwd=directory, env=environment(**variables), stderr=subprocess.STDOUT
        )
        codes = [result.returncode, *(process.wait(processes.TIMEOUT_SECS) for process in other_processes)]
    finally:
        for process in other_processes:
            process.kill()
    assert not any(codes), f"{line}\n{shlex.join(command)}\n{codes}\n{result.stdout[-3000:]}"


def normalize(line: str) -> str:
    """Returns the line without its number of steps and its output directory."""
    return re.sub(r" --(model_dir|train_steps|\w+_every_steps|global_batch_size)=\S+", "", line)


def commands_by_page() -> dict[Path, list[str]]:
    """Returns the commands by page. A command of several pages appears once."""
    normalized_lines: set[str] = set()
    commands: dict[Path, list[str]] = {}
    for page in sorted(PAGES, key=lambda page: GENERATED_MARKER in page.read_text("utf-8")):
        for line in filter(is_run, lines_of(page)):
            if normalize(line) not in normalized_lines:
                commands.setdefault(page, []).append(line)
            normalized_lines.add(normalize(line))
    return commands


COMMANDS_BY_PAGE = commands_by_page()
SLOW_PAGES = {"models", "gallery", "metrics", "evaluator", "parameter_servers", "performance",
              "several_machines"}  # in `make slow`  # fmt: skip
TESTED_PAGES = [page for page in COMMANDS_BY_PAGE if not all(map(is_slow, COMMANDS_BY_PAGE[page]))]


@pytest.mark.parametrize(
    "page", some_of(TESTED_PAGES, *(p for p in TESTED_PAGES if p.stem not in SLOW_PAGES)), ids=label
)
def test_the_commands_of_a_page_run(page, tmp_path):
    prepare_files(page, tmp_path)
    for line in [*PREPARATION.get(label(page), []), *COMMANDS_BY_PAGE[page]]:
        if not is_slow(line):
            run_line(line, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for lines in COMMANDS_BY_PAGE.values() for line in filter(is_slow, lines)]
)
def test_a_script_that_measures_runs(line, tmp_path):
    command, _ = command_to_run(line)
    command = [re.sub("^--plot=.*", f"--plot={tmp_path}/plot.svg", w) for w in command]
    command = [w for w in command if not re.fullmatch("horovod|--horovod=.*", w)]  # it is not installed
    command = [re.sub(r"^--rounds=\d+", "--rounds=1", w) for w in command]
    shorter = SCRIPT_OPTIONS.get(Path(command[1]).stem, ["--rounds=1"])
    result = processes.run([*command, *shorter], cwd=ROOT, env=environment(), timeout=1200)
    assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
