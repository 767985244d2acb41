"""Two workers whose gradients travel in buckets; and updates that begin before all have come.

early_update.py numbers              weights and errors with buckets, and at once
early_update.py travelling HOW SECS  the last bucket leaves once a variable has changed, or after SECS
"""

import json
import os
import sys
import time

import ctl
import keras
import tensorflow as tf
from ctl.collectives import engine, links
from ctl.distribute import communication_choice

SIZES, BUCKET = (20_001, 20_002, 20_003), 1 << 16  # three buckets
os.environ |= {"CTL_COLLECTIVES": "tcp", "HOROVOD_FUSION_THRESHOLD": "0"}  # no memory, one at a time
communication_choice._LEAST_BUCKET = 0
STRATEGY = ctl.make_strategy("multi_worker", communication="tcp")


@tf.custom_gradient
def with_gradient(x, factor):
    return x, lambda upstream: (upstream * factor, None)


class Job(ctl.Trainer):
    """Of three variables; the loss is what it is, and the gradient what the data say."""

    def __init__(self, factors, how, optimizer):
        self.factors, self.how, self.made = factors, how, optimizer
        fixed = {"strategy": STRATEGY, "communication": "tcp", "global_batch_size": 2, "writers": []}
        super().__init__(**fixed, steps_per_loop=3)

    def build(self):
        self.model = tf.Module()
        self.model.parts = [tf.Variable(tf.random.stateless_normal([n], [1, n])) for n in SIZES]
        self.optimizer = self.made()
        self.gradients = ctl.Gradients(**self.how)

    def train_data(self, batch_size):  # a row of the global batch for each worker
        return (
            tf.data.Dataset.from_tensor_slices(tf.constant(self.factors))
            .unbatch()
            .batch(batch_size, drop_remainder=True)
        )

    def train_step(self, factors):
        with tf.GradientTape() as tape:
            parts = [with_gradient(part, factors[0]) for part in self.model.parts]
            losses = sum(tf.reduce_mean(tf.square(part)) for part in parts)[None]
            loss = self.average(losses)
        self.minimize(loss, tape, self.model.parts)
        return {"loss": losses}


def trained(bucket, factors, how, optimizer=lambda: keras.optimizers.SGD(0.1)):
    """Weights as text, the error if there is one, and the last step."""
    communication_choice.best_bucket = lambda *_: bucket
    STRATEGY.__dict__.pop("_ctl_measured", None)
    trainer = Job(factors, how, optimizer)
    error = ""
    try:
        trainer.train(len(factors))
    except ctl.NonFiniteError as e:
        error = str(e)
    weights = tf.concat([part.read_value() for part in trainer.model.parts], axis=0)
    return {"weights": weights.numpy().tobytes().hex(), "error": error, "step": trainer.step}


def numbers():
    bad = float("nan")
    steps = [[1.0, 2.0], [0.5, -1.0], [1.0, 1.0], [2.0, 0.0]]
    cases = {
        "plain": (steps, {}),
        "adam": (steps, {}, lambda: keras.optimizers.Adam(0.1)),
        "clipped": (steps, {"clip_norm": 0.01}),
        "half": (steps, {"wire_dtype": "float16"}),
        "large in half": ([[1.0, 1.0], [3e8, 1.0]], {"wire_dtype": "float16"}),
        "huge": ([*steps, [1e20, 1.0]], {}),  # too large to promise, and finite
        "infinite norm": ([*steps, [1e22, 1.0]], {}),
        "stop": ([*steps[:2], [1.0, bad], steps[3]], {}),
        "skip": ([*steps[:2], [1.0, bad], steps[3]], {"on_nonfinite": "skip"}),
        "too much": ([*steps[:2], [3e38, 3e38], steps[3]], {"on_nonfinite": "skip"}),
    }
    return {
        name: {"buckets": trained(BUCKET, *case), "at once": trained(0, *case)}
        for name, case in cases.items()
    }


def travelling(how, most_secs):
    """Seconds for which the last bucket waited for the first update; None if it did not come in time."""
    carried_out, waited, held = engine.transfers.carried_out, [], {}
    communication_choice.best_bucket = lambda *_: BUCKET
    trainer = Job([[1.0, 2.0]] * 2, how, lambda: keras.optimizers.Adam(0.1))
    trainer.train(1)
    last = trainer.model.parts[-1]
    before = last.numpy()[0]

    def watched(mesh, ranks, me, header, asked):
        if (SIZES[0],) in [tuple(shape) for request, _ in asked for shape in request.shapes]:
            held["since"] = time.monotonic()
        return carried_out(mesh, ranks, me, header, asked)

    def after_an_update(write):
        def written(link):
            if "since" in held:
                secs = time.monotonic() - held["since"]
                if secs < most_secs and last.numpy()[0] == before:
                    time.sleep(0.01)
                    return
                del held["since"]
                waited.append(secs if secs < most_secs else None)
            write(link)

        return written

    links.SocketLink.write = after_an_update(links.SocketLink.write)
    engine.transfers.carried_out = watched
    trainer.train(2)
    return {"waited": waited, "changed": bool(last.numpy()[0] != before)}


if sys.argv[1] == "numbers":
    print(json.dumps(numbers()))
else:
    print(json.dumps(travelling(json.loads(sys.argv[2]), float(sys.argv[3]))))
