"""A residual network for small images: ResNet-18 with a narrow stem.

python -m models.resnet --model_dir=/tmp/resnet --train_steps=200
python -m models.resnet --model_dir=/tmp/resnet2 --data=PHOTOS --flip --width=32

He, Zhang, Ren and Sun 2016, arXiv:1512.03385.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import images

FLAGS = (
    flags.DEFINE_string("data", "shipped", images.HELP),
    flags.DEFINE_integer("image_size", 32, "Height and width of images from folders (pixels)."),
    flags.DEFINE_integer("width", 8, "Channels of the first stage; ResNet-18 has 64.", lower_bound=1),
    flags.DEFINE_integer("blocks", 2, "Residual blocks per stage.", lower_bound=1),
    flags.DEFINE_float("learning_rate", 0.1, "Learning rate of SGD for a batch size of 128."),
    flags.DEFINE_integer("decay_steps", 0, "Steps of cosine decay. 0: --train_steps."),
    flags.DEFINE_float("label_smoothing", 0.1, "Label smoothing, from 0 to below 1."),
    flags.DEFINE_float("shift", 0.1, "Largest random shift, as a fraction of the image size. 0: off."),
    flags.DEFINE_bool("flip", False, "Flip images horizontally at random."),
    flags.DEFINE_integer("top", 3, "k of the top-k accuracy.", lower_bound=1),
)
STAGES = 4
layers = keras.layers


class Confusion(keras.metrics.Metric):
    """Confusion matrix `[classes, classes]`: true classes in rows, predicted classes in columns."""

    def __init__(self, classes, **options):
        super().__init__(**options)
        self.counts = self.add_weight(shape=(classes, classes), initializer="zeros", name="counts")

    def update_state(self, labels, predicted):
        """Adds labels `[b]` and predicted classes `[b]`."""
        counts = tf.math.confusion_matrix(labels, predicted, len(self.counts), dtype=tf.float32)
        self.counts.assign_add(counts)

    def result(self):
        """Returns the matrix."""
        return self.counts


def batch_norm():
    """Returns a BatchNormalization layer with the statistics of all replicas."""
    return layers.BatchNormalization(momentum=0.9, synchronized=True)


def residual_block(x, width, stride):
    """Returns `x` after two convolutions with a shortcut connection."""
    shortcut = x
    if stride > 1 or x.shape[-1] != width:
        # sliced, because the gradient of a strided 1 x 1 filter corrupts memory in TensorFlow 2.21 on CPUs
        shortcut = layers.Conv2D(width, 1, use_bias=False)(x[:, ::stride, ::stride])
        shortcut = batch_norm()(shortcut)
    x = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
    x = layers.Activation("relu")(batch_norm()(x))
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = batch_norm()(x)
    return layers.Activation("relu")(x + shortcut)


class ResNet(ctl.Trainer):
    """A classifier of images, uint8 `[b, h, w, c]`; labels are int64 `[b]`."""

    def __init__(
        self, config=None, *, data="shipped", image_size=32, width=8, blocks=2, learning_rate=0.1,
        decay_steps=0, label_smoothing=0.1, shift=0.1, flip=False, top=3, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        if not 0 <= label_smoothing < 1:
            raise ctl.UsageError(f"--label_smoothing is {label_smoothing}; expected 0 to below 1.")
        self.width, self.blocks, self.label_smoothing = width, blocks, label_smoothing
        self.learning_rate, self.decay_steps = learning_rate, decay_steps
        self.shift, self.flip = shift, flip
        self.arrays, self.classes = images.load(data, image_size)
        self.top = min(top, len(self.classes))

    def build(self):
        """Creates the network and the optimizer."""
        inputs = keras.Input(self.arrays["train"]["image"].shape[1:], dtype="uint8")
        x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
        if self.flip:
            x = layers.RandomFlip("horizontal")(x)
        if self.shift:
            x = layers.RandomTranslation(self.shift, self.shift, fill_mode="nearest")(x)
        x = layers.Conv2D(self.width, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(batch_norm()(x))
        for stage in range(STAGES):
            for i in range(self.blocks):
                x = residual_block(x, self.width * 2**stage, stride=2 if stage and i == 0 else 1)
        x = layers.GlobalAveragePooling2D()(x)
        self.model = keras.Model(inputs, layers.Dense(len(self.classes), dtype="float32")(x))
        learning_rate = keras.optimizers.schedules.CosineDecay(
            self.learning_rate * self.global_batch_size / 128, self.decay_steps or self.config.train_steps
        )
        self.optimizer = keras.optimizers.SGD(
            learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.confusion = Confusion(len(self.classes), name="confusion")

    def train_data(self, batch_size):
        """Returns batches of training examples."""
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        """Returns batches of test examples."""
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def score(self, logits, label):
        """Returns loss and accuracies of each example, `[b]`."""
        targets = tf.one_hot(label, len(self.classes)) * (1 - self.label_smoothing)
        targets += self.label_smoothing / len(self.classes)
        return {
            "loss": tf.nn.softmax_cross_entropy_with_logits(targets, logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), label),
            f"top{self.top}_accuracy": tf.math.in_top_k(label, logits, self.top),
        }

    def train_step(self, batch):
        """Trains on one replica's part of the batch."""
        with tf.GradientTape() as tape:
            scores = self.score(self.model(batch["image"], training=True), batch["label"])
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        """Evaluates one replica's part of the batch."""
        logits = self.model(batch["image"], training=False)
        self.confusion.update_state(batch["label"], tf.argmax(logits, axis=1))
        return {**self.score(logits, batch["label"]), "confusion": self.confusion}

    def after_evaluation(self, step, means, metrics):
        """Writes the confusion matrix to TensorBoard."""
        counts = metrics["confusion"].result()
        self.log("confusion/names", ctl.Matrix(counts, rows=self.classes, columns=self.classes))


if __name__ == "__main__":
    ctl.run(ResNet, **{flag.name: flag for flag in FLAGS})
