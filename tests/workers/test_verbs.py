"""`save`, `restore`, `predict`, hooks and `ctl profile` of two workers."""

import pytest

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def seen(run_program, tmp_path_factory):
    """What tests/programs/verbs.py found, on the chief and on the other worker."""
    where = tmp_path_factory.mktemp("verbs")
    return [r.json for r in run_program(2, ["tests/programs/verbs.py", str(where)])]


@pytest.mark.smoke
def test_workers_save_restore_and_predict_by_hand(seen):
    chief, other = seen
    assert chief["path"].endswith("/ckpt-4") and other["path"] is None
    for worker in (chief, other):
        assert worker["step"] == 4 and worker["same"] and worker["names"] == ["ckpt-2", "ckpt-4"]
        assert worker["code"] == 2, worker["refused"]
    mine, others = chief["hooked"], other["hooked"]
    assert mine["told"] == others["told"] and [t[:3] for t in mine["told"]] == [
        ["before", 0], ["evaluation", 3, mine["told"][1][2]], ["epoch", 1, 4],
        ["evaluation", 6, mine["told"][3][2]], ["epoch", 2, 8],
    ]  # fmt: skip
    assert others["failure"] == "on the second worker"
    assert "after_epoch failed on another worker" in mine["failure"]
    for worker in (mine, others):
        assert worker["step"] == 8 and worker["rate"] == pytest.approx(0.1 / 4)
    assert mine["saved"][-1] == "ckpt-8"
    assert chief["digest"] == other["digest"] and (chief["rows"], other["rows"]) == (5, 6)


def test_the_chief_reports_the_times_of_both_workers_and_the_training_does_not_change(seen):
    plain, *others = [d for worker in seen for d in worker["profiled"]["digests"]]
    assert others == [plain] * 3 and all(worker["profiled"]["measured"] for worker in seen)
    found, nothing = (worker["profiled"]["profile"] for worker in seen)
    assert not nothing and (found["workers"], found["replicas"]) == (2, 2)
    for times in found["times"]:
        assert times["graph_call"] > times["communication"] > 0 < times["host"]
        assert times["input_wait"] > 0
    slowest = found["times"][found["slowest"]]
    assert slowest["communication"] == min(times["communication"] for times in found["times"])
    assert found["parts"]["communicating"] == slowest["communication"]
    assert sum(found["parts"].values()) == pytest.approx(found["step_secs"])
    assert found["step"] == 4, "the first step compiles, the second one starts the measurement"
    assert [w["profiled"]["traced"] for w in seen] == 2 * [[[5, 6, 7, 8]]]
