"""Snapshots: values at the time of the call, and files identical to a checkpoint of TensorFlow."""

import errno
import filecmp
import logging
import re
import threading
from types import SimpleNamespace

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import TIMEOUT_SECS, some_of
from ctl.checkpoints import commit, saving, snapshot
from ctl.errors import SaveError
from small_models import Small, every_step
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable
from test_checkpoints import Measured, assert_same, fill, manifest, prepared, state, values


class Counting(Small):
    """A trainer with a variable that is summed over replicas on read, and a bfloat16 variable."""

    def build(self):
        super().build()
        self.num_steps = tf.Variable(
            0.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )  # fmt: skip
        self.half = tf.Variable([1.5, -2.0], dtype=tf.bfloat16, trainable=False)

    def train_step(self, batch):
        self.num_steps.assign_add(1.0)
        return super().train_step(batch)


def make_trainer(framework, strategy, trainer_class=Counting):
    dropout = 0.0 if framework == "module" else 0.3
    return trainer_class(
        framework=framework, optimizer="adam", dropout=dropout, strategy=strategy, writers=[],
        intervals=every_step(log=ctl.Every()),
    )  # fmt: skip


@pytest.mark.parametrize("framework", some_of(["keras3", "tf_keras", "module"], "keras3"))
@pytest.mark.parametrize(
    "strategy_name", some_of(["default", "one_device", "mirrored", "central_storage"], "mirrored")
)
def test_the_files_of_a_snapshot_are_identical_to_those_of_tensorflow(tmp_path, strategy_name, framework):
    devices = ["cpu:0", "cpu:1"] if strategy_name == "mirrored" else ["cpu:0"]
    several = {"devices": devices} if strategy_name in ("mirrored", "one_device") else {}
    strategy = ctl.make_strategy(strategy_name, **several)
    trainer = make_trainer(framework, strategy, Small if strategy_name == "central_storage" else Counting)
    trainer.prepare()
    trainer_state = trainer._prepared_trainer.state
    (tmp_path / "ours").mkdir()
    reader = snapshot.SnapshotReader()
    for copy in (False, True):
        trainer.train(trainer.step + 2)
        captured = reader.take(trainer_state, keep=True, copy=copy)
        captured.write(f"{tmp_path}/ours/state")
        trainer_state.checkpoint.write(f"{tmp_path}/theirs/state")
        names = sorted(p.name for p in (tmp_path / "theirs").iterdir())
        assert names == sorted(p.name for p in (tmp_path / "ours").iterdir())
        same = filecmp.cmpfiles(tmp_path / "ours", tmp_path / "theirs", names, shallow=False)
        assert same == (names, [], [])
    size = sum(p.stat().st_size for p in (tmp_path / "ours").iterdir())
    assert size / 3 < captured.num_bytes < size
    reader = tf.train.load_checkpoint(f"{tmp_path}/ours/state")
    assert len(captured.keys) == len(trainer_state.variables)
    for name, key in captured.keys.items():
        np.testing.assert_array_equal(reader.get_tensor(key), trainer_state.variables[name].numpy())


def test_all_workers_write_if_tensorflow_cannot_serialize_a_snapshot(tmp_path, monkeypatch):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    monkeypatch.setattr(snapshot, "_serialize", lambda checkpoint: None)
    fill(trainer, 3)
    assert manager.save(state(trainer), manifest(trainer, 3)) == str(tmp_path / "c" / "ckpt-3")
    expected = values(trainer)
    fill(trainer, 4)
    assert manager.restore(state(trainer)).step == 3
    assert_same(values(trainer), expected)
    trainer_state = state(trainer)
    other = SimpleNamespace(
        checkpoint=trainer_state.checkpoint, topology=SimpleNamespace(is_chief=False, worker_index=1)
    )
    written = []
    write = trainer_state.checkpoint.write
    monkeypatch.setattr(trainer_state.checkpoint, "write", lambda p: (written.append(p), write(p)))
    assert manager.save(other, manifest(trainer, 5)) is None
    assert written == [f"{tmp_path}/c/workertemp_1/state"]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["ckpt-3"]


def test_workers_other_than_the_chief_write_no_files(tmp_path):
    trainer = prepared()
    other = SimpleNamespace(
        checkpoint=state(trainer).checkpoint, variables={},
        topology=SimpleNamespace(is_chief=False, worker_index=1),
    )  # fmt: skip
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c")
    assert manager.save(other, manifest(trainer, 5)) is None
    manager.finish()
    assert not (tmp_path / "c").exists()


class SlowWrites:
    """A commit.write_checkpoint that blocks until `may_write` is set and counts active calls."""

    def __init__(self, monkeypatch):
        self.may_write, self.started = threading.Event(), threading.Event()
        self.num_active, self.max_active = 0, 0
        self._write = commit.write_checkpoint
        monkeypatch.setattr(commit, "write_checkpoint", self)

    def __call__(self, *arguments, **options):
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        self.started.set()
        assert self.may_write.wait(TIMEOUT_SECS)
        path = self._write(*arguments, **options)
        self.num_active -= 1
        return path


@pytest.mark.parametrize("trainer_class", some_of([Measured, Counting], Measured))
def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path, monkeypatch, trainer_class):
    slow = SlowWrites(monkeypatch)
    trainer = prepared(trainer_class=trainer_class)
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    notifications = []
    manager.begin(state(trainer), lambda *args: notifications.append(args))
    for number in (3, 4):  # the second snapshot reuses the buffers of the first
        fill(trainer, number)
        expected = values(trainer)
        slow.may_write.clear()
        assert manager.save(state(trainer), manifest(trainer, number)) is None
        assert slow.started.wait(TIMEOUT_SECS) and manager.steps() == list(range(3, number))
        fill(trainer, 50)
        trainer.train(trainer.step + 1)  # in-place updates of Adam
        assert len(notifications) == number - 3
        slow.may_write.set()
        manager.finish()
        assert notifications[-1] == (number, str(tmp_path / "c" / f"ckpt-{number}"))
        manager.restore(state(trainer))
        assert_same(values(trainer), expected)


def test_a_snapshot_does_not_change_with_later_updates_of_rows(tmp_path):
    table = tf.Variable(tf.zeros([64, 8]))
    table_state = SimpleNamespace(checkpoint=tf.train.Checkpoint(table=table), variables={"table": table})
    table.scatter_update(tf.IndexedSlices(tf.ones([1, 8]), [0]))
    expected = table.numpy()
    captured = snapshot.SnapshotReader().take(table_state, keep=True, copy=True)
    table.scatter_update(tf.IndexedSlices(tf.fill([64, 8], 7.0), range(64)))
    captured.write(f"{tmp_path}/state")
    saved_table = tf.train.load_checkpoint(f"{tmp_path}/state").get_tensor(captured.keys["table"])
    np.testing.assert_array_equal(saved_table, expected)


def test_two_saves_never_overlap_and_restoring_waits_for_one(tmp_path, monkeypatch):
    slow = SlowWrites(monkeypatch)
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    manager.save(state(trainer), manifest(trainer, 1))
    assert slow.started.wait(TIMEOUT_SECS)
    other = threading.Thread(target=manager.save, args=(state(trainer), manifest(trainer, 2)))
    other.start()
    assert slow.num_active == 1 and manager.steps() == []
    slow.may_write.set()
    other.join(TIMEOUT_SECS)
    assert manager.restore(state(trainer)).step == 2
    assert slow.max_active == 1 and manager.steps() == [1, 2]


def failing(error):
    def write(*arguments):
        raise error

    return write


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_a_warning_and_the_next_one_works(tmp_path, monkeypatch, caplog, background):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=background)
    with monkeypatch.context() as broken:
        broken.setattr(snapshot.Snapshot, "write", failing(FULL))
        assert manager.save(state(trainer), manifest(trainer, 1)) is None
        manager._saving.wait()
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for text in (f"{tmp_path}/c/ckpt-1", "No space left", " are free there",
                 "There is no checkpoint yet", "Training continues; the last save"):  # fmt: skip
        assert text in warning
    assert re.search(r"It needs \d,\d{3} bytes, ", warning)
    manager.save(state(trainer), manifest(trainer, 2))
    manager.finish()
    assert manager.steps() == [2]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["ckpt-2"]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_of_a_run_must_succeed(tmp_path, monkeypatch, background):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=background)
    manager.save(state(trainer), manifest(trainer, 1))
    manager.finish()
    monkeypatch.setattr(commit, "write_manifest", failing(FULL))
    opened = saving.opened_manager(manager, state(trainer), print)
    with pytest.raises(SaveError, match="newest checkpoint is of step 1") as raised, opened:
        manager.save(state(trainer), manifest(trainer, 2))
    assert raised.value.exit_code == 1 and isinstance(raised.value, ctl.CheckpointError)
    assert manager.steps() == [1]
    manager.finish()  # the error is raised only once


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_ends_the_run_with_on_error_raise(tmp_path, monkeypatch, background):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=background, on_error="raise")
    monkeypatch.setattr(snapshot.Snapshot, "write", failing(FULL))
    with pytest.raises(SaveError, match="ckpt-1"):  # in the background: at the next save
        for step in (1, 2):
            manager.save(state(trainer), manifest(trainer, step))
    with pytest.raises(ctl.UsageError, match="on_error is 'stop'; expected 'continue' or 'raise'"):
        ctl.ChiefOnlyCheckpoints(tmp_path, on_error="stop")


def test_an_error_that_is_no_os_error_is_raised_at_the_next_save(tmp_path, monkeypatch):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    with monkeypatch.context() as broken:
        broken.setattr(commit, "write_checkpoint_files", failing(ValueError("ours")))
        manager.save(state(trainer), manifest(trainer, 1))
        manager._saving.wait()
    with pytest.raises(ValueError, match="ours"):
        manager.save(state(trainer), manifest(trainer, 2))


def test_the_first_error_is_raised_and_a_failed_save_is_logged(tmp_path, monkeypatch, caplog):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    monkeypatch.setattr(snapshot.Snapshot, "write", failing(FULL))
    with pytest.raises(KeyError, match="theirs"), saving.opened_manager(manager, state(trainer), print):
        manager.save(state(trainer), manifest(trainer, 1))
        raise KeyError("theirs")
    assert any(r.levelno == logging.ERROR and "ckpt-1" in r.getMessage() for r in caplog.records)


def test_saves_in_the_background_do_not_change_a_run(tmp_path):
    digests = []
    for background in (False, True):
        writer = ctl.MemoryWriter()
        manager = ctl.ChiefOnlyCheckpoints(tmp_path / str(background), background=background)
        intervals = every_step(save=ctl.Every(steps=2))
        trainer = Measured(strategy="default", writers=[writer], checkpoints=manager, intervals=intervals)
        trainer.train(7)
        assert manager.steps() == [2, 4, 6, 7]
        saved = [e.step for e in writer.events if type(e).__name__ == "Saved"]
        assert sorted(saved) == [2, 4, 6, 7]
        assert type(writer.events[-1]).__name__ == "Ended"
        manager.restore(trainer._prepared_trainer.state, step=4)
        digests.append(values(trainer))
    assert_same(*digests)


def test_a_variable_without_a_value_is_left_out_as_by_tensorflow(tmp_path):
    trainer = prepared()
    trainer_state = state(trainer)
    holder = tf.Module()
    holder.filled, holder.empty = tf.Variable(3.0), UninitializedVariable(shape=[], dtype=tf.float32)
    checkpoint = tf.train.Checkpoint(holder=holder)
    other = SimpleNamespace(checkpoint=checkpoint, variables={}, topology=trainer_state.topology)
    snapshot.SnapshotReader().take(other, keep=True, copy=True).write(f"{tmp_path}/ours/state")
    checkpoint.write(f"{tmp_path}/theirs/state")
    readers = [tf.train.load_checkpoint(f"{tmp_path}/{name}/state") for name in ("ours", "theirs")]
    ours, theirs = (reader.get_variable_to_shape_map() for reader in readers)
    assert ours == theirs and len(ours) == 2
