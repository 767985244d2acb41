"""The supervisor with real processes: restarts, missing progress, recorded attempts, logs and ports."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from launching import BEATS, TELL_SIGNALS, is_alive, pid_of
from polling import wait_until

pytestmark = pytest.mark.workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a promise for Linux")
BACKOFF = "--backoff_secs=0.1"
TRAINING = """
def save(step):
    path = here / "run" / "checkpoints" / f"ckpt-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({"step": step}))

attempt = int(os.environ["CTL_ATTEMPT"])
print("attempt", attempt, "because", os.environ.get("CTL_RESTART_REASON"), flush=True)
"""


@LINUX
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_kill_9_all_workers_are_gone_and_start_again_by_themselves(job, victim):
    job.start(
        TRAINING
        + """
print("pid", os.getpid(), flush=True)
if attempt == 1: wait_for(lambda: False)
print(task["cluster"]["worker"])
""",
        "--workers=2", BACKOFF,
    )  # fmt: skip
    job.wait_for_logs("pid ")
    pids = [pid_of(job, i) for i in range(2)]
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: not any(map(is_alive, pids)))
    gone_secs = time.monotonic() - killed
    code, err = job.end()
    assert code == 0 and gone_secs <= 35 and time.monotonic() - killed <= 60
    reason = f"worker {victim} (job {victim}) failed: SIGKILL"
    assert f"ctl launch: restart 1 of 3 in 0.1 s: {reason}\n" in err
    for i in range(2):
        assert job.log(f"job_{i}.attempt1").startswith("attempt 1 because None\n")
        assert job.log(i).startswith(f"attempt 2 because {reason}\n")
    first, second = job.attempts
    assert first["failed"] == {
        "task": f"worker {victim}", "job": victim, "exit_code": 137, "signal": "SIGKILL",
    }  # fmt: skip
    assert (first["next"], second["next"]) == ("restart in 0.1 s", "done")
    assert second["failed"] is None and first["started"] < first["ended"] <= second["started"]


def test_each_attempt_has_ports_of_its_own(job):
    code, _, _ = job.run(
        TRAINING + "print(task['cluster']); sys.exit(134 * (attempt == 1))", "--workers=2", BACKOFF
    )
    assert code == 0 and job.log("job_1.attempt1").splitlines()[1] != job.log(1).splitlines()[1]


def test_max_restarts_is_honoured_and_the_last_failure_named_with_its_log(job):
    code, _, err = job.run(
        TRAINING
        + """
(here / f"starts{job}").open("a").write("x")
if job == 1:
    print("the last words of", attempt)
    os.kill(os.getpid(), signal.SIGSEGV)
wait_for(lambda: False)
""",
        "--workers=2", "--max_restarts=2", BACKOFF,
    )  # fmt: skip
    assert code == 139 and (job.dir / "starts1").read_text() == "xxx"
    assert "restart 1 of 2 in 0.1 s" in err and "restart 2 of 2 in 0.2 s" in err
    assert "2 restarts are used up (--max_restarts=2); not restarting" in err
    end = err[err.index("worker 1 (job 1) failed first: SIGSEGV; its log is") :]
    assert end.splitlines()[-1] == "the last words of 3"
    assert [a["next"].partition(":")[0] for a in job.attempts] == [
        "restart in 0.1 s", "restart in 0.2 s", "no restart",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (5, "no progress: 3 attempts in a row ended with the newest checkpoint at step 5"),
        pytest.param(
            None, "no progress: 3 attempts in a row ended without a checkpoint", marks=pytest.mark.slow
        ),
    ],
)
def test_a_crash_loop_without_progress_stops_before_the_restarts_are_burnt(job, checkpoint, message):
    code, _, err = job.run(
        BEATS + TRAINING + f"""
beat(3, "training")
if {checkpoint} and job == 0: save({checkpoint})
if job == 0: sys.exit(134)
wait_for(lambda: False)
""",
        "--workers=2", "--max_restarts=50", BACKOFF, command=[f"--model_dir={job.dir}/run"],
    )  # fmt: skip
    assert code == 134 and f"ctl launch: {message}; not restarting\n" in err
    attempts = job.attempts
    assert len(attempts) == 3 and attempts[2]["next"] == f"no restart: {message}"
    assert [a["step_after"] for a in attempts] == [checkpoint or 0] * 3
    assert [a["step_before"] for a in attempts][1:] == [checkpoint or 0] * 2


def test_kills_at_the_start_and_crashes_before_the_first_sign_of_life(job):
    """Kills may be preemptions, so the job continues. Repeated crashes stop the job."""
    code, _, err = job.run(
        TRAINING + "if attempt < 6: os.kill(os.getpid(), signal.SIGKILL)",
        "--max_restarts=1000", "--backoff_secs=0.01",
    )  # fmt: skip
    assert code == 0 and "the SIGKILL is not from the launcher; peak memory of the process:" in err
    code, _, err = job.run(
        "os.kill(os.getpid(), signal.SIGSEGV)", "--max_restarts=8", "--backoff_secs=0.01"
    )
    assert code == 139 and len(job.attempts) == 6 + 3
    assert "3 attempts in a row failed identically before the first heartbeat; not restarting" in err


@pytest.fixture
def group():
    """Creates a control group of 64 MiB without swap. Processes join it through its cgroup.procs."""
    for root, limit, swap in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.swappiness"),
        ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
    ):
        path = Path(root) / f"ctl-test-{os.getpid()}"
        try:
            path.mkdir()
            (path / limit).write_text(str(64 * 2**20))
            (path / swap).write_text("0")
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        yield path
        wait_until(lambda group=path: not (group / "cgroup.procs").read_text())
        path.rmdir()
        return
    pytest.skip("control groups cannot be made here")


@pytest.mark.parametrize("behind_a_shell", [False, True])
def test_the_kernel_s_kills_for_memory_are_named_and_the_second_ends_the_job(job, group, behind_a_shell):
    code, _, err = job.run(
        f"""
        pathlib.Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
        time.sleep(2.5)                       # until the launcher has looked
        hold = "import os; held = bytearray(os.urandom(256)) * 2**21"
        if {behind_a_shell}:                  # which gives 128 and the number of the signal
            sys.exit(os.waitstatus_to_exitcode(os.system(f"{{sys.executable}} -c '{{hold}}'")))
        exec(hold)
        """,
        "--max_restarts=8", "--backoff_secs=0.01",
    )  # fmt: skip
    assert code == 137 and len(job.attempts) == 2
    killed = r"was killed by the kernel, out of memory \(peak \d+ MiB, a limit of 64 MiB\)"
    assert re.search(killed, err)
    assert "out of memory 2 times in a row: use a smaller --global_batch_size" in err


def test_a_crash_loop_with_progress_continues(job):
    """With more restarts than are granted without progress."""
    code, _, _ = job.run(
        TRAINING + "save(attempt); sys.exit(134 * (attempt < 6))",
        "--max_restarts=2", "--backoff_secs=0.01", command=[f"--model_dir={job.dir}/run"],
    )  # fmt: skip
    assert code == 0 and [a["step_after"] for a in job.attempts] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("code", [1, 2, 3, 130, 143])
def test_a_repeatable_or_requested_end_is_not_retried(job, code):
    ended, _, err = job.run(f"print('once')\nsys.exit({code})", BACKOFF)
    assert ended == code and "restart 1" not in err and job.log(0) == "once\n"
    [attempt] = job.attempts
    assert attempt["next"].startswith(f"no restart: exit code {code} ")


def test_errors_are_retried_on_request_but_never_usage_errors(job):
    code, _, err = job.run(TRAINING + "sys.exit([3, 1, 2][attempt - 1])", "--restart_on_error", BACKOFF)
    assert code == 2 and len(job.attempts) == 3 and "restart 2 of 3" in err


def test_a_chief_s_usage_error_wins_over_the_peers_that_lost_it(job):
    code, _, _ = job.run(
        """
        if job == 1:
            leave_pid(here / "pid")
            sys.exit(134)
        wait_for_end_of(here / "pid")
        sys.exit(2)
        """,
        "--workers=2",
    )
    assert code == 2 and len(job.attempts) == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_waiting_before_a_restart_at_once(job, signum, code):
    job.start("sys.exit(134)", "--backoff_secs=1000")
    wait_until(lambda: job.attempts)
    job.process.send_signal(signum)
    ended, err = job.end()
    assert ended == code and "restart 1 of 3 in 60 s" in err and "not restarting" in err


def test_an_evaluator_is_started_again_with_the_others_and_alone_restarts_nothing(job):
    code, _, err = job.run(
        TRAINING
        + """
if role == "evaluator":
    if attempt == 2: sys.exit(134)
    wait_for(lambda: False)
if attempt == 1: sys.exit(134)
wait_for(lambda: (here / "logs/evaluator_0.log").read_text().partition("because")[2].endswith("\\n"))
""",
        "--evaluator", BACKOFF,
    )  # fmt: skip
    assert code == 0 and len(job.attempts) == 2
    assert "evaluator 0 failed: exit code 134; training continues without it" in err
    assert job.log("evaluator_0").startswith("attempt 2 because worker 0 (job 0) failed")


def test_a_dead_parameter_server_restarts_the_gang(job):
    code, _, _ = job.run(
        TRAINING
        + """
print("here", flush=True)
if attempt == 1:
    if role == "ps": os.kill(os.getpid(), signal.SIGKILL)
    wait_for(lambda: False)
""",
        "--ps=1", BACKOFF,
    )  # fmt: skip
    assert code == 0 and [a["workers"] for a in job.attempts] == [2, 2]
    assert job.attempts[0]["failed"]["task"] == "ps 0"
    assert all("attempt 2" in job.log(n) for n in ("job_0", "job_1", "ps_0"))


def test_a_full_disk_under_the_records_does_not_stop_the_job(job):
    job.logs.mkdir()
    (job.logs / "attempts.jsonl").symlink_to("/dev/full")
    code, _, err = job.run(TRAINING + "sys.exit(134 * (attempt == 1))", BACKOFF)
    assert code == 0 and err.count("attempts.jsonl cannot be written (No space left on device)") == 2


def test_the_newest_five_earlier_logs_are_kept_and_those_of_an_earlier_start_are_not(job):
    job.logs.mkdir()
    (job.logs / "job_3.attempt9.log").write_text("of an earlier start")
    (job.logs / "notes.attempt9.log").write_text("not ours")
    code, _, _ = job.run(
        TRAINING + "save(attempt); sys.exit(134 * (attempt < 8))", "--max_restarts=9",
        "--backoff_secs=0.01", command=[f"--model_dir={job.dir}/run"],
    )  # fmt: skip
    assert code == 0 and job.log(0).startswith("attempt 8")
    log_names = sorted(p.name for p in job.logs.glob("*.attempt*"))
    assert log_names == [f"job_0.attempt{n}.log" for n in range(3, 8)] + ["notes.attempt9.log"]
    assert job.log("job_0.attempt7").startswith("attempt 7")


def test_a_runaway_log_is_bounded_and_keeps_its_beginning_and_its_end(job):
    code, _, _ = job.run(
        """
        print("the beginning")
        if job == 1:
            until = time.monotonic() + 600
            while "were cut here" not in (here / "logs/job_1.log").read_text():
                os.write(1, b"and so on\\n" * 1000)
                assert time.monotonic() < until
                time.sleep(0.01)
            (here / "cut").touch()
        wait_for((here / "cut").exists)
        print("the end")
        """,
        "--workers=2", "--max_log_mib=0.1",
    )  # fmt: skip
    text = job.log(1)
    assert code == 0 and len(text) < 10 * 2**20
    assert text.startswith("the beginning\n") and text.endswith("the end\n")
    assert " bytes were cut here (--max_log_mib)\n" in text and job.log(0).endswith("the end\n")


def test_the_chief_s_log_is_bounded_too_and_the_console_gets_all(job):
    code, out, _ = job.run(
        """
        count = 0
        until = time.monotonic() + 600
        while "were cut here" not in (here / "logs/job_0.log").read_text():
            os.write(1, b"and so on\\n" * 1000)
            count += 1000
            assert time.monotonic() < until
            time.sleep(0.01)
        print("lines", count)
        """,
        "--max_log_mib=0.1",
    )
    assert code == 0 and job.log(0).endswith(out.decode()[-100:])
    assert out.count(b"and so on\n") == int(out.split()[-1])


@LINUX
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_children_of_workers_end_with_the_launcher_too(job, signal_name):
    job.start(
        """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print("pid", child.pid, flush=True)
        wait_for(lambda: False)
        """,
        "--workers=2", "--grace_secs=0.5",
    )  # fmt: skip
    job.wait_for_logs("pid ")
    pids = [pid_of(job, i) for i in range(2)]
    assert all(map(is_alive, pids))
    job.process.send_signal(signal.Signals[signal_name])
    job.end()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_lost_port_is_no_restart_and_other_ports_are_free_ones(job):
    """The program binds its port as TensorFlow would; another one has taken it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, _, err = job.run(
            f"""
            import socket
            port = int(task["cluster"][role][index].rpartition(":")[2])
            first = not (here / "first").exists()
            (here / "first").touch()
            bound = socket.socket()
            try: bound.bind(("127.0.0.1", {other.getsockname()[1]} if first else port))
            except OSError: sys.exit("UnknownError: Could not start gRPC server")
            print(os.environ["CTL_ATTEMPT"])
            """,
            "--max_restarts=0",
        )
    assert code == 0 and "could not bind its port" in err and job.log(0) == "1\n"


@LINUX
def test_a_lost_peer_gets_little_grace_but_a_save_is_not_torn(job):
    code, _, err = job.run(
        BEATS + TELL_SIGNALS + """
if job == 1:
    wait_for(lambda: "ready\\n" in (here / "logs/job_0.log").read_text())
    os.kill(os.getpid(), signal.SIGKILL)
until = time.monotonic() + 11            # longer than those who lost a peer are given
while time.monotonic() < until: beat(7, "saving")
print("saved")
sys.exit(134)
""",
        "--workers=2", "--max_restarts=0",
    )  # fmt: skip
    assert code == 137 and "SIGKILL after 8 s" in err and job.log(0).endswith("saved\n")
