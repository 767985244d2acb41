"""Termination of launched jobs: signals, lost ports, terminals."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios

import pytest
from launching import TELL_SIGNALS, is_alive, pid_of, read_until
from polling import wait_until

pytestmark = pytest.mark.workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="supported on Linux only")


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_to_the_launcher_reaches_every_worker_once(job, signum, code):
    # After the first signal each worker stays for a while, so that it would log a second one.
    job.start(TELL_SIGNALS + "wait_for(lambda: got)\ntime.sleep(0.3)\nsys.exit(143)", "--workers=2")
    job.wait_for_logs("ready")
    job.process.send_signal(signum)
    assert job.end()[0] == code
    name = signal.Signals(signum).name
    assert [job.log(i) for i in range(2)] == [f"ready\ngot {name}\n"] * 2


def test_workers_that_exit_with_0_after_a_signal_make_the_exit_code_0(job):
    job.start(TELL_SIGNALS + "wait_for(lambda: got)", "--workers=2")
    job.wait_for_logs("ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 0


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(job):
    worker = TELL_SIGNALS + "wait_for(lambda: job == 0 and got)"
    job.start(worker, "--workers=2", "--grace_secs=4")
    job.wait_for_logs("ready")
    job.process.send_signal(signal.SIGTERM)
    code, err = job.end()
    assert code == 143 and "got SIGTERM" in job.log(1)
    assert "ended: worker 0 (job 0) exit code 0, worker 1 (job 1) SIGKILL" in err


@pytest.mark.smoke
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
    pids = [pid_of(job, i) for i in range(2)]
    assert all(map(is_alive, pids))
    job.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


@LINUX
def test_processes_started_by_a_worker_end_with_it(job):
    code, _, _ = job.run(
        """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("pid", child.pid)
        """
    )
    assert code == 0
    wait_until(lambda: not is_alive(pid_of(job, 0)))


def test_a_worker_that_lost_its_port_restarts_all_workers_on_other_ports(job):
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
    """Yields both ends of a terminal with 33 lines and 101 columns: the test's and the launcher's."""
    test_end, launcher_end = pty.openpty()
    set_size(test_end, 33, 101)
    yield test_end, launcher_end
    os.close(test_end)


def set_size(stream, lines, columns):
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def start_on(terminal, job, worker, *options):
    """Starts the launcher as the leader of the terminal's foreground group, as a shell does."""
    test_end, launcher_end = terminal
    lead_foreground = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    job.start(
        worker,
        *options,
        under=(sys.executable, "-c", lead_foreground),
        stdin=launcher_end,
        stdout=launcher_end,
        stderr=launcher_end,
        start_new_session=True,
    )
    os.close(launcher_end)
    return test_end


def test_the_chief_has_the_launcher_s_terminal_and_a_readable_log(job, terminal):
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
    output = read_until(screen, b"30%\x1b[0m\r\n")
    assert b"True True 33 lines 101 columns\r\n\r10%\r\x1b[2K\x1b[32m20%" in output
    set_size(screen, 33, 55)
    read_until(screen, b"the end\r\n")
    assert job.end()[0] == 0
    assert job.log(0) == "True True 33 lines 101 columns\n30%\nthe end\n"
    assert job.log(1).startswith("False False")


def test_ctrl_c_in_the_terminal_reaches_every_worker_once(job, terminal):
    screen = start_on(
        terminal, job, TELL_SIGNALS + "wait_for(lambda: got)\ntime.sleep(0.3)\nsys.exit(130)", "--workers=2"
    )
    job.wait_for_logs("ready")
    os.write(screen, b"\x03")
    job.wait_for_logs("got SIGINT")
    assert job.end()[0] == 130
    assert [job.log(i) for i in range(2)] == ["ready\ngot SIGINT\n"] * 2
