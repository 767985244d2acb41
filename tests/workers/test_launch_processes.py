"""The launcher with real processes: small Python programs stand in for workers.

Each sees `job` (its number) and `wait_for(condition)`, and writes into its log by printing.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.workers

ROOT = Path(__file__).parents[2]
TIMEOUT_SECS = 60
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a promise for Linux")

WORKER = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])
job = task["task"]["index"] + len(task["cluster"].get("chief", [])) * (
    task["task"]["type"] == "worker")
here = pathlib.Path(os.environ["TEST_DIR"])

def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            sys.exit("waited in vain")
        time.sleep(0.01)

def leave_pid(path):
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)

def wait_for_end_of(path):
    "Until the launcher has seen the end of the process that left its pid."
    def is_gone():
        try: os.kill(int(path.read_text()), 0)
        except ProcessLookupError: return True
    wait_for(path.exists)
    wait_for(is_gone)
"""
TELL_SIGNALS = """
got = []
def tell(signum, frame):
    got.append(signum)
    print("got", signal.Signals(signum).name)
signal.signal(signal.SIGTERM, tell)
signal.signal(signal.SIGINT, tell)
print("ready")
"""


@pytest.fixture
def job(tmp_path):
    """A launcher to be started once per test; killed, and its workers with it, at the end."""
    started = Job(tmp_path)
    yield started
    if started.process is not None and started.process.poll() is None:
        started.process.kill()
        started.process.wait(TIMEOUT_SECS)


class Job:
    def __init__(self, directory):
        self.dir = directory
        self.logs = directory / "logs"
        self.process = None

    def start(self, worker, *options, under=(), **popen):
        """Starts the launcher for the program `worker`; `under` are words to start it through."""
        program = self.dir / "worker.py"
        program.write_text(WORKER + textwrap.dedent(worker))
        command = [*under, sys.executable, "-m", "ctl", "launch", f"--log_dir={self.logs}"]
        environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        environ |= {"PYTHONPATH": str(ROOT), "TEST_DIR": str(self.dir), **popen.pop("env", {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        self.process = subprocess.Popen(
            [*command, *options, "--", sys.executable, str(program)], env=environ, **streams
        )
        return self.process

    def run(self, worker, *options, **popen):
        """Starts and waits; returns the exit code, stdout as bytes and stderr as text."""
        out, err = self.start(worker, *options, **popen).communicate(timeout=TIMEOUT_SECS)
        return self.process.returncode, out, err.decode()

    def end(self):
        """Waits for the launcher's own end; returns its exit code and what it said."""
        err = self.process.communicate(timeout=TIMEOUT_SECS)[1]
        return self.process.returncode, (err or b"").decode()

    def log(self, number):
        path = self.logs / f"job_{number}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_logs(self, text, workers=2):
        wait_for(lambda: all(text in self.log(i) for i in range(workers)))


def wait_for(condition):
    until = time.monotonic() + TIMEOUT_SECS
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def read_until(stream, text):
    """Reads a file descriptor until `text` has come; returns all that came."""
    seen, until = b"", time.monotonic() + TIMEOUT_SECS
    while text not in seen:
        assert time.monotonic() < until, f"{text!r} did not come, only {seen!r}"
        if select.select([stream], [], [], 0.1)[0]:
            seen += os.read(stream, 65536)
    return seen


def is_alive(pid):
    """False for a zombie too: it has ended, only nobody has asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pid_in(text):
    return int(re.search(r"pid (\d+)", text)[1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--workers=2"], [("worker", 0), ("worker", 1)]),
        (["--workers=1"], [("worker", 0)]),
        (["--chief", "--workers=2"], [("chief", 0), ("worker", 0), ("worker", 1)]),
    ],
)
def test_each_process_gets_its_place_in_one_cluster(job, options, expected):
    code, _, err = job.run("print(os.environ['TF_CONFIG'])", *options)
    assert (code, err) == (0, f"ctl launch: starting {job_count(expected)}, logs in {job.logs}\n")
    configs = [json.loads(job.log(i)) for i in range(len(expected))]
    assert [(c["task"]["type"], c["task"]["index"]) for c in configs] == expected
    cluster = configs[0]["cluster"]
    assert all(config["cluster"] == cluster for config in configs)
    counts = {kind: [k for k, _ in expected].count(kind) for kind, _ in expected}
    assert {kind: len(addresses) for kind, addresses in cluster.items()} == counts
    addresses = {address for kind in cluster.values() for address in kind}
    assert len(addresses) == len(expected) and all("127.0.0.1:" in a for a in addresses)


def job_count(expected):
    return f"{len(expected)} process" + "es" * (len(expected) > 1)


def test_a_tf_config_of_the_parent_is_replaced_and_that_is_said(job):
    code, out, err = job.run("print(os.environ['TF_CONFIG'])", env={"TF_CONFIG": "an old one"})
    assert code == 0 and "TF_CONFIG was set already" in err
    assert json.loads(out)["task"] == {"type": "worker", "index": 0}


def test_logs_hold_stdout_and_stderr_of_this_start_only(job):
    job.logs.mkdir()
    for i in range(2):
        (job.logs / f"job_{i}.log").write_text("from an earlier start\n" * 10)
    code, out, _ = job.run("print('out', job); print('err', job, file=sys.stderr)", "--workers=2")
    assert code == 0 and out == b"out 0\nerr 0\n"
    assert [job.log(i) for i in range(2)] == ["out 0\nerr 0\n", "out 1\nerr 1\n"]


def test_the_chief_is_on_the_console_while_it_runs_and_unaltered(job):
    job.start(
        r"""
        os.write(1, b"10%\r\x1b[1m20%\xff\x00 no line end")
        wait_for((here / "seen").exists)
        """,
        "--workers=2",
    )
    seen = read_until(job.process.stdout.fileno(), b"no line end")
    assert seen == b"10%\r\x1b[1m20%\xff\x00 no line end"
    (job.dir / "seen").touch()
    assert job.end()[0] == 0
    assert (job.logs / "job_0.log").read_bytes() == seen


def test_all_that_the_chief_wrote_is_there_when_the_launcher_ends(job):
    code, out, _ = job.run("sys.stdout.write('0123456789abcde\\n' * 100_000)")
    assert code == 0 and out == b"0123456789abcde\n" * 100_000
    assert job.log(0).encode() == out


@LINUX
def test_a_slow_console_still_gets_all_that_the_chief_wrote(job):
    job.start("print('pid', os.getpid())\nsys.stdout.write('0123456789abcde\\n' * 6_000)")
    wait_for(lambda: "pid " in job.log(0) and not Path(f"/proc/{pid_in(job.log(0))}").exists())
    with pytest.raises(subprocess.TimeoutExpired):  # the launcher stays until all is taken
        job.process.wait(0.5)
    out, _ = job.process.communicate(timeout=TIMEOUT_SECS)
    assert out.count(b"0123456789abcde\n") == job.log(0).count("0123456789abcde\n") == 6_000


def test_a_console_that_goes_away_does_not_end_the_job(job):
    job.start(
        """
        print("first")
        wait_for((here / "closed").exists)
        for i in range(1000): print("more")
        """
    )
    read_until(job.process.stdout.fileno(), b"first")
    job.process.stdout.close()
    job.process.stdout = None
    (job.dir / "closed").touch()
    assert job.end()[0] == 0
    assert job.log(0).count("more") == 1000


def test_the_first_failing_worker_decides_the_exit_code_and_ends_the_others(job):
    code, _, err = job.run(
        TELL_SIGNALS
        + """
if job == 1:
    wait_for(lambda: "ready" in (here / "logs/job_0.log").read_text())
    for i in range(30): print("line", i, "of worker 1")
    sys.exit(3)
wait_for(lambda: got)
sys.exit(7)
""",
        "--workers=2",
    )
    assert code == 3 and job.log(0) == "ready\ngot SIGTERM\n"
    first, *shown = err[err.index("worker 1 (job 1) failed first") :].splitlines()
    assert first == f"worker 1 (job 1) failed first: exit code 3; its log is {job.logs}/job_1.log"
    assert shown == [f"line {i} of worker 1" for i in range(10, 30)]


def test_a_failing_chief_is_named_and_not_shown_twice(job):
    code, out, err = job.run("print('my last words'); sys.exit(5 if job == 0 else 0)", "--chief")
    assert (code, out) == (5, b"my last words\n")
    assert "chief 0 (job 0) failed first: exit code 5" in err and "last words" not in err


def test_a_worker_ended_by_a_signal_is_128_and_its_number(job):
    code, _, err = job.run(
        "if job: os.kill(os.getpid(), signal.SIGKILL)\nwait_for(lambda: False)", "--workers=2"
    )
    assert code == 137 and "worker 1 (job 1) failed first: SIGKILL" in err


def test_a_worker_that_fails_after_its_peer_noticed_is_still_the_cause(job):
    code, _, err = job.run(
        """
        if job == 0:
            leave_pid(here / "pid")
            sys.exit(134)
        wait_for_end_of(here / "pid")
        sys.exit(3)
        """,
        "--workers=2",
    )
    assert code == 3 and "worker 1 (job 1) failed first" in err


def test_an_inherited_ignored_sigchld_does_not_hide_a_failure(job):
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    code, _, _ = job.run("sys.exit(3)", under=(sys.executable, "-c", ignore))
    assert code == 3


def test_workers_may_end_a_little_after_the_chief(job):
    code, _, _ = job.run(
        """
        if job: wait_for_end_of(here / "pid")
        else: leave_pid(here / "pid")
        """,
        "--workers=2",
    )
    assert code == 0


def test_workers_that_outlive_the_chief_by_too_much_are_ended_and_that_is_said(job):
    code, _, err = job.run("wait_for(lambda: job == 0)", "--workers=2", "--grace_secs=0.5")
    assert code == 1
    assert "worker 0 (job 0) is done but others still run after 0.5 s" in err
    assert "did not end by themselves: worker 1 (job 1)" in err


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_to_the_launcher_reaches_every_worker_once(job, signum, code):
    # After the first signal each worker stays for a while: a second one would be told too.
    job.start(TELL_SIGNALS + "wait_for(lambda: got)\ntime.sleep(0.3)\nsys.exit(143)", "--workers=2")
    job.wait_for_logs("ready")
    job.process.send_signal(signum)
    assert job.end()[0] == code
    name = signal.Signals(signum).name
    assert [job.log(i) for i in range(2)] == [f"ready\ngot {name}\n"] * 2


def test_workers_that_end_with_0_when_asked_to_make_it_0(job):
    job.start(TELL_SIGNALS + "wait_for(lambda: got)", "--workers=2")
    job.wait_for_logs("ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 0


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(job):
    worker = TELL_SIGNALS + "wait_for(lambda: job == 0 and got)"
    job.start(worker, "--workers=2", "--grace_secs=0.5")
    job.wait_for_logs("ready")
    job.process.send_signal(signal.SIGTERM)
    code, err = job.end()
    assert code == 143 and "got SIGTERM" in job.log(1)
    assert "ended: worker 0 (job 0) exit code 0, worker 1 (job 1) SIGKILL" in err


def test_a_second_signal_kills_at_once(job):
    job.start(TELL_SIGNALS + "wait_for(lambda: False)", "--workers=2", "--grace_secs=1000")
    job.wait_for_logs("ready")
    job.process.send_signal(signal.SIGINT)
    job.wait_for_logs("got SIGINT")
    job.process.send_signal(signal.SIGTERM)
    code, err = job.end()
    assert code == 130 and err.count("SIGKILL") == 3
    assert "got SIGTERM" not in job.log(0) + job.log(1)


@LINUX
def test_a_killed_launcher_leaves_no_worker(job):
    job.start(TELL_SIGNALS + "print('pid', os.getpid())\nwait_for(lambda: False)", "--workers=2")
    job.wait_for_logs("pid ")
    pids = [pid_in(job.log(i)) for i in range(2)]
    assert all(map(is_alive, pids))
    job.process.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


@LINUX
def test_what_a_worker_has_started_ends_with_it(job):
    code, _, _ = job.run(
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("pid", child.pid)
        """
    )
    assert code == 0
    wait_for(lambda: not is_alive(pid_in(job.log(0))))


def test_a_worker_that_lost_its_port_starts_all_once_more_on_other_ports(job):
    code, _, err = job.run(
        """
        (here / "start").open("a").write(str(job))
        if job == 1 and (here / "start").read_text().count("1") == 1:
            sys.exit("UnknownError: Could not start gRPC server")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)       # as TensorFlow does, waiting for peers
        wait_for(lambda: (here / "start").read_text().count("1") == 2)
        """,
        "--workers=2",
        "--grace_secs=1000",
    )
    assert code == 0
    assert re.search(r"worker 1 \(job 1\) could not bind its port \(127.0.0.1:\d+\)", err)
    assert job.log(1) == ""


def test_a_port_lost_twice_is_a_failure(job):
    code, _, err = job.run(
        """
        (here / f"start{job}").open("a").write("x")
        if job: sys.exit("Could not start gRPC server")
        wait_for(lambda: False)
        """,
        "--workers=2",
    )
    assert code == 1 and err.count("could not bind its port") == 1
    assert "worker 1 (job 1) failed first" in err
    assert (job.dir / "start1").read_text() == "xx"


@pytest.fixture
def terminal():
    """Two ends of a terminal of 33 lines and 101 columns: ours, and the launcher's."""
    ours, launchers = pty.openpty()
    set_size(ours, 33, 101)
    yield ours, launchers
    os.close(ours)


def set_size(stream, lines, columns):
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def start_on(terminal, job, worker, *options):
    """Starts the launcher as a shell would: it leads the terminal's foreground group."""
    ours, launchers = terminal
    lead = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    job.start(
        worker,
        *options,
        under=(sys.executable, "-c", lead),
        stdin=launchers,
        stdout=launchers,
        stderr=launchers,
        start_new_session=True,
    )
    os.close(launchers)
    return ours


def test_on_a_terminal_the_chief_has_one_too_and_its_log_stays_readable(job, terminal):
    screen = start_on(
        terminal,
        job,
        r"""
        size = lambda: "%d lines %d columns" % tuple(reversed(os.get_terminal_size(1)))
        print(sys.stdout.isatty(), sys.stderr.isatty(), size() if job == 0 else "")
        sys.stdout.write("\r10%\r\x1b[2K\x1b[32m20%\x1b[0m\r\x1b[2K\x1b[32m30%\x1b[0m\n")
        if job == 0: wait_for(lambda: "55 columns" in size())
        print("the end")
        """,
        "--workers=2",
    )
    seen = read_until(screen, b"30%\x1b[0m\r\n")
    assert b"True True 33 lines 101 columns\r\n\r10%\r\x1b[2K\x1b[32m20%" in seen
    set_size(screen, 33, 55)
    read_until(screen, b"the end\r\n")
    assert job.end()[0] == 0
    assert job.log(0) == "True True 33 lines 101 columns\n30%\nthe end\n"
    assert job.log(1).startswith("False False")


def test_ctrl_c_in_the_terminal_reaches_every_worker_once(job, terminal):
    screen = start_on(
        terminal,
        job,
        TELL_SIGNALS + "wait_for(lambda: got)\ntime.sleep(0.3)\nsys.exit(130)",
        "--workers=2",
    )
    job.wait_for_logs("ready")
    os.write(screen, b"\x03")
    job.wait_for_logs("got SIGINT")
    assert job.end()[0] == 130
    assert [job.log(i) for i in range(2)] == ["ready\ngot SIGINT\n"] * 2
