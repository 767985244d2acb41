"""Distributed tapes on one and on two ranks."""

import numpy as np
import pytest
from ranks import PROGRAMS, results

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def runs():
    """Returns number of ranks -> results of each rank."""
    return {count: results(PROGRAMS / "taping.py", count) for count in (1, 2)}


@pytest.mark.parametrize("case", ["eager", "in_a_function"])
def test_two_ranks_train_as_one_process_does(runs, case):
    first, second = (rank[case] for rank in runs[2])
    assert first["bits"] == second["bits"]
    np.testing.assert_allclose(first["numbers"], runs[1][0][case]["numbers"], atol=1e-6)
    assert first["asked"] == ["DistributedGradientTape.gradients.0"] * 4
    assert runs[1][0][case]["asked"] == []


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("opened_distributed", [3.0, 6.0], [3.0, 6.0]),
        ("wrapped_inside_of_its_block", 9.0, 9.0),
        ("persistent_and_watched", [2.0, 2.0, 0.0], [2.0, 2.0, 2.0]),
        ("structures", [2.0, True, 0.0], [2.0, True, 0.0]),
        ("slices", ["IndexedSlices", [0.5, 0.5, 0.0, 1.0]], ["IndexedSlices", [0.5, 0.5, 0.0, 1.0]]),
        ("partial", [0.0, 0.5], [0.5, 0.5]),
        ("generic_names", ["grad_0"], ["grad_0"]),
    ],
)
def test_gradients_are_averages_over_ranks(runs, case, first, second):
    assert [rank[case] for rank in runs[2]] == [first, second]


def test_gradients_of_local_sources_stay_and_are_divided_by_the_ranks(runs):
    for rank, expected in zip(runs[2], (3.0, 6.0), strict=True):
        assert rank["local_sources"] == {
            "all": [expected, 9.0], "local": [True, expected], "other": [True, 9.0],
        }  # fmt: skip


def test_invalid_options_are_refused_with_an_alternative(runs):
    assert "op=hvd.Average" in runs[1][0]["refusals"]["adasum"]
    assert "expected Keras layers" in runs[1][0]["refusals"]["layers"]
