"""A gradient of the second of two workers is NaN in the third step, and all losses are finite.

Prints the error or the final weight for each policy, as one line of JSON.
"""

import json

import ctl
import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS = 4, 5
BROKEN = 2 * BATCH + 3  # the derivative of the square root of this example is 0 / 0
POLICIES = "stop", "skip"


class Root(ctl.Trainer):
    """Minimizes the square root of weight times example."""

    def build(self):
        self.weight = tf.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        examples = np.ones(BATCH * STEPS, np.float32)
        examples[BROKEN] = 0
        return tf.data.Dataset.from_tensor_slices(examples).batch(batch_size)

    def train_step(self, examples):
        with tf.GradientTape() as tape:
            losses = tf.sqrt(self.weight * examples)
            loss = self.average(losses)
        self.minimize(loss, tape, [self.weight])
        return {"loss": losses}


def outcome(strategy, policy):
    trainer = Root(strategy=strategy, on_nonfinite=policy, global_batch_size=BATCH, writers=[])
    try:
        trainer.train(STEPS)
    except ctl.NonFiniteError as e:
        return str(e)
    return float(trainer.weight.numpy())


def main():
    strategy = ctl.make_strategy("multi_worker", communication="tcp")
    print(json.dumps({policy: outcome(strategy, policy) for policy in POLICIES}))


if __name__ == "__main__":
    main()
