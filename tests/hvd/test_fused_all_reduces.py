"""Fused all-reduces of one function have the results of single all-reduces."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "fusing.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def outcomes(request):
    dynamic = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return results(PROGRAMS / "fusing.py", request.param, environ=dynamic)


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_single_ones(outcomes, case):
    for rank, of_rank in enumerate(outcomes):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"
