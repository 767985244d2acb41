"""Deletion of a model directory or its checkpoints: a warning during training, an error at a restart."""

import logging
import shutil

import ctl
import pytest
from ctl.errors import SaveError
from small_models import Small, every_step


def make_trainer(model_dir, **options):
    return Small(model_dir=str(model_dir), writers=[], intervals=every_step(save=ctl.Every(steps=2)),
                 **options)  # fmt: skip


def test_deleted_checkpoints_do_not_restart_the_run_at_0(tmp_path):
    make_trainer(tmp_path / "run").train(4)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for _ in range(2):  # the refusal does not change the LOCK
        with pytest.raises(ctl.UsageError, match=r"LOCK records that a training saved step 4 here.*delete"):
            make_trainer(tmp_path / "run").train(4)
    (tmp_path / "run" / "LOCK").unlink()
    restarted = make_trainer(tmp_path / "run")
    restarted.train(2)
    assert restarted.step == 2


def test_a_run_without_any_saved_checkpoint_restarts_at_0(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ctl.checkpoints.commit.write_checkpoint", _raise_disk_full)
        with pytest.raises(SaveError):
            make_trainer(tmp_path / "run").train(4)
    restarted = make_trainer(tmp_path / "run")
    restarted.train(2)
    assert restarted.step == 2


def _raise_disk_full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_backup_that_a_complete_run_deleted_is_no_error(tmp_path):
    for _ in range(2):
        backup = ctl.BackupCheckpoints(tmp_path / "run" / "checkpoints")
        make_trainer(tmp_path / "run", checkpoints=backup).train(2)


def test_a_model_dir_that_is_deleted_while_training_is_a_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ctl")

    class Deleting(Small):
        def after_loop(self, step, means):
            if step == 3:
                shutil.rmtree(self.model_dir)

    trainer = Deleting(model_dir=str(tmp_path / "run"), writers=[],
                       intervals=every_step(save=ctl.Every(steps=2)))  # fmt: skip
    trainer.train(6)
    warnings = [m for m in caplog.messages if "was deleted during training" in m]
    assert len(warnings) == 1 and "The checkpoint of step 4 is the first" in warnings[0]
