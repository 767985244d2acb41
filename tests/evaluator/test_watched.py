"""Checkpoints that another process deletes while an evaluator reads them."""

import shutil

import ctl
import pytest
from ctl.checkpoints import commit, watched
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.errors import CheckpointError, ReadError
from small_models import Small

FAILING = {"comparison": (commit, "find_damage"), "restoring": (watched, "restore_state")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    trainer = Small(strategy="default", writers=[], model_dir=str(tmp_path_factory.mktemp("run")))
    trainer.train(1)
    return trainer


@pytest.mark.parametrize("is_deleted", [True, False])
@pytest.mark.parametrize("error_class", [ReadError, CheckpointError])
@pytest.mark.parametrize("stage", FAILING)
def test_a_deleted_checkpoint_is_unusable_and_an_unreadable_one_is_not(
    saved, tmp_path, monkeypatch, stage, error_class, is_deleted
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(f"{saved.model_dir}/checkpoints", directory)

    def fail(*arguments):
        if is_deleted:
            shutil.rmtree(directory / "ckpt-1", ignore_errors=True)
        raise error_class("the disk fails")

    monkeypatch.setattr(*FAILING[stage], fail)
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    is_unusable = is_deleted or error_class is CheckpointError
    expected = UnusableCheckpoint if is_unusable else ReadError
    with pytest.raises(expected, match="it has been deleted" if is_deleted else "the disk fails"):
        WatchedCheckpoints(directory).restore(saved._prepared_trainer.state, 1)


def test_a_directory_that_does_not_exist_yet_has_no_checkpoints(tmp_path):
    assert WatchedCheckpoints(tmp_path / "checkpoints").committed() == []


def test_the_evaluator_s_manager_saves_and_chooses_nothing(saved, tmp_path):
    manager = WatchedCheckpoints(tmp_path)
    manifest = ctl.Manifest(step=1, created=0.0)
    assert manager.save(saved._prepared_trainer.state, manifest) is None
    assert manager.restore(saved._prepared_trainer.state) is None and manager.choose() is None
    assert not list(tmp_path.iterdir())
