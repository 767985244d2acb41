"""Classification of handwritten digits with a small convolutional network, on one device or many.

python -m models.mnist --model_dir=/tmp/mnist --train_steps=500
python -m models.mnist --model_dir=/tmp/mnist2 --strategy=mirrored --num_virtual_devices=2
ctl launch --workers=2 -- python -m models.mnist --model_dir=/tmp/mnist3
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import digits

DATA = flags.DEFINE_string("data", "shipped", digits.HELP)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of Adam, for one replica.")
LR_SCALING = flags.DEFINE_enum("lr_scaling", "none", ["none", "linear", "sqrt"],
                               "Scaling of the learning rate with the number of replicas.")  # fmt: skip
DROPOUT = flags.DEFINE_float("dropout", 0.0, "Dropout rate of the dense layer. 0: off.")


class Mnist(ctl.Trainer):
    """A small classifier. Images are uint8 `[b, 28, 28]`, labels int64 `[b]`."""

    def __init__(
        self, config=None, *, data="shipped", learning_rate=1e-3, lr_scaling="none", dropout=0.0,
        **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        self.arrays, self.dropout = digits.load(data), dropout
        replicas = self.topology.num_replicas
        self.learning_rate = ctl.scale_learning_rate(learning_rate, replicas, lr_scaling)

    def build(self):
        """Creates the network and the optimizer."""
        self.model = keras.Sequential([
            keras.Input((28, 28)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            *([keras.layers.Dropout(self.dropout)] if self.dropout else []),
            keras.layers.Dense(10, dtype="float32"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.learning_rate)

    def train_data(self, batch_size):
        """Returns batches of training examples."""
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        """Returns batches of test examples."""
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def score(self, batch, training):
        """Returns loss and accuracy of each example, `[b]`."""
        logits = self.model(batch["image"], training=training)
        return {
            "loss": tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), batch["label"]),
        }

    def train_step(self, batch):
        """Trains on one replica's part of the batch."""
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        """Evaluates one replica's part of the batch."""
        return self.score(batch, training=False)


if __name__ == "__main__":
    ctl.run(Mnist, data=DATA, learning_rate=LEARNING_RATE, lr_scaling=LR_SCALING, dropout=DROPOUT)
