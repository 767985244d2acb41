"""Parts of the ranks do collectives among themselves."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "sets.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes():
    return results(PROGRAMS / "sets.py", 3)


@pytest.mark.parametrize("case", CASES)
def test_process_sets(outcomes, case):
    for rank, of_rank in enumerate(outcomes):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"
