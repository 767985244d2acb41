"""Updates begin while gradients still travel in buckets, and are those of gradients that came at once."""

import json

import pytest

pytestmark = pytest.mark.workers
PROGRAM = "tests/programs/early_update.py"


@pytest.mark.parametrize("policy", ["stop", pytest.param("skip", marks=pytest.mark.slow)])
def test_a_bucket_is_applied_while_the_next_travels(run_program, policy):
    how = {"on_nonfinite": policy}
    for found in [r.json for r in run_program(2, [PROGRAM, "travelling", json.dumps(how), "60"])]:
        assert found["changed"] and found["waited"] and None not in found["waited"], found


@pytest.fixture(scope="module")
def numbers(run_program):
    return [r.json for r in run_program(2, [PROGRAM, "numbers"], CTL_COLLECTIVES="tcp")]


def test_numbers_are_those_of_gradients_that_came_at_once(numbers):
    for of_worker in numbers:
        for case, found in of_worker.items():
            assert found["buckets"] == found["at once"], case
        assert of_worker == numbers[0]


def test_what_is_not_finite_is_not_applied(numbers):
    found = {case: of["buckets"] for case, of in numbers[0].items()}
    stopped = {case: of["error"].partition(":")[2] for case, of in found.items() if of["error"]}
    assert stopped.keys() == {"large in half", "infinite norm", "stop"}
    assert stopped["stop"].startswith(" the gradient on replica 1 (worker 1) is NaN or infinite")
    assert stopped["infinite norm"].startswith(" the sum of the gradients is NaN or infinite")
    weights = {case: of["weights"] for case, of in found.items()}
    assert weights["huge"] != weights["plain"] == weights["infinite norm"]
    assert weights["skip"] == weights["too much"] != weights["stop"]
