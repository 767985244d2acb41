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
IMAGE_SIZE = flags.DEFINE_integer("image_size", 32, "Height and width of images from folders (pixels).")
FEATURES = flags.DEFINE_integer("features", 64, "Size of the feature vector of an image.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Learning rate of Adam.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "Temperature by which similarities are divided.")

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
        self.features, self.learning_rate, self.temperature = features, learning_rate, temperature

    def build(self):
        """Creates encoder, projection, classifier and their optimizers."""
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
            layers.Dense(32, dtype="float32"),
            layers.UnitNormalization(dtype="float32"),
        ])  # fmt: skip
        self.classifier = keras.Sequential([
            keras.Input((self.features,)),
            layers.Dense(len(self.classes), dtype="float32"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.learning_rate)
        self.optimizer.build(self.encoder_variables)
        self.classifier_optimizer = keras.optimizers.Adam(1e-2)
        self.classifier_optimizer.build(self.classifier.trainable_variables)

    @property
    def encoder_variables(self):
        """Variables that the contrastive loss trains, without those of the classifier."""
        return self.model.trainable_variables + self.projection.trainable_variables

    def train_data(self, batch_size):
        """Returns batches of training examples."""
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        """Returns batches of test examples."""
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def contrastive_loss(self, anchors, partners):
        """Returns losses `[b]` and whether the most similar row is the partner, bool `[b]`.

        Args:
          anchors: Projections of one view of the images, `[b, 32]`.
          partners: Projections of another view, `[b, 32]`. The rows of all replicas are candidates.
        """
        all_partners, first_row = self.gather(partners)
        all_anchors, _ = self.gather(anchors)
        labels = first_row + tf.range(tf.shape(anchors)[0])
        is_itself = tf.one_hot(labels, tf.shape(all_anchors)[0], on_value=-1e9)  # excluded
        to_partners = tf.matmul(anchors, all_partners, transpose_b=True) / self.temperature
        to_anchors = tf.matmul(anchors, all_anchors, transpose_b=True) / self.temperature + is_itself
        logits = tf.concat([to_partners, to_anchors], axis=1)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return losses, tf.equal(tf.argmax(to_partners, axis=1, output_type=tf.int32), labels)

    def train_step(self, batch):
        """Trains the encoder, then the classifier on its features."""
        image = tf.cast(batch["image"], tf.float32)
        with tf.GradientTape() as tape:
            features = [self.model(self.views(image, training=True), training=True) for _ in range(2)]
            first, second = (self.projection(view, training=True) for view in features)
            first_losses, is_pair = self.contrastive_loss(first, second)
            second_losses, _ = self.contrastive_loss(second, first)
            losses = (first_losses + second_losses) / 2
            loss = self.average(losses)
        self.minimize(loss, tape, self.encoder_variables)
        with tf.GradientTape() as tape:
            scores = self.classify(tf.stop_gradient(features[0]), batch["label"])
            loss = self.average(scores["classifier_loss"])
        self.minimize(loss, tape, self.classifier.trainable_variables, self.classifier_optimizer)
        return {"loss": losses, "pair_accuracy": is_pair, **scores}

    def classify(self, features, label):
        """Returns loss and accuracy of the linear classifier, each `[b]`."""
        logits = self.classifier(features)
        return {
            "classifier_loss": tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), label),
        }

    def eval_step(self, batch):
        """Evaluates the classifier."""
        features = self.model(tf.cast(batch["image"], tf.float32), training=False)
        return self.classify(features, batch["label"])


if __name__ == "__main__":
    ctl.run(
        SimClr, data=DATA, image_size=IMAGE_SIZE, features=FEATURES, learning_rate=LEARNING_RATE,
        temperature=TEMPERATURE,
    )  # fmt: skip
