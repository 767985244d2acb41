"""Errors of the file system: while checkpoints are cleaned up, and while another process deletes them."""

import errno
import itertools
import threading

import ctl
import pytest
import tensorflow as tf
from ctl.checkpoints import commit, restoring, tensor_files, warm_start, watched
from ctl.checkpoints.snapshot import restore_state, write_with_tensorflow
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.errors import CheckpointError, ReadError, SaveError, UsageError
from ctl.io import paths
from small_models import Small


def fail(*arguments, **options):
    raise OSError(errno.EIO, "Input/output error")


@pytest.fixture(scope="module")
def trainer():
    trainer = Small(writers=[])
    trainer.prepare()
    return trainer


@pytest.fixture
def state(trainer):
    return trainer._prepared_trainer.state


@pytest.fixture
def save(trainer, state, tmp_path):
    """Returns a function (step, manager) that saves `state`."""

    def save(step, manager):
        trainer.step_variable.assign(step)
        manager.save(state, ctl.Manifest(step=step, created=1.0, variables=state.spec()))

    return save


def make_manager(tmp_path, newest=0, **options):
    return ctl.ChiefOnlyCheckpoints(tmp_path, keep=ctl.Keep(newest=newest), **options)


@pytest.mark.parametrize(
    ("function", "message"),
    [("list_checkpoints", "Cannot list the checkpoints"), ("remove_checkpoint", "Cannot delete the old")],
)
def test_old_checkpoints_that_cannot_be_deleted_are_logged(
    function, message, save, tmp_path, monkeypatch, caplog
):
    manager = make_manager(tmp_path, newest=1)
    save(1, manager)
    with monkeypatch.context() as patch:
        patch.setattr(commit, function, fail)
        save(2, manager)
    assert message in caplog.text and "Input/output error" in caplog.text
    assert manager.steps() == [1, 2]
    save(3, manager)
    assert manager.steps() == [3]


def test_a_failed_save_is_an_error_also_if_no_checkpoint_can_be_listed(save, tmp_path, monkeypatch):
    manager = make_manager(tmp_path, on_error="raise")
    monkeypatch.setattr(commit, "list_checkpoints", fail)
    monkeypatch.setattr(commit, "write_checkpoint", fail)
    with pytest.raises(SaveError, match="Input/output error"):
        save(1, manager)


def test_an_evaluation_of_a_deleted_checkpoint_is_not_added(save, tmp_path):
    manager = make_manager(tmp_path)
    save(1, manager)
    assert manager.amend(1, {"loss": 0.5}, {}) and not manager.amend(2, {"loss": 0.5}, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [("move_to_damaged", "Cannot move the damaged checkpoint"), ("delete_leftovers", "Cannot clean up")],
)
def test_a_directory_that_cannot_be_cleaned_up_is_logged(
    function, message, save, state, tmp_path, monkeypatch, caplog
):
    manager = make_manager(tmp_path)
    save(1, manager)
    save(2, manager)
    (tmp_path / "ckpt-2" / commit.MANIFEST).write_text("{")
    assert manager.choose() == 1
    monkeypatch.setattr(commit, function, fail)
    manager.begin(state, lambda step, path: None)
    assert message in caplog.text and "Input/output error" in caplog.text


@pytest.mark.parametrize("step", [0, 7])
def test_a_full_disk_ends_a_run_at_its_start_only(step, trainer, state, tmp_path, monkeypatch, caplog):
    """A disk may have space by the next save of a resumed run."""
    monkeypatch.setattr(paths, "free_bytes", lambda directory: 10)
    trainer.step_variable.assign(step)
    manager = make_manager(tmp_path)
    message = "cannot hold a checkpoint: No space left on device. It needs "
    if step:
        manager.begin(state, lambda step, path: None)
        assert message in caplog.text and "10 are free" in caplog.text
    else:
        with pytest.raises(ctl.errors.StorageError, match=message):
            manager.begin(state, lambda step, path: None)


def damaged(path):
    raise CheckpointError("a bad checksum")


def unreadable(path):
    raise ReadError("the server does not answer")


def deleted(path):
    commit.remove_checkpoint(path)
    raise ReadError("the server does not answer")


@pytest.mark.parametrize(
    ("fault", "error_class", "message"),
    [
        (damaged, UnusableCheckpoint, "a bad checksum"),
        (unreadable, ReadError, "does not answer"),
        (deleted, UnusableCheckpoint, "it has been deleted"),
    ],
)
@pytest.mark.parametrize("function", ["read_manifest", "find_damage", "restore_state"])
def test_a_watched_checkpoint_that_changes_while_it_is_read_is_unusable(
    function, fault, error_class, message, save, state, tmp_path, monkeypatch
):
    save(1, make_manager(tmp_path))
    path = tmp_path / "ckpt-1"
    monkeypatch.setattr(paths.time, "sleep", lambda secs: None)
    module = watched if function == "restore_state" else commit
    monkeypatch.setattr(module, function, lambda *arguments: fault(path))
    with pytest.raises(error_class, match=message) as raised:
        WatchedCheckpoints(tmp_path).restore(state, 1)
    assert isinstance(raised.value, UnusableCheckpoint) == (error_class is UnusableCheckpoint)


def test_a_directory_that_does_not_exist_yet_has_no_checkpoints(tmp_path):
    assert WatchedCheckpoints(tmp_path / "later").committed() == []


def test_an_error_of_tensorflow_s_writer_is_an_error_of_the_file_system(state, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_with_tensorflow(state, str(tmp_path / "file" / "state"))


def test_training_continues_without_its_configuration_file(tmp_path, caplog):
    (tmp_path / "config.json").mkdir()
    trainer = Small(writers=[], model_dir=str(tmp_path))
    trainer.train(1)
    assert trainer.step == 1 and "config.json cannot be written" in caplog.text


def test_a_background_save_without_a_thread_is_written_at_once(save, tmp_path, monkeypatch):
    """Python 3.12 starts no thread after the end of the main thread."""
    manager = make_manager(tmp_path, background=True)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    save(1, manager)
    assert (tmp_path / "ckpt-1").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tf.errors.NotFoundError(None, None, "no such file"), FileNotFoundError),
        (tf.errors.UnavailableError(None, None, "Failed to get matching files"), OSError),
        (tf.errors.InvalidArgumentError(None, None, "another shape"), None),
    ],
)
def test_errors_of_tensorflow_that_come_from_files_are_errors_of_files(error, expected):
    result = tensor_files.file_error(error)
    assert result is None if expected is None else type(result) is expected


def test_a_checkpoint_of_another_model_cannot_be_restored(tmp_path, state, save):
    save(1, make_manager(tmp_path))
    other = Small(framework="module", writers=[])
    other.prepare()
    with pytest.raises(CheckpointError, match="The checkpoint .*ckpt-1 cannot be restored") as raised:
        restore_state(other._prepared_trainer.state, tmp_path / "ckpt-1", {})
    assert not isinstance(raised.value, ReadError)


def test_a_missing_directory_is_a_read_error_and_has_no_newest_step(tmp_path, state, monkeypatch):
    with pytest.raises(ReadError, match="none/ckpt-1 cannot be read"):
        restore_state(state, tmp_path / "none" / "ckpt-1", {})
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        restore_state(state, tmp_path / "lr[1]" / "ckpt-1", {})
    restoring.check_newest_is_visible(tmp_path / "none", [-1])
    with monkeypatch.context() as patch:
        patch.setattr(commit, "survey_checkpoints", fail)
        restoring.check_newest_is_visible(tmp_path, [-1])
    with pytest.raises(UsageError, match="The chief finds no checkpoint in .*: worker 1 at step 4"):
        restoring.check_newest_is_visible(
            tmp_path / "none", [-1, 4], clock=itertools.count(0, 1000).__next__, sleep=lambda secs: None
        )


def test_tensors_that_tensorflow_refuses_to_read_are_damage(tmp_path, state, save, monkeypatch):
    save(1, make_manager(tmp_path))

    def fail(prefix):
        raise tf.errors.InvalidArgumentError(None, None, "another format")

    monkeypatch.setattr(tf.train, "load_checkpoint", fail)
    with pytest.raises(CheckpointError, match="--init_from .*ckpt-1 cannot be read: another format"):
        warm_start.load_initial_values(str(tmp_path / "ckpt-1"), state, ["model"])
