"""`ctl.testing`: steps of a trainer without files and signal handlers, and comparison with two replicas."""

import logging
import signal

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl import testing
from small_models import BATCH, Small


class Line(ctl.Trainer):
    """Fits y = 2 x with `weight` as the only variable."""

    def build(self):
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        self.optimizer = keras.optimizers.SGD(0.5)

    def train_data(self, batch_size):
        x = np.linspace(-1, 1, 24, dtype=np.float32)[:, None]
        return ctl.from_arrays((x, 2 * x), batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(self.model(x) - y), axis=1)
            loss = self.average(errors)
        self.minimize(loss, tape)
        return {"loss": errors}


class Halved(Line):
    """Computes the mean over the examples of a replica instead of its share of the global mean."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(self.model(x) - y), axis=1)
            loss = tf.reduce_mean(errors)
        self.minimize(loss, tape, scaled=True)
        return {"loss": errors}


class Slow(Line):
    def build(self):
        super().build()
        self.optimizer.learning_rate = 0.1


class Unequal(Line):
    """Reports a different number on each replica."""

    def train_step(self, batch):
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return {**super().train_step(batch), "number": number + tf.zeros(tf.shape(batch[0])[0])}


class NoLoss(Line):
    def train_step(self, batch):
        return {"error": super().train_step(batch)["loss"]}


def test_steps_return_losses_metrics_and_the_trainer():
    result = testing.run_steps(Line(strategy="default", global_batch_size=8), steps=6)
    losses, trainer = result
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert trainer.step == 6 and trainer is result.trainer
    assert result.metrics[0]["loss"] == losses[0]
    assert testing.run_steps(NoLoss(strategy="default", global_batch_size=8)).losses == []


def test_the_losses_are_those_of_train():
    writer = ctl.MemoryWriter()
    settings = {"strategy": "default", "global_batch_size": 8}
    intervals = ctl.Intervals(log=ctl.Every(steps=1))
    trainer = Line(writers=[writer], intervals=intervals, **settings)
    trainer.train(7)
    losses, stepped = testing.run_steps(Line(**settings), 7)
    assert losses == [values["loss"] for run, _, values in writer.rows if run == "train"]
    np.testing.assert_array_equal(stepped.model.get_weights(), trainer.model.get_weights())


def test_a_second_call_continues(two_replicas):
    uninterrupted = testing.run_steps(Line(strategy=two_replicas, global_batch_size=8), 5).losses
    trainer = Line(strategy=two_replicas, global_batch_size=8)
    assert [*testing.run_steps(trainer, 2).losses, *testing.run_steps(trainer, 3).losses] == uninterrupted
    assert trainer.predict(np.ones([3, 1], np.float32)).shape == (3, 1)


def test_nothing_is_written_restored_printed_or_handled(tmp_path, capfd, caplog):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    trained = Line(strategy="default", global_batch_size=8, model_dir=str(tmp_path / "run"), writers=[])
    trained.train(4)
    files = sorted(tmp_path.rglob("*"))
    capfd.readouterr()
    handlers_during_run = []

    class Watching(Line):
        def train_data(self, batch_size):
            handlers_during_run.append([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
            return super().train_data(batch_size)

        def after_loop(self, step, means):
            raise AssertionError

    with caplog.at_level(logging.INFO):
        trainer = Watching(strategy="default", global_batch_size=8, model_dir=str(tmp_path / "run"))
        testing.run_steps(trainer, 2)
    assert trainer.step == 2, "the checkpoint of step 4 is not restored"
    assert handlers_during_run == [handlers] and sorted(tmp_path.rglob("*")) == files
    assert capfd.readouterr() == ("", "") and not caplog.messages


def test_mistakes_are_those_of_train():
    class NoStep(ctl.Trainer):
        def build(self): ...

        def train_data(self, batch_size): ...

    class Short(Line):
        def train_data(self, batch_size):
            x = np.ones([2 * batch_size, 1], np.float32)
            return tf.data.Dataset.from_tensor_slices((x, x)).batch(batch_size)

    with pytest.raises(ctl.UsageError, match="NoStep has no train_step"):
        testing.run_steps(NoStep(strategy="default", global_batch_size=8))
    with pytest.raises(ctl.UsageError, match="train_data ends after 2 steps; expected 3"):
        testing.run_steps(Short(strategy="default", global_batch_size=8), 3)
    for steps in (0, "3", True, None):
        with pytest.raises(ctl.UsageError, match=f"steps is {steps!r}; expected a whole number >= 1"):
            testing.run_steps(Short(strategy="default", global_batch_size=8), steps)
    with pytest.raises(ctl.UsageError, match=r"Write run_steps\(Short\(global_batch_size=...\)\)"):
        testing.run_steps(Short)
    with pytest.raises(ctl.UsageError, match=r"Write assert_same_on_replicas\(Short\), with the settings"):
        testing.assert_same_on_replicas(Short(strategy="default", global_batch_size=8))


@pytest.mark.parametrize("framework", some_of(["keras3", "module"], "keras3"))
def test_a_correct_trainer_has_the_same_numbers_on_two_replicas(framework):
    testing.assert_same_on_replicas(
        lambda **settings: Small(framework, **settings), global_batch_size=BATCH
    )


@pytest.mark.parametrize(("trainer", "message"), [
    (Halved, r"^gradient_norm differs by .* between two replicas and one device after step 1"),
    pytest.param(Unequal, r"^number differs by 0\.5 between two replicas and one device after step 1 "
                 r"\(0\.5 and 0\)", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_difference_is_named_with_its_first_step(trainer, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_same_on_replicas(trainer, global_batch_size=8)


def test_the_difference_may_be_smaller_than_the_tolerance():
    testing.assert_same_on_replicas(Halved, steps=1, rtol=10.0, global_batch_size=8)


def test_weights_are_compared_after_the_last_step():
    def make(strategy, **settings):
        return (Slow if strategy == "default" else Line)(strategy=strategy, **settings)

    with pytest.raises(AssertionError, match=r"^model, weight 0 \(1, 1\) differs by .* after 1 steps"):
        testing.assert_same_on_replicas(make, steps=1, global_batch_size=8)


def test_a_process_with_one_device_is_refused(run_program, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        "import ctl, tensorflow as tf\ntf.constant(1.0)\nctl.testing.assert_same_on_replicas(ctl.Trainer)\n"
    )
    (result,) = run_program(1, [str(program)])
    assert result.code == 1  # outside of ctl.run
    assert "ctl.testing.use_virtual_devices(2) before the first tensor" in result.output
