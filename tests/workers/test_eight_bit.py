"""Workers whose gradients travel with 8 bits: what a sum lacks is added later, also after a resume."""

import numpy as np
import pytest
from conftest import some_of
from eight_bit import SIZE

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def two_workers(run_program, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs"))
    return run_program(2, ["tests/programs/eight_bit.py", directory, "ring"])


@pytest.fixture(scope="module")
def three_workers(run_program, tmp_path_factory):
    return run_program(3, ["tests/programs/eight_bit.py", str(tmp_path_factory.mktemp("runs"))])


RUNS = ["tcp of two", "ring of two", "tcp of three"]


@pytest.fixture(params=some_of(RUNS, *RUNS[:2]))
def found(request):
    path, _, count = request.param.partition(" of ")
    return [r.json[path] for r in request.getfixturevalue(f"{count}_workers")]


def large(found, name):
    return np.array([worker[name]["large"] for worker in found])


def left(found, name):
    return np.sum([worker[name]["left"] for worker in found], axis=0)


def by_block(numbers):
    """The largest of each block of 256."""
    return np.abs(np.pad(numbers, (0, -SIZE % 256))).reshape(-1, 256).max(axis=1)


@pytest.mark.parametrize(("name", "exact"), [("whole", "float"), ("skip", "skip in float")])
def test_weights_and_what_is_left_over_are_the_gradients_together(found, name, exact):
    """Weights are minus the sum of all gradients so far, whose rest every worker keeps."""
    weights, wanted = large(found, name)[0], large(found, exact)[0]
    sizes = by_block(wanted).repeat(256)[:SIZE]
    assert np.any(np.abs(weights - wanted) > 1e-4 * sizes), "nothing was rounded"
    np.testing.assert_allclose(weights - left(found, name), wanted, rtol=0, atol=4e-6 * sizes.max())
    assert np.all(np.abs(weights - left(found, name) - wanted) <= 1e-5 * sizes)
    assert np.all(by_block(left(found, name)) <= 0.1 * by_block(wanted)), "what is left over does not grow"


def test_workers_have_the_same_weights_and_leave_over_what_is_theirs(found):
    for name in ("whole", "skip"):
        assert len(set(map(bytes, large(found, name)))) == 1
        assert found[0][name]["left"] != found[1][name]["left"]


def test_small_gradients_travel_as_they_are(found):
    assert all(worker["whole"]["small"] == worker["float"]["small"] for worker in found)


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(found):
    assert all(worker["pieces"] == worker["whole"] for worker in found)


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_left_out(found):
    for worker in found:
        assert "Step 2: " in worker["stop"]["error"] and "gradient" in worker["stop"]["error"]
        assert np.isfinite(worker["skip"]["large"]).all() and np.isfinite(worker["skip"]["left"]).all()


def test_a_quarter_of_the_bytes_travels(found):
    for worker in found:
        if "bytes" in worker:
            eight, sixteen, all_bits = worker["bytes"]
            assert 0.2 < eight / all_bits < 0.29 and 0.45 < sixteen / all_bits < 0.55
