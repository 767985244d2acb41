"""Graphs with more concurrent collectives than TensorFlow has threads end."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "waiting.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def reports(request):
    return results(PROGRAMS / "waiting.py", request.param, environ={"TF_NUM_INTEROP_THREADS": "2"})


@pytest.mark.parametrize("case", CASES)
def test_two_threads_suffice(reports, case):
    for rank, report in enumerate(reports):
        assert report[case] == "ok", f"rank {rank}:\n{report[case]}"
