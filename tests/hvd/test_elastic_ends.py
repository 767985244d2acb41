"""How elastic jobs end, and begin, when something is wrong; and processes behind ssh."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from ctlrun_jobs import Ctlrun
from elastic_jobs import PROGRAMS, ElasticJob
from launching import is_alive
from polling import wait_until

pytestmark = pytest.mark.workers

PROGRAM_START = """
import os, pathlib, sys, time
here, number = pathlib.Path(sys.argv[1]), os.environ["CTL_HVD_WORKER"]
"""


@pytest.fixture
def ctlrun(tmp_path):
    started = Ctlrun(tmp_path, warm=True)
    yield started
    started.close()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(hosts, *options, program=None, **environ):
        path = None
        if program is not None:
            path = tmp_path / "program.py"
            path.write_text(PROGRAM_START + program)
        jobs.append(ElasticJob(tmp_path, hosts, *options, program=path, **environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_when_all_fail_the_job_does_and_the_first_is_named(start):
    code, output = start("127.0.0.1:2", "-np", "2", "--min-np", "1", program="sys.exit(7)").end()
    assert code == 7
    assert "ending the job: no process is running" in output
    assert "failed: exit code 7 (the first failure)" in output


def test_one_that_fails_before_the_first_group_is_replaced(start):
    program = """
(here / number).touch()
if number == "1":
    sys.exit(3)
until = time.monotonic() + 600
while not (here / "2").exists() and time.monotonic() < until:
    time.sleep(0.05)
"""
    code, output = start("127.0.0.1:2", "-np", "2", "--min-np", "2", program=program).end()
    assert code == 0, output
    assert "process 1 on 127.0.0.1 failed: exit code 3" in output


def test_too_few_slots_are_a_failure_after_the_timeout(start):
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "1")
    code, output = start("127.0.0.1:1", *options, program="sys.exit(9)").end()
    assert code == 1
    assert "the job requires 2 (--elastic-timeout)" in output


def test_a_failure_after_another_was_done_is_a_failure(start):
    program = """
from ctl.hvd import elastic_line
rank = elastic_line.join_next_group().rank
if rank == 1:
    until = time.monotonic() + 600
    while not (here / "done").exists() and time.monotonic() < until:
        time.sleep(0.05)
    other = pathlib.Path("/proc", (here / "done").read_text())
    while other.exists() and time.monotonic() < until:  # until the launcher has its exit code
        time.sleep(0.05)
    sys.exit(5)
(here / "done.new").write_text(str(os.getpid()))
(here / "done.new").rename(here / "done")
"""
    code, output = start("127.0.0.1:2", "-np", "2", "--min-np", "1", program=program).end()
    assert code == 5, output


def test_a_member_that_does_not_return_is_killed_and_the_job_continues(start):
    program = """
from ctl.hvd import elastic_line
place = elastic_line.join_next_group()
if place.rank == 1:
    time.sleep(1000)
print(elastic_line.join_next_group().size)
"""
    options = ("-np", "2", "--min-np", "1", "--elastic-timeout", "20", "--reset-limit", "1")
    code, output = start("127.0.0.1:2", *options, program=program).end()
    assert code == 0, output
    assert "process 1 did not join the new group in time; killing it" in output
    assert "[0]<stdout>:1\n" in output


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_launcher(start, signum):
    program = "(here / f'pid{number}').write_text(str(os.getpid())); time.sleep(1000)"
    job = start("127.0.0.1:2", "-np", "2", "--min-np", "1", program=program)
    paths = [job.dir / f"pid{number}" for number in range(2)]
    job.wait(lambda: all(path.exists() and path.read_text() for path in paths))
    job.process.send_signal(signum)
    assert job.process.wait(600) == (143 if signum == signal.SIGTERM else -9)
    pids = [int(path.read_text()) for path in paths]
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(("script", "message"), [
    ("#!/bin/sh\necho no hosts today >&2\nexit 4\n", "failed: exit code 4, no hosts today"),
    ("#!/bin/sh\necho 'a b c'\n", "printed an invalid line"),
])  # fmt: skip
def test_a_discovery_script_that_fails_at_first_is_a_mistake(tmp_path, ctlrun, script, message):
    path = tmp_path / "discover.sh"
    path.write_text(script)
    path.chmod(0o755)
    code, _, err = ctlrun.run_command("-np", "1", "--host-discovery-script", str(path), "sleep", "1000")
    assert code == 2 and message in err
    code, _, err = ctlrun.run_command("-np", "1", "--host-discovery-script", "/no/script", "sleep", "1")
    assert code == 2 and "cannot be run" in err


def test_hosts_without_a_number_have_the_slots_of_an_option(start):
    program = "print('slot', os.environ['HOROVOD_LOCAL_RANK'], os.environ['HOROVOD_HOSTNAME'])"
    options = ("-np", "3", "--slots-per-host", "2")
    code, output = start("127.0.0.1 127.0.0.2:1", *options, program=program).end()
    assert code == 0, output
    assert {"slot 0 127.0.0.1", "slot 1 127.0.0.1", "slot 0 127.0.0.2"} >= {
        line.partition(">:")[2] for line in output.splitlines() if "<stdout>:slot" in line
    }


def test_a_far_process_takes_part_and_its_command_line_shows_no_secret(start, monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_bytes((Path(ROOT) / "tests" / "programs" / "fake_ssh.py").read_bytes())
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "ssh.log"))
    job = start("127.0.0.1:1 me@127.0.0.2:1", "-np", "2", "--min-np", "1", last_step=4)
    job.go(4)
    facts = job.wait_for_step(4, size=2)
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert all(f["weights"] == [4.0, 4.0] for f in facts)
    ssh_log = (tmp_path / "ssh.log").read_text()
    assert "remote_entry.py" in ssh_log and "CTL_HVD" not in ssh_log and "SECRET" not in ssh_log


def test_variables_of_an_outer_job_are_not_passed_to_an_elastic_one(tmp_path, ctlrun):
    names = ("TF_CONFIG", "HOROVOD_SIZE", "CTL_HEARTBEAT")
    path = tmp_path / "show.py"
    path.write_text(f"import json, os\nprint(json.dumps([os.environ.get(k) for k in {names}]))\n")
    outer = {"TF_CONFIG": "{}", "HOROVOD_SIZE": "5", "CTL_HEARTBEAT": "/old"}
    code, out, err = ctlrun.run_command("-np", "1", "--min-np", "1", sys.executable, str(path), **outer)
    assert code == 0, err
    config, size, heartbeat = json.loads(out.removeprefix("[0]<stdout>:"))
    assert (config, size) == (None, "1") and heartbeat.startswith("/proc/")


def test_a_group_that_loses_a_rank_before_it_has_met_is_formed_anew_at_once(start):
    program = """
from ctl.hvd import elastic_line
import ctl.hvd as hvd
if number == "1":
    elastic_line.join_next_group()
    sys.exit(9)
hvd.init()  # would wait for the other for five minutes
print(f"size {hvd.size()}")
"""
    options = ("-np", "2", "--min-np", "1", "--reset-limit", "1")
    code, output = start("127.0.0.1:2", *options, program=program).end()
    assert code == 0, output
    assert "[0]<stdout>:size 1\n" in output and "rank 1 is gone" in output


SLOW_EXIT = """
import atexit, runpy, sys, time
atexit.register(time.sleep, 5)      # a dismissed process has not ended when its slot is back
sys.path.insert(0, {folder!r})
runpy.run_path({program!r}, run_name="__main__")
"""


def test_a_dismissed_process_that_has_not_ended_is_not_taken_into_the_next_group(tmp_path):
    """3, 1 and 2 slots within two seconds: all ranks waited for --start-timeout, 300 s."""
    program = tmp_path / "slow_exit.py"
    program.write_text(
        SLOW_EXIT.format(folder=str(PROGRAMS), program=str(PROGRAMS / "elastic_training.py"))
    )
    job = ElasticJob(tmp_path, "localhost:3", "-np", "3", "--min-np", "1", program=program, last_step=12)
    try:
        job.wait_for_step(3, size=3)
        job.hosts("localhost:1")
        job.wait(lambda: job.output.count("no longer has a slot") == 2)
        job.hosts("localhost:2")
        job.go(6)
        job.wait(lambda: re.search(r"group 3: .*\n", job.output))
        [numbers] = re.findall(r"group 3: 2 ranks, processes in the order of ranks: (.*)", job.output)
        assert numbers == "0, 3", job.output[-3000:]
        job.go(1000)
        code, output = job.end()
    finally:
        job.close()
    assert code == 0, output[-6000:]
