"""Signals and errors within an evaluation of two workers: no trained step is lost."""

import subprocess
import sys

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment
from polling import wait_until
from training import pids, saved, send

pytestmark = pytest.mark.workers


def start(model_dir, **env):
    command = [sys.executable, "-m", "ctl.launch", "--workers=2", "--", sys.executable,
             str(PROGRAMS / "evaluating.py"), f"--model_dir={model_dir}", "--train_steps=6",
             "--global_batch_size=8", "--eval_every_steps=4", "--export=none"]  # fmt: skip
    return processes.start(
        command, env=environment(**env), cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def log_of(model_dir, number=1):
    path = model_dir / "workers" / f"job_{number}.log"
    return path.read_text() if path.exists() else ""


def test_sigterm_within_a_long_evaluation_is_heard_and_its_steps_are_saved(tmp_path):
    job = start(tmp_path / "run", EVAL="long")
    try:
        wait_until(lambda: "evaluating" in log_of(tmp_path / "run"), job)
        send(pids(tmp_path / "run")[1], "TERM")
        output, _ = job.communicate(timeout=TIMEOUT_SECS)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 143, output[-3000:]
    assert saved(tmp_path / "run") == [4]
    assert log_of(tmp_path / "run").count("evaluating") < 300, "the evaluation went on to its end"


@pytest.mark.parametrize("unknown", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_bad_record_on_one_worker_ends_the_job_and_its_steps_are_saved(tmp_path, unknown):
    """With data of unknown length the other workers wait in the graph, so the save is made earlier."""
    job = start(tmp_path / "run", EVAL="bad:1", UNKNOWN=unknown)
    output, _ = job.communicate(timeout=TIMEOUT_SECS)
    assert job.returncode == 1, output[-3000:]
    assert saved(tmp_path / "run") == [4]
    assert "a bad record" in output and "worker 1 (job 1) failed first" in output


def test_ctrl_c_on_one_worker_and_sigterm_on_another_are_one_end(tmp_path):
    job = start(tmp_path / "run", EVAL=f"held:{tmp_path}/go")
    try:
        for worker in (0, 1):
            wait_until(lambda index=worker: "evaluating" in log_of(tmp_path / "run", index), job)
        for worker, name in enumerate(("INT", "TERM")):
            send(pids(tmp_path / "run")[worker], name)
        (tmp_path / "go").touch()  # until now the workers could not agree on a step
        output, _ = job.communicate(timeout=TIMEOUT_SECS)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 143 and "Stopped by SIGTERM at step 4" in output, output[-3000:]
    assert all("Stopped by SIGTERM at step 4" in log_of(tmp_path / "run", index) for index in (0, 1))


IN_THE_HOOK = """
import json, os, sys
import ctl
from small_models import Small, every_step

second = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1

class Evaluates(Small):
    def after_loop(self, step, means):
        if step == 2:
            self.evaluate()

    def eval_data(self, batch_size):
        if second:
            raise OSError("no such record")
        return super().eval_data(batch_size)

try:
    Evaluates(strategy="multi_worker", model_dir=sys.argv[1], writers=[], intervals=every_step()).train(4)
except Exception as e:
    print(json.dumps({"kind": type(e).__name__, "code": getattr(e, "exit_code", 1)}), flush=True)
"""


def test_an_evaluation_in_the_hook_that_fails_on_one_worker_is_saved_by_all(tmp_path, run_program):
    chief, worker = run_program(2, ["-c", IN_THE_HOOK, str(tmp_path)])
    assert worker.json == {"kind": "OSError", "code": 1}, worker.output
    assert chief.json == {"kind": "FailedElsewhere", "code": 134}, chief.output
    assert saved(tmp_path) == [2]
