"""Behaviours of Keras's trainer and callbacks, each a program that `Model.fit` and `ctl.fit` execute.

A behaviour is a function of `Verbs` that returns numbers, strings and structures of them. `BEHAVIOURS` has
those that are the same for `keras.Model` and for `ctl`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ctl
import keras
import numpy as np
import tensorflow as tf
from fitting import numbers

layers = keras.layers
X, Y, WEIGHTS = numbers(n=20)
VALIDATION = numbers(7, 12)[:2]
FLOATS = X[:, :1] * 0.5


@dataclasses.dataclass(frozen=True)
class Verbs:
    """The functions to compare. `evaluate` returns a dictionary unless `return_dict` is False."""

    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]


def evaluate_with_keras(model, *arguments, return_dict=True, **options):
    return model.evaluate(*arguments, return_dict=return_dict, **options)


OF_KERAS = Verbs(lambda model, *a, **o: model.fit(*a, **o), evaluate_with_keras,
                 lambda model, *a, **o: model.predict(*a, **o))  # fmt: skip
OF_CTL = Verbs(ctl.fit, ctl.evaluate, ctl.predict)
BEHAVIOURS: dict[str, Callable[[Verbs, Any], Any]] = {}


def behaviour(name):
    def add(function):
        BEHAVIOURS[name] = function
        return function

    return add


def classifier(optimizer=None, **compiled):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"optimizer": optimizer or keras.optimizers.SGD(0.1), "loss": loss, "metrics": ["accuracy"]}
    model.compile(**{**options, **compiled})
    return model


def regression(**compiled):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled})
    return model


def batches(size=8, repeat=1, arrays=(X, Y)):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size).repeat(repeat)


class Calls(keras.callbacks.Callback):
    """Records each call: method, index, names of the logs.

    Args:
      methods: Methods to record. None: all.
    """

    def __init__(self, *methods):
        super().__init__()
        self.calls = []
        names = methods or [f"on_{m}_{e}" for m in ("train", "test", "predict") for e in ("begin", "end")]
        for name in names:
            setattr(self, name, self._recorder(name))

    def _recorder(self, name):
        def record(*arguments, **named):
            logs = named.get("logs", arguments[-1] if arguments else None)
            index = arguments[0] if arguments and isinstance(arguments[0], int) else None
            self.calls.append((name, index, sorted(logs) if isinstance(logs, dict) else None))

        return record


class EpochLogs(keras.callbacks.Callback):
    """Records the logs of each epoch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append((epoch, dict(logs)))


def trained(verbs, model=None, x=X, y=Y, **options):
    """Returns the history, the epochs, the updates and the weights of a training without shuffling."""
    model = classifier() if model is None else model
    history = verbs.fit(model, x, y, **{"epochs": 2, "verbose": 0, "shuffle": False, **options})
    updates = None if model.optimizer is None else int(model.optimizer.iterations.numpy())
    return history.history, history.epoch, updates, model.get_weights()


def with_callback(make, **options):
    """Returns a behaviour: the training with a callback, and the value of its attribute `result`."""

    def run(verbs, directory):
        callback = make(directory)
        files = trained(verbs, callbacks=[callback], validation_data=VALIDATION, **options)
        names = sorted(p.name for p in directory.iterdir())
        return files, names, getattr(callback, "result", lambda: None)()

    return run


def of_fit(**options):
    return lambda verbs, directory: trained(verbs, **options)


def of_model(make, **options):
    return lambda verbs, directory: trained(verbs, make(), **options)


def rows_of(*arrays, size=8):
    for start in range(0, len(arrays[0]), size):
        yield tuple(a[start : start + size] for a in arrays)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[8 * index :][:8], Y[8 * index :][:8]


# arguments of fit
BEHAVIOURS |= {
    "defaults": of_fit(),
    "batch size": of_fit(batch_size=6),
    "steps of arrays": of_fit(steps_per_epoch=4),
    "batch size and fewer steps of a pass": of_fit(x=batches(4, -1), y=None, steps_per_epoch=3),
    "one epoch": of_fit(epochs=1),
    "no epoch": of_fit(epochs=0),
    "first epoch": of_fit(initial_epoch=1, epochs=3),
    "first epoch after the last": of_fit(initial_epoch=3, epochs=2),
    "weights of examples": of_fit(sample_weight=WEIGHTS),
    "weights of classes": of_fit(class_weight={0: 0.2, 1: 2.0}),
    "split": of_fit(validation_split=0.25),
    "split of weighted examples": of_fit(validation_split=0.25, sample_weight=WEIGHTS),
    "split beside validation data": of_fit(validation_split=0.25, validation_data=VALIDATION),
    "validation": of_fit(validation_data=VALIDATION),
    "weighted validation": of_fit(validation_data=(*VALIDATION, WEIGHTS[:12])),
    "validation in a list": of_fit(validation_data=list(VALIDATION)),
    "validation of a dataset": of_fit(validation_data=batches(5, arrays=VALIDATION)),
    "steps of validation": of_fit(validation_data=VALIDATION, validation_steps=2, validation_batch_size=5),
    "steps of an endless validation": of_fit(validation_data=batches(4, -1), validation_steps=2),
    "validation each second epoch": of_fit(validation_data=VALIDATION, validation_freq=2, epochs=5),
    "validation in listed epochs": of_fit(validation_data=VALIDATION, validation_freq=[1, 3], epochs=4),
    "batches of validation": of_fit(validation_data=VALIDATION, validation_batch_size=5),
    "a dataset": of_fit(x=batches(), y=None),
    "a weighted dataset": of_fit(x=batches(arrays=(X, Y, WEIGHTS)), y=None),
    "inputs of 64 bits": of_fit(x=X.astype("float64")),
    "integers as inputs": of_fit(x=(X * 3).astype("int64")),
    "tensors": of_fit(x=tf.constant(X), y=tf.constant(Y)),
    "a PyDataset": of_fit(x=Sequence(), y=None),
    "validation of a PyDataset": of_fit(validation_data=Sequence()),
    "a generator": lambda verbs, _: trained(
        verbs, x=rows_of(*(np.tile(a.T, 4).T for a in (X, Y))), y=None, steps_per_epoch=3),
    "targets of one column": of_fit(y=Y[:, None]),
    "validation in batches of one": of_fit(validation_data=VALIDATION, validation_batch_size=1),
}  # fmt: skip


def eagerly_named(labels, outputs):
    return keras.ops.mean(keras.ops.abs(labels - outputs), axis=-1)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
        return x


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - y)) * 2.0


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


class OwnSteps(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"my_loss": loss}

    def test_step(self, data):
        return {"my_test": keras.ops.sum(self(data[0])) * 0.0 + 2.0}

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data) * 0.0 + 5.0


class ShapeOfBatch(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self, **options):
        super().__init__(**options)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return {"examples": self.total, "double": self.total * 2}


def of_class(cls, **compiled):
    def make():
        model = cls([keras.Input((6,)), layers.Dense(1)])
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled})
        return model

    return make


def added_loss(**compiled):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), AddsLoss(), layers.Dense(1)])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled})
    return model


def structured():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((1,), name="b")}
    hidden = layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {"one": layers.Dense(1, name="one")(hidden), "two": layers.Dense(3, name="two")(hidden)}
    model = keras.Model(inputs, outputs)
    losses = {"one": "mse", "two": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(keras.optimizers.SGD(0.1), losses, metrics={"one": "mae", "two": ["accuracy"]})
    return model


def listed():
    x = keras.Input((6,))
    model = keras.Model(x, [layers.Dense(1, name="a")(x), layers.Dense(1, name="b")(x)])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], loss_weights=[0.2, 2.0])
    return model


def without_variables():
    model = keras.Sequential([keras.Input((6,)), layers.Rescaling(2.0)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def frozen():
    model = regression()
    model.trainable = False
    model.compile("adam", "mse", metrics=["mae"])
    return model


def regularized():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, kernel_regularizer="l2")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def unbuilt():
    model = keras.Sequential([layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


# models and arguments of compile
BEHAVIOURS |= {
    "string loss": of_model(regression, y=FLOATS),
    "function as loss": lambda v, _: trained(v, regression(loss=eagerly_named), y=FLOATS),
    "loss object": lambda v, _: trained(v, regression(loss=keras.losses.Huber(reduction="sum")), y=FLOATS),
    "reduction none": lambda v, _: trained(
        v, regression(loss=keras.losses.MeanSquaredError(reduction=None)), y=FLOATS),
    "named metrics": lambda v, _: trained(
        v, regression(metrics=["mae", keras.metrics.MeanSquaredError(name="square")]), y=FLOATS),
    "function as metric": lambda v, _: trained(v, regression(metrics=[eagerly_named]), y=FLOATS),
    "metric of a dictionary": lambda v, _: trained(
        v, regression(metrics=[ShapeOfBatch(name="counts")]), y=FLOATS, validation_data=(X, FLOATS)),
    "weighted metrics": lambda v, _: trained(
        v, regression(metrics=["mae"], weighted_metrics=["mae"]), y=FLOATS, sample_weight=WEIGHTS),
    "steps per execution": lambda v, _: trained(v, classifier(steps_per_execution=3), batch_size=4),
    "a rest of steps per execution": lambda v, _: trained(
        v, classifier(steps_per_execution=2), batch_size=4),
    "adam": lambda v, _: trained(v, classifier("adam")),
    "schedule": lambda v, _: trained(v, classifier(
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))),
    "clipping": lambda v, _: trained(v, classifier(keras.optimizers.SGD(0.1, global_clipnorm=0.01))),
    "moving average": lambda v, _: trained(v, classifier(
        keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))),
    "accumulation": lambda v, _: trained(v, classifier(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), batch_size=5),
    "added loss": of_model(added_loss, y=FLOATS),
    "added loss alone": lambda v, _: trained(v, added_loss(loss=None), y=None),
    "regularizer": of_model(regularized, y=FLOATS, validation_data=(X, FLOATS)),
    "compute_loss": of_model(of_class(OwnLoss), y=FLOATS, validation_data=(X, FLOATS)),
    "compute_metrics": of_model(of_class(OwnMetrics), y=FLOATS, validation_data=(X, FLOATS)),
    "own steps": of_model(of_class(OwnSteps), y=FLOATS, validation_data=(X, FLOATS)),
    "structures": of_model(structured, x={"a": X, "b": FLOATS}, y={"one": FLOATS, "two": Y}),
    "lists of outputs": of_model(listed, y=[FLOATS, FLOATS]),
    "unbuilt": of_model(unbuilt, y=FLOATS),
    "no variables": of_model(without_variables, y=X),
    "frozen": of_model(frozen, y=FLOATS),
    "eager": lambda v, _: trained(v, classifier(run_eagerly=True)),
}  # fmt: skip
