"""A model with overrides of `fit`, `evaluate` and `predict`. As a program: a worker that trains it.

    overriding.py OUTPUT_DIR [STEP_OF_SIGTERM]
"""

import json
import os
import signal
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf
from fitting import numbers

X, Y, _ = numbers(n=20)
LINES = np.array([" ".join(map(str, row)) for row in X.tolist()])


class ReadsText(keras.Sequential):
    """A model with a preprocessor of text in its input pipeline, like a task of KerasHub."""

    def read(self, x, *targets):
        return (tf.strings.to_number(tf.strings.split(x).to_tensor(shape=[None, 6])), *targets)

    def prepared(self, x, y=None, batch_size=None):
        if not isinstance(x, tf.data.Dataset):
            arrays = (x,) if y is None else (x, y)
            x = tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size or 32)
        return x.map(self.read)

    def fit(self, x=None, y=None, batch_size=None, validation_data=None, **options):
        if validation_data is not None:
            validation_data = self.prepared(*validation_data, batch_size)
        data = self.prepared(x, y, batch_size)
        return super().fit(data, validation_data=validation_data, **options)

    def evaluate(self, x=None, y=None, batch_size=None, **options):
        if options.get("_use_cached_eval_dataset"):
            return super().evaluate(x, y, batch_size, **options)
        return super().evaluate(self.prepared(x, y, batch_size), **options)

    def predict(self, x=None, batch_size=None, **options):
        return super().predict(self.prepared(x, None, batch_size), **options)


def compiled(cls):
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


class Records(keras.callbacks.Callback):
    """Records the evaluations, batch by batch. Sends SIGTERM to this process after a training step."""

    def __init__(self, last_step=None):
        super().__init__()
        self.last_step, self.num_steps, self.lines = last_step, 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        if self.num_steps == self.last_step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_test_batch_end(self, batch, logs=None):
        self.lines.append([batch, logs["loss"], logs["accuracy"]])


def trained(fit, callbacks):
    """Returns the history of three epochs of three steps and three batches of evaluation."""
    data = {"batch_size": 8, "validation_data": (LINES, Y), "shuffle": False}
    history = fit(LINES, Y, epochs=3, verbose=0, callbacks=callbacks, **data)
    return history.history


if __name__ == "__main__":
    directory, last_step = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None
    strategy = ctl.make_strategy("multi_worker")
    with strategy.scope():
        model = compiled(ReadsText)
    records = Records(last_step)
    callbacks = [keras.callbacks.BackupAndRestore(f"{directory}/backup", save_freq=1), records]
    history = trained(lambda *a, **o: ctl.fit(model, *a, **o), callbacks)
    weights = [w.tolist() for w in model.get_weights()]
    print(json.dumps({"history": history, "evaluations": records.lines, "weights": weights}))
