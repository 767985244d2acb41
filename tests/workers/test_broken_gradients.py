"""A gradient of one worker is NaN, and all losses are finite: the message names the worker."""

import math

import pytest
from broken_gradients import POLICIES, STEPS

pytestmark = pytest.mark.workers


def test_the_worker_of_a_gradient_that_is_not_finite_is_named_and_no_worker_applies_it(run_program):
    results = run_program(2, ["tests/programs/broken_gradients.py"])
    assert set(results[0].json) == set(POLICIES) and results[0].json == results[1].json
    error = results[0].json["stop"]
    assert error.startswith("Step 3: the gradient on replica 1 (worker 1) is NaN or infinite.")
    weight = 1.0
    for _ in range(STEPS - 1):
        weight -= 0.1 * 0.5 / math.sqrt(weight)
    assert results[0].json["skip"] == pytest.approx(weight)
    warning = "ctl: step 3 is skipped: loss or gradient is not finite (flags by replica: loss [0 0]"
    assert f"{warning} gradient [0 1] )" in results[0].output
