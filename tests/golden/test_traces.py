"""Losses and weights of short trainings, compared with traces.json to the last bit."""

import json

import processes
import pytest
from compare_commits import CASES, JOBS, ROOT, outcome
from traces import FILE, assert_equal, environment

RECORDED = json.loads(FILE.read_text())


def test_every_case_is_recorded():
    assert RECORDED["cases"].keys() == {*CASES, *JOBS}
    assert all(recorded["losses"] and recorded["weights"] for recorded in RECORDED["cases"].values())


@pytest.mark.parametrize("name", [*CASES, *JOBS])
def test_losses_and_weights_are_those_of_the_recorded_trace(name):
    exact = environment() == RECORDED["environment"]
    assert_equal(RECORDED["cases"][name], outcome(ROOT, name, run=processes.run), exact=exact)


def test_one_changed_bit_is_a_difference():
    recorded = RECORDED["cases"]["mnist"]
    changed = {**recorded, "losses": [*recorded["losses"][:-1], recorded["losses"][-1].replace("p", "1p")]}
    with pytest.raises(AssertionError):
        assert_equal(recorded, changed, exact=True)
    assert_equal(recorded, changed, exact=False)
    with pytest.raises(AssertionError):
        assert_equal(recorded, {"losses": [(3.0).hex()] * 30, "weights": ""}, exact=False)
