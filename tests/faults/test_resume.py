"""Stopped runs that the same command resumes: the losses of an uninterrupted run, bit for bit."""

import json
import os
import signal
import subprocess
import sys

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment, some_of
from polling import wait_until

pytestmark = pytest.mark.workers
STEPS = 16
MNIST = [sys.executable, "-m", "models.mnist", f"--train_steps={STEPS}", "--dropout=0.3",
         "--global_batch_size=32", "--log_every_steps=1", "--export=none", "--eval_every_steps=10",
         "--learning_rate=0.01"]  # fmt: skip
LAUNCH = [sys.executable, "-m", "ctl.launch", "--workers=2", "--"]
COMMANDS = {
    "one_device": [*MNIST, "--strategy=one_device"],
    "two_replicas": [*MNIST, "--strategy=mirrored", "--num_virtual_devices=2"],
    "two_workers": [*LAUNCH, *MNIST, "--strategy=multi_worker"],
}


def rows(model_dir):
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trace(model_dir, run="train"):
    return [(r["step"], r["loss"], r["accuracy"]) for r in rows(model_dir) if r["run"] == run]


def slowly(command):
    """Returns the command with a pause after each log, so that a signal precedes the last step."""
    slow_command = [*command]
    at = slow_command.index("-m", slow_command.index("--") if "--" in slow_command else 0)
    slow_command[at : at + 2] = [str(PROGRAMS / "slow_logs.py"), slow_command[at + 1]]
    return slow_command


def start(command, model_dir, log):
    return processes.start(
        [*command, f"--model_dir={model_dir}"], stdout=log, stderr=subprocess.STDOUT,
        env=environment(), cwd=ROOT,
    )  # fmt: skip


def finish(process):
    try:
        return process.wait(timeout=TIMEOUT_SECS)
    finally:
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("job_name", some_of(COMMANDS, "two_replicas"))
def test_a_run_stopped_by_ctrl_c_and_started_again_equals_an_unbroken_one(job_name, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    with (tmp_path / "log").open("w+b") as log:
        assert finish(start(COMMANDS[job_name], unbroken, log)) == 0
        process = start(slowly(COMMANDS[job_name]), broken, log)
        wait_until(lambda: len(trace(broken)) >= 5, process, show=lambda: log_text(log), pause_secs=0.005)
        process.send_signal(signal.SIGINT)
        assert finish(process) == 130, log_text(log)
        stopped_at = trace(broken)[-1][0]
        assert 5 <= stopped_at < STEPS
        assert finish(start(COMMANDS[job_name], broken, log)) == 0, log_text(log)
        text = log_text(log)
    assert "Traceback" not in text
    assert f"resuming at step {stopped_at}" in text
    assert [step for step, *_ in trace(broken)] == list(range(1, STEPS + 1))
    assert trace(broken) == trace(unbroken)
    assert trace(broken, "eval") == trace(unbroken, "eval")
    assert [p.name for p in (broken / "checkpoints").iterdir() if p.name.startswith(("tmp", "work"))] == []


def test_sigterm_to_the_launcher_saves_one_checkpoint_at_the_same_step_on_every_worker(tmp_path):
    model_dir = tmp_path / "run"
    with (tmp_path / "log").open("w+b") as log:
        process = start([*COMMANDS["two_workers"], "--train_steps=100000"], model_dir, log)
        wait_until(lambda: len(trace(model_dir)) >= 3, process, show=lambda: log_text(log))
        process.send_signal(signal.SIGTERM)
        assert finish(process) == 143, log_text(log)
    stop_messages = [
        [line for line in (model_dir / "workers" / f"job_{i}.log").read_text().splitlines()
         if line.startswith("Stopped by SIGTERM at step")]
        for i in range(2)
    ]  # fmt: skip
    assert stop_messages[0] == stop_messages[1] and len(stop_messages[0]) == 1
    step = int(stop_messages[0][0].split("step ")[1].split(";")[0])
    assert [p.name for p in (model_dir / "checkpoints").iterdir()] == [f"ckpt-{step}"]


def log_text(log):
    log.flush()
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
