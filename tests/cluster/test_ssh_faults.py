"""Jobs on hosts with a real sshd: names on loopback, restarts, lost connections, slow networks."""

import os
import re
import signal
import subprocess
import time

import pytest
from conftest import ROOT
from polling import wait_until
from test_ssh_commands import environ, ssh_children

pytestmark = pytest.mark.cluster
MNIST = ["python", "-m", "models.mnist"]


def test_a_chief_whose_name_is_127_0_1_1_is_reached(ssh_hosts, tmp_path):
    """The default of Debian and Ubuntu."""
    for host in ("hosta", "hostb"):
        ssh_hosts.set_hosts(host, f"127.0.1.1 {host}")
    result = ssh_hosts.run(
        "ctl", "launch", "-H", "hosta,hostb", "--startup_timeout_secs=40", "--max_restarts=0", "--",
        *MNIST, f"--model_dir={tmp_path}/run", "--train_steps=4",
        env=environ(), cwd=ROOT, timeout_secs=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_rank_0_whose_name_is_127_0_1_1_is_reached(ssh_hosts):
    for host in ("hosta", "hostb"):
        ssh_hosts.set_hosts(host, f"127.0.1.1 {host}")
    program = "import ctl.hvd as hvd; hvd.init(); print(hvd.size()); hvd.shutdown()"
    result = ssh_hosts.run(
        "ctlrun", "-np", "2", "-H", "hosta,hostb", "--start-timeout", "30", "python", "-c", program,
        env=environ(), cwd=ROOT, timeout_secs=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:2", "[1]<stdout>:2"]


HEARTBEAT_PROGRAM = """
import json, os, pathlib, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("attempt", os.environ["CTL_ATTEMPT"], "on", os.uname().nodename, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    now = time.time()
    beat = {"pid": os.getpid(), "step": 5, "phase": "training", "beat": now, "progressed": now}
    pathlib.Path(os.environ["CTL_HEARTBEAT"]).write_text(json.dumps(beat))
    time.sleep(0.2)
"""


class Launch:
    """A started `ctl launch` with its stderr in a file."""

    def __init__(self, ssh_hosts, directory, *arguments):
        self.logs = directory / "logs"
        self._errors = directory / "errors"
        with self._errors.open("wb") as errors:
            self.process = ssh_hosts.popen(
                ["ctl", "launch", f"--log_dir={self.logs}", *arguments],
                env=environ(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip

    @property
    def err(self):
        return self._errors.read_text()

    def log(self, number):
        path = self.logs / f"job_{number}.log"
        return path.read_text() if path.exists() else ""

    def wait_until(self, condition):
        wait_until(condition, self.process, show=lambda: self.err)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            finally:
                self.process.kill()


@pytest.fixture
def launch(ssh_hosts, tmp_path):
    """A function `start(*arguments)` that returns a job. The job ends with the test."""
    jobs = []

    def start(*arguments):
        jobs.append(Launch(ssh_hosts, tmp_path, *arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()


def test_a_lost_host_that_returns_is_a_restart_from_the_checkpoint(launch, ssh_hosts, tmp_path):
    run = tmp_path / "run"
    job = launch(
        "-H", "hosta,hostb", "--max_restarts=20", "--",
        *MNIST, f"--model_dir={run}", "--train_steps=60", "--save_every_steps=20",
    )  # fmt: skip
    job.wait_until((run / "checkpoints" / "ckpt-20" / "manifest.json").exists)
    ssh_hosts.stop("hostb")
    job.wait_until(lambda: "worker 1 (job 1) lost its machine hostb: " in job.err)
    ssh_hosts.start("hostb")
    assert job.process.wait(600) == 0, job.err
    assert "resuming at step" in job.log(0) and (run / "checkpoints" / "ckpt-60").is_dir()


def test_a_lost_connection_is_detected_and_attempts_are_distinguished(launch, ssh_hosts, tmp_path):
    """The disconnected worker still writes heartbeats into the shared directory."""
    end = tmp_path / "end"
    options = ["-H", "hosta,hostb", "--max_restarts=20", "--grace_secs=2"]
    job = launch(*options, "--", "python", "-c", HEARTBEAT_PROGRAM, end)
    job.wait_until(lambda: "attempt 1 on hostb" in job.log(1))
    job.wait_until(lambda: any((job.logs / "heartbeat").glob("job_1*")))
    time.sleep(2)  # the launcher reads twice a second
    ssh_hosts.disconnect("hostb")
    start_secs = time.monotonic()
    job.wait_until(lambda: "lost its machine hostb: Timeout, server hostb not responding" in job.err)
    assert time.monotonic() - start_secs < 60
    job.wait_until(lambda: job.err.count("because host hostb cannot be reached") >= 4)
    ssh_hosts.reconnect("hostb")
    job.wait_until(lambda: "attempt" in job.log(1))
    end.touch()
    assert job.process.wait(600) == 0, job.err
    assert "restart (not counted; 0 of 20 used)" in job.err and "restart 2 of 20" in job.err, job.err
    assert job.err.count("0 of 20") == 1, job.err


def test_an_ssh_that_is_killed_is_a_restart(launch):
    program = "import os, sys, time; print('pid', os.getpid(), flush=True); time.sleep(1000)"
    job = launch("-H", "hosta", "--max_restarts=1", "--backoff_secs=0.1", "--", "python", "-c", program)
    job.wait_until(lambda: "pid" in job.log(0))
    [ssh] = ssh_children(job.process.pid)
    os.kill(ssh, signal.SIGKILL)
    job.wait_until(lambda: "restart" in job.err and "pid" in job.log(0))
    assert "lost its machine hosta: ssh ended with SIGKILL" in job.err


def test_a_model_dir_that_is_not_shared_is_refused_when_the_chief_moves(ssh_hosts, tmp_path):
    """/run is another directory on each host."""
    options = [f"--log_dir={tmp_path}/logs", "--max_restarts=0", "-H"]
    command = [*MNIST, "--model_dir=/run/mnist", "--save_every_steps=5"]

    def run(hosts, steps):
        arguments = [*options, hosts, "--", *command, f"--train_steps={steps}"]
        return ssh_hosts.run("ctl", "launch", *arguments, env=environ(), cwd=ROOT, timeout_secs=600)

    result = run("hosta,hostb", 5)
    assert result.returncode == 0, result.stderr
    result = run("hostb,hosta", 10)
    assert result.returncode == 2, result.stderr
    assert "The chief finds no checkpoint in /run/mnist/checkpoints; other workers" in result.stdout
    assert "worker 1 at step 5" in result.stdout


LINEAR_PROGRAM = """
import ctl
import keras
import numpy as np
import tensorflow as tf

class Linear(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def train_data(self, batch_size):
        features = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
        return ctl.from_arrays({"x": features, "y": features.sum(1)}, batch_size)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            error = tf.square(self.model(batch["x"], training=True)[:, 0] - batch["y"])
            loss = self.average(error)
        self.minimize(loss, tape)
        return {"loss": error}

ctl.run(Linear)
"""


def test_the_logged_cost_of_communication_is_that_of_a_step(ssh_hosts, tmp_path):
    """With a round trip of 100 ms."""
    program = tmp_path / "linear.py"
    program.write_text(LINEAR_PROGRAM)
    ssh_hosts.delay("hostb", 0.05)
    result = ssh_hosts.run(
        "ctl", "launch", f"--log_dir={tmp_path}/logs", "-H", "hosta,hostb", "--",
        "python", program, f"--model_dir={tmp_path}/run", "--train_steps=60", "--log_every_steps=20",
        "--global_batch_size=16", env=environ(), cwd=ROOT, timeout_secs=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    logged = re.search(r"communication: tcp (\S+) ms, ring (\S+) ms per step -> tcp", result.stdout)
    assert logged, result.stdout
    measured_ms = 1000 / float(re.findall(r"([0-9.]+) steps/s", result.stdout)[-1])
    assert float(logged[1]) == pytest.approx(measured_ms, rel=0.3)
