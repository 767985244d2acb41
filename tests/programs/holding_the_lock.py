"""An update that holds the lock for long. The chief prints the number of complete steps.

    python holding_the_lock.py FILE

FILE is written when the long update begins.
"""

import json
import sys
import threading
import time

import ctl
import numpy as np
import tensorflow as tf

STEPS = 1000
ROUNDS = 4000  # of work within the update: about 20 s


class Update:
    """An optimizer that changes no variable and is slow for the batch that begins with example 1."""

    def __init__(self, trainer):
        self._trainer = trainer

    @tf.autograph.experimental.do_not_convert
    def apply(self, gradients, variables):
        def work():
            tf.io.write_file(sys.argv[1], "")
            m = tf.random.normal([700, 700])
            loop = (lambda i, x: i < ROUNDS), (lambda i, x: (i + 1, tf.tanh(x @ m)))
            return tf.while_loop(*loop, (0, m), parallel_iterations=1)[1][0, 0] * 0.0

        zero = tf.cond(tf.equal(self._trainer.first, 1), work, lambda: 0.0)
        variables[0].assign_sub(0.0 * gradients[0] + zero)


class Slow(ctl.Trainer):
    """A trainer with one slow update."""

    def build(self):
        self.model = tf.Module()
        self.model.w = tf.Variable(1.0)
        self.optimizer = Update(self)

    def train_data(self, batch_size):
        return ctl.from_arrays(np.arange(10 * STEPS), batch_size, shuffle=False)

    def train_step(self, batch):
        self.first = batch[0]
        with tf.GradientTape() as tape:
            loss = self.average(tf.cast(batch, tf.float32) * self.model.w)
        self.minimize(loss, tape)
        return {}


# one loop, so that a worker waits only for the lock
one_loop = ctl.Intervals(steps_per_loop=STEPS, log=ctl.Every(), save=ctl.Every())
trainer = Slow(global_batch_size=1, writers=[], intervals=one_loop)
trainer.prepare()


def print_steps():
    while True:
        print("counted", trainer.step, flush=True)
        time.sleep(0.5)


print("training", flush=True)
threading.Thread(target=print_steps, daemon=True).start()
trainer.train(STEPS)
print(json.dumps({"step": trainer.step}), flush=True)
