"""Errors for an unusable model_dir and for invalid files in it."""

import errno
import os

import ctl
import pytest
from ctl.checkpoints import commit, saving
from ctl.errors import StorageError
from ctl.io import paths
from ctl.metrics.console_text import run_footer, run_header
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.protocol import Ended, RunEnd, Started
from ctl.training.ends import precise_end
from ctl.training.model_directory import check_model_directory
from small_models import Small
from test_console_live import INFO


def test_a_dangling_link_is_named_with_its_target(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        ctl.UsageError, match="link' is a symbolic link to '.*nowhere', which does not exist"
    ):
        check_model_directory(str(link))
    with pytest.raises(ctl.UsageError, match="lies in '.*link', which is a symbolic link to"):
        check_model_directory(str(link / "run"))


def test_a_name_that_is_not_utf_8_is_refused_with_a_hint():
    with pytest.raises(
        ctl.UsageError, match=r"b'/tmp/gr\\xff', which Python could not decode.*PYTHONUTF8=1"
    ):
        check_model_directory(os.fsdecode(b"/tmp/gr\xff"))


def test_a_lock_that_is_a_directory_is_refused_before_training(tmp_path):
    (tmp_path / "LOCK").mkdir()
    with pytest.raises(ctl.UsageError, match="LOCK is not a file; expected the lock file"):
        Small(model_dir=str(tmp_path), strategy="default", writers=[]).train(1)
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]


@pytest.mark.slow
def test_metrics_in_a_pipe_do_not_hang_the_training(tmp_path, caplog):
    os.mkfifo(tmp_path / "metrics.jsonl")
    trainer = Small(model_dir=str(tmp_path), strategy="default")
    trainer.train(1)
    assert trainer.step == 1 and "is not a regular file; remove it" in caplog.text


def test_deeply_nested_metrics_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 100_000 + "\n" + '{"step": 1, "run": "train", "loss": 1.0}\n')
    writer = JsonlWriter(path)
    writer.note(Started(1, 2, INFO))
    writer.write(2, {"loss": 0.5})
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ['{"step": 1', '{"step": 2']


def test_the_error_of_a_full_disk_mentions_missing_inodes(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "free_inodes", lambda where: 8)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    error_message = str(saving.save_error(5, tmp_path / "ckpt-5", full, 1000, None))
    assert "and 8 more files (inodes) fit there: delete files" in error_message
    monkeypatch.setattr(paths, "free_inodes", lambda where: 10**6)
    assert "inodes" not in str(saving.save_error(5, tmp_path / "ckpt-5", full, 1000, None))


def test_a_retry_names_the_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    errors = [OSError(errno.ENOSPC, "No space left on device")]

    def fail_once():
        if errors:
            raise errors.pop()
        return 1

    assert paths.call_with_retries(fail_once, where=tmp_path / "metrics.jsonl") == 1
    assert f"{tmp_path}/metrics.jsonl: [Errno 28] No space left on device. Trying again" in caplog.text


def test_fewer_requested_steps_than_completed_are_shown_as_none():
    started = Started(40, 20, INFO)
    (block,) = [block for block in run_header(started).renderables if hasattr(block, "columns")][:1]
    assert "none: 40 are complete, 20 were requested" in [str(cell) for cell in block.columns[1].cells]


@pytest.mark.parametrize(
    ("end", "start", "requested", "phrase"),
    [
        (RunEnd.DONE, 0, None, "done"), (RunEnd.DONE, 0, 40, "done"),
        (RunEnd.DONE, 0, 50, "the data ended, 50 steps were requested,"),
        (RunEnd.DONE, 40, 50, "the data ended, 50 steps were requested,"),
        (RunEnd.DONE, 40, 40, "no steps left: complete"),
        (RunEnd.DONE, 40, None, "no steps left: complete"),
        (RunEnd.DONE, 40, 20, "no steps left, 20 steps were requested: complete"),
        (RunEnd.DATA_ENDED, 0, 50, "data ended"), (RunEnd.STOPPED, 40, 50, "stopped"),
        (RunEnd.SIGNAL, 40, 50, "stopped by a signal"), (RunEnd.FAILED, 0, 50, "failed"),
    ],
)  # fmt: skip
def test_the_phrase_for_the_end_of_a_run(end, start, requested, phrase):
    ended = Ended(40, precise_end(end, start, 40, requested), requested_steps=requested)
    assert ended.reason == phrase
    assert str(run_footer(ended).renderables[0]) == f"{phrase} at step 40"


def test_the_phrase_for_the_end_of_a_run_has_its_detail():
    assert Ended(1, RunEnd.FAILED, detail="ValueError").reason == "failed: ValueError"
    assert Ended(1, RunEnd.TRAINING_ENDED, detail="done").reason == "the training has ended (done)"


@pytest.mark.parametrize(
    ("name", "error_pattern"),
    [("monitor", r"got EarlyStopping\(monitor=.loss.\); expected only the arguments.*Write metric="),
     ("restore_best_weights", "Write restore_best="), ("patiense", "Write patience=")],
)  # fmt: skip
def test_a_name_of_keras_is_refused_with_that_of_ctl(name, error_pattern):
    with pytest.raises(ctl.UsageError, match=error_pattern):
        ctl.EarlyStopping(**{"metric": "loss", name: "loss"} if name != "monitor" else {name: "loss"})
    with pytest.raises(ctl.UsageError, match="Write min_learning_rate="):
        ctl.ReduceOnPlateau("loss", min_lr=0.1)


def test_dir_lists_public_names_only():
    import ctl.hvd

    assert {*dir(ctl)} == {*ctl.__all__, "hvd", "testing"} and {*dir(ctl.hvd)} == {*ctl.hvd.__all__}


def test_a_full_disk_whose_checkpoints_cannot_be_listed_is_to_be_retried(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(paths, "probe", fail)
    monkeypatch.setattr(commit, "list_checkpoints", fail)
    with pytest.raises(StorageError, match="cannot be written: No space left on device. Free some"):
        Small(strategy="default", writers=[], model_dir=str(tmp_path)).train(1)
