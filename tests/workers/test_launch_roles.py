"""Jobs with chief, workers, parameter servers and an evaluator: cluster, logs, exits, restarts."""

import json
import os
import signal
import sys

import pytest
from launching import TELL_SIGNALS, is_alive, pid_of, read_until
from polling import wait_until

pytestmark = pytest.mark.workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="supported on Linux only")
ALL = ("--workers=2", "--ps=1", "--evaluator", "--chief")
LOGS = ("job_0", "job_1", "job_2", "ps_0", "evaluator_0")


@pytest.mark.smoke
def test_every_role_gets_its_position_in_one_cluster_and_a_log_of_its_name(job):
    code, _, err = job.run("print(os.environ['TF_CONFIG'])", *ALL)
    assert (code, err) == (0, f"ctl launch: starting 5 processes, logs in {job.logs}\n")
    configs = {name: json.loads(job.log(name)) for name in LOGS}
    assert sorted(p.stem for p in job.logs.glob("*.log")) == sorted(LOGS)
    assert [(c["task"]["type"], c["task"]["index"]) for c in configs.values()] == [
        ("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0),
    ]  # fmt: skip
    cluster = configs["ps_0"]["cluster"]
    assert all(c["cluster"] == cluster for c in configs.values())
    assert {task_type: len(a) for task_type, a in cluster.items()} == {
        "chief": 1, "worker": 2, "ps": 1, "evaluator": 1,
    }  # fmt: skip
    assert len({address for addresses in cluster.values() for address in addresses}) == 5


def test_parameter_servers_without_a_chief_get_one_and_one_line_is_logged(job):
    code, out, err = job.run("print(role)", "--ps=1")
    assert (code, out) == (0, b"chief\n")
    assert err.splitlines() == [
        "ctl launch: parameter servers require a coordinator; starting a chief (--chief)",
        f"ctl launch: starting 3 processes, logs in {job.logs}",
    ]


def test_an_evaluator_needs_no_chief(job):
    code, out, _ = job.run("print(role, index)", "--evaluator")
    assert (code, out, job.log("evaluator_0")) == (0, b"worker 0\n", "evaluator 0\n")
    assert "chief" not in json.dumps(os.listdir(job.logs))


def test_an_evaluator_that_fails_is_named_once_and_does_not_end_the_job(job):
    code, _, err = job.run(
        """
        if role == "evaluator":
            leave_pid(here / "pid")
            sys.exit(3)
        wait_for_end_of(here / "pid")
        """,
        "--workers=2",
        "--evaluator",
    )
    assert code == 0 and err.splitlines()[1:] == [
        "ctl launch: evaluator 0 failed: exit code 3; training continues without it; "
        f"its log is {job.logs}/evaluator_0.log"
    ]


def test_the_launcher_waits_for_an_evaluator_after_the_training(job):
    job.start(
        """
        if role == "evaluator":
            wait_for((here / "go").exists)
            print("evaluated the rest")
        elif index == 0:
            wait_for_end_of(here / "pid")
        else:
            leave_pid(here / "pid")
        """,
        "--workers=2",
        "--evaluator",
        "--grace_secs=0.2",
    )
    read_until(job.process.stderr.fileno(), b"waiting for evaluator 0")
    (job.dir / "go").touch()
    assert job.end()[0] == 0 and job.log("evaluator_0") == "evaluated the rest\n"


def test_an_evaluator_ends_with_the_training_that_failed(job):
    code, _, err = job.run(
        TELL_SIGNALS
        + """
if role == "evaluator":
    wait_for(lambda: got)
    sys.exit(143)
wait_for(lambda: "ready\\n" in (here / "logs/evaluator_0.log").read_text())
sys.exit(5)
""",
        "--evaluator",
    )
    assert code == 5 and job.log("evaluator_0") == "ready\ngot SIGTERM\n"
    assert "worker 0 (job 0) failed first: exit code 5" in err and "evaluator 0 failed" not in err


@pytest.mark.parametrize("with_signal", [False, True])
def test_servers_end_with_the_chief_and_are_no_failure(job, with_signal):
    code, _, err = job.run(
        f"""
        if role == "chief":
            leave_pid(here / "pid")
            sys.exit()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        wait_for_end_of(here / "pid")
        if {not with_signal}: sys.exit(1 if role == "ps" else 134)
        wait_for(lambda: False)
        """,
        "--workers=2",
        "--ps=2",
        "--grace_secs=0.3",
    )
    assert code == 0
    assert [line for line in err.splitlines() if "failed" in line or "did not end" in line] == []


def test_a_killed_worker_of_parameter_servers_is_restarted_with_its_index(job):
    code, _, err = job.run(
        """
        print(role, index, task["cluster"][role][index])
        starts = here / f"{role}{index}"
        starts.open("a").write("x")
        if role == "chief": wait_for(lambda: (here / "again").exists())
        elif role == "worker" and index == 1:
            if starts.read_text() == "x": os.kill(os.getpid(), signal.SIGKILL)
            (here / "again").touch()
        else: wait_for(lambda: (here / "again").exists())
        """,
        "--workers=2",
        "--ps=1",
    )
    assert code == 0
    assert "worker 1 (job 2) ended with SIGKILL; the job continues, restarting it" in err
    first, note, second = job.log(2).splitlines()
    assert first == second and note == "ctl launch: ended with SIGKILL; restarting"
    assert (job.dir / "chief0").read_text() == (job.dir / "ps0").read_text() == "x"


@LINUX
def test_a_restarted_worker_ends_with_a_killed_launcher_too(job):
    job.start(
        """
        (here / f"{role}").open("a").write("x")
        if role == "worker" and (here / "worker").read_text() == "x": sys.exit(1)
        print("pid", os.getpid())
        wait_for(lambda: False)
        """,
        "--ps=1",
    )
    names = ("job_0", "job_1", "ps_0")
    pids = [pid_of(job, n) for n in names]
    job.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("role", ["ps", "chief"])
def test_a_dead_parameter_server_or_chief_ends_the_job(job, role):
    code, _, err = job.run(
        f"""
        if role == "{role}": os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: False)
        """,
        "--ps=1",
        "--evaluator",
        "--max_restarts=0",
    )
    task_name = "ps 0" if role == "ps" else "chief 0 (job 0)"
    log = "ps_0" if role == "ps" else "job_0"
    assert code == 137
    assert f"{task_name} failed first: SIGKILL; its log is {job.logs}/{log}.log" in err


def test_the_job_ends_when_no_worker_of_the_servers_is_running(job):
    code, _, err = job.run("if role == 'worker': sys.exit(3)\nwait_for(lambda: False)", "--ps=1")
    assert code == 3 and "worker 0 (job 1) failed first: exit code 3" in err
    assert err.count("restarting it in") == 3 and job.log(1).count("; restarting") == 3


def test_a_signal_lets_the_chief_save_before_its_servers_are_ended(job):
    job.start(
        TELL_SIGNALS
        + """
if role == "chief":
    leave_pid(here / "chief")
    wait_for(lambda: got)
    time.sleep(0.3)       # saving what the parameter server holds
    print("servers gone", (here / "gone").exists())
    sys.exit(143)
wait_for(lambda: got)
if role != "evaluator": (here / "gone").touch()
""",
        "--ps=1",
        "--evaluator",
    )
    wait_until(lambda: all("ready\n" in job.log(n) for n in ("job_0", "job_1", "ps_0", "evaluator_0")))
    job.process.send_signal(signal.SIGTERM)
    code, err = job.end()
    assert code == 143 and "forwarded SIGTERM to 2 processes" in err
    assert "servers gone False" in job.log(0)
    assert "got SIGTERM" in job.log("evaluator_0") and "got SIGTERM" in job.log("ps_0")


@LINUX
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_no_process_of_any_role_outlives_the_launcher(job, signal_name):
    job.start("print('pid', os.getpid())\nwait_for(lambda: False)", *ALL, "--grace_secs=0.5")
    pids = [pid_of(job, n) for n in LOGS]
    assert all(map(is_alive, pids))
    job.process.send_signal(signal.Signals[signal_name])
    code, _ = job.end()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert code == {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}[signal_name]
