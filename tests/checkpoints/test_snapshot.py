"""A snapshot has the values of the call and the bytes of TensorFlow's own checkpoint."""

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
from test_checkpoints import Measured, assert_same, fill, manifest, prepared, state, values


class Counting(Small):
    """With a variable that is summed over replicas when it is read, and a half-precision one."""

    def build(self):
        super().build()
        self.seen = tf.Variable(
            0.0, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )  # fmt: skip
        self.half = tf.Variable([1.5, -2.0], dtype=tf.bfloat16, trainable=False)

    def train_step(self, batch):
        self.seen.assign_add(1.0)
        return super().train_step(batch)


def make(framework, strategy, kind=Counting):
    dropout = 0.0 if framework == "module" else 0.3
    return kind(
        framework=framework, optimizer="adam", dropout=dropout, strategy=strategy, writers=[],
        intervals=every_step(log=ctl.Every()),
    )  # fmt: skip


@pytest.mark.parametrize("framework", ["keras3", "tf_keras", "module"])
@pytest.mark.parametrize(
    "word", some_of(["default", "one_device", "mirrored", "central_storage"], "mirrored")
)
def test_a_snapshot_is_byte_for_byte_what_tensorflow_writes(tmp_path, word, framework):
    devices = ["cpu:0", "cpu:1"] if word == "mirrored" else ["cpu:0"]
    several = {"devices": devices} if word in ("mirrored", "one_device") else {}
    strategy = ctl.make_strategy(word, **several)
    trainer = make(framework, strategy, Small if word == "central_storage" else Counting)
    trainer.prepare()
    here = trainer._prepared_trainer.state
    (tmp_path / "ours").mkdir()
    reader = snapshot.SnapshotReader()
    for copy in (False, True):
        trainer.train(trainer.step + 2)
        taken = reader.take(here, keep=True, copy=copy)
        taken.write(f"{tmp_path}/ours/state")
        here.checkpoint.write(f"{tmp_path}/theirs/state")
        names = sorted(p.name for p in (tmp_path / "theirs").iterdir())
        assert names == sorted(p.name for p in (tmp_path / "ours").iterdir())
        same = filecmp.cmpfiles(tmp_path / "ours", tmp_path / "theirs", names, shallow=False)
        assert same == (names, [], [])
    size = sum(p.stat().st_size for p in (tmp_path / "ours").iterdir())
    assert size / 3 < taken.num_bytes < size
    reader = tf.train.load_checkpoint(f"{tmp_path}/ours/state")
    assert len(taken.keys) == len(here.variables)
    for name, key in taken.keys.items():
        np.testing.assert_array_equal(reader.get_tensor(key), here.variables[name].numpy())


def test_without_that_part_of_tensorflow_all_workers_write(tmp_path, monkeypatch):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    monkeypatch.setattr(snapshot, "_serialize", lambda checkpoint: None)
    fill(trainer, 3)
    assert manager.save(state(trainer), manifest(trainer, 3)) == str(tmp_path / "c" / "ckpt-3")
    expected = values(trainer)
    fill(trainer, 4)
    assert manager.restore(state(trainer)).step == 3
    assert_same(values(trainer), expected)
    here = state(trainer)
    other = SimpleNamespace(
        checkpoint=here.checkpoint, topology=SimpleNamespace(is_chief=False, worker_index=1)
    )
    written = []
    write = here.checkpoint.write
    monkeypatch.setattr(here.checkpoint, "write", lambda p: (written.append(p), write(p)))
    assert manager.save(other, manifest(trainer, 5)) is None
    assert written == [f"{tmp_path}/c/workertemp_1/state"]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["ckpt-3"]


def test_the_others_read_and_write_nothing(tmp_path):
    trainer = prepared()
    other = SimpleNamespace(
        checkpoint=state(trainer).checkpoint, variables={},
        topology=SimpleNamespace(is_chief=False, worker_index=1),
    )  # fmt: skip
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c")
    assert manager.save(other, manifest(trainer, 5)) is None
    manager.finish()
    assert not (tmp_path / "c").exists()


class Slow:
    """commit.write_checkpoint that waits to be let go, and counts how many are at work."""

    def __init__(self, monkeypatch):
        self.go, self.begun, self.at_work, self.most = threading.Event(), threading.Event(), 0, 0
        self._write = commit.write_checkpoint
        monkeypatch.setattr(commit, "write_checkpoint", self)

    def __call__(self, *arguments, **how):
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        self.begun.set()
        assert self.go.wait(TIMEOUT_SECS)
        path = self._write(*arguments, **how)
        self.at_work -= 1
        return path


@pytest.mark.parametrize("kind", [Measured, Counting])
def test_what_is_saved_in_the_background_is_the_state_of_the_call(tmp_path, monkeypatch, kind):
    slow = Slow(monkeypatch)
    trainer = prepared(kind=kind)
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    told = []
    manager.begin(state(trainer), lambda *what: told.append(what))
    for number in (3, 4):  # the second one uses the memory of the first
        fill(trainer, number)
        expected = values(trainer)
        slow.go.clear()
        assert manager.save(state(trainer), manifest(trainer, number)) is None
        assert slow.begun.wait(TIMEOUT_SECS) and manager.steps() == list(range(3, number))
        fill(trainer, 50)
        trainer.train(trainer.step + 1)  # in-place updates of Adam
        assert len(told) == number - 3
        slow.go.set()
        manager.finish()
        assert told[-1] == (number, str(tmp_path / "c" / f"ckpt-{number}"))
        manager.restore(state(trainer))
        assert_same(values(trainer), expected)


def test_a_variable_whose_rows_are_updated_is_saved_as_it_was(tmp_path):
    table = tf.Variable(tf.zeros([64, 8]))
    here = SimpleNamespace(checkpoint=tf.train.Checkpoint(table=table), variables={"table": table})
    table.scatter_update(tf.IndexedSlices(tf.ones([1, 8]), [0]))
    expected = table.numpy()
    taken = snapshot.SnapshotReader().take(here, keep=True, copy=True)
    table.scatter_update(tf.IndexedSlices(tf.fill([64, 8], 7.0), range(64)))
    taken.write(f"{tmp_path}/state")
    found = tf.train.load_checkpoint(f"{tmp_path}/state").get_tensor(taken.keys["table"])
    np.testing.assert_array_equal(found, expected)


def test_two_saves_never_overlap_and_restoring_waits_for_one(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    manager.save(state(trainer), manifest(trainer, 1))
    assert slow.begun.wait(TIMEOUT_SECS)
    other = threading.Thread(target=manager.save, args=(state(trainer), manifest(trainer, 2)))
    other.start()
    assert slow.at_work == 1 and manager.steps() == []
    slow.go.set()
    other.join(TIMEOUT_SECS)
    assert manager.restore(state(trainer)).step == 2
    assert slow.most == 1 and manager.steps() == [1, 2]


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
    [said] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for words in (f"{tmp_path}/c/ckpt-1", "No space left", " are free there",
                  "There is no checkpoint yet", "Training continues; the last save"):  # fmt: skip
        assert words in said
    assert re.search(r"It needs \d,\d{3} bytes, ", said)
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
    with pytest.raises(SaveError, match="newest checkpoint is of step 1") as caught, opened:
        manager.save(state(trainer), manifest(trainer, 2))
    assert caught.value.exit_code == 1 and isinstance(caught.value, ctl.CheckpointError)
    assert manager.steps() == [1]
    manager.finish()  # said once


@pytest.mark.parametrize("background", [False, True])
def test_by_choice_a_failed_save_ends_the_run(tmp_path, monkeypatch, background):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=background, on_error="raise")
    monkeypatch.setattr(snapshot.Snapshot, "write", failing(FULL))
    with pytest.raises(SaveError, match="ckpt-1"):  # in the background: at the next save
        for step in (1, 2):
            manager.save(state(trainer), manifest(trainer, step))
    with pytest.raises(ctl.UsageError, match="on_error is 'stop'; expected 'continue' or 'raise'"):
        ctl.ChiefOnlyCheckpoints(tmp_path, on_error="stop")


def test_what_is_no_fault_of_the_disk_is_raised_at_the_next_save(tmp_path, monkeypatch):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    with monkeypatch.context() as broken:
        broken.setattr(commit, "write_checkpoint_files", failing(ValueError("ours")))
        manager.save(state(trainer), manifest(trainer, 1))
        manager._saving.wait()
    with pytest.raises(ValueError, match="ours"):
        manager.save(state(trainer), manifest(trainer, 2))


def test_the_first_error_is_seen_and_a_failed_save_is_logged(tmp_path, monkeypatch, caplog):
    trainer = prepared()
    manager = ctl.ChiefOnlyCheckpoints(tmp_path / "c", background=True)
    monkeypatch.setattr(snapshot.Snapshot, "write", failing(FULL))
    with pytest.raises(KeyError, match="theirs"), saving.opened_manager(manager, state(trainer), print):
        manager.save(state(trainer), manifest(trainer, 1))
        raise KeyError("theirs")
    assert any(r.levelno == logging.ERROR and "ckpt-1" in r.getMessage() for r in caplog.records)


def test_a_run_that_saves_in_the_background_is_the_same_run(tmp_path):
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
