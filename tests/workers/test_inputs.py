"""Inputs of every kind end at the same step on all workers, with the numbers of two replicas."""

import pytest

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def seen(run_program):
    """What tests/programs/inputs.py found, by place."""
    mirrored = run_program(1, ["tests/programs/inputs.py", "mirrored"])
    workers = run_program(2, ["tests/programs/inputs.py", "multi_worker"])
    return {"mirrored": mirrored[0].json, "chief": workers[0].json, "worker": workers[1].json}


@pytest.mark.parametrize("kind", ["generator", "ragged", "finite", "one bad row"])
def test_two_workers_do_what_two_replicas_do(seen, kind):
    expected = seen["mirrored"][kind]
    for where in ("chief", "worker"):
        got = seen[where][kind]
        assert got["step"] == expected["step"]
        assert got["weights"] == pytest.approx(expected["weights"], abs=1e-6)
        assert got.get("eval") == pytest.approx(expected.get("eval"), abs=1e-6)
    assert seen["chief"][kind]["losses"] == pytest.approx(expected["losses"], abs=1e-6)


@pytest.mark.parametrize(("kind", "steps"), [("generator", 6), ("ragged", 4), ("finite", 25)])
def test_training_ends_with_the_data_at_the_same_step_everywhere(seen, kind, steps):
    for place in seen.values():
        assert place[kind]["step"] == steps
        assert "error" not in place[kind]


def test_workers_with_unequal_data_stop_together_at_the_shortest(seen):
    assert seen["chief"]["uneven"]["step"] == seen["worker"]["uneven"]["step"] == 3
    assert seen["chief"]["uneven"]["weights"] == seen["worker"]["uneven"]["weights"]


def test_a_nan_in_one_replica_stops_all_before_the_update_and_names_step_and_checkpoint(seen):
    for place in seen.values():
        got = place["one bad row"]
        assert got["step"] == 10
        assert got["error"].startswith("NonFiniteError: Step 11: ")
        assert "checkpoint is of step 10" in got["error"]
        assert got["weights"] == pytest.approx(got["weights"]), "the weights are not numbers"


def test_the_chief_s_clock_decides_when_everyone_saves(seen):
    assert seen["chief"]["by the clock"]["saved"] == seen["worker"]["by the clock"]["saved"]
    assert len(seen["chief"]["by the clock"]["saved"]) >= 2


def test_a_worker_that_the_others_wait_for_is_named_by_the_chief_and_what_it_is(seen):
    for what, said in zip(("input", "step"), seen["chief"]["slow"], strict=True):
        assert len(said) == 1 and said[0].startswith("Worker 1 (127.0.0.1:"), said
        assert f"It is its {what} that takes longer" in said[0]
    assert seen["worker"]["slow"] == [[], []]
