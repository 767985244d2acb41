"""Gradients transferred with 8 bits: weights, quantization errors and bytes, as one line of JSON."""

import json
import sys

import ctl
import keras
import tensorflow as tf
from ctl.distribute.engine_all_reduce import engine_of, install_engine

SIZE, LARGE, SMALL, BATCH, STEPS = 5000, 200_000, 3, 6, 8


def gradient_of(number, size):
    """Returns the gradient of one example, `[size]`. Blocks have very different magnitudes."""
    positions = tf.range(size, dtype=tf.float32)
    return tf.sin(positions * (tf.cast(number, tf.float32) + 1.0)) * 10.0 ** (positions // 256 % 20 - 9.0)


class Line(ctl.Trainer):
    """A loss that is linear in the weights, so that the gradient of an example is constant."""

    def __init__(self, broken=(), wire_dtype="int8", policy="stop", size=SIZE, **options):
        self.size, self.broken, self.gradient_options = (
            size,
            broken,
            {"wire_dtype": wire_dtype, "on_nonfinite": policy},
        )
        path = "tcp" if engine_of(options["strategy"]) else "ring"  # which `auto` would choose again
        fixed = {"global_batch_size": BATCH, "writers": [], "steps_per_loop": 3, "communication": path}
        super().__init__(**{**fixed, **options})

    def build(self):
        self.model = tf.Module()
        self.model.large, self.model.small = tf.Variable(tf.zeros(self.size)), tf.Variable(tf.zeros(SMALL))
        self.optimizer = keras.optimizers.SGD(1.0)
        self.gradients = ctl.Gradients(**self.gradient_options)

    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)

    def train_step(self, numbers):
        gradients = tf.stack([gradient_of(n, self.size) for n in tf.unstack(numbers)])
        for number in self.broken:
            gradients = tf.where((numbers == number)[:, None], float("nan"), gradients)
        with tf.GradientTape() as tape:
            losses = tf.linalg.matvec(gradients, self.model.large) + tf.reduce_sum(self.model.small)
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
    (error,) = errors.values() or [tf.zeros(SIZE)]
    return {
        "large": trainer.model.large.numpy().astype(float).tolist(),
        "small": trainer.model.small.numpy().astype(float).tolist(),
        "left": error.numpy().astype(float).tolist(),
    }


def resumed(strategy, model_dir):
    """Trains in two runs of 3 and 5 steps."""
    trained(strategy, 3, model_dir=model_dir)
    return trained(strategy, STEPS, model_dir=model_dir)


def bytes_sent(strategy, wire_dtype):
    before = engine_of(strategy).bytes_sent
    trained(strategy, 8, wire_dtype=wire_dtype, size=LARGE, steps_per_loop=8, log_every_steps=0)
    return engine_of(strategy).bytes_sent - before


def train_in_float(strategy):
    """Returns results in float. The sums of two workers are identical on both paths."""
    return {
        "float": trained(strategy, wire_dtype=None),
        "skip in float": trained(strategy, broken=[10], policy="skip", wire_dtype=None),
    }


def results(strategy, directory, exact):
    results_by_case = {
        **exact,
        "whole": trained(strategy, model_dir=f"{directory}/whole"),
        "pieces": resumed(strategy, f"{directory}/pieces"),
        "stop": trained(strategy, broken=[6]),
        "skip": trained(strategy, broken=[10], policy="skip"),
    }
    if engine_of(strategy) is not None:
        engine_of(strategy).all_share_memory = False  # as between machines, where 16 bits apply
        results_by_case["bytes"] = [bytes_sent(strategy, dtype) for dtype in ("int8", "bfloat16", None)]
    return results_by_case


def main():
    strategy = ctl.make_strategy("multi_worker", communication="tcp")
    exact = train_in_float(strategy)
    results_by_path = {"tcp": results(strategy, f"{sys.argv[1]}/tcp", exact)}
    if "ring" in sys.argv:
        install_engine(strategy, None)
        results_by_path["ring"] = results(strategy, f"{sys.argv[1]}/ring", exact)
    print(json.dumps(results_by_path))


if __name__ == "__main__":
    main()
