"""Time of one evaluation on arrays: `Trainer.evaluate`, Keras `Model.evaluate` and a loop by hand.

    python tests/benchmarks/evaluation.py --batches=1,16,256 --rounds=15

Each evaluation begins with the arrays, as in a run with evaluations. In each round the variants follow each
other; the first round is excluded, because it compiles. Prints medians (ms), and their ratios to the loop.
"""

import statistics
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

_BATCHES = flags.DEFINE_list("batches", ["1", "16", "256"], "Numbers of batches of an evaluation.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Number of rounds.")
_BATCH_SIZE = 32


def build_model():
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    return model


def score(model, x, y):
    """Returns loss and accuracy of each example, `[b]`."""
    logits = model(x)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    return loss, tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32)


class Classifier(ctl.Trainer):
    """A network of two layers, on some arrays."""

    def __init__(self, arrays, **options):
        super().__init__(**options)
        self.arrays = arrays

    def build(self):
        self.model = build_model()

    def eval_data(self, batch_size):
        return ctl.from_arrays(self.arrays, batch_size)

    def eval_step(self, batch):
        loss, accuracy = score(self.model, *batch)
        return {"loss": loss, "accuracy": accuracy}


def hand_written(x, y):
    """Returns a function that evaluates, with a compiled step and a dataset of batches."""
    model, loss, accuracy = build_model(), keras.metrics.Mean(), keras.metrics.Mean()

    @tf.function(reduce_retracing=True)
    def step(x, y):
        losses, hits = score(model, x, y)
        loss.update_state(losses)
        accuracy.update_state(hits)

    def evaluate():
        loss.reset_state()
        accuracy.reset_state()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
        for batch in dataset:
            step(*batch)
        return float(loss.result()), float(accuracy.result())

    return evaluate


def measure(num_batches: int, rounds: int) -> dict[str, float]:
    """Returns the median time of an evaluation by variant (seconds)."""
    source = np.random.default_rng(0)
    x = source.normal(size=(num_batches * _BATCH_SIZE, 20)).astype(np.float32)
    y = source.integers(0, 10, len(x))
    trainer, keras_model = Classifier((x, y), global_batch_size=_BATCH_SIZE, writers=()), build_model()
    variants = {
        "ctl": trainer.evaluate,
        "keras": lambda: keras_model.evaluate(x, y, batch_size=_BATCH_SIZE, verbose=0),
        "hand_written": hand_written(x, y),
    }
    secs = {name: [] for name in variants}
    for _round in range(rounds + 1):
        for name, evaluate in variants.items():
            start = time.perf_counter()
            evaluate()
            secs[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in secs.items()}


def main(_: list[str]) -> None:
    print(f"{'batches':>7} {'ctl':>8} {'keras':>8} {'by hand':>8} {'ctl/hand':>9} {'keras/hand':>11}")
    for num_batches in map(int, _BATCHES.value):
        times = [1e3 * value for value in measure(num_batches, _ROUNDS.value).values()]
        ratios = [value / times[-1] for value in times[:-1]]
        print(f"{num_batches:7} {times[0]:8.1f} {times[1]:8.1f} {times[2]:8.1f}", end="")
        print(f" {ratios[0]:9.2f} {ratios[1]:11.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
