"""Workers with 8-bit gradients: the rounding error is added to a later sum, also after a resume."""

import os

import numpy as np
import pytest
from conftest import some_of
from eight_bit import SIZE

pytestmark = pytest.mark.workers
ALGORITHM = os.environ.get("CTL_COLLECTIVE_ALGORITHM", "auto")


@pytest.fixture(scope="module")
def two_workers(run_program, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs"))
    return run_program(2, ["tests/programs/eight_bit.py", directory, "ring"])


@pytest.fixture(scope="module")
def three_workers(run_program, tmp_path_factory):
    return run_program(3, ["tests/programs/eight_bit.py", str(tmp_path_factory.mktemp("runs"))])


RUNS = ["tcp of two", "ring of two", "tcp of three"]


@pytest.fixture(params=some_of(RUNS, *RUNS[:2]))
def results(request):
    path, _, count = request.param.partition(" of ")
    return [r.json[path] for r in request.getfixturevalue(f"{count}_workers")]


def large_weights(results, name):
    return np.array([worker[name]["large"] for worker in results])


def residual(results, name):
    return np.sum([worker[name]["left"] for worker in results], axis=0)


def by_block(numbers):
    """Returns the largest magnitude of each block of 256."""
    return np.abs(np.pad(numbers, (0, -SIZE % 256))).reshape(-1, 256).max(axis=1)


@pytest.mark.parametrize(("name", "exact"), [("whole", "float"), ("skip", "skip in float")])
def test_weights_and_residuals_add_up_to_the_gradients(results, name, exact):
    """The weights minus the residuals of all workers are the weights of a run without rounding."""
    weights, expected = large_weights(results, name)[0], large_weights(results, exact)[0]
    sizes = by_block(expected).repeat(256)[:SIZE]
    assert np.any(np.abs(weights - expected) > 1e-4 * sizes), "no weight was rounded"
    np.testing.assert_allclose(weights - residual(results, name), expected, rtol=0, atol=4e-6 * sizes.max())
    assert np.all(np.abs(weights - residual(results, name) - expected) <= 1e-5 * sizes)
    assert np.all(by_block(residual(results, name)) <= 0.1 * by_block(expected)), "the residuals grow"


def test_workers_have_equal_weights_and_different_residuals(results):
    for name in ("whole", "skip"):
        assert len(set(map(bytes, large_weights(results, name)))) == 1
        assert results[0][name]["left"] != results[1][name]["left"]


def test_small_gradients_are_not_rounded(results):
    assert all(worker["whole"]["small"] == worker["float"]["small"] for worker in results)


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(results):
    assert all(worker["pieces"] == worker["whole"] for worker in results)


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_skipped(results):
    for worker in results:
        assert "Step 2: " in worker["stop"]["error"] and "gradient" in worker["stop"]["error"]
        assert np.isfinite(worker["skip"]["large"]).all() and np.isfinite(worker["skip"]["left"]).all()


def test_a_quarter_of_the_bytes_is_sent(results):
    for worker in results:
        if "bytes" in worker:
            eight, sixteen, all_bits = worker["bytes"]
            assert 0.2 < eight / all_bits < 0.29
            if ALGORITHM in ("auto", "ring"):  # the others send 16-bit addends as float32
                assert 0.45 < sixteen / all_bits < 0.55
