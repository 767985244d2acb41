"""SIGHUP, which a closed terminal or ssh session sends, acts like SIGTERM; under nohup it is ignored."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from launching import TELL_SIGNALS
from polling import wait_until
from training import output_of, run, saved, started

pytestmark = pytest.mark.workers
WAITING_PROGRAM = TELL_SIGNALS + "wait_for(lambda: got)\nsys.exit(143)\n"


def test_a_closed_terminal_saves_a_checkpoint_and_ends_with_143(tmp_path):
    """The kernel and the shell send one each."""
    result = run(tmp_path / "run", "--train_steps=1000", faults="hup@5 hup@5!")
    assert result.code == 143, result.output[-3000:]
    [step] = saved(tmp_path / "run")
    next_result = run(tmp_path / "run", f"--train_steps={step + 1}")
    assert next_result.code == 0 and f"resuming at step {step}" in next_result.output


def test_usr1_in_a_task_of_slurm_saves_a_checkpoint_and_ends_with_143(tmp_path):
    """Outside of Slurm it ends the process, as for every program."""
    slurm = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}
    result = run(tmp_path / "run", "--train_steps=1000", faults="usr1@5 usr1@5!", **slurm)
    assert result.code == 143 and "Stopped by SIGUSR1" in result.output, result.output[-3000:]
    assert len(saved(tmp_path / "run")) == 1
    assert run(tmp_path / "again", faults="usr1@5").code == -signal.SIGUSR1


def test_a_closed_terminal_of_the_launcher_saves_a_checkpoint_on_all_workers(tmp_path):
    with started(tmp_path / "run", "--train_steps=100000", workers=2) as process:
        wait_until(lambda: "step 5/" in output_of(tmp_path / "run").read_text(), process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert process.wait(TIMEOUT_SECS) == 143
    assert len(saved(tmp_path / "run")) >= 1


@pytest.mark.parametrize("count", [1, 3])
def test_the_launcher_passes_sigterm_on_once(job, count):
    job.start(WAITING_PROGRAM, "--workers=2")
    job.wait_for_logs("ready")
    for _ in range(count):
        os.kill(job.process.pid, signal.SIGHUP)
    code, _ = job.end()
    assert code == 143
    assert all(job.log(i).count("got SIGTERM") == 1 for i in range(2))


def test_under_nohup_the_launcher_and_its_workers_continue(job):
    job.start(
        "print('ready', flush=True)\nwait_for((here / 'go').exists)\nprint('done', flush=True)\n",
        under=["nohup"],
    )
    job.wait_for_logs("ready", workers=1)
    os.kill(job.process.pid, signal.SIGHUP)
    (job.dir / "go").touch()
    code, _ = job.end()
    assert code == 0 and "done" in job.log(0)


IGNORING_PROGRAM = """
import os, signal
from ctl.supervision import signals
with signals.immediate_exit(), signals.Interruption() as received:
    os.kill(os.getpid(), signal.SIGHUP)
    print("ignored", received.received, flush=True)
with signals.default_action():
    os.kill(os.getpid(), signal.SIGHUP)
print("alive", flush=True)
"""


def test_under_nohup_a_worker_does_not_hear_of_it():
    result = subprocess.run(
        ["nohup", sys.executable, "-c", IGNORING_PROGRAM], env=environment(), cwd=ROOT, capture_output=True,
        text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert result.stdout == "ignored None\nalive\n", result.stderr


def test_a_real_terminal_that_closes_ends_the_launcher_after_its_workers_have_saved(job):
    """The session leader is the launcher, and its terminal is closed."""
    import pty

    controller, terminal = pty.openpty()
    process = job.start(
        WAITING_PROGRAM,
        "--workers=2",
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        under=["setsid", "--ctty"],
    )
    os.close(terminal)
    job.wait_for_logs("ready")
    os.close(controller)
    assert process.wait(TIMEOUT_SECS) == 143
    wait_until(lambda: all("got SIGTERM\n" in job.log(i) for i in range(2)))
