"""Restarts of elastic jobs of `ctl launch`, when no worker with the state of the job remains."""

import sys

import pytest
from conftest import some_of
from ctl.distribute.topology import Topology
from ctl.launch import cli
from ctl.launch.elastic_restarts import FailurePolicy, WorkerPolicy
from ctl.launch.process import ProcessExit
from ctl.launch.restart_policy import ERROR, REFUSED, RestartPolicy

ENDED = Topology({}, "worker", 0)
ATTEMPTS = """
import os, signal, sys
attempt = int(os.environ.get("CTL_ATTEMPT", "1"))
print("attempt", attempt, "after", repr(os.environ.get("CTL_RESTART_REASON", "")), flush=True)
if attempt < {succeeds}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def launch(tmp_path, *options, code):
    launcher = ["--workers=1:2", f"--log_dir={tmp_path / 'logs'}", "--backoff_secs=0.1"]
    return cli.main([*launcher, *options, "--", sys.executable, "-c", code])


def policy_of(**options):
    return WorkerPolicy(RestartPolicy(**options), None)


def test_a_job_is_restarted_after_all_its_workers_have_died(capfd, tmp_path):
    assert launch(tmp_path, code=ATTEMPTS.format(succeeds=3)) == 0
    output = capfd.readouterr()
    assert "restart 1 of 3" in output.err and "restart 2 of 3" in output.err
    assert "attempt 3 after 'process " in output.out and "attempt 4" not in output.out
    logs = sorted(path.name for path in (tmp_path / "logs").glob("rank.*"))
    assert len(logs) >= 4  # the logs of earlier attempts remain


@pytest.mark.parametrize("restarts", some_of([0, 1, 2], 1))
def test_the_number_of_restarts_is_limited(capfd, tmp_path, restarts):
    assert launch(tmp_path, f"--max_restarts={restarts}", code=ATTEMPTS.format(succeeds=99)) == 134
    output = capfd.readouterr()
    assert f"--max_restarts={restarts}" in output.err
    assert f"attempt {restarts + 1} " in output.out and f"attempt {restarts + 2} " not in output.out


def test_with_restart_on_error_a_failed_worker_is_replaced(capfd, tmp_path):
    code = "import os, sys; sys.exit(int(os.environ['CTL_HVD_WORKER']) < 2)"
    assert launch(tmp_path, code=code) == 1
    assert "a new process would fail, too" in capfd.readouterr().err
    assert launch(tmp_path, "--restart_on_error", code=code) == 0
    assert "a new process would fail, too" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "with_errors", "is_permanent"),
    [
        (2, True, True),
        (2, False, True),
        (1, True, False),
        (1, False, True),
        (134, False, False),
        (-9, False, False),
    ],
)
def test_exit_codes_of_programs_are_permanent(code, with_errors, is_permanent):
    policy = policy_of(restart_on_error=with_errors)
    assert policy.is_permanent(ProcessExit(ENDED, code, 1.0)) == is_permanent
    assert not FailurePolicy().is_permanent(ProcessExit(ENDED, code, 1.0))


def test_a_host_that_refuses_the_login_does_not_end_the_job():
    policy = policy_of()
    assert not policy.is_permanent(ProcessExit(ENDED, 2, 1.0, loss=REFUSED))
    assert policy.is_permanent(ProcessExit(ENDED, 2, 1.0, loss=ERROR))


def test_checkpoints_between_restarts_reset_their_number(tmp_path):
    policy = WorkerPolicy(RestartPolicy(max_restarts=1), tmp_path)
    killed = ProcessExit(ENDED, -9, 1.0)
    assert policy.restart_delay_secs(killed, has_trained=True) == 1.0
    folder = tmp_path / "checkpoints" / "ckpt-5"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"step": 5}')
    assert policy.restart_delay_secs(killed, has_trained=True) == 1.0
    assert policy.restart_delay_secs(killed, has_trained=True) is None
