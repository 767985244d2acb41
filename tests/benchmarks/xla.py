"""Step time with XLA: a hand-written loop in the graph, and ctl with each value of --jit_compile.

    python tests/benchmarks/xla.py [--model=tiny|cnn|transformer] [--rounds=9]

All variants read arrays in memory; the hand-written loop reads a tf.data pipeline of the same batches in
order. The variants run alternately in one process. The table has medians (µs per step) and ratios to the
hand-written loop. The compile times are printed before.
"""

import argparse
import statistics
import threading
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from overhead import Gate

LAYERS = keras.layers


def images(examples, side):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(examples, side, side, 1)).astype(np.float32)
    return x, generator.integers(0, 10, examples)


def tiny():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4096, 32)).astype(np.float32)
    network = [keras.Input((32,)), LAYERS.Dense(64, "relu"), LAYERS.Dense(10)]
    return keras.Sequential(network), (x, generator.integers(0, 10, 4096))


def cnn():
    network = [
        keras.Input((28, 28, 1)), LAYERS.Conv2D(16, 3, activation="relu"), LAYERS.MaxPooling2D(),
        LAYERS.Conv2D(32, 3, activation="relu"), LAYERS.MaxPooling2D(), LAYERS.Flatten(),
        LAYERS.Dense(10),
    ]  # fmt: skip
    return keras.Sequential(network), images(2048, 28)


def transformer():
    """Returns a classifier of sequences with two blocks over 32 tokens of width 64, and its data."""
    num_tokens, length, width = 200, 32, 64
    tokens = keras.Input((length,), dtype="int32")
    x = LAYERS.Embedding(num_tokens, width)(tokens)
    for _ in range(2):
        attended = LAYERS.MultiHeadAttention(4, width // 4)(LAYERS.LayerNormalization()(x), x)
        x = x + attended
        hidden = LAYERS.Dense(4 * width, "gelu")(LAYERS.LayerNormalization()(x))
        x = x + LAYERS.Dense(width)(hidden)
    model = keras.Model(tokens, LAYERS.Dense(10)(LAYERS.GlobalAveragePooling1D()(x)))
    generator = np.random.default_rng(0)
    x = generator.integers(0, num_tokens, (2048, length)).astype(np.int32)
    return model, (x, generator.integers(0, 10, 2048))


CASES = {"tiny": (tiny, 64, 100, 2000), "cnn": (cnn, 32, 10, 40), "transformer": (transformer, 32, 10, 40)}


def score(model, batch, training):
    x, y = batch
    return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=training))}


class Classifier(ctl.Trainer):
    def __init__(self, make_model, shuffle, **options):
        super().__init__(**options)
        self.make_model, self.shuffle = make_model, shuffle

    def build(self):
        self.model, self.arrays = self.make_model()
        self.optimizer = keras.optimizers.Adam(1e-3)

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays, batch_size, shuffle=self.shuffle)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = score(self.model, batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores


def ctl_trainer(make_model, batch_size, steps_per_loop, jit_compile, shuffle=False):
    gate = Gate()
    trainer = Classifier(
        make_model, shuffle, strategy="default", global_batch_size=batch_size, jit_compile=jit_compile,
        writers=[gate],
        intervals=ctl.Intervals(steps_per_loop=steps_per_loop, log=ctl.Every(steps=1000), save=ctl.Every()),
    )  # fmt: skip
    gate.allowed = 1
    threading.Thread(target=trainer.train, args=(2**40,), daemon=True).start()
    return gate.advance


def bare_in_graph(make_model, batch_size, steps_per_loop):
    model, arrays = make_model()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    data = tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(batch_size, drop_remainder=True)

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(score(model, batch, training=True)["loss"])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train_loop(iterator, steps):
        for _ in tf.range(steps):
            step(next(iterator))

    length, iterator = tf.constant(steps_per_loop), iter(data.prefetch(4))

    def train(steps):
        for _ in range(steps // steps_per_loop):
            train_loop(iterator, length)

    return train


def measure(name, rounds):
    make_model, batch_size, steps_per_loop, steps = CASES[name]
    ctl_variants = {f"ctl, jit_compile={value}": (value, False) for value in ("off", "step", "loop")}
    ctl_variants |= {f"ctl, {value}, shuffled": (value, True) for value in ("off", "loop")}
    print(f"\n{name}: batches of {batch_size}, {steps_per_loop} steps per loop")
    print(f"seconds until step {2 * steps_per_loop}:")
    variants = {}
    for variant in ("bare in-graph loop", *ctl_variants):
        start = time.perf_counter()
        if variant in ctl_variants:
            variants[variant] = ctl_trainer(make_model, batch_size, steps_per_loop, *ctl_variants[variant])
        else:
            variants[variant] = bare_in_graph(make_model, batch_size, steps_per_loop)
        variants[variant](2 * steps_per_loop)
        print(f"  {variant:28} {time.perf_counter() - start:6.2f}")
    times = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, train in variants.items():
            start = time.perf_counter()
            train(steps)
            times[variant].append((time.perf_counter() - start) / steps * 1e6)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    print(f"medians of {rounds} interleaved rounds\n{'':28} {'µs/step':>10} {'min':>10} {'/bare':>7}")
    for variant, median in medians.items():
        ratio = median / medians["bare in-graph loop"]
        print(f"{variant:28} {median:10.1f} {min(times[variant]):10.1f} {ratio:7.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CASES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for name in arguments.model or CASES:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
