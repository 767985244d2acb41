"""Generation of digits with a small DCGAN: two optimizers in one step, images in TensorBoard.

python -m models.gan --model_dir=/tmp/gan --train_steps=2000
ctl launch --workers=2 -- python -m models.gan --model_dir=/tmp/gan2 --train_steps=2000

Radford, Metz and Chintala 2016, arXiv:1511.06434.
"""

import ctl
import keras
import tensorflow as tf
from absl import flags

from models.data import digits

DATA = flags.DEFINE_string("data", "shipped", digits.HELP)
GENERATOR_RATE = flags.DEFINE_float("generator_rate", 2e-4, "Learning rate of the generator.")
DISCRIMINATOR_RATE = flags.DEFINE_float(
    "discriminator_rate", 2e-4, "Learning rate of the discriminator."
)
DISCRIMINATOR_EVERY = flags.DEFINE_integer(
    "discriminator_every_steps", 2,
    "Steps between updates of the discriminator; the generator is updated in every step.",
    lower_bound=1)  # fmt: skip
SHOW_EVERY = flags.DEFINE_integer(
    "show_every_steps", 200, "Steps between generated pictures, a multiple of --log_every_steps. 0: off."
)

NOISE_SIZE, NUM_SAMPLES = 64, 36
layers = keras.layers


def logistic_loss(logits, is_real):
    """Returns losses `[b]` of logits `[b, 1]` for real images, or for generated images."""
    labels = tf.fill(tf.shape(logits), float(is_real))
    return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)[:, 0]


class Gan(ctl.Trainer):
    """A generator of images, and a discriminator that separates generated from real images."""

    def __init__(
        self, config=None, *, data="shipped", generator_rate=2e-4, discriminator_rate=2e-4,
        discriminator_every_steps=2, show_every_steps=200, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        self.arrays, self.show_every_steps = digits.load(data), show_every_steps
        self.generator_rate, self.discriminator_rate = generator_rate, discriminator_rate
        self.discriminator_every_steps = discriminator_every_steps

    def build(self):
        """Creates generator, discriminator and their optimizers."""
        self.model = keras.Sequential([
            keras.Input((NOISE_SIZE,)),
            layers.Dense(7 * 7 * 32, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.LeakyReLU(),
            layers.Reshape((7, 7, 32)),
            layers.Conv2DTranspose(16, 5, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(1, 5, strides=2, padding="same", activation="tanh", dtype="float32"),
        ])  # fmt: skip
        self.discriminator = keras.Sequential([
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 5, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Conv2D(32, 5, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1, dtype="float32"),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.generator_rate, beta_1=0.5)
        self.discriminator_optimizer = keras.optimizers.Adam(self.discriminator_rate, beta_1=0.5)
        self.discriminator_optimizer.build(self.discriminator.trainable_variables)

    def train_data(self, batch_size):
        """Returns batches of images and their numbers."""
        arrays = {"image": self.arrays["train"]["image"]}
        numbers = tf.range(len(arrays["image"]), dtype=tf.int64)
        return ctl.from_arrays({**arrays, "number": numbers}, batch_size)

    def noise(self, numbers):
        """Returns noise `[b, 64]` that depends only on the example numbers `[b]` and the step.

        So the noise is the same on any number of replicas.
        """
        seeds = tf.stack([numbers, tf.fill(tf.shape(numbers), self.step_variable)], axis=1)
        return tf.map_fn(
            lambda s: tf.random.stateless_normal([NOISE_SIZE], s), seeds, fn_output_signature=tf.float32
        )

    def train_step(self, batch):
        """Updates the generator, and the discriminator every n-th step."""
        real = tf.cast(batch["image"], tf.float32)[..., None] / 127.5 - 1
        noise = self.noise(batch["number"])
        with tf.GradientTape() as tape:
            fake = self.model(noise, training=True)
            generator_loss = logistic_loss(self.discriminator(fake, training=True), True)
            loss = self.average(generator_loss)
        self.minimize(loss, tape)
        with tf.GradientTape() as tape:
            real_logits = self.discriminator(real, training=True)
            fake_logits = self.discriminator(tf.stop_gradient(fake), training=True)
            discriminator_loss = logistic_loss(real_logits, True) + logistic_loss(fake_logits, False)
            loss = self.average(discriminator_loss)
        self.minimize(
            loss, tape, self.discriminator.trainable_variables, self.discriminator_optimizer,
            when=self.step_variable % self.discriminator_every_steps == 0,
        )  # fmt: skip
        is_correct = tf.concat([real_logits > 0, fake_logits < 0], axis=1)
        return {
            "generator_loss": generator_loss, "discriminator_loss": discriminator_loss,
            "discriminator_accuracy": tf.reduce_mean(tf.cast(is_correct, tf.float32), axis=1),
        }  # fmt: skip

    def after_loop(self, step, means):
        """Writes generated images to TensorBoard."""
        if self.show_every_steps and step % self.show_every_steps == 0:
            self.show("generated", self.generate_samples())

    def generate_samples(self):
        """Returns images `[36, 28, 28, 1]` in 0..1, generated from the same noise in each call."""
        noise = tf.random.stateless_normal([NUM_SAMPLES, NOISE_SIZE], [self.seed, 0])
        return (self.model(noise, training=False).numpy() + 1) / 2


if __name__ == "__main__":
    ctl.run(
        Gan, data=DATA, generator_rate=GENERATOR_RATE, discriminator_rate=DISCRIMINATOR_RATE,
        discriminator_every_steps=DISCRIMINATOR_EVERY, show_every_steps=SHOW_EVERY,
    )  # fmt: skip
