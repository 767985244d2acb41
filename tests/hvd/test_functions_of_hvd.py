"""Collectives in functions: the order is the same on all ranks, for any graph of TensorFlow."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "functions.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def outcomes(request):
    return results(PROGRAMS / "functions.py", request.param)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_ranks_stay_in_step(outcomes, case):
    for rank, of_rank in enumerate(outcomes):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"
