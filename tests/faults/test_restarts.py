"""Real training under the launcher: lost workers, hangs and crash loops do not change the results."""

import json
import random
import stat

import numpy as np
import pytest
from conftest import TIMEOUT_SECS
from polling import wait_until
from training import STEPS, assert_bit_identical, output_of, pids, run, saved, send, started, tensors, trace

pytestmark = pytest.mark.workers
BACKOFF = ("--backoff_secs=0.2",)


def attempts(model_dir):
    lines = (model_dir / "workers" / "attempts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.smoke
@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_costs_nothing_but_time(worker, tmp_path, unbroken):
    step = random.randint(3, STEPS - 2)
    result = run(tmp_path / "run", workers=2, launcher=BACKOFF, faults=f"kill@{step}:{worker}")
    assert result.code == 0, (step, result.output[-3000:])
    assert_bit_identical(tmp_path / "run", unbroken(2))
    first, second = attempts(tmp_path / "run")
    assert first["failed"]["signal"] == "SIGKILL" and first["failed"]["task"] == f"worker {worker}"
    assert second["failed"] is None and second["step_after"] == STEPS
    assert f"attempt 2 after: worker {worker} (job {worker}) failed: SIGKILL" in result.output
    assert not pids(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("workertemp_*"))


@pytest.mark.parametrize("worker", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_worker_that_is_stopped_is_a_hang_that_ends(worker, tmp_path, unbroken):
    result = run(
        tmp_path / "run", workers=2, launcher=(*BACKOFF, "--heartbeat_timeout_secs=5"),
        faults=f"stop@7:{worker}",
    )  # fmt: skip
    assert result.code == 0, result.output[-3000:]
    assert_bit_identical(tmp_path / "run", unbroken(2))
    assert attempts(tmp_path / "run")[0]["failed"]["task"] == f"worker {worker}"


@pytest.mark.slow
def test_a_hook_that_hangs_is_ended_from_within_and_started_again(tmp_path, unbroken):
    result = run(tmp_path / "run", "--step_timeout_secs=6", workers=2, launcher=BACKOFF, faults="hang@8:1")
    assert result.code == 0, result.output[-3000:]
    text = (tmp_path / "run" / "workers" / "job_1.attempt1.log").read_text()
    assert "no progress for 6 s" in text and "in after_loop" in text
    assert_bit_identical(tmp_path / "run", unbroken(2))


@pytest.mark.slow
def test_a_crash_at_the_same_step_again_and_again_stops_early(tmp_path):
    result = run(tmp_path / "run", workers=2, launcher=(*BACKOFF, "--max_restarts=20"), faults="kill@7:1!")
    assert result.code == 137
    assert "no progress" in result.output and "step 5" in result.output
    assert len(attempts(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_job_shrinks_and_grows_with_its_hosts(tmp_path, unbroken):
    """2, then 1, then 3 workers, found by a script: the numbers of 2, no example twice or never."""
    unbroken_dir = unbroken(2, "--dropout=0")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    options = ("--min_workers=1", "--max_workers=4", f"--host_discovery={script}", *BACKOFF)
    with started(
        tmp_path / "run", "--dropout=0", workers="found", launcher=options, PAUSE_SECS="0.3"
    ) as process:
        for step, slots in ((6, 1), (18, 3)):
            wait_until(lambda at=step: max(trace(tmp_path / "run"), default=0) >= at, process)
            hosts.write_text(f"localhost:{slots}\n")
            send(pids(tmp_path / "run")[0], "KILL")
        assert process.wait(TIMEOUT_SECS) == 0, output_of(tmp_path / "run").read_text()[-3000:]
    assert [a["workers"] for a in attempts(tmp_path / "run")] == [2, 1, 3]
    losses, expected = trace(tmp_path / "run"), trace(unbroken_dir)
    assert losses.keys() == expected.keys()
    np.testing.assert_allclose([losses[s] for s in expected], list(expected.values()), atol=1e-5)
    uses_by_example = next(v for n, v in tensors(tmp_path / "run").items() if n.startswith("seen/"))
    assert set(uses_by_example) == {1.0}
    assert saved(tmp_path / "run")[-1] == STEPS
