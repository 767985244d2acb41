"""Random generators of the program in `ctl.fit`, compared with `Model.fit`."""

import random

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from fitting import BATCH, classifier, numbers


class Noisy(keras.Model):
    """Draws from the global generator of Keras."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            scores = self.dense(x + keras.random.normal(tf.shape(x)))
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, scores, from_logits=True))
        weights = self.dense.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.add_metric_of(loss)
        return {m.name: m.result() for m in self.metrics}

    def add_metric_of(self, loss):
        self.metrics[0].update_state(loss)


def noisy():
    model = Noisy()
    model.compile(keras.optimizers.SGD(0.1))
    return model


class Reordered(keras.utils.PyDataset):
    """Shuffles its rows with NumPy's and Python's global generators."""

    def __init__(self):
        super().__init__()
        self.x, self.y, _ = numbers()
        self.order = list(range(len(self.x)))

    def __len__(self):
        return len(self.x) // BATCH

    def __getitem__(self, index):
        rows = self.order[BATCH * index : BATCH * (index + 1)]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)
        random.shuffle(self.order)


@pytest.mark.parametrize(("make", "data"), [
    (noisy, lambda: numbers()[:2]),
    pytest.param(classifier, lambda: (Reordered(),), marks=pytest.mark.slow),
])  # fmt: skip
def test_global_generators_draw_the_numbers_of_model_fit(make, data):
    histories = []
    for fit in (keras.Model.fit, ctl.fit):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        history = fit(make(), *data(), batch_size=None, epochs=3, shuffle=False, verbose=0)
        histories.append(history.history)
    assert histories[1]["loss"] == pytest.approx(histories[0]["loss"], abs=1e-5)


def draw_numbers():
    return random.random(), np.random.random(), float(tf.random.uniform([]))


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_fit_evaluate_and_predict_do_not_change_the_generators_of_the_program(replicas, two_replicas):
    x, y, _ = numbers()
    with (two_replicas if replicas == 2 else tf.distribute.get_strategy()).scope():
        model = classifier()
        model.compile("sgd", lambda labels, scores: tf.reduce_mean(tf.square(scores), axis=-1))
    keras.utils.set_random_seed(7)
    expected = [draw_numbers() for _ in range(4)]
    keras.utils.set_random_seed(7)
    actual = [draw_numbers()]
    ctl.fit(model, x, y, verbose=0)
    actual.append(draw_numbers())
    ctl.evaluate(model, x, y, verbose=0)
    actual.append(draw_numbers())
    ctl.predict(model, x)
    actual.append(draw_numbers())
    assert actual == expected


def test_a_seed_of_fit_determines_the_numbers_after_any_draws():
    losses = []
    for program_seed in (7, 8):
        keras.utils.set_random_seed(1)
        model = classifier()
        keras.utils.set_random_seed(program_seed)
        losses.append(ctl.fit(model, Reordered(), epochs=2, seed=3, verbose=0).history["loss"])
    assert losses[0] == losses[1]
