"""Contrastive learning of image features: two views of an image are closer than views of other images.

python -m models.simclr --model_dir=/tmp/simclr --epochs=5
python -m models.simclr --model_dir=/tmp/simclr2 --strategy=mirrored --num_virtual_devices=2

Chen, Kornblith, Norouzi and Hinton 2020, arXiv:2002.05709. A linear classifier is trained at the same time
to measure the quality of the features. Its loss does not change them.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import images

DATA = flags.DEFINE_string("data", "shipped", images.HELP)
IMAGE_SIZE = flags.DEFINE_integer("image_size", 32, "Pixels per side, for folders of pictures.")
FEATURES = flags.DEFINE_integer("features", 64, "Numbers per image.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Step size of Adam.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "Divides similarities, -1 to 1, in the loss.")

layers = keras.layers


class SimClr(ctl.Trainer):
    """Trainer of image features. Images are uint8 `[b, h, w, c]`; only the classifier uses labels `[b]`."""

    def __init__(
        self, config=None, *, data="shipped", image_size=32, features=64, learning_rate=2e-3,
        temperature=0.2, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        if temperature <= 0:
            raise ctl.UsageError(f"--temperature is {temperature}; expected a number above 0.")
        self.arrays, self.classes = images.load(data, image_size)
        self.features, self.rate, self.temperature = features, learning_rate, temperature

    def build(self):
        shape = self.arrays["train"]["image"].shape[1:]
        self.views = keras.Sequential([
            keras.Input(shape),
            layers.RandomTranslation(0.15, 0.15, fill_mode="nearest"),
            layers.RandomRotation(0.05, fill_mode="nearest"),
            layers.RandomZoom(0.2, fill_mode="nearest"),
        ])  # fmt: skip
        self.model = keras.Sequential([
            keras.Input(shape),
            layers.Rescaling(1 / 127.5, offset=-1),
            *(
                layers.Conv2D(width, 3, strides=2, padding="same", activation="relu")
                for width in (16, 32, 64)
            ),
            layers.Flatten(),
            layers.Dense(self.features, activation="relu"),
        ])  # fmt: skip
        self.projection = keras.Sequential([
            keras.Input((self.features,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(32),
            layers.UnitNormalization(),
        ])  # fmt: skip
        self.classifier = keras.Sequential([
            keras.Input((self.features,)),
            layers.Dense(len(self.classes)),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.rate)
        self.optimizer.build(self.learned)
        self.classifier_optimizer = keras.optimizers.Adam(1e-2)
        self.classifier_optimizer.build(self.classifier.trainable_variables)

    @property
    def learned(self):
        """Variables that the contrastive loss trains, without those of the classifier."""
        return self.model.trainable_variables + self.projection.trainable_variables

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def contrast(self, one, other):
        """Returns losses and hits, `[b]`, of a search for the partner of each row of `one` in `other`.

        Args:
          one, other: Projections of two views of the same images, `[b, 32]`. Rows of all replicas are
            candidates.
        """
        every, first = self.gather(other)
        same, _ = self.gather(one)
        own = first + tf.range(tf.shape(one)[0])
        far = tf.one_hot(own, tf.shape(same)[0], on_value=-1e9)  # a row is not its own partner
        found = tf.matmul(one, every, transpose_b=True) / self.temperature
        among = tf.matmul(one, same, transpose_b=True) / self.temperature + far
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(own, tf.concat([found, among], axis=1))
        return losses, tf.equal(tf.argmax(found, axis=1, output_type=tf.int32), own)

    def train_step(self, batch):
        image = tf.cast(batch["image"], tf.float32)
        with tf.GradientTape() as tape:
            one, other = (self.model(self.views(image, training=True), training=True) for _ in range(2))
            pair = self.projection(one, training=True), self.projection(other, training=True)
            (there, hits), (back, _) = self.contrast(*pair), self.contrast(*pair[::-1])
            losses = (there + back) / 2
            loss = self.average(losses)
        self.minimize(loss, tape, self.learned)
        with tf.GradientTape() as tape:
            scores = self.judged(tf.stop_gradient(one), batch["label"])
            loss = self.average(scores["classifier_loss"])
        self.minimize(
            loss, tape, self.classifier.trainable_variables, self.classifier_optimizer
        )  # fmt: skip
        return {"loss": losses, "pair_accuracy": hits, **scores}

    def judged(self, features, label):
        logits = self.classifier(features)
        return {
            "classifier_loss": tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), label),
        }

    def eval_step(self, batch):
        features = self.model(tf.cast(batch["image"], tf.float32), training=False)
        return self.judged(features, batch["label"])


if __name__ == "__main__":
    ctl.run(
        SimClr, data=DATA, image_size=IMAGE_SIZE, features=FEATURES, learning_rate=LEARNING_RATE,
        temperature=TEMPERATURE,
    )  # fmt: skip
