"""Data of unknown length: whole epochs, their ends, and what a resumed run knows of them."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints import commit
from small_models import BATCH, EXAMPLES, Small, digest, every_step, examples

PER_EPOCH = EXAMPLES // BATCH  # 4 steps


class Filtered(Small):
    """Batches that nobody has counted; notes what it trains on, and its hooks."""

    def __init__(self, **options):
        options.setdefault("strategy", "default")
        options.setdefault("intervals", every_step())
        super().__init__(writers=[], **options)
        self._epochs = []

    def source(self, batch_size):
        data = tf.data.Dataset.from_tensor_slices(examples()).shuffle(EXAMPLES)
        return data.filter(lambda x, y: y >= 0).batch(batch_size)

    def train_data(self, batch_size):
        return self.source(batch_size)

    def after_epoch(self, epoch, step, means):
        self._epochs.append((epoch, step))


class Counted(Filtered):
    def source(self, batch_size):
        return super().source(batch_size).apply(tf.data.experimental.assert_cardinality(PER_EPOCH))


@pytest.mark.parametrize("strategy", ["default", "two"])
def test_whole_epochs_need_no_length(strategy, two_replicas):
    where = {"strategy": two_replicas if strategy == "two" else "default"}
    unknown, known = Filtered(**where), Counted(**where)
    assert unknown.train(epochs=3) == known.train(epochs=3)
    assert unknown.step == known.step == 3 * PER_EPOCH
    assert unknown._epochs == known._epochs == [(1, 4), (2, 8), (3, 12)]
    assert digest(unknown) == digest(known), "a shuffle has the same orders"


def test_marks_by_epochs_are_those_of_data_of_known_length():
    seen = []
    intervals = ctl.Intervals(log=ctl.Every(epochs=1), evaluate=ctl.Every(epochs=2), save=ctl.Every())
    for kind in (Filtered, Counted):
        callback = ctl.MemoryCallback()
        kind(intervals=intervals, callbacks=[callback]).train(epochs=4)
        seen.append([(run, step, values["loss"]) for run, step, values in callback.seen])
    assert [s[:2] for s in seen[0]] == [
        ("train", 4), ("train", 8), ("eval", 8), ("train", 12), ("train", 16), ("eval", 16)
    ]  # fmt: skip
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "stop", some_of([2, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH + 3], PER_EPOCH, PER_EPOCH + 1)
)
def test_a_resumed_run_is_the_unbroken_one(tmp_path, stop):
    unbroken = Filtered()
    unbroken.train(epochs=3)
    where = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}

    class Stopping(Filtered):
        def after_loop(self, step, means):
            return step == stop

    first = Stopping(**where)
    first.train(epochs=3)
    assert first.step == stop
    found = {m.step: m for _, m in commit.list_checkpoints(tmp_path / "checkpoints")}
    assert found[stop].data.get("pass_batches") == (PER_EPOCH if stop > PER_EPOCH else None)
    again = Filtered(**where)
    again.train(epochs=3)
    assert again.step == 3 * PER_EPOCH and digest(again) == digest(unbroken)


def test_the_length_is_known_from_the_second_epoch_on(tmp_path):
    where = {"model_dir": str(tmp_path)}
    Filtered(**where).train(epochs=2)
    writer = ctl.MemoryWriter()
    again = Filtered(**where)
    again._writers = [writer]
    again.train(epochs=3)
    (started,) = [e for e in writer.events if type(e).__name__ == "Started"]
    assert (started.step, started.total_steps) == (8, 12)


def test_another_batch_size_has_another_length(tmp_path):
    where = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}

    class Stopping(Filtered):
        def after_loop(self, step, means):
            return step == PER_EPOCH + 1

    Stopping(**where).train(epochs=3)
    writer = ctl.MemoryWriter()
    again = Filtered(global_batch_size=BATCH * 2, allow_config_change=True, **where)
    again._writers = [writer]
    again.train(epochs=3)
    (started,) = [e for e in writer.events if type(e).__name__ == "Started"]
    assert again.step == started.total_steps == PER_EPOCH + 1 + 2 * (PER_EPOCH // 2)


def test_marks_by_steps_come_once_where_an_epoch_ends():
    writer = ctl.MemoryWriter()
    trainer = Filtered(intervals=every_step(log=ctl.Every(steps=PER_EPOCH)))
    trainer._writers = [writer]
    trainer.train(epochs=2)
    assert [step for _, step, _ in writer.rows] == [PER_EPOCH, 2 * PER_EPOCH]


def test_random_numbers_of_a_pass_are_those_of_a_resumed_run(tmp_path):
    class Noisy(Filtered):
        def source(self, batch_size):
            return super().source(batch_size).map(lambda x, y: (x + tf.random.uniform([8]), y))

    class Stopping(Noisy):
        def after_loop(self, step, means):
            return step == 6

    unbroken = Noisy()
    unbroken.train(epochs=3)
    where = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}
    Stopping(**where).train(epochs=3)
    again = Noisy(**where)
    again.train(epochs=3)
    assert digest(again) == digest(unbroken)


def test_a_part_of_an_epoch_needs_a_length_and_an_endless_epoch_cannot_be():
    with pytest.raises(ctl.UsageError, match=r"epochs is 1.5.*whole epochs.*assert_cardinality\(n\)"):
        Filtered().train(epochs=1.5)
    assert Counted().train(epochs=0.5)
    halves = ctl.Intervals(log=ctl.Every(epochs=0.5))
    with pytest.raises(ctl.UsageError, match=r"Every\(epochs=0.5\).*assert_cardinality"):
        Filtered(intervals=halves).train(epochs=1)

    class Endless(Small):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensors(examples()).unbatch().batch(batch_size).repeat()

    with pytest.raises(ctl.UsageError, match="train_data is endless.*train_steps"):
        Endless(strategy="default", writers=[]).train(epochs=2)


def test_one_pass_and_its_end(caplog):
    trainer = Filtered(intervals=ctl.Intervals(log=ctl.Every(epochs=1), evaluate=ctl.Every(epochs=1)))
    found = trainer.train()
    assert trainer.step == PER_EPOCH and trainer._epochs == [(1, 4)] and np.isfinite(found["eval_loss"])


def test_steps_end_within_an_epoch():
    trainer = Filtered()
    trainer.train(2)
    assert trainer.step == 2 and trainer._epochs == []


def test_epochs_of_each_worker_s_own_data():
    class Parts(Small):
        train_data = ctl.Trainer.train_data

        def train_data_fn(self, input_context):
            return tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH)

    trainer = Parts(strategy="default", writers=[])
    trainer.train(epochs=3)
    assert trainer.step == 3 * PER_EPOCH
    with pytest.raises(ctl.UsageError, match="whole epochs"):
        Parts(strategy="default", writers=[]).train(epochs=0.5)
