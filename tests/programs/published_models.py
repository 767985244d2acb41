"""Models of the kinds that keras.io publishes: custom steps, custom losses and endpoints."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
EXAMPLES, BATCH, EPOCHS = 52, 16, 3  # the last batch has 4 rows


def arrays(seed=0, n=EXAMPLES):
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(n, 6)), generator.normal(size=(n, 1))
    return x.astype(np.float32), y.astype(np.float32)


def stacked(inputs, *units):
    inner = [layers.Dense(n, activation="relu") for n in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *inner, layers.Dense(units[-1])])


def inputs_of(data):
    return data[0] if isinstance(data, tuple) else data


class Autoencoder(keras.Model):
    """A model with logs that have names other than its trackers, and a value without a tracker."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = stacked(6, 4), stacked(4, 6)
        self.total_tracker = keras.metrics.Mean(name="total_loss")
        self.error_tracker = keras.metrics.Mean(name="reconstruction_loss")

    @property
    def metrics(self):
        return [self.total_tracker, self.error_tracker]

    def losses_of(self, x):
        code = self.encoder(x)
        error = tf.reduce_mean(tf.reduce_sum((self.decoder(code) - x) ** 2, axis=1))
        return error + 0.1 * tf.reduce_mean(code**2), error

    def train_step(self, data):
        with tf.GradientTape() as tape:
            total, error = self.losses_of(inputs_of(data))
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_tracker.update_state(total)
        self.error_tracker.update_state(error)
        return {
            "loss": self.total_tracker.result(), "error": self.error_tracker.result(),
            "newest": error,
        }  # fmt: skip


class Adversaries(keras.Model):
    """Two optimizers, of which the critic's is applied twice per step. Has no `call`."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = stacked(4, 6), stacked(6, 8, 1)
        self.maker_loss, self.critic_loss = (keras.metrics.Mean(name=n) for n in ("g_loss", "d_loss"))

    def compile(self, maker_optimizer, critic_optimizer, loss_fn):
        super().compile()
        self.maker_optimizer, self.critic_optimizer = maker_optimizer, critic_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.critic_loss, self.maker_loss]

    def train_step(self, data):
        real = inputs_of(data)
        real_labels, generated_labels = tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])
        for _ in range(2):
            with tf.GradientTape() as tape:
                both = tf.concat([self.maker(real[:, :4]), real], axis=0)
                loss = self.loss_fn(tf.concat([real_labels, generated_labels], axis=0), self.critic(both))
            weights = self.critic.trainable_weights
            self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(generated_labels, self.critic(self.maker(real[:, :4])))
        weights = self.maker.trainable_weights
        self.maker_optimizer.apply(tape.gradient(loss, weights), weights)
        self.maker_loss.update_state(loss)
        return {"d_loss": self.critic_loss.result(), "g_loss": self.maker_loss.result()}


class Denoiser(keras.Model):
    """Diffusion with averaged weights and a layer that is not used here."""

    def __init__(self):
        super().__init__()
        self.network, self.average = stacked(7, 8, 6), stacked(7, 8, 6)
        self.average.set_weights(self.network.get_weights())
        self.normalizer = layers.Normalization()

    def compile(self, **options):
        super().compile(**options)
        self.noise_loss = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss]

    def loss_of(self, network, x):
        rate, noise = tf.sigmoid(x[:, :1]), tf.sin(7.0 * x)
        return self.loss(noise, network(tf.concat([x * rate + noise * (1 - rate), rate], axis=1)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.network, inputs_of(data))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.noise_loss.update_state(loss)
        for new, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * new)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        self.noise_loss.update_state(self.loss_of(self.average, inputs_of(data)))
        return {m.name: m.result() for m in self.metrics}


class Siamese(keras.Model):
    """A loss per example from three parts of each example."""

    def __init__(self):
        super().__init__()
        dense = layers.Dense(4, use_bias=False)  # a bias would have no gradient
        self.embedding = keras.Sequential([keras.Input((2,)), dense])
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        anchor, positive, negative = (self.embedding(x[:, i : i + 2]) for i in (0, 2, 4))
        return tf.reduce_sum((anchor - positive) ** 2, -1), tf.reduce_sum((anchor - negative) ** 2, -1)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            near, far = self(inputs_of(data))
            loss = tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))
        weights = self.embedding.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Captioner(keras.Model):
    """A model with `compute_loss` and the compiled metrics, under different names."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        results = self.get_metrics_result()
        return {"loss": results["loss"], "acc": results["mae"]}


class Distiller(keras.Model):
    """A custom `compute_loss` without a compiled loss."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = stacked(6, 1), stacked(6, 1)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hard = keras.losses.MeanSquaredError()(y, y_pred)
        return hard + tf.reduce_mean((y_pred - self.teacher(x)) ** 2)


class Endpoint(layers.Layer):
    """A layer that adds the loss of targets in its inputs, as LogisticEndpoint and CTC endpoints do."""

    def call(self, targets, predicted):
        self.add_loss(keras.losses.MeanSquaredError()(targets, predicted))
        return predicted


class Measured(keras.Model):
    """A model that returns custom values from `compute_metrics`."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        super().compute_metrics(x, y, y_pred, sample_weight)
        return {"n": tf.constant(4.0), "error": self.get_metrics_result()["mae"]}


class Noisy(keras.Model):
    """A model that draws random numbers without a seed."""

    def train_step(self, data):
        x = inputs_of(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x + tf.random.normal(tf.shape(x))) - x[:, :1]) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"noisy_loss": loss}


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without `get_config`."""

    def __call__(self, step):
        return 0.01 / (1.0 + tf.cast(step, tf.float32))


class Unnamed(keras.optimizers.Adam):
    def get_config(self):
        raise NotImplementedError("no configuration")


class Halves(keras.Model):
    """A model that compares the halves of a batch, which needs an even number of rows."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Dense(3)

    def call(self, x):
        return self.embedding(x)

    def train_step(self, data):
        first, second = tf.split(inputs_of(data), 2, axis=0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(first) - self(second)) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"distance": loss}


class Reshaped(keras.Model):
    """A model that reshapes to the batch size of its data."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(tf.reshape(tf.reshape(x, [4, 4, 6]), [16, 6]))


class Transfer(keras.Model):
    """A frozen body with normalization in inference mode, below a new head."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization()])
        self.head = layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.body(x, training=False))
