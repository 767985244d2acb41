"""`save`, `restore`, `predict`, hooks and `ctl profile` on two workers."""

import pytest

pytestmark = pytest.mark.workers


@pytest.fixture(scope="module")
def results(run_program, tmp_path_factory):
    """Returns the results of tests/programs/verbs.py on the chief and on the other worker."""
    directory = tmp_path_factory.mktemp("verbs")
    return [r.json for r in run_program(2, ["tests/programs/verbs.py", str(directory)])]


@pytest.mark.smoke
def test_workers_save_restore_and_predict_by_hand(results):
    chief, other = results
    assert chief["path"].endswith("/ckpt-4") and other["path"] is None
    for worker in (chief, other):
        assert worker["step"] == 4 and worker["same"] and worker["names"] == ["ckpt-2", "ckpt-4"]
        assert worker["code"] == 2, worker["refused"]
    chief_hooks, other_hooks = chief["hooked"], other["hooked"]
    assert chief_hooks["told"] == other_hooks["told"] and [t[:3] for t in chief_hooks["told"]] == [
        ["before", 0], ["evaluation", 3, chief_hooks["told"][1][2]], ["epoch", 1, 4],
        ["evaluation", 6, chief_hooks["told"][3][2]], ["epoch", 2, 8],
    ]  # fmt: skip
    assert other_hooks["failure"] == "on the second worker"
    assert "after_epoch failed on another worker" in chief_hooks["failure"]
    for worker in (chief_hooks, other_hooks):
        assert worker["step"] == 8 and worker["rate"] == pytest.approx(0.1 / 4)
    assert chief_hooks["saved"][-1] == "ckpt-8"
    assert chief["digest"] == other["digest"] and (chief["rows"], other["rows"]) == (5, 6)


def test_the_chief_reports_the_times_of_both_workers_and_the_training_does_not_change(results):
    unprofiled_digest, *digests = [d for worker in results for d in worker["profiled"]["digests"]]
    assert digests == [unprofiled_digest] * 3 and all(worker["profiled"]["measured"] for worker in results)
    profile, profile_of_other = (worker["profiled"]["profile"] for worker in results)
    assert not profile_of_other and (profile["workers"], profile["replicas"]) == (2, 2)
    for times in profile["times"]:
        assert times["graph_call"] > times["communication"] > 0 < times["host"]
        assert times["input_wait"] > 0
    slowest = profile["times"][profile["slowest"]]
    assert slowest["communication"] == min(times["communication"] for times in profile["times"])
    assert profile["parts"]["communicating"] == slowest["communication"]
    assert sum(profile["parts"].values()) == pytest.approx(profile["step_secs"])
    assert profile["step"] == 4, "the first step compiles, the second one starts the measurement"
    assert [w["profiled"]["traced"] for w in results] == 2 * [[[5, 6, 7, 8]]]
