"""Updates after a step that is compiled with XLA, and the selection of trained weights."""

import logging

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.checkpoints.tracked_state import trained_weights_of
from ctl.step import keras_losses
from ctl.step.keras_losses import GlobalMeans


class EveryOther(ctl.Trainer):
    """A trainer that applies its update only after every second step."""

    def build(self):
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
        return ctl.from_arrays((x, x[:, :1]), batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((self.model(x) - y) ** 2, axis=1)
            loss = self.average(losses)
        self.minimize(loss, tape, when=self.step_variable % 2 == 1)
        return {"loss": losses}


def weights_after(steps, jit_compile):
    options = {"strategy": "default", "writers": [], "global_batch_size": 8, "steps_per_loop": 1}
    trainer = EveryOther(jit_compile=jit_compile, **options)
    trainer.train(steps)
    return trainer.model.get_weights()[0]


def test_a_condition_holds_for_the_update_after_a_compiled_step():
    after_1, after_2, after_3 = (weights_after(steps, "step") for steps in (1, 2, 3))
    assert np.array_equal(after_2, after_3) and not np.array_equal(after_1, after_2)
    np.testing.assert_allclose(after_2, weights_after(2, "off"), rtol=1e-5)


def test_weights_of_frozen_layers_and_variables_are_not_trained():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.layers[0].trainable = False
    frozen_variable, trainable_variable = tf.Variable(1.0, trainable=False), tf.Variable(2.0)
    trained = trained_weights_of([{"model": model}, frozen_variable, trainable_variable])
    assert [id(v) for v in trained] == [id(v) for v in [*model.layers[1].weights, trainable_variable]]


@pytest.mark.parametrize(("num_replicas", "num_warnings"), [(1, 0), (2, 1)])
def test_a_scalar_loss_logs_a_warning_on_several_replicas_only(caplog, num_replicas, num_warnings):
    keras_losses._warn_of_scalar.cache_clear()
    with caplog.at_level(logging.WARNING, "ctl"):
        loss = GlobalMeans(3, num_replicas).reduce(tf.constant(6.0), None, None, "sum", None)
    assert loss.numpy() == 6.0 / num_replicas
    assert len([r for r in caplog.records if "returned a scalar" in r.getMessage()]) == num_warnings


def test_a_loop_of_the_user_may_call_the_step_on_two_replicas():
    strategy = ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"])
    trainer = EveryOther(strategy=strategy, writers=[], global_batch_size=8)
    trainer.prepare()
    trainer.step_variable.assign(1)
    before = trainer.model.get_weights()[0]
    batch = tf.ones([4, 3]), tf.ones([4, 1])
    tf.function(lambda: strategy.run(trainer.train_step, (batch,)), autograph=False)()
    assert not np.array_equal(before, trainer.model.get_weights()[0])
