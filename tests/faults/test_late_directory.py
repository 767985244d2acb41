"""Promise 47: the chief selects the checkpoint to restore; other workers wait until it is visible."""

import pytest

pytestmark = pytest.mark.workers
PROGRAM = "tests/programs/late_directory.py"


@pytest.fixture(scope="module")
def outcomes(run_program, tmp_path_factory):
    chief, other = run_program(2, [PROGRAM, str(tmp_path_factory.mktemp("late"))])
    return chief.json, other.json


def test_a_worker_waits_for_a_checkpoint_that_is_not_visible_yet(outcomes):
    assert [worker["late"] for worker in outcomes] == [{"step": 3}, {"step": 3}]


@pytest.mark.parametrize("case", ["never", "other content"])
def test_a_checkpoint_that_never_becomes_visible_ends_the_job_with_134_on_all_workers(case, outcomes):
    chief, other = (worker[case] for worker in outcomes)
    assert chief["code"] == other["code"] == 134
    assert "Worker 1 could not restore a checkpoint; its log has the reason" in chief["error"]
    assert "The chief restores the checkpoint of step 3" in other["error"]
    assert "put it on shared storage" in other["error"]
    assert outcomes[0]["there"] == ["ckpt-3"]  # no checkpoint was set aside


@pytest.mark.parametrize("case", ["another run", "restore", "init_from"])
def test_workers_that_see_the_checkpoint_of_another_run_refuse_on_all_workers(case, outcomes):
    for worker in outcomes:
        assert worker[case]["code"] == 2
        assert "worker 1 read different checkpoints" in worker[case]["error"]
    assert [worker["the same"] for worker in outcomes] == [{"step": 0}, {"step": 0}]
