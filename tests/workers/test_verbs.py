"""`save`, `restore` and `predict` of two workers."""

import pytest

pytestmark = pytest.mark.workers


def test_workers_save_restore_and_predict_by_hand(run_program, tmp_path):
    chief, other = (r.json for r in run_program(2, ["tests/programs/verbs.py", str(tmp_path)]))
    assert chief["path"].endswith("/ckpt-4") and other["path"] is None
    for worker in (chief, other):
        assert worker["step"] == 4 and worker["same"] and worker["names"] == ["ckpt-2", "ckpt-4"]
        assert worker["code"] == 2, worker["refused"]
    assert chief["digest"] == other["digest"] and (chief["rows"], other["rows"]) == (5, 6)
