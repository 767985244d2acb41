"""Workers with separate input files: a resumed run reads the remaining examples."""

import pytest

pytestmark = pytest.mark.workers
PROGRAM = "tests/programs/own_files.py"


@pytest.fixture(scope="module")
def results(run_program, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("own_files"))
    of_two_workers = [r.json for r in run_program(2, [PROGRAM, directory, "4", "100"])]
    return of_two_workers, run_program(1, [PROGRAM, directory, "100"])[0].json


@pytest.mark.parametrize("policy", ["file", "off"])
def test_each_worker_of_a_resumed_run_continues_at_its_position(policy, results):
    workers = [worker[policy] for worker in results[0]]
    for before, after in workers:
        assert (before["step"], after["step"]) == (4, 10)
        assert len(before["seen"]) == 16 and len(after["seen"]) == 24
    example_ids = [i for before, after in workers for i in (*before["seen"], *after["seen"])]
    assert sorted(example_ids) == list(range(80))  # each example once


@pytest.mark.parametrize("policy", ["file", "off"])
def test_another_number_of_workers_is_refused(policy, results):
    assert "workers: 2 before, 1 now" in results[1][policy][0]["error"]
