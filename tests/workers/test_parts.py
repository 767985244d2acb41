"""Sharded data: each example is on one worker; all workers refuse mistakes before training."""

import pytest

pytestmark = pytest.mark.workers
PROGRAM = "tests/programs/parts.py"


@pytest.fixture(scope="module")
def results(run_program):
    first, second = run_program(2, [PROGRAM, "multi_worker"])
    return {"one": run_program(1, [PROGRAM, "default"])[0].json,
            "two": run_program(1, [PROGRAM, "mirrored"])[0].json,
            0: first.json, 1: second.json}  # fmt: skip


def test_train_data_fn_gives_each_worker_its_own_part(results):
    parts = [results[w]["sharded"]["seen"] for w in (0, 1)]
    assert sorted(parts[0]) == list(range(0, 24, 2))
    assert sorted(parts[1]) == list(range(1, 24, 2))
    assert [results[w]["sharded"]["step"] for w in (0, 1)] == [6, 6]
    assert results[0]["sharded"]["weights"] == results[1]["sharded"]["weights"]
    for where in ("one", "two"):
        assert sorted(results[where]["sharded"]["seen"]) == list(range(24))


def test_parts_that_overlap_are_refused_on_every_worker(results):
    for worker in (0, 1):
        case = results[worker]["overlapping"]
        assert case["step"] == 0
        assert "gives workers 0 and 1 the same examples" in case["error"]
        assert "num_input_pipelines" in case["error"]


def test_global_batches_from_train_data_fn_are_refused(results):
    for where, rows in (("one", 4), ("two", 2), (0, 2), (1, 2)):
        assert f"yields 64 rows at a time; expected {rows}" in results[where]["global batches"]["error"]


def test_fewer_files_than_workers_are_refused_on_every_worker_before_training(results):
    for worker in (0, 1):
        case = results[worker]["one file"]
        assert case["step"] == 0
        assert "by files over 2 workers" in case["error"]
        assert results[worker]["files"]["step"] > 0 and "error" not in results[worker]["files"]


def test_a_step_without_data_has_the_same_results_with_every_strategy(results):
    ids = [i / 100 for i in range(20)]
    for where in ("one", "two"):
        assert sorted(results[where]["no data"]["seen"]) == pytest.approx(ids)
    ids_of_workers = results[0]["no data"]["seen"] + results[1]["no data"]["seen"]
    assert sorted(ids_of_workers) == pytest.approx(ids)
    for where in ("two", 0, 1):
        expected = results["one"]["no data"]["weights"]
        assert results[where]["no data"]["weights"] == pytest.approx(expected, abs=1e-5)
