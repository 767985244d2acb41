"""What is deleted under a run: said while it trains, and never a silent start at step 0."""

import logging
import shutil

import ctl
import pytest
from ctl.errors import SaveError
from small_models import Small, every_step


def make(model_dir, **options):
    return Small(model_dir=str(model_dir), writers=[], intervals=every_step(save=ctl.Every(steps=2)),
                 **options)  # fmt: skip


def test_checkpoints_that_are_gone_are_no_start_at_0(tmp_path):
    make(tmp_path / "run").train(4)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(ctl.UsageError, match=r"LOCK records that a training saved step 4 here.*delete"):
            make(tmp_path / "run").train(4)
    (tmp_path / "run" / "LOCK").unlink()
    again = make(tmp_path / "run")
    again.train(2)
    assert again.step == 2


def test_a_run_that_could_save_nothing_begins_at_0_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ctl.checkpoints.commit.write_checkpoint", _full)
        with pytest.raises(SaveError):
            make(tmp_path / "run").train(4)
    again = make(tmp_path / "run")
    again.train(2)
    assert again.step == 2


def _full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_backup_that_a_complete_run_deleted_is_not_missed(tmp_path):
    for _ in range(2):
        backup = ctl.BackupCheckpoints(tmp_path / "run" / "checkpoints")
        make(tmp_path / "run", checkpoints=backup).train(2)


def test_a_model_dir_that_is_deleted_while_training_is_a_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "ctl")

    class Deleting(Small):
        def after_loop(self, step, means):
            if step == 3:
                shutil.rmtree(self.model_dir)

    trainer = Deleting(model_dir=str(tmp_path / "run"), writers=[],
                       intervals=every_step(save=ctl.Every(steps=2)))  # fmt: skip
    trainer.train(6)
    said = [m for m in caplog.messages if "was deleted during training" in m]
    assert len(said) == 1 and "The checkpoint of step 4 is the first" in said[0]
