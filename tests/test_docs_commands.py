"""The commands of README.md and docs/ run: a page's in order, in one directory, with fewer steps.

Absolute paths become paths in that directory, hosts become this one. What is not run is listed.
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
from test_docs import MADE, PAGES, blocks, label

OTHERS = {"gcloud", "kubectl", "docker", "sbatch", "tail"}  # need a cloud or a cluster
INSTALLING = {"pip", ".", "make", ".venv/bin/python", ".venv/bin/ruff"}  # CI itself, and what it calls
STEPS = 2
FEWER = {
    "": [f"--train_steps={STEPS}", "--global_batch_size=8", "--eval_every_steps=0"],
    "models.mnist": ["--export="],
    "models.language": ["--context=16", "--layers=1", "--width=8", "--heads=2", "--length=5"],
    "models.resnet": ["--width=2", "--blocks=1", "--export="],
    "models.recommender": ["--rows=1000"],
    "models.simclr": ["--features=8"],
    "models.cartpole": ["--game_steps=20"],
    "models.flowers": ["--image_size=32"],
}
BEFORE = {  # what a reader of the page has
    "docs/checkpoints.md": ["python -m models.mnist --model_dir=runs/c"],
    "docs/metrics.md": ["python -m models.mnist --model_dir=/tmp/mnist"],
}
SHORTER = {
    "overhead": ["--strategy=default"], "xla": ["--model=tiny"],
    "host_cost": ["--only=metrics", "--rounds=1"],
    "communication": ["--steps=4"], "cost_model": ["--steps=4", "--workers", "1", "2"],
    "sync_every": ["--steps=32", "--every", "1", "16", "--outer", "0.7,0.5"],
}  # fmt: skip
START = {
    "ctl": [sys.executable, "-m", "ctl"], "ctlrun": [sys.executable, "-m", "ctl.launch.horovodrun_cli"],
    "tensorboard": [sys.executable, "-m", "tensorboard.main"],
}  # fmt: skip


def lines_of(page: Path) -> list[str]:
    """The commands of a page, those that show what others made at the end."""
    texts = [re.sub(r"\\\n", " ", text) for _, text in blocks(page, "sh")]
    texts = [re.sub(r"^export (.*)\n", r"\1 ", text, flags=re.MULTILINE) for text in texts]
    if page.stem == "parameter_servers":  # "Run the same command in every process"
        texts = [f"TF_CONFIG='{blocks(page, 'json')[0][1].strip()}' {text}" for text in texts]
    lines = [line for text in texts for line in text.splitlines() if shlex.split(line, comments=True)]
    return sorted(lines, key=lambda line: line.startswith("tensorboard"))


def is_run(line: str) -> bool:
    return shlex.split(line, comments=True)[0] not in OTHERS | INSTALLING and "-m venv" not in line


def is_slow(line: str) -> bool:
    """A script that measures or draws."""
    return re.match(r"python (tests/benchmarks|docs)/", line) is not None


def prepare(page: Path, where: Path) -> None:
    """The files that a page's commands name."""
    if page.stem == "first_model":
        below = page.read_text("utf-8").split("## As a command")[1]
        code = [text for _, text in blocks(page, "python")[:2]]
        main = re.search(r"```python no-run\n(.*?)```", below, re.DOTALL)
        (where / "first.py").write_text("\n".join([*code, main[1]]))
    if page.stem == "several_machines":
        (where / "hosts.sh").write_text("#!/bin/sh\necho 127.0.0.1:2\n")
        (where / "hosts.sh").chmod(0o755)
    if page.parent.name == "deploy":
        (where / "tf_ctl-0.1.0-py3-none-any.whl").touch()
        (where / "trainer").mkdir()
        (where / "trainer" / "task.py").touch()
    (where / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    if page.stem in ("flowers", "models"):
        found = photos.make(where, per_class=4)
        shutil.copytree(found, where / "PHOTOS")
        shutil.copytree(found / "china", where / "new")


def as_here(line: str, where: Path) -> str:
    """The line with paths and hosts of this machine."""
    if not line.startswith("ctl deploy"):  # whose paths are those of the cluster
        line = re.sub(r"(?<=[= ])/(tmp|data|shared)/", f"{where}/", line)
    line = line.replace("host1:2,host2:2 ", "127.0.0.1:2 ")
    hosts = sorted(set(re.findall(r"host\d:2222", line)))
    for host, port in zip(hosts, free_ports(len(hosts)), strict=True):
        line = line.replace(host, f"127.0.0.1:{port}")
    return line


def words_to_run(line: str) -> tuple[list[str], dict[str, str]]:
    """The line as words for this machine, with fewer steps, and the variables in front of it."""
    words, variables = shlex.split(line, comments=True), {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    model = next((w for w in words if re.match(r"models\.\w+|first\.py", w)), None)
    if model is not None and "horovod" in model:
        words = [re.sub(r"^--steps=\d+$", f"--steps={STEPS}", w) for w in words]
    elif model is not None and "deploy" not in words:
        words = [w for w in words if not w.startswith("--epochs")] + [*FEWER[""], *FEWER.get(model, [])]
    if words[0] == "tensorboard":
        words.append("--inspect")
    if words[1] != "deploy":
        words = [sys.executable if w == "python" else w for w in words]
    return [*START.get(words[0], []), *words[words[0] in START :]], variables


def tasks(config: str) -> list[str]:
    """A TF_CONFIG for each process of its job, that of its own task at the end."""
    cluster, own = (json.loads(config)[key] for key in ("cluster", "task"))
    found = [{"type": kind, "index": i} for kind, hosts in cluster.items() for i in range(len(hosts))]
    found.sort(key=lambda task: task == own)
    return [json.dumps({"cluster": cluster, "task": task}) for task in found]


def run_line(line: str, where: Path) -> None:
    words, variables = words_to_run(as_here(line, where))
    *others, own = tasks(variables["TF_CONFIG"]) if "TF_CONFIG" in variables else [""]
    if own:
        variables["TF_CONFIG"] = own
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [processes.start(words, cwd=where, env=environment(TF_CONFIG=c), **silent) for c in others]
    try:
        done = processes.run(words, cwd=where, env=environment(**variables), stderr=subprocess.STDOUT)
        codes = [done.returncode, *(process.wait(processes.TIMEOUT_SECS) for process in started)]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), f"{line}\n{shlex.join(words)}\n{codes}\n{done.stdout[-3000:]}"


def what(line: str) -> str:
    """The line without what is no other command: its number of steps, and where it writes."""
    return re.sub(r" --(model_dir|train_steps|\w+_every_steps|global_batch_size)=\S+", "", line)


def commands() -> dict[Path, list[str]]:
    """Page -> its commands that are run here; a command of several pages once."""
    seen: set[str] = set()
    found: dict[Path, list[str]] = {}
    for page in sorted(PAGES, key=lambda page: MADE in page.read_text("utf-8")):
        for line in filter(is_run, lines_of(page)):
            if what(line) not in seen:
                found.setdefault(page, []).append(line)
            seen.add(what(line))
    return found


RUN = commands()
LONG = {"models", "gallery", "metrics", "evaluator", "parameter_servers", "performance",
        "several_machines"}  # in `make slow`
QUICK = [page for page in RUN if not all(map(is_slow, RUN[page]))]


@pytest.mark.parametrize("page", some_of(QUICK, *(p for p in QUICK if p.stem not in LONG)), ids=label)
def test_the_commands_of_a_page_run(page, tmp_path):
    prepare(page, tmp_path)
    for line in [*BEFORE.get(label(page), []), *RUN[page]]:
        if not is_slow(line):
            run_line(line, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for lines in RUN.values() for line in filter(is_slow, lines)])
def test_a_script_that_measures_runs(line, tmp_path):
    words, _ = words_to_run(line)
    words = [re.sub("^--plot=.*", f"--plot={tmp_path}/plot.svg", w) for w in words]
    words = [w for w in words if not re.fullmatch("horovod|--horovod=.*", w)]  # it is not installed
    words = [re.sub(r"^--rounds=\d+", "--rounds=1", w) for w in words]
    shorter = SHORTER.get(Path(words[1]).stem, ["--rounds=1"])
    done = processes.run([*words, *shorter], cwd=ROOT, env=environment(), timeout=1200)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
