"""Models with their own `train_step` train in `ctl.fit` as in `Model.fit`, on one replica."""

import functools

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from fitting import BATCH, numbers


class Own(keras.Model):
    """A train step as in the Keras guide."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted, sample_weight=weight)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


class WithoutMetrics(keras.Model):
    """The steps return numbers without a metric."""

    def squares(self, data):
        x, y = data
        return tf.reduce_mean(tf.square(tf.cast(y, tf.float32)[:, None] - self(x)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.squares(data)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": self.squares(data)}


class Gan(keras.Model):
    """Model with two optimizers, a metric and a seed generator, without `call`."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = (keras.Sequential([keras.layers.Dense(n)]) for n in (6, 1))
        self.mean = keras.metrics.Mean(name="maker_loss")
        self.random = keras.random.SeedGenerator(3)

    def compile(self, *optimizers):
        super().compile()
        self.maker_optimizer, self.critic_optimizer = optimizers

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, x):
        noise = keras.random.normal((tf.shape(x)[0], 4), seed=self.random)
        with tf.GradientTape(persistent=True) as tape:
            scores_of_x, scores_of_generated = self.critic(x), self.critic(self.maker(noise))
            critic_loss = tf.reduce_mean(scores_of_x - scores_of_generated + tf.square(scores_of_x))
            maker_loss = tf.reduce_mean(tf.square(scores_of_generated - 1))
        for part, loss, optimizer in ((self.critic, critic_loss, self.critic_optimizer),
                                      (self.maker, maker_loss, self.maker_optimizer)):  # fmt: skip
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state(maker_loss)
        return {"maker_loss": self.mean.result()}


def functional(model_class, *compiled, **named):
    x = keras.Input((6,))
    model = model_class(x, keras.layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.05), *compiled, **named)
    return model


def model_with_own_step():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return functional(Own, loss, metrics=["accuracy"])


def gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
    return model


def trained(make, fit, epochs=3, arrays=2, **options):
    keras.utils.set_random_seed(1)
    model = make()
    history = fit(model, *numbers()[:arrays], batch_size=BATCH, epochs=epochs, verbose=0, **options)
    return history.history, model.get_weights()


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


CASES = {
    "own": (model_with_own_step, 2, {"validation_data": numbers(7, 21)[:2]}),
    "weights of classes": (model_with_own_step, 2, {"class_weight": {0: 0.3}}),
    "gan": (gan, 1, {}),
}


@functools.cache
def trained_gan():
    return trained(gan, ctl.fit, arrays=1, shuffle=False)


@pytest.mark.parametrize("case", some_of(CASES, "own", "gan"))
def test_own_train_steps_have_the_history_and_weights_of_model_fit(case):
    make, arrays, options = CASES[case]
    expected, weights = trained(make, keras.Model.fit, arrays=arrays, shuffle=False, **options)
    if case == "gan":
        history, actual_weights = trained_gan()
    else:
        history, actual_weights = trained(make, ctl.fit, arrays=arrays, shuffle=False, **options)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-6, err_msg=name)
    assert_equal(actual_weights, weights)


def test_the_newest_of_numbers_without_a_metric_is_reported():
    x, y, _ = numbers(n=48)
    model = functional(WithoutMetrics)
    history = ctl.fit(model, x, y, BATCH, 2, verbose=0, validation_data=(x, y), shuffle=False).history
    last = model.squares((x[-BATCH:], y[-BATCH:]))
    assert history["val_loss"][1] == pytest.approx(float(last), abs=1e-5)
    assert history["loss"][0] > history["loss"][1] > history["val_loss"][1] > 0
    _, weights = trained(lambda: functional(WithoutMetrics), keras.Model.fit, shuffle=False)
    _, actual_weights = trained(lambda: functional(WithoutMetrics), ctl.fit, shuffle=False)
    assert_equal(actual_weights, weights)


def test_a_resumed_run_has_the_state_of_all_its_optimizers(tmp_path):
    _, uninterrupted = trained_gan()
    trained(gan, ctl.fit, epochs=1, arrays=1, shuffle=False, model_dir=tmp_path)
    _, resumed = trained(gan, ctl.fit, arrays=1, shuffle=False, model_dir=tmp_path)
    for a, b in zip(resumed, uninterrupted, strict=True):
        np.testing.assert_array_equal(a, b)


def model_that_returns(value):
    class Returns(keras.Model):
        def train_step(self, data):
            self(data[0])
            return value

    return functional(Returns)


def on_two_replicas():
    with ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"]).scope():
        return model_with_own_step()


REFUSED = {
    "two replicas": (on_two_replicas, {}, "Own has its own train_step.*own_step=.*ctl.Trainer"),
    "no loss to evaluate": (lambda: model_that_returns({}), {"validation_data": numbers()[:2]},
                            "Write a test_step too"),
    "no dictionary": (lambda: model_that_returns([1.0]), {}, "did not return a dictionary; expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_own_steps_that_cannot_be_counted_are_refused(case):
    make, options, message = REFUSED[case]
    with pytest.raises(ctl.UsageError, match=message):
        ctl.fit(make(), *numbers()[:2], batch_size=BATCH, verbose=0, **options)
