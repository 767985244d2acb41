"""Collectives in functions: in step on all ranks, whatever TensorFlow makes of the graph."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "functions.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def said(request):
    return results(PROGRAMS / "functions.py", request.param)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_ranks_stay_in_step(said, case):
    for rank, of_rank in enumerate(said):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"
