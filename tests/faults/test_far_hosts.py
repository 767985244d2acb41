"""Workers on other machines: a stand-in for ssh, and two networks on one machine."""

import json
import os
import signal
import stat
import subprocess
import sys

import processes
import pytest
from launching import ROOT, TELL_SIGNALS, is_alive, pids_of
from polling import wait_until

pytestmark = [
    pytest.mark.workers,
    pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent on Linux only"),
]
BACKOFF = "--backoff_secs=0.1"
HOST_PROGRAM = """
print("on", os.environ.get("FAR_HOST", "here"), flush=True)
attempt = int(os.environ["CTL_ATTEMPT"])
"""


@pytest.fixture
def ssh(job):
    """Returns variables with a simulated ssh first on PATH. It records its arguments in job.dir/ssh."""
    binaries = job.dir / "bin"
    binaries.mkdir()
    program = binaries / "ssh"
    text = (ROOT / "tests/programs/fake_ssh.py").read_text()
    program.write_text(processes.python_script(text.partition("\n")[2]))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    # Remote workers inherit no environment: their program contains the directory of the test.
    return {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SSH_LOG": str(job.dir / "ssh"),
        "FAKE_SSH_DEAD": str(job.dir / "dead"),
        "PYTHONPATH": str(ROOT),
    }


def with_directory(job, text):
    """Returns a program that contains its directory."""
    return f"here = pathlib.Path({str(job.dir)!r})\n" + text


@pytest.fixture(autouse=True)
def without_test_dir(monkeypatch):
    import launching

    monkeypatch.setattr(
        launching, "WORKER", launching.WORKER.replace('os.environ["TEST_DIR"]', '"/nowhere"')
    )


def calls(job):
    return [json.loads(line) for line in (job.dir / "ssh").read_text().splitlines()]


def test_each_host_gets_its_workers_with_addresses_in_its_name(job, ssh):
    code, out, err = job.run(
        with_directory(job, HOST_PROGRAM + "print(json.dumps(task)); sys.exit(0)"),
        "-H", "me@host1:2,host2", "--port=3333", env=ssh,
    )  # fmt: skip
    assert (code, err) == (0, f"ctl launch: starting 3 processes, logs in {job.logs}\n")
    logs = [job.log(i).splitlines() for i in range(3)]
    assert [lines[0] for lines in logs] == ["on me@host1", "on me@host1", "on host2"]
    tasks = [json.loads(lines[1]) for lines in logs]
    assert [t["task"] for t in tasks] == [{"type": "worker", "index": i} for i in range(3)]
    addresses = ["host1:3333", "host1:3334", "host2:3333"]
    assert all(t["cluster"] == {"worker": addresses} for t in tasks)
    assert out.decode() == job.log(0) and job.attempts[0]["hosts"] == ["me@host1"] * 2 + ["host2"]


def test_ssh_receives_a_list_of_arguments_and_no_environment(job, ssh):
    arguments = ["it's", "$(touch owned)", "a b", "; exit 7", "*"]
    code, out, _ = job.run(
        "print(sys.argv[1:], os.getcwd(), os.environ.get('A_SECRET'))",
        "-H", "host1", env={**ssh, "A_SECRET": "of mine"}, command=arguments, cwd=str(job.dir),
    )  # fmt: skip
    assert code == 0 and out.decode() == f"{arguments} {job.dir} None\n"
    [call] = calls(job)
    assert call["words"][:4] == ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    assert call["words"][-3:-1] == ["--", "host1"] and "of mine" not in json.dumps(call)


def test_one_host_of_two_may_be_this_machine_and_runs_directly(job, ssh):
    this_host = os.uname().nodename
    program = with_directory(job, HOST_PROGRAM + "print(json.dumps(task))")
    code, _, _ = job.run(program, "-H", f"{this_host}:1,host2:1", env=ssh)
    assert code == 0 and len(calls(job)) == 1
    assert job.log(0).startswith("on here\n") and job.log(1).startswith("on host2\n")
    addresses = json.loads(job.log(1).splitlines()[1])["cluster"]["worker"]
    assert addresses[0].startswith(f"{this_host}:") and addresses[1] == "host2:2222"


def test_exit_codes_and_signals_come_through_and_the_job_is_started_again(job, ssh):
    code, _, err = job.run(
        with_directory(
            job,
            HOST_PROGRAM
            + """
if job == 1 and attempt == 1: os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2: sys.exit(3 * (job == 1))
wait_for(lambda: False)
""",
        ),
        "-H", "host1,host2", "--grace_secs=1", BACKOFF, env=ssh,
    )  # fmt: skip
    assert code == 3 and "restart 1 of 3 in 0.1 s: worker 1 (job 1) failed: SIGKILL" in err
    assert "worker 1 (job 1) failed first: exit code 3" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_workers_of_other_machines_once(job, ssh, signum, code):
    job.start(
        TELL_SIGNALS + "wait_for(lambda: got)\ntime.sleep(0.3)\nsys.exit(143)",
        "-H", "host1,host2", env=ssh,
    )  # fmt: skip
    job.wait_for_logs("ready")
    job.process.send_signal(signum)
    assert job.end()[0] == code
    assert [job.log(i) for i in range(2)] == [f"ready\ngot {signal.Signals(signum).name}\n"] * 2


SIGTERM_IGNORING_PROGRAM = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("pid", os.getpid(), child.pid, flush=True)
wait_for(lambda: False)
"""


def pids(job, count=2):
    return [pid for i in range(count) for pid in pids_of(job, i)]


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_remote_workers_and_their_children_end_with_the_launcher(job, ssh, signal_name):
    job.start(SIGTERM_IGNORING_PROGRAM, "-H", "host1,host2", "--grace_secs=0.5", env=ssh)
    worker_pids = pids(job)
    assert all(map(is_alive, worker_pids))
    job.process.send_signal(signal.Signals[signal_name])
    job.end()
    wait_until(lambda: not any(map(is_alive, worker_pids)))


def test_far_workers_end_with_their_connection_and_the_host_is_named(job, ssh):
    job.start(
        SIGTERM_IGNORING_PROGRAM, "-H", "host1,host2", "--grace_secs=0.5", "--max_restarts=0", env=ssh
    )
    worker_pids = pids(job)
    os.kill(calls(job)[1]["pid"], signal.SIGKILL)
    code, _ = job.end()
    assert code == 137
    wait_until(lambda: not any(map(is_alive, worker_pids)))


def test_a_host_that_cannot_be_reached_is_named_and_tried_again(job, ssh):
    (job.dir / "dead").write_text("host2")
    job.start(
        with_directory(job, "print('attempt', os.environ['CTL_ATTEMPT'])\nwait_for((here / 'up').exists)"),
        "-H", "host1,host2", BACKOFF, "--grace_secs=1", "--max_restarts=50", env=ssh,
    )  # fmt: skip
    wait_until(lambda: job.attempts)
    (job.dir / "dead").write_text("")
    wait_until(lambda: job.log(1).startswith("attempt"))
    (job.dir / "up").touch()
    code, err = job.end()
    assert code == 0
    assert (
        "worker 1 (job 1) cannot be started, because host host2 cannot be reached: ssh: connect to host "
        "host2 port 22: No route to host" in err
    )
    assert "No route to host" in job.log("job_1.attempt1")


def test_workers_come_and_go_between_attempts(job, ssh):
    """Two, then three, then one; the first host keeps the chief."""
    script = job.dir / "hosts.sh"
    answers = ["host1:2", "host1:2\nhost2:4", "host1", "x"]
    for number, answer in enumerate(answers):
        (job.dir / f"answer{number}").write_text(answer + "\n")
    script.write_text(
        f"#!/bin/sh\ncd {job.dir}\nn=$(cat asked 2>/dev/null || echo 0)\n"
        "cat answer$n\necho $((n + 1)) > asked\n"
    )
    script.chmod(0o755)
    code, _, err = job.run(
        "sys.exit(0 if os.environ['CTL_ATTEMPT'] == '3' else 134)",
        f"--host_discovery={script}", "--max_workers=3", BACKOFF, env=ssh,
    )  # fmt: skip
    assert code == 0 and [a["workers"] for a in job.attempts] == [2, 3, 1]
    assert job.attempts[1]["hosts"] == ["host1", "host1", "host2"]
    assert "ctl launch: 2 workers → 3 workers\n" in err
    assert "ctl launch: 3 workers → 1 worker\n" in err


def test_too_few_hosts_are_waited_for_and_then_it_is_134(job, ssh):
    script = job.dir / "hosts.sh"
    script.write_text("#!/bin/sh\necho host1:1\n")
    script.chmod(0o755)
    options = [f"--host_discovery={script}", "--min_workers=2", "--startup_timeout_secs=1"]
    code, _, err = job.run("pass", *options, env=ssh)
    assert code == 134 and not (job.dir / "ssh").exists()
    reason = "1 slot on host1:1, fewer than --min_workers=2"
    assert err.splitlines() == [
        f"ctl launch: waiting for workers: {reason}",
        f"ctl launch: not enough workers after 1 s: {reason}",
    ]


def test_a_signal_ends_the_waiting_for_hosts(job, ssh):
    script = job.dir / "hosts.sh"
    script.write_text("#!/bin/sh\ntouch asked\nsleep 1000\n")
    script.chmod(0o755)
    job.start("pass", f"--host_discovery={script}", env=ssh, cwd=str(job.dir))
    wait_until((job.dir / "asked").exists)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(timeout_secs=25)[0] == 143, "the script itself may take 30 s"


def networks():
    """Returns whether two network namespaces can be created."""
    if os.geteuid() != 0:
        return False
    name = f"ctl{os.getpid()}x"
    try:
        created = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except OSError:
        return False
    return created.returncode == 0


@pytest.fixture
def two_networks():
    """Names of two namespaces joined by a pair of veth, 10.77.1.1 and 10.77.1.2."""
    names = [f"ctl{os.getpid()}{side}" for side in "ab"]
    lines = [f"netns add {name}" for name in names]
    lines.append(f"-n {names[0]} link add near type veth peer name near netns {names[1]}")
    for i, name in enumerate(names):
        lines.append(f"-n {name} addr add 10.77.1.{i + 1}/24 dev near")
        lines += [f"-n {name} link set {device} up" for device in ("lo", "near")]
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True, timeout=20)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


@pytest.mark.skipif(not networks(), reason="no rights to make network namespaces")
def test_workers_in_two_networks_reach_each_other_at_their_addresses(job, ssh, two_networks):
    local_network, remote_network = two_networks
    code, _, err = job.run(
        """
        import socket
        host, port = task["cluster"]["worker"][0].split(":")
        if index == 0:
            server = socket.create_server((host, int(port)))
            server.settimeout(600)
            peer = server.accept()[0]
            print("heard", peer.recv(100).decode())
            print("of", peer.getpeername()[0])
        else:
            link = []
            def connects():
                try: link.append(socket.create_connection((host, int(port)), 5))
                except OSError: return False
                return True
            wait_for(connects)
            link[0].sendall(b"hello")
        """,
        "-H", "10.77.1.1,10.77.1.2",
        under=("ip", "netns", "exec", local_network),
        env={**ssh, "FAKE_SSH_WAY": f"ip netns exec {remote_network}"},
    )  # fmt: skip
    assert (code, job.log(0)) == (0, "heard hello\nof 10.77.1.2\n"), err
    assert [call["words"][-2] for call in calls(job)] == ["10.77.1.2"]


@pytest.mark.slow
@pytest.mark.skipif(not networks(), reason="no rights to make network namespaces")
def test_training_over_two_networks_goes_on_after_a_lost_connection(job, ssh, two_networks):
    """Workers of TensorFlow connect to the addresses that the launcher assigns."""
    local_network, remote_network = two_networks
    run = job.dir / "run"
    options = [f"--model_dir={run}", "--train_steps=300", "--save_every_steps=20"]
    job.start(
        "import runpy; sys.argv[0] = 'mnist'; runpy.run_module('models.mnist', run_name='__main__')",
        "-H", "10.77.1.1,10.77.1.2",
        under=("ip", "netns", "exec", local_network), command=options,
        env={**ssh, "FAKE_SSH_WAY": f"ip netns exec {remote_network}"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until((run / "checkpoints" / "ckpt-20" / "manifest.json").exists)
    os.kill(calls(job)[0]["pid"], signal.SIGKILL)
    code, err = job.end()
    assert code == 0 and "restart (not counted; 0 of 3 used)" in err, err
    assert (run / "checkpoints" / "ckpt-300").is_dir() and len(job.attempts) == 2
    assert job.attempts[1]["step_before"] >= 20
