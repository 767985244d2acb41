"""Runs that are stopped by a signal at any point and restarted: no example is lost or repeated."""

import signal
import subprocess

import numpy as np
import pytest
from conftest import TIMEOUT_SECS
from polling import wait_until
from training import STEPS, assert_bit_identical, output_of, pids, run, saved, send, started, tensors, trace

pytestmark = pytest.mark.workers
SLOW_STEPS = {"PAUSE_SECS": "0.3"}


@pytest.mark.parametrize(
    "signal_target",
    ["the launcher", *(pytest.param(w, marks=pytest.mark.slow) for w in ("one worker", "all"))],
)
def test_after_sigterm_one_checkpoint_at_one_step_and_a_resume_that_loses_none(
    signal_target, tmp_path, unbroken
):
    with started(tmp_path / "run", workers=2, **SLOW_STEPS) as process:
        wait_until(lambda: len(trace(tmp_path / "run")) >= 7, process)
        workers = pids(tmp_path / "run")
        assert sorted(workers) == [0, 1]
        if signal_target == "the launcher":
            process.send_signal(signal.SIGTERM)
        for index in {"the launcher": [], "one worker": [1], "all": [0, 1]}[signal_target]:
            send(workers[index], "TERM")
        code = process.wait(TIMEOUT_SECS)
    last = max(trace(tmp_path / "run"))
    assert code == 143, output_of(tmp_path / "run").read_text()[-2000:]
    assert max(saved(tmp_path / "run")) == last, "the last step that was logged is the one saved"
    assert not pids(tmp_path / "run")
    assert run(tmp_path / "run", workers=2).code == 0
    assert_bit_identical(tmp_path / "run", unbroken(2))


def test_a_second_signal_ends_at_once(tmp_path):
    with started(tmp_path / "run", faults="hang@6", PAUSE_SECS="0.1") as process:
        wait_until((tmp_path / "run-marks" / "fired-hang-6").exists, process)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)  # until the first one was received
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_SECS) == 143


def test_ctrl_c_in_a_single_process_is_one_line_and_a_checkpoint(tmp_path, unbroken):
    with started(tmp_path / "run", **SLOW_STEPS) as process:
        wait_until(lambda: len(trace(tmp_path / "run")) >= 7, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECS) == 130
    output = output_of(tmp_path / "run").read_text()
    assert "Traceback" not in output
    assert [line for line in output.splitlines() if "Ctrl-C" in line] == [
        f"Stopped by Ctrl-C at step {max(saved(tmp_path / 'run'))}; the same command continues from there."
    ]
    assert run(tmp_path / "run").code == 0
    assert_bit_identical(tmp_path / "run", unbroken(0))


@pytest.mark.parametrize("step", [5, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 19, 39))])
def test_a_stop_at_any_step_leaves_no_trace_in_the_numbers(step, tmp_path, unbroken):
    assert run(tmp_path / "run", faults=f"term@{step}").code == 143
    assert saved(tmp_path / "run")[-1] == step
    assert run(tmp_path / "run").code == 0
    assert_bit_identical(tmp_path / "run", unbroken(0))


@pytest.mark.parametrize("workers", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_a_job_of_two_workers_resumes_with_another_number_of_workers(workers, tmp_path, unbroken):
    """No example is repeated or skipped, and the losses stay within 1e-5."""
    unbroken_dir = unbroken(2, "--dropout=0")
    first = run(tmp_path / "run", "--dropout=0", workers=2, faults="term@17")
    assert first.code == 143, first.output[-2000:]
    next_result = run(tmp_path / "run", "--dropout=0", workers=workers)
    assert next_result.code == 0, next_result.output[-2000:]
    losses, expected = trace(tmp_path / "run"), trace(unbroken_dir)
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose([losses[s] for s in expected], list(expected.values()), atol=1e-5)
    uses_by_example = next(v for n, v in tensors(tmp_path / "run").items() if n.startswith("seen/"))
    assert set(uses_by_example) == {1.0} and len(uses_by_example) == STEPS * 12, "each example once"
