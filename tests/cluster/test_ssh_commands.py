"""Commands of the documentation, and arguments with special characters, on hosts with a real sshd."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from polling import wait_until

pytestmark = pytest.mark.cluster
BINARY_DIRECTORY = Path(sys.executable).parent
SPECIAL = ["a\\", "b\\\\", "!!", "$(touch owned)", "it's", 'a "b"', "new\nline", "*", "", "ü", "; exit 7"]


def environ(**variables):
    """Returns the environment of a shell after `. .venv/bin/activate`."""
    inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return {**inherited, "PATH": f"{BINARY_DIRECTORY}:/usr/local/bin:/usr/bin:/bin", **variables}


@pytest.mark.parametrize(
    "options",
    [["-H", "hosta:2,hostb:2"], ["--host_discovery=hosts.sh", "--min_workers=2", "--max_workers=8"]],
    ids=["hosts", "discovery"],
)
def test_the_documented_command_trains_on_two_hosts(ssh_hosts, tmp_path, options):
    run, script = tmp_path / "mnist", tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho hosta:2\necho hostb:2\n")
    script.chmod(0o755)
    options = [option.replace("hosts.sh", str(script)) for option in options]
    command = ["python", "-m", "models.mnist", f"--model_dir={run}", "--train_steps=20"]
    result = ssh_hosts.run(
        "ctl", "launch", *options, "--", *command, env=environ(), cwd=ROOT, timeout_secs=600
    )
    assert result.returncode == 0, result.stderr
    assert (run / "checkpoints" / "ckpt-20").is_dir()
    assert "4 workers" in result.stdout


def test_the_documented_command_of_ctlrun_finds_its_program(ssh_hosts):
    program = "import os, sys; print(os.environ['HOROVOD_RANK'], os.uname().nodename, sys.executable)"
    command = ["-np", "4", "-H", "hosta:2,hostb:2", "python", "-c", program]
    result = ssh_hosts.run("ctlrun", *command, env=environ())
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}]<stdout>:{rank} host{'aabb'[rank]} {BINARY_DIRECTORY / 'python'}" for rank in range(4)
    ]


def test_a_program_that_a_host_does_not_have_is_named(ssh_hosts):
    program = ssh_hosts.etc("launch") / "here"  # other hosts have a separate /etc
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = f"{BINARY_DIRECTORY}:/bin:/etc"
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "here", env=environ(PATH=path))
    assert result.returncode == 2
    assert "the command 'here' was not found on hosta; expected a program on PATH=" in result.stderr
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "/etc/here", env=environ())
    assert result.returncode == 2 and "'/etc/here' cannot be run on hosta" in result.stderr


@pytest.mark.parametrize("count", [12, 64])
def test_many_workers_start_on_one_host(ssh_hosts, count):
    result = ssh_hosts.run("ctlrun", "-np", f"{count}", "-H", f"hostc:{count}", "/usr/bin/env", "hostname",
                           env=environ())  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(f"[{i}]<stdout>:hostc" for i in range(count))


def test_login_shells_receive_no_text_of_the_user(ssh_hosts, tmp_path):
    """Shells such as fish and csh have other quoting rules."""
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/commands\nexec /bin/sh -c "$2"\n')
    shell.chmod(0o755)
    ssh_hosts.set_login("hosta", shell)
    directory = tmp_path / "a 'b' \\"
    directory.mkdir()
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd()]))"
    launch = [sys.executable, "-m", "ctl", "launch"]  # the script `ctl` may name another link to it
    result = ssh_hosts.run(*launch, "-H", "hosta", "--", "python", "-c", program, *SPECIAL,
                           env=environ(), cwd=directory)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [SPECIAL, str(directory)]
    [shell_commands] = (tmp_path / "commands").read_text().splitlines()
    assert shell_commands == f"exec {sys.executable} {ROOT}/ctl/launch/remote_entry.py"


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "fish", "csh"])
def test_arguments_arrive_unchanged_with_any_login_shell(ssh_hosts, shell):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    ssh_hosts.set_login("hosta", path)
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "python", "-c", program, *SPECIAL,
                           env=environ())  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == SPECIAL


def test_a_login_that_a_busy_sshd_refuses_is_repeated(ssh_hosts):
    """Connections before the login fill MaxStartups for the first seconds."""
    with (ssh_hosts.etc("hosta") / "ssh" / "sshd_config").open("a") as config:
        config.write("MaxStartups 1\n")
    ssh_hosts.stop("hosta")
    ssh_hosts.start("hosta")
    connect = "import socket, time; s = socket.create_connection(('hosta', 22)); s.recv(9)"
    command = [sys.executable, "-u", "-c", connect + "; print(1); time.sleep(4)"]
    with ssh_hosts.popen(command, stdout=subprocess.PIPE) as other_connection:
        assert other_connection.stdout.readline() == b"1\n"
        result = ssh_hosts.run("ctlrun", "-np", "2", "-H", "hosta:2", "hostname", env=environ())
    assert (result.returncode, result.stdout.count("hosta")) == (0, 2), result.stderr


def test_a_startup_file_that_reads_stdin_is_named(ssh_hosts):
    (ssh_hosts.home("hosta") / ".bashrc").write_text("read answer\n")
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "true", env=environ())
    assert result.returncode == 2
    assert "a program on hosta read the beginning of the launcher's input; expected" in result.stderr
    assert "Traceback" not in result.stderr + result.stdout and "restart" not in result.stderr


def test_a_startup_file_that_prints_changes_nothing(ssh_hosts):
    (ssh_hosts.home("hosta") / ".bashrc").write_text("echo welcome; printf 'to hosta'\n")
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "echo", "done", env=environ())
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_a_login_shell_that_runs_nothing_is_no_success(ssh_hosts):
    ssh_hosts.set_login("hosta", "/bin/true")
    result = ssh_hosts.run("ctl", "launch", "-H", "hosta", "--", "true", env=environ())
    assert result.returncode == 2
    assert "cannot be started on hosta: no error message was received" in result.stderr


@pytest.mark.parametrize(
    "command", [("ctl", "launch", "-H", "{},hostb", "--"), ("ctlrun", "-np", "2", "-H", "{},hostb")]
)
@pytest.mark.parametrize(
    ("break_login", "host", "error"),
    [
        (lambda hosts: (hosts.etc("hosta") / "ssh" / "test_authorized_keys").write_text(""), "hosta",
         "Permission denied (publickey)"),
        (lambda hosts: (hosts.etc("launch") / "ssh" / "test_known_hosts").write_text(""), "hosta",
         "Host key verification failed"),
        (lambda hosts: None, "hostx", "Could not resolve hostname hostx"),
    ],
    ids=["key", "host-key", "name"],
)  # fmt: skip
def test_an_error_of_ssh_is_reported_at_once(ssh_hosts, command, break_login, host, error):
    break_login(ssh_hosts)
    launch_command = [argument.format(host) for argument in command]
    start_secs = time.monotonic()
    result = ssh_hosts.run(*launch_command, "sleep", "1000", env=environ())
    assert result.returncode == 2, result.stderr
    assert error in result.stderr, result.stderr
    assert "restart" not in result.stderr and "lost its machine" not in result.stderr
    assert time.monotonic() - start_secs < 20


@pytest.mark.parametrize(
    "command", [("ctl", "launch", "-H", "hosta", "--"), ("ctlrun", "-np", "1", "-H", "hosta")]
)
def test_ctrl_c_ends_ssh_while_it_connects(ssh_hosts, command):
    ssh_hosts.disconnect("hosta")
    launcher = ssh_hosts.popen([*command, "sleep", "1000"], env=environ(), start_new_session=True)
    try:
        wait_until(lambda: ssh_children(launcher.pid))
        start_secs = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 130
        assert time.monotonic() - start_secs < 5
    finally:
        launcher.kill()


def ssh_children(pid):
    """Returns the process IDs of the ssh processes of a launcher."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = []
    for child in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            if Path(f"/proc/{child}/comm").read_text() == "ssh\n":
                pids.append(int(child))
    return pids
