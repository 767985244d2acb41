"""Two workers with steps of their own: the same numbers as a simulation, and as an unbroken run."""

import numpy as np
import pytest
from local_steps import EVERY, FEATURES, MOMENTUM, OUTER, RATE

pytestmark = pytest.mark.workers
STEPS = 10  # no multiple of EVERY: the weights of the end are averaged too


@pytest.fixture(scope="module")
def found(run_program, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs"))
    return [r.json for r in run_program(2, ["tests/programs/local_steps.py", directory, "tcp"])]


def simulated(found, name, outer_rate=1.0, outer_momentum=0.0):
    """Local SGD with an outer Nesterov step on the examples that the workers saw, in float64."""
    weights = [np.linspace(-1, 1, FEATURES)] * 2
    speeds, common, outer = [np.zeros(FEATURES)] * 2, weights[0], np.zeros(FEATURES)
    for step in range(STEPS):
        for i in range(2):
            n = np.array(found[i][name]["seen"][step], float)
            x = np.sin(n[:, None] * np.arange(1.0, FEATURES + 1))
            gradient = 2 * x.T @ (x @ weights[i] - np.cos(n)) / len(n)
            speeds[i] = MOMENTUM * speeds[i] - RATE * gradient
            weights[i] = weights[i] + speeds[i]
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            difference = common - np.mean(weights, axis=0)
            outer = outer_momentum * outer + difference
            common = common - outer_rate * (difference + outer_momentum * outer)
            weights = [common, common]
    return common


@pytest.mark.parametrize(("name", "outer"), [("averaged", ()), ("outer", tuple(OUTER.values()))])
def test_weights_are_those_of_a_simulation_and_equal_on_both_workers(found, name, outer):
    assert found[0][name]["seen"] != found[1][name]["seen"]
    assert found[0][name]["bits"] != found[1][name]["bits"], "the momenta of workers differ"
    assert found[0][name]["weights"] == found[1][name]["weights"]
    np.testing.assert_allclose(found[0][name]["weights"], simulated(found, name, *outer), atol=1e-6)


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(found):
    for worker in (0, 1):
        runs = found[worker]["resumed"]
        assert runs["pieces"] == runs["whole"]
        assert runs["signalled"] == runs["whole"]
        assert runs["step"] < 16 and runs["step"] % EVERY == 0, "a signal waits for equal weights"
    first, second = (found[worker]["resumed"]["whole"] for worker in (0, 1))
    assert first != second, "each worker has moments of its own"


def test_a_number_that_is_not_finite_stops_both_workers_at_the_next_average(found):
    for worker in (0, 1):
        error = found[worker]["stop"]["error"]
        assert error.startswith("By step 4: the loss on replica 0 (worker 0)")
        assert "on_nonfinite=skip" in error and "rollback" not in error


def test_a_worker_leaves_out_its_own_step_and_the_weights_stay_equal(found):
    assert found[0]["skip"]["weights"] == found[1]["skip"]["weights"]
    assert np.isfinite(found[0]["skip"]["weights"]).all()


def test_fewer_averages_send_fewer_bytes(found):
    for worker in (0, 1):
        assert 0 < 3 * found[worker]["bytes"]["16"] < found[worker]["bytes"]["1"]
