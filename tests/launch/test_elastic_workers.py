"""`ctl launch --workers=MIN:MAX`: options that exclude each other, and exit codes."""

import sys

import pytest
from ctl.launch import cli
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import Host
from ctl.launch.membership import Limits, Membership

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def launch(tmp_path, *options, code="pass"):
    logs = f"--log_dir={tmp_path / 'logs'}"
    return cli.main(["--workers=1:2", logs, *options, "--", sys.executable, "-c", code])


@pytest.mark.parametrize(
    "option", ["--chief", "--ps=1", "--evaluator", "-H=a:2", "--host_discovery=x", "--host=127.0.0.1"]
)
def test_options_for_other_jobs_are_refused(capsys, tmp_path, option):
    assert launch(tmp_path, *option.split("=", 1)) == 2
    assert "cannot be combined with --workers=1:2" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0:2", "3:2", "1:x", ":"])
def test_invalid_limits_are_refused(capsys, text):
    assert cli.main([f"--workers={text}", "--", "true"]) == 2
    assert "expected MIN:MAX with 1 <= MIN <= MAX" in capsys.readouterr().err


@pytest.mark.parametrize("exit_code", [1, 2, 7])
def test_an_exit_code_of_the_program_ends_the_job(capfd, tmp_path, exit_code):
    assert launch(tmp_path, code=f"import sys; sys.exit({exit_code})") == exit_code
    error = capfd.readouterr().err
    assert "a new process would fail, too" in error and "ending the job: process" in error
    assert "the next process" not in error


def test_a_job_without_enough_workers_ends_with_134(capfd, tmp_path):
    assert launch(tmp_path, code=KILLED) == 134
    assert "ctl launch: ending the job: no process is running" in capfd.readouterr().err
    assert launch(tmp_path, "--startup_timeout_secs=1", code="import time; time.sleep(60)") == 134
    assert "the job requires 2" in capfd.readouterr().err


def test_the_first_group_has_its_own_timeout():
    seconds = [0.0]
    hosts = HostHealth(clock=lambda: seconds[0])
    hosts.update([Host("localhost", 2)])
    membership = Membership(Limits(initial=2, minimum=1, timeout_secs=1.0, start_timeout_secs=9.0), hosts)
    for slot in membership.find_free_slots():
        membership.add_worker(slot)
    for now, has_failed in ((0.0, False), (5.0, False), (9.0, True)):
        seconds[0] = now
        assert membership.form_group() is None
        membership.find_overdue_members()
        assert bool(membership.failure) == has_failed
