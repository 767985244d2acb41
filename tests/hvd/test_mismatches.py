"""Ranks with different requests: every rank raises an error that names them, without a hang."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "mismatches.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def outcomes(request):
    quick = {"CTL_HVD_ORDER_TIMEOUT_SECS": "1"}
    return results(PROGRAMS / "mismatches.py", request.param, environ=quick)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ_have_an_error_on_every_rank(outcomes, case):
    for rank, of_rank in enumerate(outcomes):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"
