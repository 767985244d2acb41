"""Hung workers with real processes: silent, stopped, without a step, never there."""

import os
import re
import signal
import sys
import time

import pytest
from launching import BEATS, is_alive, pid_of
from polling import wait_until

pytestmark = [
    pytest.mark.workers,
    pytest.mark.skipif(sys.platform != "linux", reason="stopped processes are seen in /proc"),
]
BACKOFF = "--backoff_secs=0.1"
TRAINING = (
    BEATS
    + """
attempt = int(os.environ["CTL_ATTEMPT"])
print("pid", os.getpid(), flush=True)
if attempt == 2: sys.exit()
def train_for_ever(step=7):
    until = time.monotonic() + 600
    while time.monotonic() < until: beat(step, "training", 1.0)
"""
)


def beats(job, number):
    return (job.dir / f"beats_{number}").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_is_named_and_all_start_again(job, victim):
    job.start(
        TRAINING + "train_for_ever()",
        "--workers=2", "--heartbeat_timeout_secs=3", BACKOFF,
    )  # fmt: skip
    wait_until(lambda: beats(job, 0) and beats(job, 1))
    pids = [pid_of(job, i) for i in range(2)]
    os.kill(pids[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert time.monotonic() - stopped <= 30
    code, err = job.end()
    reason = rf"worker {victim} \(job {victim}\) sent no heartbeat for \d+ s \(last at step 7\)"
    assert code == 0 and re.search(f"{reason}; killing it", err)
    assert re.search(f"restart 1 of 3 in 0.1 s: {reason}", err)
    first, _ = job.attempts
    assert 3 <= first["detected_secs"] <= 15
    assert (first["failed"]["exit_code"], first["failed"]["task"]) == (134, f"worker {victim}")


def test_a_hang_again_and_again_ends_with_134(job):
    code, _, err = job.run(
        BEATS + "beat(7, 'training'); wait_for(lambda: False)",
        "--max_restarts=1", "--heartbeat_timeout_secs=0.7", BACKOFF,
    )  # fmt: skip
    assert code == 134
    failed = r"worker 0 \(job 0\) failed first: it sent no heartbeat for \d+ s \(last at step 7\)"
    assert re.search(failed, err)


def test_a_stopped_peer_of_one_that_lost_it_is_the_cause_and_killed_at_once(job):
    """Also without heartbeats: these workers write none."""
    job.start(
        """
        print("pid", os.getpid(), flush=True)
        if os.environ["CTL_ATTEMPT"] == "2": sys.exit()
        wait_for((here / "lost").exists)
        if job == 0: sys.exit(134)
        wait_for(lambda: False)
        """,
        "--workers=2", "--grace_secs=1000", BACKOFF,
    )  # fmt: skip
    job.wait_for_logs("pid ")
    pid = pid_of(job, 1)
    os.kill(pid, signal.SIGSTOP)
    (job.dir / "lost").touch()
    code, err = job.end()
    assert code == 0 and not is_alive(pid)
    assert "worker 1 (job 1) is stopped (SIGSTOP), and its peers have lost it; killing it" in err
    assert job.attempts[0]["failed"]["task"] == "worker 1"


def test_training_without_a_step_is_a_hang_on_request(job):
    code, _, err = job.run(TRAINING + "train_for_ever()", "--workers=2", "--hang_timeout_secs=2", BACKOFF)
    assert code == 0
    assert re.search(r"worker \d \(job \d\) completed no step for \d+ s \(last at step 7", err)


def test_steps_and_long_evaluations_are_no_hang(job):
    code, _, err = job.run(
        TRAINING
        + """
for step in range(30): beat(step, "training", float(step))
for _ in range(100): beat(30, "evaluating", 30.0)  # 5 s at least
""",
        "--hang_timeout_secs=4", "--max_restarts=0",
    )  # fmt: skip
    assert code == 0 and len(err.splitlines()) == 1


def test_a_worker_that_never_connects_is_named(job):
    code, _, err = job.run(
        TRAINING + "if job == 0: train_for_ever(0)\nwait_for(lambda: False)",
        "--workers=2", "--startup_timeout_secs=3", BACKOFF,
    )  # fmt: skip
    message = r"worker 1 \(job 1\) sent no heartbeat within \d+ s of the start; killing it"
    assert code == 0 and re.search(message, err)


def test_programs_that_never_beat_are_left_alone(job):
    code, _, err = job.run(
        "time.sleep(3)",
        "--workers=2", "--heartbeat_timeout_secs=1", "--startup_timeout_secs=1",
        "--hang_timeout_secs=1",
    )  # fmt: skip
    assert code == 0 and len(err.splitlines()) == 1


@pytest.mark.parametrize(("victim", "busy"), [(0, False), (1, True)])
def test_one_that_is_stopped_before_its_first_beat_is_named(job, victim, busy):
    """With and without heartbeats of the other workers."""
    program_of_others = "train_for_ever()" if busy else "wait_for(lambda: False)"
    job.start(
        TRAINING + f"if job == {victim}: os.kill(os.getpid(), signal.SIGSTOP)\n{program_of_others}",
        "--workers=2", "--heartbeat_timeout_secs=4", BACKOFF,
    )  # fmt: skip
    code, err = job.end()
    reason = rf"worker {victim} \(job {victim}\) was stopped for \d+ s before its first heartbeat"
    assert code == 0 and re.search(f"restart 1 of 3 in 0.1 s: {reason}", err)


def test_one_that_is_idle_before_its_first_beat_is_named_when_others_have_theirs(job):
    """Not one that works, as an import of TensorFlow does."""
    code, _, err = job.run(
        TRAINING
        + """
if job == 0: train_for_ever(0)
until = time.monotonic() + 7
while time.monotonic() < until: pass
print("worked", flush=True)
time.sleep(60)
""",
        "--workers=2", "--heartbeat_timeout_secs=4", BACKOFF,
    )  # fmt: skip
    reason = r"worker 1 \(job 1\) was idle for \d+ s before its first heartbeat"
    assert code == 0 and re.search(f"restart 1 of 3 in 0.1 s: {reason}", err)
    assert "worked" in job.log("job_1.attempt1")


def test_one_that_waits_for_its_peers_may_be_silent_but_not_stopped(job):
    """TensorFlow may stop all threads of Python meanwhile."""
    code = TRAINING + "beat(0, 'connecting'); wait_for(lambda: False)"
    job.start(code, "--heartbeat_timeout_secs=1", BACKOFF)
    wait_until(lambda: beats(job, 0))
    time.sleep(2.5)
    pid = pid_of(job, 0)
    assert is_alive(pid) and not job.attempts
    os.kill(pid, signal.SIGSTOP)
    code, err = job.end()
    assert code == 0 and "sent no heartbeat" in err


def test_a_hung_evaluator_is_killed_alone(job):
    code, _, err = job.run(
        BEATS
        + """
if role == "evaluator":
    leave_pid(here / "pid")
    beat(1, "evaluating")
    wait_for(lambda: False)
wait_for((here / "pid").exists)
evaluator = pathlib.Path("/proc", (here / "pid").read_text())
while evaluator.exists(): beat(1, "training")
""",
        "--evaluator", "--heartbeat_timeout_secs=3", "--max_restarts=0",
    )  # fmt: skip
    assert code == 0 and re.search(r"evaluator 0 sent no heartbeat for \d+ s \(last at", err)
    assert "training continues without it" in err


def test_an_old_heartbeat_is_cleared_before_each_attempt(job):
    code, _, _ = job.run(
        """
        print(len(pathlib.Path(os.environ["CTL_HEARTBEAT"]).read_bytes()))
        pathlib.Path(os.environ["CTL_HEARTBEAT"]).write_text("no JSON")
        time.sleep(1)                       # until it has been read, too
        sys.exit(134 * (os.environ["CTL_ATTEMPT"] == "1"))
        """,
        BACKOFF,
    )
    assert code == 0
    assert job.log("job_0.attempt1") == job.log(0) == "0\n"


def test_a_worker_receives_its_attempt_and_its_timeouts(job):
    code, out, _ = job.run(
        """
        print({k: v for k, v in sorted(os.environ.items())
               if k.startswith("CTL_") and "SECRET" not in k})
        sys.exit(134 * (os.environ["CTL_ATTEMPT"] == "1"))
        """,
        BACKOFF, "--startup_timeout_secs=77", env={"CTL_RESTART_REASON": "of a job around this one"},
    )  # fmt: skip
    assert code == 0
    first, second = map(eval, out.decode().splitlines())
    path = first["CTL_HEARTBEAT"]
    assert path.startswith("/proc/")
    variables = {"CTL_HEARTBEAT": path, "CTL_STARTUP_TIMEOUT_SECS": "77"}
    assert first == {**variables, "CTL_ATTEMPT": "1"}
    reason = "worker 0 (job 0) failed: exit code 134"
    assert second == {**variables, "CTL_ATTEMPT": "2", "CTL_RESTART_REASON": reason}
