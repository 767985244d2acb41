"""`ctl launch --workers=MIN:MAX`: options that exclude each other, and exit codes."""

import subprocess
import sys

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from ctl.launch import cli
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import Host
from ctl.launch.membership import Limits, Membership
from polling import wait_until

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
PRINT_NUMBERS = """
import os, sys
print(os.environ["CTL_ELASTIC_SLOT"], os.environ["CTL_HVD_RENDEZVOUS"].rpartition(":")[0], flush=True)
sys.exit(7 if os.environ["CTL_ELASTIC_SLOT"] == "2" else 0)
"""


def launch(tmp_path, *options, code="pass", workers="1:2"):
    logs = f"--log_dir={tmp_path / 'logs'}"
    return cli.main([f"--workers={workers}", logs, *options, "--", sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--chief"], "an elastic job has only workers. Omit --chief"),
        (["--ps=1"], "an elastic job has only workers. Omit --ps"),
        (["--evaluator"], "an elastic job has only workers. Omit --evaluator"),
        (["--min_workers=1", "--host_discovery=true"], "the range gives the smallest number of workers"),
        (["--max_workers=2", "--host_discovery=true"], "the range gives the largest number of workers"),
        (["--port=2222", "-H=a:2"], "the workers of an elastic job listen at free ports. Omit --port"),
        (["--host=10.0.0.1"], "on one machine, whose workers use 127.0.0.1; add -H or --host_discovery"),
    ],
)
def test_options_for_other_jobs_are_refused(capsys, tmp_path, options, reason):
    arguments = [word for option in options for word in option.split("=", 1)]
    assert launch(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert "cannot be combined with --workers=1:2" in error and reason in error


def test_hosts_and_a_script_exclude_each_other(capsys, tmp_path):
    options = ["-H", "a:2", "--host_discovery=true", "--startup_timeout_secs=9"]
    assert launch(tmp_path, *options) == 2
    assert "-H cannot be combined with --host_discovery" in capsys.readouterr().err


@pytest.mark.parametrize(("hosts", "slots"), [("a:1", "1 slot"), ("a:1,b:1", "2 slots")])
def test_hosts_with_fewer_slots_than_the_minimum_are_refused(capsys, tmp_path, hosts, slots):
    assert launch(tmp_path, "-H", hosts, workers="3:4") == 2
    expected = f"-H {hosts} has {slots}; expected at least 3, the minimum of --workers=3:4"
    assert expected in capsys.readouterr().err


def test_a_name_without_an_address_is_refused(capsys, tmp_path):
    assert launch(tmp_path, "-H", "elsewhere.invalid:2", "--startup_timeout_secs=9") == 2
    assert "the host name 'elsewhere.invalid' cannot be resolved" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["/no/script", "false"])
def test_a_script_that_does_not_work_is_refused(capsys, tmp_path, script):
    assert launch(tmp_path, f"--host_discovery={script}") == 2
    assert "ctl launch: --host_discovery" in capsys.readouterr().err


def test_workers_on_several_hosts_have_different_numbers_below_the_maximum(capfd, tmp_path):
    """Both hosts are this machine; there are more slots than workers."""
    assert launch(tmp_path, "-H", "127.0.0.1:2,127.0.0.2:2", workers="3:3", code=PRINT_NUMBERS) == 7
    assert {path.read_text() for path in tmp_path.glob("logs/rank.*/stdout")} <= {
        f"{number} 127.0.0.1\n" for number in range(3)
    }
    assert "exit code 7" in capfd.readouterr().err


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
    assert "the job requires 2 (--elastic_timeout_secs)" in capfd.readouterr().err


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


def test_a_limit_for_steps_is_refused(capsys, tmp_path):
    assert launch(tmp_path, "--hang_timeout_secs=30") == 2
    assert "Omit it, and set --collective_timeout_secs" in capsys.readouterr().err


def test_logs_of_workers_have_a_size_limit(tmp_path):
    code = "import sys, time; [(print('x' * 999), sys.stdout.flush()) for i in range(400)]; time.sleep(3)"
    assert launch(tmp_path, "--max_log_mib=0.1", code=code) == 0
    for path in (tmp_path / "logs").glob("rank.*/stdout"):
        assert path.stat().st_size < 250_000 and b"bytes were cut here" in path.read_bytes()


TICKS = """
import signal, time
def tick(*_):
    for _ in range(6000):
        print("tick", flush=True)
        time.sleep(0.1)
signal.signal(signal.SIGTERM, tick)
print("ready", flush=True)
time.sleep(600)
"""


def test_the_time_from_a_signal_to_sigkill_is_that_of_the_option(tmp_path):
    command = ["--workers=1:2", f"--log_dir={tmp_path / 'logs'}", "--grace_secs=1"]
    launcher = processes.start(
        [sys.executable, "-m", "ctl.launch", *command, "--", sys.executable, "-c", TICKS],
        stdout=subprocess.DEVNULL, env=environment(), cwd=ROOT,
    )  # fmt: skip
    logs = [tmp_path / "logs" / f"rank.{i}" / "stdout" for i in range(2)]
    wait_until(lambda: all(p.exists() and b"ready\n" in p.read_bytes() for p in logs), launcher)
    launcher.terminate()
    assert launcher.wait(TIMEOUT_SECS) == 143
    assert all(p.read_bytes().count(b"tick") < 150 for p in logs)  # by default 30 s, 300 times
