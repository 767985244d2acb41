"""Promises 21 and 22: checkpoints do not depend on the number of workers; only one directory remains."""

import filecmp
import json

import numpy as np
import pytest
import tensorflow as tf
from saving_jobs import PROGRAM, checkpoints, names, truncate_data

pytestmark = pytest.mark.workers
TWO_WORKERS_OPTIONS = ["--strategy=multi_worker", "--dropout=0"]


def final_variables(results):
    assert [r.code for r in results] == [0] * len(results), [r.output[-2000:] for r in results]
    return [r.json["final"] for r in results]


def test_n_workers_restore_a_checkpoint_of_k_workers(run_program, tmp_path):
    """Two workers, then two replicas, then two workers that may not use the newest checkpoint."""
    arguments = [PROGRAM, str(tmp_path), "--twice"]
    first, second = run_program(2, [*arguments, *TWO_WORKERS_OPTIONS, "--steps=4"])
    saved = first.json["final"]
    assert final_variables([first, second]) == [saved, saved] and checkpoints(tmp_path) == [2, 4]
    assert any(n.startswith("optimizer/") for n in saved) and "seen/Variable" in saved
    [mirrored] = run_program(1, [*arguments, "--strategy=mirrored", "--dropout=0", "--steps=6"])
    assert mirrored.json["began"] == 4 and mirrored.json["restored"] == saved
    [single_device] = run_program(1, [*arguments, "--strategy=one_device", "--dropout=0", "--steps=8"])
    assert single_device.json["restored"] == mirrored.json["final"]
    truncate_data(tmp_path / "checkpoints" / "ckpt-8")
    results = run_program(2, [*arguments, *TWO_WORKERS_OPTIONS, "--steps=8"])
    for result in results:
        assert result.json["began"] == 6
        assert result.json["restored"] == mirrored.json["final"]
    assert checkpoints(tmp_path) == [2, 4, 6, 8]
    assert names(tmp_path / "checkpoints" / "damaged") == ["ckpt-8"]
    assert "Moved the damaged" in results[0].output and "Moved the damaged" not in results[1].output


def test_after_a_kill_an_error_and_a_signal_only_the_chief_s_directory_remains(run_program, tmp_path):
    model_dir = tmp_path / "run"
    arguments = [PROGRAM, str(model_dir), *TWO_WORKERS_OPTIONS]
    users_file = tmp_path / "workertemp_1"  # a file of the user's
    users_file.write_text("mine")
    codes = [r.code for r in run_program(2, arguments, FAULTS="kill:mid_data@4")]
    assert codes[0] == -9 and codes[1] != 0
    assert not list(model_dir.rglob("workertemp_*"))
    for name in ("workertemp_0", "workertemp_1"):  # as an earlier version left them
        (model_dir / "checkpoints" / name).mkdir()
    results = run_program(2, [*arguments, "--raise_at=5"])
    assert all(r.code != 0 for r in results) and "raised at step 5" in results[0].output
    assert names(model_dir / "checkpoints") == ["ckpt-2", "ckpt-4", "ckpt-5"]
    results = run_program(2, [*arguments, "--signal_at=7", "--background"])
    assert [r.code for r in results] == [143, 143], [r.output[-2000:] for r in results]
    assert names(model_dir / "checkpoints") == [f"ckpt-{n}" for n in (2, 4, 5, 6, 7)]
    assert checkpoints(model_dir) == [2, 4, 5, 6, 7]
    assert users_file.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_processes_write_the_tensors_that_tensorflow_writes(strategy, run_program, tmp_path):
    """`--compare` writes once more with `tf.train.Checkpoint.write`."""
    arguments = ["--steps=4", "--dropout=0", f"--strategy={strategy}", f"--compare={tmp_path}/theirs"]
    if strategy == "multi_worker":
        results = run_program(2, [PROGRAM, str(tmp_path / "run"), *arguments])
        assert [r.code for r in results] == [0, 0], [r.output[-2000:] for r in results]
    else:
        from serving import ServedJob

        served = ServedJob(tmp_path, [PROGRAM, str(tmp_path / "run"), *arguments])
        try:
            served.start()
            result = served.result("chief0")
            assert result.code == 0, result.output[-3000:]
        finally:
            served.stop_all()
    ctl_directory, tensorflow_directory = (
        tmp_path / "run" / "checkpoints" / "ckpt-4",
        tmp_path / "theirs" / "0",
    )
    readers = [
        tf.train.load_checkpoint(str(path / "state")) for path in (ctl_directory, tensorflow_directory)
    ]
    tensors = [r.get_variable_to_shape_map() for r in readers]
    assert tensors[0] == tensors[1] and len(tensors[0]) > 10
    for name in tensors[0]:
        np.testing.assert_array_equal(*(r.get_tensor(name) for r in readers), err_msg=name)
    assert json.loads((ctl_directory / "manifest.json").read_text())["keys"]
    if strategy == "multi_worker":
        for path in tensorflow_directory.iterdir():
            assert filecmp.cmp(path, ctl_directory / path.name, shallow=False), path.name
