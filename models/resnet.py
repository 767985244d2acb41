"""A residual network for small images: ResNet-18 with a narrow stem.

python -m models.resnet --model_dir=/tmp/resnet --train_steps=200
python -m models.resnet --model_dir=/tmp/resnet2 --data=PHOTOS --flip --width=32

He, Zhang, Ren and Sun 2016, arXiv:1512.03385.
"""

from types import SimpleNamespace

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import images

DATA = flags.DEFINE_string("data", "shipped", images.HELP)
IMAGE_SIZE = flags.DEFINE_integer("image_size", 32, "Pixels per side, for folders of pictures.")
WIDTH = flags.DEFINE_integer("width", 8, "Channels of the first stage; 64 is ResNet-18.", lower_bound=1)
BLOCKS = flags.DEFINE_integer("blocks", 2, "Blocks of each of the four stages.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "Step size of SGD, for a batch of 128.")
DECAY_STEPS = flags.DEFINE_integer("decay_steps", 0, "Steps of the cosine. 0: --train_steps.")
SMOOTHING = flags.DEFINE_float("label_smoothing", 0.1, "Probability shared by all classes.")
SHIFT = flags.DEFINE_float("shift", 0.1, "Largest shift, as a part of the image. 0 turns it off.")
FLIP = flags.DEFINE_bool("flip", False, "Flip images left to right at random.")
TOP = flags.DEFINE_integer("top", 3, "Also count labels among so many likeliest.", lower_bound=1)

SETTINGS = (
    DATA, IMAGE_SIZE, WIDTH, BLOCKS, LEARNING_RATE, DECAY_STEPS, SMOOTHING, SHIFT, FLIP, TOP,
)  # fmt: skip
DEFAULTS = {flag.name: flag.default for flag in SETTINGS}
layers = keras.layers


class Confusion(keras.metrics.Metric):
    """Confusion matrix `[classes, classes]`: true classes in rows, predicted classes in columns."""

    def __init__(self, classes, **options):
        super().__init__(**options)
        self.counts = self.add_weight(shape=(classes, classes), initializer="zeros", name="counts")

    def update_state(self, labels, predicted):
        """Adds labels `[b]` and predicted classes `[b]`."""
        found = tf.math.confusion_matrix(labels, predicted, len(self.counts), dtype=tf.float32)
        self.counts.assign_add(found)

    def result(self):
        return self.counts


def normalized():
    """Returns a BatchNormalization layer with the statistics of all replicas."""
    return layers.BatchNormalization(momentum=0.9, synchronized=True)


def block(x, width, stride):
    """Returns `x` after two convolutions with a shortcut connection."""
    short = x
    if stride > 1 or x.shape[-1] != width:
        # sliced, because the gradient of a strided 1 x 1 filter corrupts memory in TensorFlow 2.21 on CPUs
        short = layers.Conv2D(width, 1, use_bias=False)(x[:, ::stride, ::stride])
        short = normalized()(short)
    x = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
    x = layers.Activation("relu")(normalized()(x))
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = normalized()(x)
    return layers.Activation("relu")(x + short)


class ResNet(ctl.Trainer):
    """A classifier of images, uint8 `[b, h, w, c]`; labels are int64 `[b]`."""

    def __init__(self, config=None, **settings):
        """Accepts the flags above as keywords, e.g. `width=64`, and the keywords of ctl.Trainer."""
        own = {name: settings.pop(name, default) for name, default in DEFAULTS.items()}
        super().__init__(config, **settings)
        if not 0 <= own["label_smoothing"] < 1:
            raise ctl.UsageError(
                f"--label_smoothing is {own['label_smoothing']}; expected 0 to below 1."
            )
        self.own = SimpleNamespace(**own)
        self.arrays, self.classes = images.load(own["data"], own["image_size"])
        self.top = min(own["top"], len(self.classes))

    def build(self):
        own, shape = self.own, self.arrays["train"]["image"].shape[1:]
        image = keras.Input(shape, dtype="uint8")
        x = layers.Rescaling(1 / 127.5, offset=-1)(image)
        if own.flip:
            x = layers.RandomFlip("horizontal")(x)
        if own.shift:
            x = layers.RandomTranslation(own.shift, own.shift, fill_mode="nearest")(x)
        x = layers.Conv2D(own.width, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(normalized()(x))
        for stage in range(4):
            for number in range(own.blocks):
                x = block(x, own.width * 2**stage, 2 if stage and not number else 1)
        x = layers.GlobalAveragePooling2D()(x)
        self.model = keras.Model(image, layers.Dense(len(self.classes))(x))
        full = own.learning_rate * self.global_batch_size / 128
        rate = keras.optimizers.schedules.CosineDecay(full, own.decay_steps or self.config.train_steps)
        self.optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
        self.confusion = Confusion(len(self.classes), name="confusion")

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays["train"], batch_size)

    def eval_data(self, batch_size):
        return ctl.from_arrays(self.arrays["test"], batch_size)

    def score(self, logits, label):
        wanted = tf.one_hot(label, len(self.classes))
        smoothing = self.own.label_smoothing
        wanted = wanted * (1 - smoothing) + smoothing / len(self.classes)
        return {
            "loss": tf.nn.softmax_cross_entropy_with_logits(wanted, logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), label),
            f"top{self.top}_accuracy": tf.math.in_top_k(label, logits, self.top),
        }

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(self.model(batch["image"], training=True), batch["label"])
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        logits = self.model(batch["image"], training=False)
        self.confusion.update_state(batch["label"], tf.argmax(logits, axis=1))
        return {**self.score(logits, batch["label"]), "confusion": self.confusion}

    def after_evaluation(self, step, means, metrics):
        counts = metrics["confusion"].result()
        self.log("confusion/names", ctl.Matrix(counts, rows=self.classes, columns=self.classes))


if __name__ == "__main__":
    ctl.run(ResNet, **{flag.name: flag for flag in SETTINGS})
