"""Healthy workers that could be mistaken for hung ones: full disks, deleted directories, long calls."""

import os
import shutil
import signal
import sys
import time

import pytest
from ctlrun_jobs import Ctlrun
from launching import BEATS, pid_of
from polling import wait_until
from small_disks import fill, mounted

pytestmark = [
    pytest.mark.workers,
    pytest.mark.skipif(sys.platform != "linux", reason="needs memory files and /proc"),
]
SECS = 9  # longer than the heartbeat timeout of 6 s
TRAIN = f"""
from ctl.supervision import heartbeat
heartbeat.current.start()
time.sleep(1.5)  # three polls of the launcher
print("trains", flush=True)
time.sleep({SECS})
"""
OPTIONS = ("--heartbeat_timeout_secs=6", "--max_restarts=0", "--workers=2")


def test_a_full_disk_of_the_logs_is_no_hang(job, tmp_path):
    with mounted(tmp_path / "small", "1m") as disk:
        job.logs = disk / "logs"
        job.start(TRAIN, *OPTIONS)
        job.wait_for_logs("trains")
        fill(disk / "filler")
        code, err = job.end()
    assert code == 0 and "no heartbeat" not in err, err


def test_a_deleted_directory_of_the_logs_is_no_hang(job):
    job.start(TRAIN, *OPTIONS)
    job.wait_for_logs("trains")
    shutil.rmtree(job.logs)
    code, err = job.end()
    assert code == 0 and "no heartbeat" not in err, err


@pytest.mark.parametrize("fault", ["full", "deleted"])
def test_a_lost_temporary_directory_is_no_hang(tmp_path, fault):
    ctlrun = Ctlrun(tmp_path, warm=True)
    try:
        with mounted(tmp_path / "small", "1m") as disk:
            (disk / "temporary").mkdir()
            ctlrun.start(
                f"""
                from ctl.supervision import heartbeat
                heartbeat.current.start()
                time.sleep(1.5)  # three polls of the launcher
                leave(f"trains-{{rank}}")
                time.sleep({SECS})
                """,
                "-np", "2", "--heartbeat-timeout", "6", TMPDIR=str(disk / "temporary"),
            )  # fmt: skip
            for rank in range(2):
                ctlrun.read(f"trains-{rank}")
            if fault == "full":
                fill(disk / "filler")
            else:
                shutil.rmtree(disk / "temporary")
            code, _, err = ctlrun.end()
    finally:
        ctlrun.close()
    assert code == 0, err


def test_a_long_call_that_holds_the_interpreter_is_no_hang(job):
    """No thread of the worker runs meanwhile, so it sends no heartbeats; but it uses a processor."""
    code, _, err = job.run(
        BEATS
        + f"""
import ctypes
beat(7, "training")
library, until = ctypes.PyDLL(None), time.monotonic() + {SECS}
while time.monotonic() < until:
    for _ in range(10000): library.getpid()
""",
        "--heartbeat_timeout_secs=2", "--max_restarts=0",
    )  # fmt: skip
    assert code == 0, err


def test_a_launcher_that_was_stopped_takes_no_worker_for_hung(job):
    """Worker and launcher are stopped together, as a frozen container is, and the launcher runs first."""
    job.start(
        BEATS
        + """
print("pid", os.getpid(), flush=True)
while not (here / "done").exists(): beat(7, "training", time.monotonic())
""",
        "--heartbeat_timeout_secs=6", "--max_restarts=0",
    )  # fmt: skip
    worker = pid_of(job, 0)
    wait_until((job.dir / "beats_0").exists)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1.2)  # until the launcher has read the last heartbeat
    os.kill(job.process.pid, signal.SIGSTOP)
    time.sleep(9)  # longer than the heartbeat timeout
    os.kill(job.process.pid, signal.SIGCONT)
    time.sleep(0.7)
    os.kill(worker, signal.SIGCONT)
    (job.dir / "done").touch()
    code, err = job.end()
    assert code == 0, err
