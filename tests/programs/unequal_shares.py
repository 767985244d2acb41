"""An embedding with batches of seven, split to two replicas as three and four examples (15 and 20 rows).

python unequal_shares.py STRATEGY STEPS MODEL_DIR
"""

import json
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf
from small_models import every_step, losses


class Odd(ctl.Trainer):
    in_memory = False

    def build(self):
        start = np.random.default_rng(7).normal(size=[4000, 3])
        self.model = tf.Module()
        self.model.table = tf.Variable(start, dtype=tf.float32)
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        ids = np.random.default_rng(1).integers(0, 4000, [63, 5])
        if self.in_memory:
            return ctl.from_arrays(ids, batch_size, shuffle=False)
        return tf.data.Dataset.from_tensor_slices(ids).batch(batch_size, drop_remainder=True)

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.model.table, ids)
            scores = tf.reduce_sum(tf.reduce_sum(rows, 1) ** 2, axis=1)
            loss = self.average(scores)
        self.minimize(loss, tape)
        return {"loss": scores}


def outcome(strategy, steps, in_memory=False, model_dir=None):
    """Trains a model and returns its losses and weights."""
    writer = ctl.MemoryWriter()
    trainer = Odd(
        strategy=strategy, global_batch_size=7, writers=[writer], intervals=every_step(),
        model_dir=model_dir,
    )  # fmt: skip
    trainer.in_memory = in_memory
    trainer.train(steps)
    return {"losses": losses(writer), "weights": trainer.model.table.numpy().tolist()}


if __name__ == "__main__":
    print(json.dumps(outcome(sys.argv[1], int(sys.argv[2]), model_dir=sys.argv[3])))
