"""Two workers with local steps: results equal those of a simulation and of an unbroken run."""

import numpy as np
import pytest
from local_steps import EVERY, FEATURES, MOMENTUM, OUTER, RATE

pytestmark = pytest.mark.workers
STEPS = 10  # no multiple of EVERY: the final weights are averaged too


@pytest.fixture(scope="module")
def results(run_program, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs"))
    return [r.json for r in run_program(2, ["tests/programs/local_steps.py", directory, "tcp"])]


def simulated(results, name, outer_rate=1.0, outer_momentum=0.0):
    """Simulates local SGD with an outer Nesterov step on the examples of the workers, in float64."""
    weights = [np.linspace(-1, 1, FEATURES)] * 2
    velocities, common, outer = [np.zeros(FEATURES)] * 2, weights[0], np.zeros(FEATURES)
    for step in range(STEPS):
        for i in range(2):
            n = np.array(results[i][name]["seen"][step], float)
            x = np.sin(n[:, None] * np.arange(1.0, FEATURES + 1))
            gradient = 2 * x.T @ (x @ weights[i] - np.cos(n)) / len(n)
            velocities[i] = MOMENTUM * velocities[i] - RATE * gradient
            weights[i] = weights[i] + velocities[i]
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            difference = common - np.mean(weights, axis=0)
            outer = outer_momentum * outer + difference
            common = common - outer_rate * (difference + outer_momentum * outer)
            weights = [common, common]
    return common


@pytest.mark.parametrize(("name", "outer"), [("averaged", ()), ("outer", tuple(OUTER.values()))])
def test_weights_are_those_of_a_simulation_and_equal_on_both_workers(results, name, outer):
    assert results[0][name]["seen"] != results[1][name]["seen"]
    assert results[0][name]["bits"] != results[1][name]["bits"], "the momenta of workers differ"
    assert results[0][name]["weights"] == results[1][name]["weights"]
    np.testing.assert_allclose(results[0][name]["weights"], simulated(results, name, *outer), atol=1e-6)


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(results):
    for worker in (0, 1):
        runs = results[worker]["resumed"]
        assert runs["pieces"] == runs["whole"]
        assert runs["signalled"] == runs["whole"]
        assert runs["step"] < 16 and runs["step"] % EVERY == 0, "a signal waits for equal weights"
    first, second = (results[worker]["resumed"]["whole"] for worker in (0, 1))
    assert first != second, "each worker has its own moments"


def test_a_number_that_is_not_finite_stops_both_workers_at_the_next_average(results):
    for worker in (0, 1):
        error = results[worker]["stop"]["error"]
        assert error.startswith("By step 4: the loss on replica 0 (worker 0)")
        assert "on_nonfinite=skip" in error and "rollback" not in error


def test_a_worker_skips_its_own_step_and_the_weights_stay_equal(results):
    assert results[0]["skip"]["weights"] == results[1]["skip"]["weights"]
    assert np.isfinite(results[0]["skip"]["weights"]).all()


def test_fewer_averages_send_fewer_bytes(results):
    for worker in (0, 1):
        assert 0 < 3 * results[worker]["bytes"]["16"] < results[worker]["bytes"]["1"]
