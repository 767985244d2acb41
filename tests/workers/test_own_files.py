"""Workers that each read data of their own: a run that is stopped and resumed sees what it had not seen."""

import pytest

pytestmark = pytest.mark.workers
PROGRAM = "tests/programs/own_files.py"


@pytest.fixture(scope="module")
def found(run_program, tmp_path_factory):
    where = str(tmp_path_factory.mktemp("own_files"))
    together = [r.json for r in run_program(2, [PROGRAM, where, "4", "100"])]
    return together, run_program(1, [PROGRAM, where, "100"])[0].json


@pytest.mark.parametrize("policy", ["file", "off"])
def test_a_resumed_run_of_two_workers_goes_on_where_each_of_them_was(policy, found):
    workers = [worker[policy] for worker in found[0]]
    for before, after in workers:
        assert (before["step"], after["step"]) == (4, 10)
        assert len(before["seen"]) == 16 and len(after["seen"]) == 24
    seen = [i for before, after in workers for i in (*before["seen"], *after["seen"])]
    assert sorted(seen) == list(range(80))  # each once


@pytest.mark.parametrize("policy", ["file", "off"])
def test_another_number_of_workers_is_refused(policy, found):
    assert "workers: 2 before, 1 now" in found[1][policy][0]["error"]
