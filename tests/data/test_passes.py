"""Data of unknown length: whole epochs, the end of an epoch, and resumed runs."""

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.checkpoints import commit
from small_models import BATCH, EXAMPLES, Small, digest, every_step, examples

PER_EPOCH = EXAMPLES // BATCH  # 4 steps


class Filtered(Small):
    """Trainer with batches of unknown number. Records the calls of `after_epoch`."""

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


@pytest.mark.parametrize("strategy", some_of(["default", "two"], "default"))
def test_whole_epochs_need_no_length(strategy, two_replicas):
    options = {"strategy": two_replicas if strategy == "two" else "default"}
    filtered, counted = Filtered(**options), Counted(**options)
    assert filtered.train(epochs=3) == counted.train(epochs=3)
    assert filtered.step == counted.step == 3 * PER_EPOCH
    assert filtered._epochs == counted._epochs == [(1, 4), (2, 8), (3, 12)]
    assert digest(filtered) == digest(counted), "a shuffle has the same orders"


def test_intervals_in_epochs_match_those_of_data_of_known_length():
    rows_by_class = []
    intervals = ctl.Intervals(log=ctl.Every(epochs=1), evaluate=ctl.Every(epochs=2), save=ctl.Every())
    for trainer_class in (Filtered, Counted):
        callback = ctl.MemoryCallback()
        trainer_class(intervals=intervals, callbacks=[callback]).train(epochs=4)
        rows_by_class.append([(run, step, values["loss"]) for run, step, values in callback.seen])
    assert [s[:2] for s in rows_by_class[0]] == [
        ("train", 4), ("train", 8), ("eval", 8), ("train", 12), ("train", 16), ("eval", 16)
    ]  # fmt: skip
    assert rows_by_class[0] == rows_by_class[1]


@pytest.mark.parametrize(
    "stop", some_of([2, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH + 3], PER_EPOCH + 1)
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, stop):
    uninterrupted = Filtered()
    uninterrupted.train(epochs=3)
    options = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}

    class Stopping(Filtered):
        def after_loop(self, step, means):
            return step == stop

    first = Stopping(**options)
    first.train(epochs=3)
    assert first.step == stop
    manifest_by_step = {m.step: m for _, m in commit.list_checkpoints(tmp_path / "checkpoints")}
    assert manifest_by_step[stop].data.get("pass_batches") == (PER_EPOCH if stop > PER_EPOCH else None)
    resumed = Filtered(**options)
    resumed.train(epochs=3)
    assert resumed.step == 3 * PER_EPOCH and digest(resumed) == digest(uninterrupted)


def test_the_length_is_known_from_the_second_epoch_on(tmp_path):
    options = {"model_dir": str(tmp_path)}
    Filtered(**options).train(epochs=2)
    writer = ctl.MemoryWriter()
    resumed = Filtered(**options)
    resumed._writers = [writer]
    resumed.train(epochs=3)
    (started,) = [e for e in writer.events if type(e).__name__ == "Started"]
    assert (started.step, started.total_steps) == (8, 12)


def test_another_batch_size_has_another_length(tmp_path):
    options = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}

    class Stopping(Filtered):
        def after_loop(self, step, means):
            return step == PER_EPOCH + 1

    Stopping(**options).train(epochs=3)
    writer = ctl.MemoryWriter()
    resumed = Filtered(global_batch_size=BATCH * 2, allow_config_change=True, **options)
    resumed._writers = [writer]
    resumed.train(epochs=3)
    (started,) = [e for e in writer.events if type(e).__name__ == "Started"]
    assert resumed.step == started.total_steps == PER_EPOCH + 1 + 2 * (PER_EPOCH // 2)


def test_intervals_in_steps_occur_once_at_the_end_of_an_epoch():
    writer = ctl.MemoryWriter()
    trainer = Filtered(intervals=every_step(log=ctl.Every(steps=PER_EPOCH)))
    trainer._writers = [writer]
    trainer.train(epochs=2)
    assert [step for _, step, _ in writer.rows] == [PER_EPOCH, 2 * PER_EPOCH]


@pytest.mark.slow
def test_random_numbers_of_a_pass_are_those_of_a_resumed_run(tmp_path):
    class Noisy(Filtered):
        def source(self, batch_size):
            return super().source(batch_size).map(lambda x, y: (x + tf.random.uniform([8]), y))

    class Stopping(Noisy):
        def after_loop(self, step, means):
            return step == 6

    uninterrupted = Noisy()
    uninterrupted.train(epochs=3)
    options = {"model_dir": str(tmp_path), "intervals": every_step(save=ctl.Every(steps=1))}
    Stopping(**options).train(epochs=3)
    resumed = Noisy(**options)
    resumed.train(epochs=3)
    assert digest(resumed) == digest(uninterrupted)


def test_a_part_of_an_epoch_needs_a_length_and_an_endless_epoch_is_refused():
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
    results = trainer.train()
    assert trainer.step == PER_EPOCH and trainer._epochs == [(1, 4)] and np.isfinite(results["eval_loss"])


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
