"""Inputs of different kinds end at the same step on all workers, with the results of two replicas."""

import pytest

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def results(run_program):
    """Returns the results of tests/programs/inputs.py by worker."""
    mirrored = run_program(1, ["tests/programs/inputs.py", "mirrored"])
    workers = run_program(2, ["tests/programs/inputs.py", "multi_worker"])
    return {"mirrored": mirrored[0].json, "chief": workers[0].json, "worker": workers[1].json}


CASES = ["generator", "ragged", "finite", "one bad row", "source", "python batches", "py dataset"]


@pytest.mark.parametrize("case", CASES)
def test_two_workers_have_the_results_of_two_replicas(results, case):
    expected = results["mirrored"][case]
    for where in ("chief", "worker"):
        actual = results[where][case]
        assert actual["step"] == expected["step"]
        assert actual["weights"] == pytest.approx(expected["weights"], abs=1e-6)
        assert actual.get("eval") == pytest.approx(expected.get("eval"), abs=1e-6)
    assert results["chief"][case]["losses"] == pytest.approx(expected["losses"], abs=1e-6)


STEPS = {"generator": 6, "ragged": 4, "finite": 25, "python batches": 6, "py dataset": 6}


@pytest.mark.parametrize(("case", "steps"), STEPS.items())
def test_training_ends_with_the_data_at_the_same_step_everywhere(results, case, steps):
    for result in results.values():
        assert result[case]["step"] == steps
        assert "error" not in result[case]


def test_a_generator_of_batches_equals_a_dataset_of_the_same_examples(results):
    for result in results.values():
        for key in ("losses", "weights", "eval"):
            expected = pytest.approx(result["generator"][key], abs=1e-6)
            assert result["python batches"][key] == expected


def test_workers_with_unequal_data_stop_together_at_the_shortest(results):
    assert results["chief"]["uneven"]["step"] == results["worker"]["uneven"]["step"] == 3
    assert results["chief"]["uneven"]["weights"] == results["worker"]["uneven"]["weights"]


def test_a_nan_in_one_replica_stops_all_before_the_update_and_names_step_and_checkpoint(results):
    for result in results.values():
        actual = result["one bad row"]
        assert actual["step"] == 10
        assert actual["error"].startswith("NonFiniteError: Step 11: ")
        assert "checkpoint is of step 10" in actual["error"]
        assert actual["weights"] == pytest.approx(actual["weights"]), "the weights are not numbers"


def test_the_chief_s_clock_decides_when_all_workers_save(results):
    assert results["chief"]["by the clock"]["saved"] == results["worker"]["by the clock"]["saved"]
    assert len(results["chief"]["by the clock"]["saved"]) >= 2


def test_the_chief_names_the_slow_worker_and_its_slow_phase(results):
    for phase, warnings in zip(("input", "step"), results["chief"]["slow"], strict=True):
        assert len(warnings) == 1 and warnings[0].startswith("Worker 1 (127.0.0.1:"), warnings
        assert f"The cause is its {phase}" in warnings[0]
    assert results["worker"]["slow"] == [[], []]
