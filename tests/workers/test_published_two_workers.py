"""Keras models with custom train steps on two workers, compared with `Model.fit` on one device."""

import numpy as np
import published
import pytest
from published import OWN_STEPS, arrays, assert_same, trained

pytestmark = pytest.mark.workers
CASES = (*OWN_STEPS, "endpoint", "small table")


@pytest.fixture(scope="module")
def workers(run_program):
    return [w.json for w in run_program(2, ["tests/programs/published.py", ",".join(CASES)])]


@pytest.mark.parametrize("name", CASES)
def test_a_program_on_two_workers_has_the_results_of_one_device(workers, name):
    assert workers[0][name] == workers[1][name]
    assert_same(workers[0][name], trained(name))


def test_evaluate_of_keras_is_an_error_on_two_workers_and_that_of_ctl_is_not(workers):
    for worker in workers:
        assert "Call ctl.evaluate(model, x, y)" in worker["evaluate"]
    assert workers[0]["evaluated"] == workers[1]["evaluated"]
    np.testing.assert_allclose(workers[0]["predicted"], workers[1]["predicted"])
    assert np.shape(workers[0]["predicted"]) == (3, 1)
    assert len(arrays()[0]) == published.EXAMPLES
