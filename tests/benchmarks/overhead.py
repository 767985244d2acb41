"""Framework overhead of a step: ctl, hand-written loops, Model.fit and Orbit's pattern.

    python tests/benchmarks/overhead.py [--strategy=default|one_device|mirrored] [--rounds=9]

A tiny model (32 -> 64 -> 10, batch 64, Adam, the loss only) makes the overhead of the framework visible.
All variants run alternately in one process. The table has medians (µs per step) and ratios to the
hand-written per-step loop and to the bare loop in the graph.
"""

import argparse
import statistics
import threading
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from ctl.metrics.protocol import Progressed

BATCH, FEATURES, HIDDEN, CLASSES, EXAMPLES, STEPS_PER_LOOP = 64, 32, 64, 10, 4096, 100
STRATEGIES = ("default", "one_device", "mirrored")


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return x, generator.integers(0, CLASSES, EXAMPLES)


def dataset():
    data = tf.data.Dataset.from_tensor_slices(arrays()).repeat()
    return data.batch(BATCH, drop_remainder=True).prefetch(4)


def network():
    return keras.Sequential([
        keras.Input((FEATURES,)), keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(CLASSES),
    ])  # fmt: skip


def score(model, batch, training):
    x, y = batch
    logits = model(x, training=training)
    return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)}


class Tiny(ctl.Trainer):
    def build(self):
        self.model, self.optimizer = network(), keras.optimizers.Adam(1e-3)

    def train_data(self, batch_size):
        return dataset()

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = score(self.model, batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores


class Gate:
    """A metric writer that lets a run in another thread continue for a number of steps."""

    def __init__(self):
        self.allowed, self.step = 0, 0
        self.changed = threading.Condition()

    def write(self, step, values, run="train"):
        pass

    def note(self, event):
        if not isinstance(event, Progressed):
            return
        self.step = event.step
        if self.step >= self.allowed:
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.step < self.allowed)

    def advance(self, steps):
        with self.changed:
            self.allowed = self.step + steps
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.step >= self.allowed)


def ctl_trainer(strategy, steps_per_loop):
    gate = Gate()
    trainer = Tiny(
        strategy=strategy, global_batch_size=BATCH, writers=[gate],
        intervals=ctl.Intervals(
            steps_per_loop=steps_per_loop, log=ctl.Every(steps=1000), save=ctl.Every()),
    )  # fmt: skip
    gate.allowed = 1
    threading.Thread(target=trainer.train, args=(2**40,), daemon=True).start()
    return gate.advance


def replica_step_and_iterator(strategy):
    """Returns the replica step and the iterator of the hand-written loops."""
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    def step(batch):
        with tf.GradientTape() as tape:
            scores = score(model, batch, training=True)
            loss = tf.nn.compute_average_loss(scores["loss"], global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, iter(strategy.experimental_distribute_dataset(dataset()))


def hand_written(strategy):
    step, iterator = replica_step_and_iterator(strategy)

    @tf.function
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None)

    def train(steps):
        for _ in range(steps):
            train_step(next(iterator))

    return train


def hand_written_next_inside(strategy):
    step, iterator = replica_step_and_iterator(strategy)

    @tf.function
    def train_step(iterator):
        return strategy.reduce("SUM", strategy.run(step, (next(iterator),)), axis=None)

    def train(steps):
        for _ in range(steps):
            train_step(iterator)

    return train


def bare_in_graph(strategy):
    step, iterator = replica_step_and_iterator(strategy)

    @tf.function
    def train_loop(iterator, steps):
        for _ in tf.range(steps):
            strategy.run(step, (next(iterator),))

    length = tf.constant(STEPS_PER_LOOP)

    def train(steps):
        for _ in range(steps // STEPS_PER_LOOP):
            train_loop(iterator, length)

    return train


def orbit_pattern(strategy):
    """Returns an outer Python loop around a graph loop that updates a Keras metric in every step."""
    step, iterator = replica_step_and_iterator(strategy)
    with strategy.scope():
        metric = keras.metrics.Mean("loss")
        count = tf.Variable(0, dtype=tf.int64)

    def with_metrics(batch):
        metric.update_state(step(batch))

    @tf.function
    def train_loop(iterator, steps):
        for _ in tf.range(steps):
            strategy.run(with_metrics, (next(iterator),))
            count.assign_add(1)

    length = tf.constant(STEPS_PER_LOOP)

    def train(steps):
        for _ in range(steps // STEPS_PER_LOOP):
            metric.reset_state()
            train_loop(iterator, length)
            float(metric.result())
            count.numpy()

    return train


def model_fit(strategy, steps_per_execution):
    with strategy.scope():
        model = network()
        model.compile(
            keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution, jit_compile=False,
        )  # fmt: skip
    data = dataset()
    return lambda steps: model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)


def measure(strategy, rounds: int) -> dict[str, list[float]]:
    variants = {
        "hand-written, per step": (hand_written(strategy), 500),
        "hand-written, next() inside": (hand_written_next_inside(strategy), 500),
        "ctl, steps_per_loop=1": (ctl_trainer(strategy, 1), 500),
        "Model.fit": (model_fit(strategy, 1), 500),
        "bare in-graph loop": (bare_in_graph(strategy), 2000),
        f"ctl, steps_per_loop={STEPS_PER_LOOP}": (ctl_trainer(strategy, STEPS_PER_LOOP), 2000),
        "ctl, steps_per_loop=auto": (ctl_trainer(strategy, "auto"), 4000),
        "Orbit's pattern": (orbit_pattern(strategy), 2000),
        f"Model.fit, steps_per_execution={STEPS_PER_LOOP}": (model_fit(strategy, STEPS_PER_LOOP), 2000),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for train, steps in variants.values():
        train(steps)
    for _ in range(rounds):
        for name, (train, steps) in variants.items():
            start = time.perf_counter()
            train(steps)
            times[name].append((time.perf_counter() - start) / steps * 1e6)
    return times


def show(strategy_name: str, times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    hand, bare = medians["hand-written, per step"], medians["bare in-graph loop"]
    print(f"\n{strategy_name}: medians of {len(times['bare in-graph loop'])} interleaved rounds")
    print(f"{'':34} {'µs/step':>9} {'min':>8} {'max':>8} {'/hand':>7} {'/bare':>7}")
    for name, median in medians.items():
        low, high = min(times[name]), max(times[name])
        print(f"{name:34} {median:9.1f} {low:8.1f} {high:8.1f} {median / hand:7.2f} {median / bare:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for strategy_name in arguments.strategy or STRATEGIES:
        devices = ["cpu:0"] if strategy_name == "mirrored" else []
        show(strategy_name, measure(ctl.make_strategy(strategy_name, devices=devices), arguments.rounds))


if __name__ == "__main__":
    main()
