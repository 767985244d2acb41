"""Gradients that travel with 8 bits: weights, what is left over and bytes, as one line of JSON."""

import json
import sys

import ctl
import keras
import tensorflow as tf
from ctl.distribute.engine_all_reduce import engine_of, install_engine

SIZE, LARGE, SMALL, BATCH, STEPS = 5000, 200_000, 3, 6, 8


def gradient_of(number, size):
    """What one example adds to the gradient, `[size]`; blocks of very different sizes."""
    places = tf.range(size, dtype=tf.float32)
    return tf.sin(places * (tf.cast(number, tf.float32) + 1.0)) * 10.0 ** (places // 256 % 20 - 9.0)


class Line(ctl.Trainer):
    """The loss is linear in the weights, so that an example's gradient is known."""

    def __init__(self, broken=(), wire_dtype="int8", policy="stop", size=SIZE, **options):
        self.size, self.broken, self.how = size, broken, {"wire_dtype": wire_dtype, "on_nonfinite": policy}
        path = "tcp" if engine_of(options["strategy"]) else "ring"  # which `auto` would choose again
        fixed = {"global_batch_size": BATCH, "writers": [], "steps_per_loop": 3, "communication": path}
        super().__init__(**{**fixed, **options})

    def build(self):
        self.model = tf.Module()
        self.model.large, self.model.small = tf.Variable(tf.zeros(self.size)), tf.Variable(tf.zeros(SMALL))
        self.optimizer = keras.optimizers.SGD(1.0)
        self.gradients = ctl.Gradients(**self.how)

    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)

    def train_step(self, numbers):
        given = tf.stack([gradient_of(n, self.size) for n in tf.unstack(numbers)])
        for number in self.broken:
            given = tf.where((numbers == number)[:, None], float("nan"), given)
        with tf.GradientTape() as tape:
            losses = tf.linalg.matvec(given, self.model.large) + tf.reduce_sum(self.model.small)
            loss = self.average(losses)
        self.minimize(loss, tape, [self.model.large, self.model.small])
        return {"loss": losses}


def trained(strategy, steps=STEPS, **options):
    trainer = Line(strategy=strategy, **options)
    try:
        trainer.train(steps)
    except ctl.NonFiniteError as e:
        return {"error": str(e)}
    errors = getattr(trainer._prepared_trainer.programs.reducer, "_error_by_id", {})
    (left,) = errors.values() or [tf.zeros(SIZE)]
    return {
        "large": trainer.model.large.numpy().astype(float).tolist(),
        "small": trainer.model.small.numpy().astype(float).tolist(),
        "left": left.numpy().astype(float).tolist(),
    }


def resumed(strategy, where):
    """In pieces of 3 and 5 steps."""
    trained(strategy, 3, model_dir=where)
    return trained(strategy, STEPS, model_dir=where)


def bytes_sent(strategy, wire_dtype):
    before = engine_of(strategy).bytes_sent
    trained(strategy, 8, wire_dtype=wire_dtype, size=LARGE, steps_per_loop=8, log_every_steps=0)
    return engine_of(strategy).bytes_sent - before


def in_float(strategy):
    """The sums of two workers are the same on either path."""
    return {
        "float": trained(strategy, wire_dtype=None),
        "skip in float": trained(strategy, broken=[10], policy="skip", wire_dtype=None),
    }


def results(strategy, directory, exact):
    found = {
        **exact,
        "whole": trained(strategy, model_dir=f"{directory}/whole"),
        "pieces": resumed(strategy, f"{directory}/pieces"),
        "stop": trained(strategy, broken=[6]),
        "skip": trained(strategy, broken=[10], policy="skip"),
    }
    if engine_of(strategy) is not None:
        engine_of(strategy).all_share_memory = False  # as between machines: 16 bits are for a network
        found["bytes"] = [bytes_sent(strategy, word) for word in ("int8", "bfloat16", None)]
    return found


def main():
    strategy = ctl.make_strategy("multi_worker", communication="tcp")
    exact = in_float(strategy)
    found = {"tcp": results(strategy, f"{sys.argv[1]}/tcp", exact)}
    if "ring" in sys.argv:
        install_engine(strategy, None)
        found["ring"] = results(strategy, f"{sys.argv[1]}/ring", exact)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
