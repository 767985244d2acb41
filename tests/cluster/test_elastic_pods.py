"""The pods of `ctl deploy kubernetes --elastic`, without Kubernetes: its script in namespaces."""

import json
import sys

import pytest
import ssh_hosts
import training
from conftest import PROGRAMS, ROOT
from ctl.deploy import command
from elastic_training_jobs import FLAGS, TIMEOUT_SECS, Job
from pods import Pods
from test_ssh_commands import environ
from test_ssh_elastic_training import check_is_exact, unbroken  # noqa: F401

pytestmark = pytest.mark.cluster


@pytest.fixture
def pods(capsys, tmp_path):
    """Pods of a job of 2 to 3 pods."""
    if reason := ssh_hosts.missing():
        pytest.skip(reason)
    program = [
        sys.executable, str(PROGRAMS / "leaving.py"), f"--model_dir={tmp_path}/m",
        f"--train_steps={training.STEPS}", *training.OPTIONS, *FLAGS,
    ]  # fmt: skip
    options = ("--image=ghcr.io/me/a:1", "--elastic=2:3", f"--mount={tmp_path}", "--claim=c")
    variables = ("--env=PAUSE_SECS=2.5", f"--env=FAULTS_DIR={tmp_path}", "--env=FAULTS=kill@3:2")
    assert command.main(["kubernetes", *options, *variables, "--format=json", "--", *program]) == 0
    manifest = json.loads(capsys.readouterr().out)
    (tmp_path / "pods").mkdir()
    names = ["pod0", "pod1", "pod2", "pod1b"]
    with Pods(tmp_path / "pods", manifest, names, environ(PYTHONPATH=f"{ROOT}")) as started_pods:
        yield started_pods


class PodJob(Job):
    """A job with its launcher in the first pod."""

    def __init__(self, pods: Pods):
        self.model_dir = pods.directory.parent / "m"
        self._output = pods.log("pod0")
        self.pods = {name: pods.start(name, is_listed=False) for name in ("pod1", "pod2", "pod0")}
        self.process = self.pods["pod0"]
        self.wait_for(lambda: "Waiting for the addresses of the Service" in self.output)
        pods.publish()


def test_a_lost_worker_and_a_replaced_pod_do_not_end_the_job(pods, unbroken):  # noqa: F811
    job = PodJob(pods)
    job.wait_for_step(4, size=2)  # one worker was killed, its pod still runs
    job.wait_for(lambda: any(fact.get("process") == 3 and fact.get("size") == 3 for fact in job.facts))
    pods.delete("pod1")
    job.wait_for(lambda: job.facts[-1].get("size") == 2)
    pods.start("pod1b")
    job.wait_for(lambda: any(fact.get("process") == 4 and fact.get("size") == 3 for fact in job.facts))
    check_is_exact(job, unbroken)
    for name in ("pod2", "pod1b"):  # Kubernetes ends them when the first one has succeeded
        pods.terminate(name)
    assert job.pods["pod2"].wait(TIMEOUT_SECS) == 143


def test_the_workers_save_if_the_job_is_deleted(pods):
    job = PodJob(pods)
    job.wait_for_step(5)
    for name in job.pods:
        pods.terminate(name)
    assert [job.pods[name].wait(TIMEOUT_SECS) for name in sorted(job.pods)] == [143, 143, 143]
    newest = max(training.saved(job.model_dir))
    last_step = max(fact.get("step", 0) for fact in job.facts)
    assert newest == last_step and last_step < training.STEPS


def test_a_pod_without_login_shell_ends_the_job_with_the_reason(pods):
    passwd = pods.etc("pod1") / "passwd"
    passwd.write_text(passwd.read_text().replace("/bin/sh", "/usr/sbin/nologin"))
    assert pods.start("pod1").wait(TIMEOUT_SECS) == 2
    assert "sshd requires a login shell" in pods.log("pod1").read_text()
