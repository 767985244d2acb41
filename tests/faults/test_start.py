"""Errors at the start are reported at once or soon, and never only by a silent wait."""

import json
import re
import signal
import socket
import subprocess
import sys

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment, free_ports
from polling import wait_until
from training import STEPS, command, output_of, run, saved, started, trace

pytestmark = pytest.mark.workers


def start(tmp_path, index, addresses, command_line):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    log = tmp_path / f"worker_{index}.log"
    with log.open("wb") as file:
        process = processes.start(
            command_line, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment(TF_CONFIG=json.dumps(config)),
        )  # fmt: skip
    return process, log


def ends(started):
    """Returns (exit code, output) of each process of `start`."""
    try:
        return [(p.wait(TIMEOUT_SECS), log.read_text()) for p, log in started]
    finally:
        for process, _ in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def addresses(count):
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def test_a_peer_that_is_missing_is_named_and_in_the_end_everybody_leaves(tmp_path):
    worker_addresses = addresses(3)
    command_line = command(tmp_path / "run", "--startup_timeout_secs=9")
    missing = rf"(worker 1 \S+, )?worker 2 \({worker_addresses[2]}\)"  # worker 1 may start late
    outcomes = ends([start(tmp_path, i, worker_addresses, command_line) for i in (0, 1)])
    waited = re.search(rf"(\d+) s: still waiting for {missing}", outcomes[0][1])
    assert waited and int(waited[1]) <= 5, outcomes  # as in docs/reliability.md
    for code, output in outcomes:
        assert code == 134, output[-2000:]
        assert f"Waited 9 s (--startup_timeout_secs) for worker 2 ({worker_addresses[2]})" in output
        assert "Traceback" not in output


def test_a_chief_that_is_missing_is_named_too(tmp_path):
    worker_addresses = addresses(2)
    command_line = command(tmp_path / "run", "--startup_timeout_secs=3")
    ((code, output),) = ends([start(tmp_path, 1, worker_addresses, command_line)])
    assert code == 134 and f"worker 0 ({worker_addresses[0]})" in output and "Traceback" not in output


@pytest.mark.slow
def test_tensorflow_waiting_for_a_peer_that_just_left_is_ended_too(tmp_path):
    """Python does not run during the wait: a separate process supervises it."""
    command_line = [sys.executable, str(PROGRAMS / "meets_and_leaves.py"), "1"]
    worker_addresses = addresses(2)
    (code, output), (code_of_leaver, _) = ends(
        [start(tmp_path, i, worker_addresses, command_line) for i in (0, 1)]
    )
    assert code_of_leaver == 0
    assert code == -signal.SIGABRT, output[-2000:]  # 134 to a shell
    assert "TensorFlow has waited" in output and f"for worker 1 ({worker_addresses[1]})" in output


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as used_socket:
        used_socket.bind(("127.0.0.1", 0))
        used_socket.listen()
        own_address = f"127.0.0.1:{used_socket.getsockname()[1]}"
        worker_addresses = [own_address, *addresses(1)]
        ((code, output),) = ends([start(tmp_path, 0, worker_addresses, command(tmp_path / "run"))])
    assert code == 2 and own_address.partition(":")[2] in output and "Traceback" not in output


@pytest.mark.parametrize("difference", ["--width=17", "--seed=3"])
def test_workers_with_other_flags_are_refused(difference, tmp_path):
    worker_addresses = addresses(2)
    command_lines = [command(tmp_path / "run"), command(tmp_path / "run", difference)]
    name, _, value = difference.partition("=")
    for code, output in ends(
        [start(tmp_path, i, worker_addresses, w) for i, w in enumerate(command_lines)]
    ):
        assert code == 2, output[-2000:]
        assert f"{name}: {value} on worker 1" in output and "Traceback" not in output
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_job_in_one_model_dir_is_refused_and_loses_nothing(tmp_path):
    with started(tmp_path / "run", PAUSE_SECS="1.5") as first:
        wait_until(lambda: len(trace(tmp_path / "run")) >= 2, first)
        second = run(tmp_path / "run")
        assert second.code == 2
        assert f"is in use: process {first.pid} on {socket.gethostname()}" in second.output
        assert "Traceback" not in second.output.partition("is in use")[2]
        first.terminate()
        assert first.wait(TIMEOUT_SECS) == 143, output_of(tmp_path / "run").read_text()[-2000:]
    steps = max(trace(tmp_path / "run"))
    assert saved(tmp_path / "run")[-1] == steps and steps < STEPS


@pytest.mark.slow
def test_a_second_launcher_leaves_the_logs_of_the_first_alone(tmp_path):
    with started(tmp_path / "run", workers=2, PAUSE_SECS="0.5") as first:
        wait_until(lambda: len(trace(tmp_path / "run")) >= 3, first)
        second = run(tmp_path / "run", workers=2)
        assert second.code == 2 and "is in use: process" in second.output
        assert "starting" not in second.output
        assert first.wait(TIMEOUT_SECS) == 0
    assert "step 1/40" in (tmp_path / "run" / "workers" / "job_0.log").read_text()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path, unbroken):
    assert run(tmp_path / "run", faults="kill@7").code == -signal.SIGKILL
    assert json.loads((tmp_path / "run" / "LOCK").read_text())["state"] == "training"
    next_result = run(tmp_path / "run")
    assert next_result.code == 0 and "waiting up to" not in next_result.output
    assert trace(tmp_path / "run") == trace(unbroken(0))


def test_another_order_of_the_data_is_refused_unless_it_is_wanted(tmp_path):
    assert run(tmp_path / "run", faults="term@6").code == 143
    refused = run(tmp_path / "run", "--seed=4", "--global_batch_size=24")
    assert refused.code == 2
    assert "seed: 0 before, 4 now" in refused.output
    assert "global_batch_size: 12 before, 24 now" in refused.output
    changed = run(tmp_path / "run", "--seed=4", "--allow_config_change", "--train_steps=8")
    assert changed.code == 0 and "seed: 0 before, 4 now" in changed.output


def test_settings_that_change_no_data_are_shown(tmp_path):
    assert run(tmp_path / "run", faults="term@6").code == 143
    other = run(tmp_path / "run", "--dropout=0.3", "--train_steps=8")
    assert other.code == 0 and "dropout: 0.2 before, 0.3 now" in other.output


@pytest.mark.parametrize("communication", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_limit_of_open_files_is_named_and_not_taken_for_a_peer_that_is_missing(communication, tmp_path):
    listed = addresses(2)
    program = str(PROGRAMS / "faulty.py")
    arguments = [sys.executable, program, "--train_steps=6", f"--communication={communication}"]
    limited = ["bash", "-c", 'ulimit -n 26; exec "$0" "$@"', *arguments]
    (code, output), (other_code, other_output) = ends([start(tmp_path, i, listed, limited) for i in (0, 1)])
    assert "`ulimit -n` is 26" in output and "ulimit -n 4096" in output, output[-2000:]
    assert "waits for rank" not in output + other_output
    assert code == other_code == (0 if communication == "auto" else 2), output[-2000:]
    assert communication == "tcp" or "Sums use TensorFlow's ring" in output
