"""Elastic jobs of `ctlrun` on hosts with a real sshd that are cut off, removed or unreachable."""

import re
import signal
import textwrap
import time

import pytest
from conftest import ROOT
from polling import wait_until
from test_ssh_commands import environ

pytestmark = pytest.mark.cluster
TIMEOUT_SECS = 600
PROGRAM = """
    import os, sys, time
    import numpy as np
    import ctl.hvd as hvd

    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state):
        while not os.path.exists(sys.argv[1]):
            hvd.allreduce(np.ones(4, np.float32), name="gradient")
            state.step += 1
            if state.step % 10 == 0:
                print("step", state.step, "of", hvd.size(), os.uname().nodename, flush=True)
            time.sleep(0.05)
            state.commit()

    hvd.init()
    train(state)
    print("done", os.uname().nodename, flush=True)
"""


class Elastic:
    """An elastic job with a discovery script."""

    def __init__(self, ssh_hosts, directory):
        self._hosts = ssh_hosts
        self._output = directory / "output"
        self._end = directory / "end"
        self._list = directory / "list"
        self._program = directory / "train.py"
        self._program.write_text(textwrap.dedent(PROGRAM))
        self._script = directory / "hosts.sh"
        self._script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        self._script.chmod(0o755)
        self.process = None

    def write_hosts(self, *hosts):
        """Replaces the list of hosts atomically."""
        new_list = self._list.with_suffix(".new")
        new_list.write_text("\n".join(hosts) + "\n")
        new_list.rename(self._list)

    def start(self, *options):
        with self._output.open("wb") as output:
            self.process = self._hosts.popen(
                ["ctlrun", *options, "--host-discovery-script", self._script,
                 "python", self._program, self._end],
                env=environ(HOROVOD_STALL_CHECK_TIME_SECONDS="20"), cwd=ROOT, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def output(self):
        return self._output.read_text()

    def wait_for(self, text, timeout_secs=TIMEOUT_SECS, after=0):
        """Waits for a pattern in the output after a position. Returns the position after the match."""
        match = wait_until(
            lambda: re.search(text, self.output[after:]), self.process,
            show=lambda: self.output[-6000:], timeout_secs=timeout_secs, pause_secs=0.1,
        )  # fmt: skip
        return after + match.end()

    def end(self):
        self._end.touch()
        try:
            return self.process.wait(TIMEOUT_SECS)
        finally:
            self.stop()

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            finally:
                self.process.kill()


@pytest.fixture
def elastic(ssh_hosts, tmp_path):
    job = Elastic(ssh_hosts, tmp_path)
    yield job
    job.stop()


def test_a_host_that_was_disconnected_for_long_gets_processes_again(elastic, ssh_hosts):
    elastic.write_hosts("hosta:1", "hostb:1")
    elastic.start("-np", "2", "--min-np", "1")
    after = elastic.wait_for("of 2 hostb")
    ssh_hosts.disconnect("hostb")
    after = elastic.wait_for("step .* of 1 hosta", after=after)
    for _ in range(4):  # four failed connections
        after = elastic.wait_for("cannot be started, because host hostb cannot be reached", after=after)
    ssh_hosts.reconnect("hostb")
    elastic.wait_for("step .* of 2 hostb", after=after, timeout_secs=90)
    assert elastic.end() == 0, elastic.output[-6000:]
    assert "since" not in elastic.output.partition("group 2:")[2], "no warning about a group that has ended"


def test_processes_of_a_removed_host_leave_at_the_next_commit(elastic):
    elastic.write_hosts("hosta:1", "hostb:2")
    elastic.start("-np", "3", "--min-np", "1")
    after = elastic.wait_for("of 3 hosta")
    elastic.write_hosts("hosta:1")
    start_secs = time.monotonic()
    after = elastic.wait_for("step .* of 1 hosta", after=after)
    assert time.monotonic() - start_secs < 20
    elastic.write_hosts("hosta:1", "hostc:1")
    elastic.wait_for("step .* of 2 hostc", after=after)
    assert elastic.end() == 0
    assert "killed" not in elastic.output


def test_a_host_that_does_not_answer_does_not_delay_the_first_group(elastic, ssh_hosts):
    (ssh_hosts.home("hostb") / ".bashrc").write_text("sleep 1000\n")
    elastic.write_hosts("hosta:1", "hostb:1")
    elastic.start("-np", "1")
    elastic.wait_for("step .* of 1 hosta", timeout_secs=40)
    start_secs = time.monotonic()
    assert elastic.end() == 0
    assert time.monotonic() - start_secs < 20


def test_a_list_of_hosts_that_flaps_ends_in_the_newest_one(elastic):
    """Hosts are added and removed while processes start, wait and leave."""
    elastic.write_hosts("hosta:1", "hostb:1")
    elastic.start("-np", "1", "--max-np", "3")
    after = elastic.wait_for("of 2 hosta")
    pauses_secs = [0.5, 2.0, 6.0, 1.0, 4.0, 9.0, 0.2, 3.0, 7.0, 1.5]
    for i, pause_secs in enumerate(pauses_secs):
        elastic.write_hosts("hosta:1", *(["hostb:1"] if i % 2 else []), *(["hostc:1"] if i % 3 else []))
        time.sleep(pause_secs)
        assert elastic.process.poll() is None, elastic.output[-6000:]
    elastic.write_hosts("hosta:1", "hostc:1")
    after = len(elastic.output)
    after = elastic.wait_for("step .* of 2 hostc", after=after)
    elastic.write_hosts("hosta:1")
    after = elastic.wait_for("step .* of 1 hosta", after=after)
    elastic.write_hosts("hosta:1", "hostb:1", "hostc:1")
    elastic.wait_for("step .* of 3 hostb", after=after)
    assert elastic.end() == 0, elastic.output[-6000:]
    assert "killing it" not in elastic.output and "failures" not in elastic.output
