"""`ctl sweep`: one run per combination, parallel runs, and a restart with the remaining runs."""

import json
import os
import re
import signal
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from polling import wait_until
from processes import run, start
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard_runs import trials

PROGRAM = """
import json, os, signal, subprocess, sys, threading, time
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
directory = flags["model_dir"]
print("began", flags, flush=True)
if "slow" in flags and flags["rate"] == flags["slow"]:  # ends normally after a signal
    released = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: released.set())
    open(os.path.join(directory, "waits"), "w").close()
    while not released.is_set():
        time.sleep(0.02)
elif "slow" in flags:  # ends when the slow run waits
    while not os.path.exists(os.path.join(os.path.dirname(directory), "rate=" + flags["slow"], "waits")):
        time.sleep(0.02)
if "wait" in flags:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--wait=" + flags["wait"]])
    open(os.path.join(directory, "waits"), "w").close()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    while not os.path.exists(flags["wait"]):
        time.sleep(0.02)
if flags.get("rate") == flags.get("bad"):
    sys.exit("cannot")
loss = float(flags.get("rate", 1)) + len(flags.get("name", ""))
rows = [{"step": 1, "run": "eval", "time": 0.0, "loss": 99.0},
        {"step": 2, "run": "train", "time": 1.0, "loss": 5.0},
        {"step": 2, "run": "eval", "time": 2.0, "loss": loss, "accuracy": 1 - loss}]
with open(os.path.join(directory, "metrics.jsonl"), "w") as file:
    file.write("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path), "--bad=never"]


def run_sweep(arguments, cwd):
    return run([sys.executable, "-m", "ctl", "sweep", *arguments], env=environment(), cwd=cwd)


def state(directory):
    return json.loads((directory / "sweep.json").read_text())["runs"]


def test_each_combination_runs_once_and_the_best_comes_first(tmp_path, program):
    result = run_sweep(["--", *program, "--rate=0.5,0.25", "--name=a,bc", "--fixed=1"], tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["rate", "name", "loss", "accuracy", "step", "exit", "code"]
    assert [line[:3] for line in lines[1:5]] == [
        ["0.25", "a", "1.25"], ["0.5", "a", "1.5"], ["0.25", "bc", "2.25"], ["0.5", "bc", "2.5"],
    ]  # fmt: skip
    assert lines[-1] == ["tensorboard", "--logdir", "sweep"]
    runs = state(tmp_path / "sweep")
    assert list(runs)[:2] == ["rate=0.5,name=a", "rate=0.5,name=bc"]
    best = runs["rate=0.25,name=a"]
    assert best["exit_code"] == 0 and best["settings"] == {"rate": "0.25", "name": "a"}
    assert best["metrics"] == {"step": 2, "loss": 1.25, "accuracy": -0.25}
    log = (tmp_path / "sweep" / "rate=0.25,name=a" / "console.log").read_text()
    assert "'fixed': '1'" in log


def test_the_largest_metric_may_be_the_best_and_model_dir_is_the_directory(tmp_path, program):
    where = tmp_path / "here"
    command = [*program, f"--model_dir={where}", "--rate=0.5,0.25,0.75"]
    result = run_sweep(["--metric=accuracy", "--max", "--", *command], tmp_path)
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == ["0.25", "0.5", "0.75"]
    assert set(state(where)) == {"rate=0.5", "rate=0.25", "rate=0.75"}
    assert not (tmp_path / "sweep").exists()


def test_completed_runs_are_skipped_and_failed_runs_are_repeated(tmp_path, program):
    arguments = ["--", *program[:2], "--bad=0.5", "--rate=0.5,0.25"]
    first = run_sweep(arguments, tmp_path)
    assert first.returncode == 1
    assert "rate=0.5 failed: exit code 1; see sweep/rate=0.5/console.log" in first.stderr
    assert "cannot" in (tmp_path / "sweep/rate=0.5/console.log").read_text()
    second = run_sweep(arguments, tmp_path)
    assert second.returncode == 1 and "2 runs, 1 already completed" in second.stderr
    logs = [(tmp_path / f"sweep/rate={r}/console.log").read_text() for r in ("0.5", "0.25")]
    assert [log.count("began") for log in logs] == [2, 1]
    other = run_sweep([*arguments, "--more=1"], tmp_path)  # another command has no completed runs
    assert "already completed" not in other.stderr


def test_a_run_that_ended_at_its_time_limit_continues(tmp_path, program):
    arguments = ["--", *program, "--rate=1,2"]
    assert run_sweep(arguments, tmp_path).returncode == 0
    lock = {"host": "h", "pid": 1, "process": "", "started": 0.0, "beat": 0.0, "state": "ended"}
    for rate, reason in [("1", "done"), ("2", "stopped by the time limit")]:
        path = tmp_path / "sweep" / f"rate={rate}" / "LOCK"
        path.write_text(json.dumps({**lock, "reason": reason}))
    second = run_sweep(arguments, tmp_path)
    assert second.returncode == 0 and "2 runs, 1 already completed" in second.stderr
    assert (tmp_path / "sweep" / "rate=2" / "console.log").read_text().count("began") == 2


def test_a_metric_that_no_run_has_ends_the_sweep_after_the_first_run(tmp_path, program):
    result = run_sweep(["--metric=acc", "--", *program, "--rate=1,2,3"], tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert "--metric=acc is not reported by the run rate=1; expected one of loss, accuracy" in result.stderr
    runs = state(tmp_path / "sweep")
    assert [run["exit_code"] for run in runs.values()] == [0, None, None]
    second = run_sweep(["--metric=accuracy", "--max", "--", *program, "--rate=1,2,3"], tmp_path)
    assert second.returncode == 0 and "3 runs, 1 already completed" in second.stderr


def test_a_run_that_ends_while_a_sweep_without_its_metric_stops_is_recorded(tmp_path, program):
    command = [*program, "--slow=2", "--rate=1,2"]
    result = run_sweep(["--metric=acc", "--jobs=2", "--", *command], tmp_path)
    assert result.returncode == 2 and "--metric=acc is not reported by the run rate=1" in result.stderr
    runs = state(tmp_path / "sweep")
    assert [run["exit_code"] for run in runs.values()] == [0, 0]
    assert runs["rate=2"]["metrics"]["loss"] == 2.0


def test_an_escaped_comma_is_part_of_the_value(tmp_path, program):
    result = run_sweep(["--", *program, r"--name=a\,b,c", r"--list=x\,y"], tmp_path)
    assert result.returncode == 0, result.stderr
    runs = state(tmp_path / "sweep")
    assert [record["settings"]["name"] for record in runs.values()] == ["a,b", "c"]
    logs = [path.read_text() for path in (tmp_path / "sweep").glob("*/console.log")]
    assert len(logs) == 2 and all("'list': 'x,y'" in log for log in logs)


def test_a_secret_of_the_command_is_in_no_file(tmp_path):
    result = run_sweep(["--", sys.executable, "-c", "pass", "--token=hunter2", "--seed=1,2"], tmp_path)
    assert result.returncode == 0 and "hunter2" not in result.stdout + result.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3 and not any(b"hunter2" in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("arguments", "error_message"),
    [
        ([], "no command was given after"),
        (["--"], "no command was given after"),
        (["--", "no-such-program", "--a=1,2"], "'no-such-program' was not found"),
        (["--", sys.executable, "--a=1"], "no flag of the command has several values"),
        (["--", sys.executable, "--a=1,1"], "has an empty or duplicate value"),
        (["--", sys.executable, "--a=1,"], "has an empty or duplicate value"),
        (["--", sys.executable, "--a=1,2", "--a=3,4"], "--a was given twice"),
        (["--", sys.executable, "--model_dir=a,b"], "expected one"),
        (["--jobs=0", "--", sys.executable, "--a=1,2"], "--jobs=0 is invalid"),
        (["--jops=2", "--", sys.executable, "--a=1,2"], "--jops=2"),
    ],
)
def test_invalid_arguments_are_refused_before_any_run(tmp_path, arguments, error_message):
    result = run_sweep(arguments, tmp_path)
    assert result.returncode == 2 and error_message in result.stderr and not result.stdout
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_damaged_is_not_overwritten(tmp_path, program):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/sweep.json").write_text("{")
    result = run_sweep(["--", *program, "--rate=1,2"], tmp_path)
    assert result.returncode == 2 and "sweep.json cannot be read" in result.stderr
    assert (tmp_path / "sweep/sweep.json").read_text() == "{"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_parallel_runs_end_with_a_signal_and_a_second_sweep_completes_them(tmp_path, program, signum):
    release_file = tmp_path / "go"
    arguments = ["--jobs=2", "--", *program, "--rate=1,2,3", f"--wait={release_file}"]
    command = [sys.executable, "-m", "ctl", "sweep", *arguments]
    with (tmp_path / "out").open("wb") as out:
        sweep = start(command, env=environment(), cwd=tmp_path, stdout=out, stderr=out)
    waits = [tmp_path / f"sweep/rate={i}/waits" for i in (1, 2, 3)]
    wait_until(lambda: waits[0].exists() and waits[1].exists())
    assert not waits[2].exists()
    sweep.send_signal(signum)
    code = sweep.wait(TIMEOUT_SECS)
    assert code == (-9 if signum == signal.SIGKILL else 128 + signum)
    flag = f"--wait={release_file}".encode()

    def no_process_is_running():
        has_flag = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    has_flag.append(flag in file.read().split(b"\0"))
            except OSError:
                continue
        return not any(has_flag)

    wait_until(no_process_is_running)
    release_file.touch()
    second = run_sweep(arguments, tmp_path)
    assert second.returncode == 0, second.stderr
    assert [record["exit_code"] for record in state(tmp_path / "sweep").values()] == [0, 0, 0]


def test_a_sweep_of_real_trainings_is_shown_in_tensorboard(tmp_path):
    command = [sys.executable, "-m", "models.mnist", "--train_steps=4", "--eval_every_steps=4",
               "--global_batch_size=16", "--export=", f"--model_dir={tmp_path}/runs",
               "--dropout=0,0.5"]  # fmt: skip
    result = run_sweep(["--metric=accuracy", "--max", "--", *command], ROOT)
    assert result.returncode == 0, result.stderr
    runs = state(tmp_path / "runs")
    assert set(runs) == {"dropout=0", "dropout=0.5"}
    assert all({"loss", "accuracy"} <= set(record["metrics"]) for record in runs.values())
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "runs")).Reload()
    sessions = events.PluginRunToTagToContent("hparams")
    assert {run for run, tags in sessions.items() if "_hparams_/session_start_info" in tags} == {
        "dropout=0/logs/eval", "dropout=0.5/logs/eval",
    }  # fmt: skip
    names = [re.sub(r" \([0-9a-f]{6}\)$", "", group.name) for group in trials(tmp_path / "runs")]
    assert sorted(names) == ["dropout=0", "dropout=0.5"]
