"""Jobs on hosts with a real sshd: names on loopback, restarts, cut cables."""


import pytest
from conftest import ROOT
from test_ssh_commands import environ

pytestmark = pytest.mark.cluster
MNIST = ["python", "-m", "models.mnist"]


def test_a_chief_whose_name_is_127_0_1_1_is_reached(ssh_hosts, tmp_path):
    """The default of Debian and Ubuntu."""
    for host in ("hosta", "hostb"):
        ssh_hosts.set_hosts(host, f"127.0.1.1 {host}")
    result = ssh_hosts.run(
        "ctl", "launch", "-H", "hosta,hostb", "--startup_timeout_secs=40", "--max_restarts=0", "--",
        *MNIST, f"--model_dir={tmp_path}/run", "--train_steps=4", "--communication=tcp",
        env=environ(), cwd=ROOT, timeout_secs=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_rank_0_whose_name_is_127_0_1_1_is_reached(ssh_hosts):
    for host in ("hosta", "hostb"):
        ssh_hosts.set_hosts(host, f"127.0.1.1 {host}")
    program = "import ctl.hvd as hvd; hvd.init(); print(hvd.size()); hvd.shutdown()"
    result = ssh_hosts.run(
        "ctlrun", "-np", "2", "-H", "hosta,hostb", "--start-timeout", "30", "python", "-c", program,
        env=environ(), cwd=ROOT, timeout_secs=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:2", "[1]<stdout>:2"]
