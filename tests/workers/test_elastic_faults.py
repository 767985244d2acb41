"""Elastic training with real processes: faults before training, while groups form, and of all workers."""

import functools

import leaving_runs
import pytest
import training
from conftest import some_of
from leaving_runs import FLAGS, check_is_exact, sizes_of

pytestmark = pytest.mark.workers
KILL_ALL = "kill@13:0 kill@13:1 kill@13:2"
FORMING = {  # name -> faults, expected numbers of workers
    "before the first connections": ("kill@connect1:1", [2]),
    "in the first agreement": ("kill@agree1:1", [2]),
    "while the others connect again": ("kill@13:2 kill@connect2:1", [3, 1]),
    "the chief in the next agreement": ("kill@13:2 kill@agree2:0", [3, 1]),
    "the chief before it restores": ("kill@13:2 kill@resume2:0", [3, 1]),
}
JOINING = {
    "the chief while it sends the state": "kill@5:1 kill@send3:0",
    "the new worker while it receives the state": "kill@5:1 kill@send3:2",
    "the new worker before it connects": "kill@5:1 kill@connect3:2",
}


@pytest.fixture
def start(monkeypatch):
    """A function that runs an elastic job, and returns its result and its JSON lines."""
    return functools.partial(leaving_runs.run, monkeypatch)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The model_dir of a run on one device."""
    model_dir = tmp_path_factory.mktemp("unbroken") / "m"
    result = training.run(model_dir, *FLAGS)
    assert result.code == 0, result.output
    return model_dir


@pytest.mark.parametrize("case", some_of(sorted(FORMING), "the chief in the next agreement"))
def test_a_loss_while_a_group_forms_leads_to_the_next_group(start, unbroken, tmp_path, case):
    faults, sizes = FORMING[case]
    result, facts = start(tmp_path / "m", faults=faults)
    assert result.code == 0, result.output[-6000:]
    assert result.output.count("fault: kill") == len(faults.split())
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts)[: len(sizes)] == sizes
    assert "restart 1 of" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(JOINING))
def test_a_loss_while_a_worker_receives_the_state_leads_to_the_next_group(start, unbroken, tmp_path, case):
    result, facts = start(tmp_path / "m", faults=JOINING[case], PAUSE_SECS="0.6")
    assert result.code == 0, result.output[-6000:]
    assert result.output.count("fault: kill") == 2
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts)[:2] == [3, 2] and "restart 1 of" not in result.output


@pytest.mark.parametrize("stage", some_of(["build", "data", "trace"], "build"))
def test_a_loss_before_the_first_step_does_not_end_the_job(start, unbroken, tmp_path, stage):
    result, _ = start(tmp_path / "m", faults=f"kill@{stage}:1", launcher=("--backoff_secs=0.1",))
    assert result.code == 0, result.output[-6000:]
    assert f"fault: kill at {stage}" in result.output
    check_is_exact(tmp_path / "m", unbroken)


def test_the_job_resumes_from_its_checkpoint_after_all_workers_have_died(start, unbroken, tmp_path):
    result, facts = start(
        tmp_path / "m", "--save_every_steps=5", faults=KILL_ALL, launcher=("--backoff_secs=0.1",)
    )
    assert result.code == 0, result.output[-6000:]
    assert "restart 1 of 3" in result.output and "resuming at step" in result.output
    check_is_exact(tmp_path / "m", unbroken)
    assert sizes_of(facts) == [3]


@pytest.mark.slow
def test_without_restarts_the_death_of_all_workers_ends_the_job_with_134(start, tmp_path):
    result, _ = start(tmp_path / "m", faults=KILL_ALL, launcher=("--max_restarts=0",))
    assert result.code == 134 and "--max_restarts=0" in result.output, result.output[-6000:]
