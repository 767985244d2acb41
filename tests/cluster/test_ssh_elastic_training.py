"""Elastic training on hosts with a real sshd: lost workers, cut links, a changing list of hosts."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import training
from elastic_training_jobs import FLAGS, Job
from ssh_hosts import LAUNCH
from test_ssh_commands import ssh_children

pytestmark = pytest.mark.cluster
HOSTS = ("-H", "hosta,hostb,hostc")
HEARTBEAT_SECS = 6.0
WITH_HEARTBEAT = (f"--heartbeat_secs={HEARTBEAT_SECS}",)
SLACK_SECS = 30.0  # for a busy machine; without detection a cut costs 60 s or more


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The model_dir of a run on one device."""
    model_dir = tmp_path_factory.mktemp("unbroken") / "m"
    result = training.run(model_dir, *FLAGS)
    assert result.code == 0, result.output
    return model_dir


@pytest.fixture
def start(ssh_hosts, tmp_path):
    """A function that starts a job, which ends with the test."""
    jobs = []

    def start_job(*options, **settings):
        jobs.append(Job(ssh_hosts, tmp_path, *options, **settings))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.stop()


def check_is_exact(job: Job, unbroken: Path) -> None:
    """Checks the end of the job, its losses, its metrics, and that each example was used once."""
    assert job.wait() == 0, job.output[-6000:]
    losses, expected = training.trace(job.model_dir), training.trace(unbroken)
    assert list(losses) == list(expected) == list(range(1, training.STEPS + 1))  # neither gaps nor repeats
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=0, atol=1e-5)
    (counts,) = (v for name, v in training.tensors(job.model_dir).items() if name.startswith("seen/"))
    assert counts.tolist() == [1.0] * len(counts)
    print(f"from the last step of the first group to the next step: {job.pause_secs():.2f} s")


def test_the_chief_is_killed_and_its_successor_on_another_host_takes_over(start, unbroken):
    job = start("--workers=1:3", *HOSTS, FAULTS="kill@13:0", PAUSE_SECS="0.6")
    job.wait_for_step(1)
    assert job.slots() == {0: 0, 1: 1, 2: 2}
    job.wait_for_step(14, size=2)
    assert json.loads((job.model_dir / "LOCK").read_text())["host"] == "hostb"
    job.wait_for(lambda: job.slots().get(3) == 0)  # the replacement has the lowest free number
    check_is_exact(job, unbroken)
    assert job.pause_secs() < SLACK_SECS  # LOCK of a host that cannot be observed is valid for 60 s


def test_a_stopped_worker_is_killed_when_the_others_have_lost_it(start, unbroken):
    job = start("--workers=1:3", *HOSTS, flags=WITH_HEARTBEAT, FAULTS="stop@13:1")
    check_is_exact(job, unbroken)
    assert "process 1 on hostb is silent, and other processes have lost it; killing it" in job.output
    assert job.pause_secs() < HEARTBEAT_SECS + SLACK_SECS


@pytest.mark.parametrize(("host", "number"), [("hosta", 0), ("hostb", 1)], ids=["chief", "another worker"])
def test_a_worker_behind_a_cut_link_ends_and_the_others_continue(start, unbroken, ssh_hosts, host, number):
    job = start("--workers=1:3", *HOSTS, flags=WITH_HEARTBEAT)
    job.wait_for_step(10)
    pid, cut_secs = job.pids()[number], time.monotonic()
    ssh_hosts.disconnect(host)
    job.wait_for(lambda: number not in job.pids(), HEARTBEAT_SECS + SLACK_SECS)
    print(f"process {pid} ended {time.monotonic() - cut_secs:.2f} s after the cut")
    job.wait_for(lambda: any(fact.get("size") == 2 for fact in job.facts), HEARTBEAT_SECS + SLACK_SECS)
    lock = json.loads((job.model_dir / "LOCK").read_text())
    assert lock["state"] == "training" and lock["host"] == ("hostb" if host == "hosta" else "hosta")
    check_is_exact(job, unbroken)


def test_a_launcher_behind_a_cut_link_leaves_no_worker(start, ssh_hosts):
    options = ("--workers=1:2", "-H", "hosta,hostb", "--max_restarts=0")
    job = start(*options, flags=WITH_HEARTBEAT, PAUSE_SECS="3")
    job.wait_for_step(2)
    ssh_hosts.disconnect(LAUNCH)
    job.wait_for(lambda: not job.pids(), HEARTBEAT_SECS + SLACK_SECS)
    assert json.loads((job.model_dir / "LOCK").read_text())["state"] == "ended"
    assert job.wait() == 134, job.output[-6000:]


def test_an_ssh_that_breaks_costs_one_worker(start, unbroken):
    job = start("--workers=1:3", *HOSTS)
    job.wait_for_step(10)
    [pid, *_] = sorted(ssh_children(job.process.pid))
    os.kill(pid, signal.SIGKILL)
    check_is_exact(job, unbroken)
    assert "lost its machine" in job.output


def test_sigterm_to_the_launcher_saves_one_checkpoint_on_all_hosts(start):
    job = start("--workers=1:2", "-H", "hosta,hostb", flags=["--save_every_steps=0"])
    job.wait_for_step(5)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output[-6000:]
    assert len(training.saved(job.model_dir)) == 1 and not job.pids()


def test_workers_follow_the_list_of_hosts(start, unbroken, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("hosta\nhostb\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    job = start("--workers=1:2", f"--host_discovery={script}", PAUSE_SECS="2")
    job.wait_for_step(2, size=2)
    hosts.write_text("hostc\nhostb\n")
    job.wait_for(lambda: any(f["process"] == 2 and f.get("size") == 2 for f in job.facts))
    assert job.slots() == {1: 1, 2: 0}
    assert "process 0 on hosta no longer has a slot; requesting its exit" in job.output
    check_is_exact(job, unbroken)
    assert "killing it" not in job.output and max(f["size"] for f in job.facts if "size" in f) == 2

