"""`save`, `restore`, `predict` and hooks of two workers."""

import pytest

pytestmark = pytest.mark.workers


def test_workers_save_restore_and_predict_by_hand(run_program, tmp_path):
    chief, other = (r.json for r in run_program(2, ["tests/programs/verbs.py", str(tmp_path)]))
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
