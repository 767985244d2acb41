"""The launcher with real processes: position in the cluster, logs, console, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from launching import TELL_SIGNALS, TIMEOUT_SECS, pid_of, read_until
from polling import wait_until

pytestmark = pytest.mark.workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="supported on Linux only")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--workers=2"], [("worker", 0), ("worker", 1)]),
        (["--workers=1"], [("worker", 0)]),
        (["--chief", "--workers=2"], [("chief", 0), ("worker", 0), ("worker", 1)]),
    ],
)
def test_each_process_gets_its_position_in_one_cluster(job, options, expected):
    code, _, err = job.run("print(os.environ['TF_CONFIG'])", *options)
    assert (code, err) == (0, f"ctl launch: starting {job_count(expected)}, logs in {job.logs}\n")
    configs = [json.loads(job.log(i)) for i in range(len(expected))]
    assert [(c["task"]["type"], c["task"]["index"]) for c in configs] == expected
    cluster = configs[0]["cluster"]
    assert all(config["cluster"] == cluster for config in configs)
    counts = {task_type: [t for t, _ in expected].count(task_type) for task_type, _ in expected}
    assert {task_type: len(addresses) for task_type, addresses in cluster.items()} == counts
    addresses = {address for task_addresses in cluster.values() for address in task_addresses}
    assert len(addresses) == len(expected) and all("127.0.0.1:" in a for a in addresses)


def job_count(expected):
    return f"{len(expected)} process" + "es" * (len(expected) > 1)


def test_a_tf_config_of_the_parent_is_replaced_and_this_is_logged(job):
    code, out, err = job.run("print(os.environ['TF_CONFIG'])", env={"TF_CONFIG": "an old one"})
    assert code == 0 and "ignoring the TF_CONFIG of this process" in err
    assert json.loads(out)["task"] == {"type": "worker", "index": 0}


def test_workers_do_not_inherit_the_platform_variables_of_the_launcher(job):
    outer = {"CLUSTER_SPEC": "{}", "CTL_WORKERS": "a:1,b:1", "CTL_TASK_INDEX": "1", "SM_HOSTS": "[]",
             "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1", "JOB_COMPLETION_INDEX": "1"}  # fmt: skip
    code, out, _ = job.run(f"print(sorted(set(os.environ) & set({sorted(outer)})))", env=outer)
    assert (code, out) == (0, b"[]\n")


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
    output = read_until(job.process.stdout.fileno(), b"no line end")
    assert output == b"10%\r\x1b[1m20%\xff\x00 no line end"
    (job.dir / "seen").touch()
    assert job.end()[0] == 0
    assert (job.logs / "job_0.log").read_bytes() == output


def test_the_whole_output_of_the_chief_is_printed_when_the_launcher_ends(job):
    code, out, _ = job.run("sys.stdout.write('0123456789abcde\\n' * 100_000)")
    assert code == 0 and out == b"0123456789abcde\n" * 100_000
    assert job.log(0).encode() == out


@LINUX
def test_a_slow_console_gets_the_whole_output_of_the_chief(job):
    job.start("print('pid', os.getpid())\nsys.stdout.write('0123456789abcde\\n' * 6_000)")
    worker = Path(f"/proc/{pid_of(job, 0)}")
    wait_until(lambda: not worker.exists())
    with pytest.raises(subprocess.TimeoutExpired):  # the launcher runs until its output is read
        job.process.wait(0.5)
    out, _ = job.process.communicate(timeout=TIMEOUT_SECS)
    assert out.count(b"0123456789abcde\n") == job.log(0).count("0123456789abcde\n") == 6_000


def test_a_closed_console_does_not_end_the_job(job):
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


@pytest.mark.smoke
def test_the_first_failing_worker_decides_the_exit_code_and_ends_the_others(job):
    code, _, err = job.run(
        TELL_SIGNALS
        + """
if job == 1:
    wait_for(lambda: "ready\\n" in (here / "logs/job_0.log").read_text())
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


def test_the_exit_code_of_a_signal_is_128_and_its_number(job):
    code, _, err = job.run(
        "if job: os.kill(os.getpid(), signal.SIGKILL)\nwait_for(lambda: False)",
        "--workers=2", "--max_restarts=0",
    )  # fmt: skip
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


def test_workers_that_outlive_a_finished_chief_are_ended_with_a_warning(job):
    code, _, err = job.run("wait_for(lambda: job == 0)", "--workers=2", "--grace_secs=0.5")
    assert code == 0
    assert "worker 0 (job 0) has finished, but other processes are still running after 0.5 s" in err
    assert "warning: worker 1 (job 1) did not exit after the chief had finished" in err


@pytest.mark.parametrize(("ending", "code"), [("os.abort()", 0), ("sys.exit(3)", 3)])
def test_a_crash_after_the_end_of_the_chief_is_a_warning_and_an_error_is_not(job, ending, code):
    exit_code, _, err = job.run(
        f"""
        if job == 0: leave_pid(here / "pid")
        else:
            wait_for_end_of(here / "pid")
            {ending}
        """,
        "--workers=2",
        "--max_restarts=0",
    )
    assert exit_code == code
    warning = "warning: worker 1 (job 1) ended with SIGABRT after the chief had finished"
    assert (warning in err) == (code == 0)


def test_a_second_launcher_leaves_the_logs_of_the_first_alone(job):
    """The second launcher may start before the first one has written its LOCK."""
    job.start("print('mine', flush=True)\nwait_for((here / 'go').exists)", "--workers=1")
    wait_until(lambda: "mine\n" in job.log(0))
    command = [sys.executable, "-m", "ctl", "launch", f"--log_dir={job.logs}", "--", "true"]
    second = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False
    )
    assert second.returncode == 2 and "is in use: ctl launch, process" in second.stderr
    assert job.log(0) == "mine\n"
    (job.dir / "go").touch()
    assert job.end()[0] == 0
