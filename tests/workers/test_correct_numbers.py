"""Masks, loss scaling, lent rows and metrics: two workers give the numbers of one device."""

import correctness
import numpy as np
import pytest

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def found(run_program):
    """Outcomes of all cases: {"one": ..., 0: ..., 1: ...}."""
    program = "tests/programs/correctness.py"
    one = run_program(1, [program, "default"])[0]
    first, second = run_program(2, [program, "multi_worker"])
    return {"one": one.json, 0: first.json, 1: second.json}


@pytest.mark.parametrize("case", correctness.WITH_WORKERS)
def test_two_workers_train_as_one_device_does(found, case):
    one, first, second = (found[where][case] for where in ("one", 0, 1))
    assert first["digest"] == second["digest"]
    assert first["step"] == one["step"]
    for key in ("losses", "mse", "total", "logged", "norms", "eval", "scale", "iterations"):
        if key in one:
            np.testing.assert_allclose(first[key], one[key], atol=1e-5, err_msg=key)
    for a, b in zip(first["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_bad_worker_skips_the_step_on_both_without_a_deadlock(found):
    for where in ("one", 0, 1):
        case = found[where]["scaled"]
        assert (case["step"], case["iterations"], case["scale"]) == (9, 6, 512.0)


def test_a_run_resumed_on_workers_with_unequal_shares_goes_on_as_on_one_device(run_program, tmp_path):
    program = "tests/programs/unequal_shares.py"
    [one] = run_program(1, [program, "default", "6", str(tmp_path / "one")])
    run_program(1, [program, "default", "3", str(tmp_path / "two")])
    workers = run_program(2, [program, "multi_worker", "6", str(tmp_path / "two")])
    np.testing.assert_allclose(workers[0].json["losses"], one.json["losses"][3:], atol=1e-4)
    for worker in workers:
        np.testing.assert_allclose(worker.json["weights"], one.json["weights"], atol=1e-5)
