"""Layers that a hook freezes between two loops. The step is traced again."""

import logging

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from small_models import Small, every_step

BATCH, STEPS = 8, 6


class Freezes(ctl.Trainer):
    """A trainer that freezes the first layer after 3 steps."""

    def build(self):
        keras.utils.set_random_seed(2)
        self.model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        self.optimizer = keras.optimizers.Adam(0.1)

    def arrays(self):
        x = np.random.default_rng(1).normal(size=(48, 3)).astype(np.float32)
        return x, x.sum(axis=1)

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays(), batch_size, shuffle=False)

    def losses(self, batch):
        return tf.square(self.model(batch[0])[:, 0] - batch[1])

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.losses(batch)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}

    def after_loop(self, step, means):
        self.freeze(step)

    def freeze(self, step):
        self.model.layers[0].trainable = step < 3


def weights(trainer):
    """Returns the weights by layer: the order of `get_weights` changes when a layer is frozen."""
    return [w for layer in trainer.model.layers for w in layer.get_weights()]


def weights_of_manual_training():
    trainer = Freezes(strategy="default", global_batch_size=BATCH, writers=[])
    trainer.build()
    trainer.optimizer.build(trainer.model.trainable_variables)
    x, y = trainer.arrays()
    for step in range(STEPS):
        rows = slice(step * BATCH, step * BATCH + BATCH)
        variables = trainer.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(trainer.losses((x[rows], y[rows])))
        trainer.optimizer.apply(tape.gradient(loss, variables), variables)
        trainer.freeze(step + 1)
    return weights(trainer)


@pytest.mark.parametrize("steps_per_loop", some_of([1, 3], 3))
@pytest.mark.parametrize("where", some_of(["default", "two"], "two"))
def test_a_layer_frozen_by_a_hook_is_not_trained(two_replicas, where, steps_per_loop, caplog):
    trainer = Freezes(
        strategy=two_replicas if where == "two" else "default", global_batch_size=BATCH, writers=[],
        intervals=every_step(steps_per_loop=steps_per_loop, log=ctl.Every()),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "ctl"):
        trainer.train(STEPS)
    for a, b in zip(weights(trainer), weights_of_manual_training(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert caplog.text.count("the step is traced again") == 1


def test_a_layer_frozen_between_two_runs_is_not_trained():
    trainer = type("Free", (Freezes,), {"freeze": lambda self, step: None})(
        strategy="default", global_batch_size=BATCH, writers=[]
    )
    trainer.train(2)
    trainer.model.layers[0].trainable = False
    before = weights(trainer)
    trainer.train(4)
    after = weights(trainer)
    np.testing.assert_array_equal(before[0], after[0])
    assert (before[2] != after[2]).any()


def test_a_checkpoint_of_a_frozen_layer_is_restored_into_the_same_layer(tmp_path):
    options = dict(strategy="default", global_batch_size=BATCH, writers=[], model_dir=str(tmp_path),
                   intervals=every_step(save=ctl.Every(steps=2)))  # fmt: skip
    first = Freezes(**options)
    first.train(STEPS)
    second = Freezes(**options)
    second.prepare()
    assert second.step == STEPS
    for a, b in zip(weights(first), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("framework", some_of(["keras3", "tf_keras"], "keras3"))
def test_a_layer_that_is_trained_later_needs_an_optimizer_built_with_it(framework):
    class Unfreezing(Small):
        builds_all = False

        def build(self):
            super().build()
            if self.builds_all:
                self.optimizer.build(self.model.trainable_variables)
            self.model.layers[0].trainable = False

        def after_loop(self, step, means):
            self.model.layers[0].trainable = True

    options = {"framework": framework, "strategy": "default", "writers": [],
               "intervals": every_step(steps_per_loop=1)}  # fmt: skip
    with pytest.raises(ctl.UsageError, match=r"optimizer.build\(self.model.trainable_variables\)"):
        Unfreezing(**options).train(2)
    trainer = type("BuildsAll", (Unfreezing,), {"builds_all": True})(**options)
    trainer.train(1)
    before = weights(trainer)
    trainer.train(2)
    assert all((a != b).any() for a, b in zip(before, weights(trainer), strict=True))
