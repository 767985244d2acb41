"""Equal results of one device, two replicas and two processes; test_strategy_matrix.py has more cases."""

import numpy as np
import pytest
from compare import MODELS

pytestmark = pytest.mark.workers
STEPS = 60


@pytest.fixture(scope="module")
def traces(run_program):
    """Returns losses, weight digests and evaluations of the models by strategy and worker."""
    program = "tests/programs/compare.py"
    single = run_program(1, [program, "one_device", str(STEPS)])
    mirrored = run_program(1, [program, "mirrored", str(STEPS)])
    workers = run_program(2, [program, "multi_worker", str(STEPS)])
    return {
        "one_device": single[0].json, "mirrored": mirrored[0].json,
        "worker 0": workers[0].json, "worker 1": workers[1].json,
    }  # fmt: skip


@pytest.mark.parametrize(("framework", "optimizer"), MODELS)
def test_losses_are_equal_on_one_device_two_replicas_and_two_workers(traces, framework, optimizer):
    key = f"{framework} {optimizer}"
    expected = traces["one_device"][key]["losses"]
    assert len(expected) == STEPS
    assert expected[-1] < 0.8 * expected[0], "the loss did not decrease, so the test checks nothing"
    for where in ("mirrored", "worker 0"):
        np.testing.assert_allclose(traces[where][key]["losses"], expected, atol=1e-5, rtol=0)


def test_both_workers_hold_the_same_weights_to_the_last_bit(traces):
    for key in traces["one_device"]:
        assert traces["worker 0"][key]["digest"] == traces["worker 1"][key]["digest"]


def test_thirteen_examples_are_each_evaluated_once_on_two_workers(traces):
    for key, result in traces["one_device"].items():
        for where in ("mirrored", "worker 0", "worker 1"):
            assert traces[where][key]["eval"] == pytest.approx(result["eval"], abs=1e-6)
