"""Promise 24: a background save does not block, is exclusive, and completes before the end of the run."""

import json
import re
import signal
import subprocess
import sys

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from polling import wait_until
from saving_jobs import PROGRAM, checkpoints, jobs, names, unbroken  # noqa: F401

pytestmark = pytest.mark.workers


def logged(model_dir):
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def test_training_continues_during_a_save_and_the_next_save_waits(
    jobs, unbroken, tmp_path  # noqa: F811
):  # fmt: skip
    model_dir = tmp_path / "run"
    jobs.start(
        model_dir, "--background", f"--signals={tmp_path}", faults="stop:before_commit@4 "
        "stop:after_step@7",
    )  # fmt: skip
    wait_until((tmp_path / "stopped-4").exists)
    wait_until(lambda: 6 in logged(model_dir))
    assert checkpoints(model_dir) == [2]
    (tmp_path / "go-4").touch()
    wait_until((tmp_path / "stopped-7").exists)
    assert 4 in checkpoints(model_dir)
    (tmp_path / "go-7").touch()
    result = jobs.wait()
    assert result.code == 0 and result.json["final"] == unbroken, result.output
    assert checkpoints(model_dir) == [2, 4, 6, 8]
    saved = [int(n) for n in re.findall(r"^saved ckpt step (\d+)", result.output, re.MULTILINE)]
    assert saved == [2, 4, 6, 8]


def start(model_dir, *arguments, faults=""):
    return processes.start(
        [sys.executable, PROGRAM, str(model_dir), "--background", *arguments], cwd=ROOT, text=True,
        env=environment(FAULTS=faults), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process):
    try:
        return process.communicate(timeout=TIMEOUT_SECS)[0]
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "steps"),
    [
        (["--signal_at=5"], 143, [2, 4, 5]),
        pytest.param(["--raise_at=5"], 1, [2, 4, 5], marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_process_waits_for_the_save_under_way(tmp_path, arguments, code, steps):
    """Step 4 is held until step 5 has requested the end."""
    model_dir = tmp_path / "run"
    process = start(
        model_dir, *arguments, f"--signals={tmp_path}",
        faults="stop:before_commit@4 stop:after_step@5",
    )  # fmt: skip
    for name in ("stopped-4", "stopped-5"):
        wait_until((tmp_path / name).exists)
    (tmp_path / "go-5").touch()
    assert checkpoints(model_dir) == [2] and process.poll() is None
    (tmp_path / "go-4").touch()
    output = finish(process)
    assert process.returncode == code, output
    assert checkpoints(model_dir) == steps
    assert names(model_dir / "checkpoints") == [f"ckpt-{step}" for step in steps]


def test_a_second_signal_ends_at_once_and_keeps_complete_checkpoints(jobs, unbroken, tmp_path):  # noqa: F811
    model_dir = tmp_path / "run"
    process = start(model_dir, "--signal_at=5", f"--signals={tmp_path}", faults="stop:before_commit@4")
    wait_until((tmp_path / "stopped-4").exists)
    wait_until(lambda: 4 in logged(model_dir))
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert process.returncode == 143, finish(process)
    assert checkpoints(model_dir) == [2]
    result = jobs(model_dir)
    assert result.json["began"] == 2 and result.json["final"] == unbroken
    assert names(model_dir / "checkpoints") == ["ckpt-2", "ckpt-4", "ckpt-6", "ckpt-8"]
