"""Mistakes in a trainer: early errors, and saved steps where an error comes late."""

import ctl
import pytest
import tensorflow as tf
from ctl.callbacks.schedule import AT_THE_END
from small_models import BATCH, Small, every_step, examples


@pytest.fixture(scope="module")
def two_replicas():
    return ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("missing", ["eval_data and eval_step", "eval_step", "eval_data"])
@pytest.mark.parametrize("options", [
    {"eval_every_steps": 5}, {"intervals": ctl.Intervals(evaluate=ctl.Every(secs=9))},
], ids=["a setting", "intervals"])  # fmt: skip
def test_intervals_of_an_evaluation_without_data_or_step_are_refused(options, missing):
    class Half(ctl.Trainer):
        build, train_data, train_step = Small.build, Small.train_data, Small.train_step

    for name in {"eval_data", "eval_step"} - set(missing.split(" and ")):
        setattr(Half, name, getattr(Small, name))
    Half.framework, Half.word, Half.dropout, Half.tf_data = "keras3", "sgd", 0.0, False
    trainer = Half(strategy="default", global_batch_size=BATCH, writers=[], **options)
    with pytest.raises(ctl.UsageError, match=f"Half has no {missing}\\. Write"):
        trainer.train(1)
    assert not trainer.step


def test_half_an_evaluation_is_warned_of_at_the_end_of_a_program(caplog):
    class Half(ctl.Trainer):
        build, train_data, train_step = Small.build, Small.train_data, Small.train_step
        eval_data = Small.eval_data

    Half.score, Half.framework, Half.word, Half.dropout, Half.tf_data = (
        Small.score, "keras3", "sgd", 0.0, False)  # fmt: skip
    for has_evaluation in (False, True):
        caplog.clear()
        intervals = every_step(evaluate=AT_THE_END if has_evaluation else ctl.Every())
        trainer = Half(strategy="default", global_batch_size=BATCH, writers=[], intervals=intervals)
        trainer.train(1)
        assert ("has eval_data but no eval_step" in caplog.text) == has_evaluation


def test_evaluation_data_that_cannot_be_used_is_refused_before_training():
    class Endless(Small):
        def eval_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(([[1.0] * 8], [1])).repeat().batch(batch_size)

    trainer = Endless(strategy="default", writers=[], intervals=every_step(evaluate=ctl.Every(steps=5)))
    with pytest.raises(ctl.UsageError, match="eval_data is endless"):
        trainer.train(5)
    assert trainer.step == 0


def test_steps_are_saved_when_the_evaluation_after_them_is_wrong():
    class WithoutEvalResult(Small):
        def eval_step(self, batch):
            self.score(batch, training=False)

    checkpoints = ctl.MemoryCheckpoints()
    trainer = WithoutEvalResult(
        strategy="default", writers=[], checkpoints=checkpoints,
        intervals=every_step(evaluate=ctl.Every(steps=50)),
    )  # fmt: skip
    with pytest.raises(ctl.UsageError, match="returned NoneType"):
        trainer.train(5)
    assert checkpoints.steps() == [5]


@pytest.mark.parametrize("best", ["accurcy", "loss"])
def test_the_best_checkpoint_needs_a_metric_of_the_evaluation(best):
    checkpoints = ctl.MemoryCheckpoints(keep=ctl.Keep(best=best))
    trainer = Small(
        strategy="default", writers=[], checkpoints=checkpoints,
        intervals=every_step(evaluate=ctl.Every(steps=2)),
    )  # fmt: skip
    if best == "loss":
        assert "eval_loss" in trainer.train(2)
        return
    with pytest.raises(ctl.UsageError, match="'accurcy' is to be kept, but eval_step returns loss"):
        trainer.train(2)


@pytest.mark.parametrize("options", [
    {"checkpoints": "directory"}, {"writers": ["screen"]}, {"writers": ctl.NullWriter()},
], ids=["a manager", "a list", "one writer"])  # fmt: skip
def test_parts_of_another_type_are_refused(options):
    with pytest.raises(ctl.UsageError, match=next(iter(options))):
        Small(strategy="default", **options)


def test_a_loss_that_average_did_not_make_is_refused_on_two_replicas(two_replicas):
    class Mean(Small):
        scaled = False

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                scores = self.score(batch, training=True)
                loss = tf.reduce_mean(scores["loss"])
            self.minimize(loss, tape, scaled=self.scaled)
            return scores

    options = dict(writers=[], intervals=every_step())
    Mean(strategy="default", **options).train(1)
    with pytest.raises(ctl.UsageError, match=r"average\(\) has not computed.*scaled=True"):
        Mean(strategy=two_replicas, **options).train(1)
    scaled_class = type("Mean", (Mean,), {"scaled": True})
    scaled_class(strategy=two_replicas, **options).train(1)


def test_batches_that_are_always_too_small_are_warned_of(caplog):
    class Small17(Small):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(17)

    Small17(strategy="default", writers=[], intervals=every_step()).train(2)
    assert "held 17.0 examples on average, global_batch_size is 24" in caplog.text


@pytest.mark.parametrize(("size", "is_warned"), [(4, True), (24, False)])
def test_small_batches_of_a_finite_dataset_are_warned_of_unless_there_is_one(size, is_warned, caplog):
    class Finite(Small):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples()).take(20).batch(size)

    Finite(strategy="default", writers=[], global_batch_size=24, intervals=every_step()).train(2)
    assert ("held 4.0 examples on average" in caplog.text) == is_warned


def test_the_reason_of_the_end_is_short_data_or_no_remaining_steps():
    writer = ctl.MemoryWriter()

    class Finite(Small):
        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(examples()).batch(batch_size)

    trainer = Finite(strategy="default", writers=[writer], intervals=every_step())
    trainer.train(10)
    trainer.train(4)
    reasons = [e.reason for e in writer.events if type(e).__name__ == "Ended"]
    assert reasons == ["the data ended, 10 steps were requested,", "no steps left: complete"]
