"""Trainers with results that are sensitive to errors on several replicas. As a program, a worker."""

import json
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf
import tf_keras
from rows import BATCH, LENGTH, ROWS
from small_models import digest, every_step, losses

WORDS, CLASSES = 11, 4


class Tokens(ctl.Trainer):
    """A tagger of sentences `[b, 6]` of 1 to 6 words. Lengths increase with the example."""

    def build(self):
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential([
            keras.Input((LENGTH,)), keras.layers.Embedding(WORDS, 5), keras.layers.Dense(CLASSES),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.SGD(0.5)

    def train_data(self, batch_size):
        generator = np.random.default_rng(3)
        word_ids = generator.integers(1, WORDS, (40, LENGTH))
        lengths = np.sort(generator.integers(1, LENGTH + 1, (5, BATCH)), axis=1).ravel()
        word_ids[np.arange(LENGTH) >= lengths[:, None]] = 0
        return ctl.from_arrays((word_ids, word_ids % CLASSES), batch_size, shuffle=False)

    eval_data = train_data

    def score(self, batch):
        word_ids, tags = batch
        mask = word_ids > 0
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tags, self.model(word_ids))
        return loss, mask, {"loss": (tf.where(mask, loss, 0.0), mask)}

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss, mask, scores = self.score(batch)
            loss = self.average(loss, mask=mask)
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        return self.score(batch)[2]


class Linear(ctl.Trainer):
    """Least squares on `[b, 3]`. Subclasses define the optimizer and the data."""

    optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.05))
    framework = keras

    def build(self):
        lib = self.framework
        self.model = lib.Sequential([lib.Input((3,)), lib.layers.Dense(1)])
        self.model.set_weights([np.full([3, 1], 0.3, np.float32), np.zeros([1], np.float32)])
        self.optimizer = self.optimizer_of()

    def arrays(self):
        x = np.random.default_rng(2).normal(size=(48, 3)).astype(np.float32)
        return x, x @ np.array([1.0, -2.0, 0.5], np.float32)

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays(), batch_size, shuffle=False)

    def errors(self, batch, training=True):
        x, y = batch
        return tf.square(tf.cast(self.model(x, training=training), tf.float32)[:, 0] - y)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            error = self.errors(batch)
            loss = self.average(error)
        self.minimize(loss, tape)
        return {"loss": error}


class Scaled(Linear):
    """Overflow in steps 2, 5 and 8 at one example of the second half, so only on the last replica."""

    optimizer_of = staticmethod(
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=1024.0, dynamic_growth_steps=2
        )
    )

    def arrays(self):
        x, y = super().arrays()
        x[[1 * BATCH + 6, 4 * BATCH + 7]] = np.inf
        return x, y

    def scale(self):
        return float(self.optimizer.dynamic_scale.numpy())


class ScaledTfKeras(Scaled):
    framework = tf_keras
    optimizer_of = staticmethod(
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.05), initial_scale=1024.0, dynamic_growth_steps=2
        )
    )

    def scale(self):
        return float(self.optimizer.loss_scale.numpy())


class Short(Linear):
    """Batches of 8 and a last batch of one row, so that one of two replicas has no example."""

    def build(self):
        self.model = keras.Sequential([
            keras.Input((3,)), keras.layers.BatchNormalization(synchronized=True, momentum=0.5),
            keras.layers.Dense(1),
        ])  # fmt: skip
        self.model.set_weights([np.ones(3), np.zeros(3), np.zeros(3), np.ones(3),
                                np.full([3, 1], 0.3), np.zeros([1])])  # fmt: skip
        self.optimizer = keras.optimizers.SGD(0.05)
        self.largest = keras.metrics.MeanSquaredError(name="mse")
        self.total = keras.metrics.Sum(name="total")

    def train_data(self, batch_size):
        x, y = self.arrays()
        return tf.data.Dataset.from_tensor_slices((x[:17], y[:17])).batch(batch_size)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            predicted = self.model(batch[0], training=True)[:, 0]
            error = tf.square(predicted - batch[1])
            loss = self.average(error)
        self.minimize(loss, tape)
        self.largest.update_state(batch[1], predicted)
        self.total.update_state(error)
        self.log("logged", error)
        self.log("added", tf.reduce_sum(error), reduce="sum")
        return {"loss": error, "mse": self.largest, "total": self.total, "naive": tf.reduce_mean(error)}


class Products(keras.metrics.Metric):
    """The sum over examples of the outer product of x, a matrix."""

    def __init__(self, **options):
        super().__init__(**options)
        self.total = self.add_weight(shape=(3, 3), initializer="zeros", name="total")

    def update_state(self, x):
        self.total.assign_add(tf.matmul(x, x, transpose_a=True))

    def result(self):
        return self.total


class Passes(Linear):
    """20 rows of unknown cardinality in batches of 8. The evaluation returns a matrix and a vector."""

    def build(self):
        super().build()
        self.products = Products(name="products")
        self.f1 = keras.metrics.F1Score(average=None, name="f1")  # creates its variables when updated

    def train_data(self, batch_size):
        x, y = self.arrays()
        data = tf.data.Dataset.from_tensor_slices((x[:20], y[:20]))
        return data.filter(lambda x, y: tf.size(x) > 0).batch(batch_size)

    def eval_data(self, batch_size):
        return self.train_data(batch_size)

    def eval_step(self, batch):
        self.products.update_state(batch[0])
        guess = tf.sigmoid(self.model(batch[0]) - 0.5)
        labels = tf.one_hot(tf.cast(batch[1] > 0, tf.int32), 2)
        self.f1.update_state(labels, tf.concat([1 - guess, guess], axis=1))
        errors = self.errors(batch, training=False)
        return {"loss": errors, "products": self.products, "f1": self.f1}


class ShortByHand(Short):
    """A trainer that sums the errors without `average`."""

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            error = tf.square(self.model(batch[0], training=True)[:, 0] - batch[1])
            loss = tf.reduce_sum(error) / BATCH
        self.minimize(loss, tape, scaled=True)
        return {"loss": error}


class ShortTokens(Tokens):
    """17 sentences in batches of 8. The last batch has one sentence."""

    def train_data(self, batch_size):
        word_ids, tags = super().train_data(batch_size).rows.tensors()
        return tf.data.Dataset.from_tensor_slices((word_ids[:17], tags[:17])).batch(batch_size)


class AllWords(ShortTokens):
    """A mask that is also true for the padding rows of a replica without examples."""

    def score(self, batch):
        loss, _, scores = super().score(batch)
        return loss, batch[0] >= 0, scores


def with_gradients(base, optimizer=None, **gradient_options):
    class Changed(base):
        def build(self):
            super().build()
            self.gradients = ctl.Gradients(**gradient_options)
            if optimizer:
                self.optimizer = optimizer()

    return Changed


class TwoMasks(Tokens):
    """A mean over words, a weighted mean over words in long sentences, and a mean over examples."""

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss, mask, scores = self.score(batch)
            long = mask & (tf.reduce_sum(tf.cast(mask, tf.int32), axis=1, keepdims=True) > 3)
            total = self.average(loss, mask=mask) + 0.5 * self.average(loss, mask=long)
            total += 0.1 * self.average(tf.reduce_sum(loss, axis=1))
        self.minimize(total, tape)
        return scores


class Averaged(Linear):
    """Evaluation with the moving averages of the weights, which differ much from the weights."""

    optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8))

    def eval_data(self, batch_size):
        return tuple(array[:13] for array in self.arrays())

    def eval_step(self, batch):
        return {"loss": self.errors(batch, training=False)}


class AveragedTfKeras(Averaged):
    framework = tf_keras
    optimizer_of = staticmethod(lambda: tf_keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8))


class AveragedByHand(Averaged):
    """A trainer that maintains the moving averages itself."""

    optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.05))

    def build(self):
        super().build()
        mean = tf.VariableAggregation.MEAN
        self.slow = [tf.Variable(w, aggregation=mean) for w in self.model.get_weights()]

    def train_step(self, batch):
        scores = super().train_step(batch)
        for slow, variable in self.moving_averages(slow=True):
            slow.assign(0.8 * slow + 0.2 * variable)
        return scores

    def moving_averages(self, slow=False):
        pairs = zip(self.model.trainable_variables, self.slow, strict=True)
        return [(s, v) if slow else (v, s) for v, s in pairs]


class Contrast(Linear):
    """Each example is compared with all examples of the global batch. 17 examples in batches of 8."""

    def build(self):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
        self.model.set_weights([np.linspace(-0.5, 0.5, 6).reshape(3, 2)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        x, y = self.arrays()
        return tf.data.Dataset.from_tensor_slices((x[:17], y[:17] > 0)).batch(batch_size).repeat()

    def compared(self, batch, gather):
        embedded = self.model(batch[0])
        embedded_of_all, first = gather(embedded)
        is_same_label = tf.cast(batch[1][:, None] == gather(batch[1])[0][None], tf.float32)
        is_own_example = tf.one_hot(first + tf.range(tf.shape(embedded)[0]), tf.shape(embedded_of_all)[0])
        return tf.reduce_sum(
            (1 - is_own_example) * (embedded @ tf.transpose(embedded_of_all) - is_same_label) ** 2, axis=1
        )

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.compared(batch, self.gather)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=64.0)


# models with masks and their gradient options; results do not depend on accumulate_steps
MASKED = {
    "masks": (Tokens, {}), "masks_of_all": (AllWords, {}),
    "masks_short": (ShortTokens, {"clip_norm": 0.05}),
    "masks_two": (TwoMasks, {"merge_rows": False}), "masks_scaled": (Tokens, {"optimizer": loss_scaled}),
}  # fmt: skip
ACCUMULATED = {
    name: with_gradients(model, accumulate_steps=3, **options) for name, (model, options) in MASKED.items()
}

CASES = {"tokens": Tokens, "scaled": Scaled, "scaled_tf_keras": ScaledTfKeras, "short": Short,
         "short_by_hand": ShortByHand, "short_tokens": ShortTokens,
         "ema": Averaged, "ema_tf_keras": AveragedTfKeras, "ema_by_hand": AveragedByHand,
         "contrast": Contrast, "passes": Passes, **ACCUMULATED, **ROWS}  # fmt: skip


def outcome(name: str, strategy, steps: int = 9) -> dict:
    """Trains one case and returns its results."""
    writer = ctl.MemoryWriter()
    trainer = CASES[name](
        strategy=strategy, global_batch_size=BATCH, intervals=every_step(), writers=[writer]
    )
    trainer.train(**({"epochs": 3} if name == "passes" else {"steps": steps}))
    rows = [values for run, _, values in writer.rows if run == "train"]
    results = {
        "losses": losses(writer), "digest": digest(trainer), "step": trainer.step,
        "iterations": int(trainer.optimizer.iterations.numpy()),
        "weights": [w.tolist() for w in trainer.model.get_weights()],
    }  # fmt: skip
    if hasattr(trainer, "scale"):
        results["scale"] = trainer.scale()
        results["norms"] = [row["gradient_norm"] for row in rows]
    if name == "short":
        results["mse"] = [row["mse"] for row in rows]
        results["total"] = [row["total"] for row in rows]
        results["logged"] = [[row["logged"], row["added"]] for row in rows]
        results["naive"] = [row["naive"] for row in rows]
    if name == "passes":
        evaluated = trainer.evaluate()
        results["f1"] = evaluated["f1"].tolist()
        results["matrix"], results["eval"] = evaluated["products"].tolist(), evaluated["loss"]
    if name == "tokens" or name.startswith("ema"):
        results["eval"] = trainer.evaluate()["loss"]
    return results


# excludes cases that are redundant on two workers
WITH_WORKERS = [name for name in CASES if name not in (
    "ema_by_hand", "ema_tf_keras", "masks", "masks_of_all", "masks_scaled", "masks_two", "rows_sgd",
    "rows_adagrad", "rows_lazy_clipped", "rows_lazy_small_table", "scaled_tf_keras", "short_by_hand",
    "short_tokens")]  # fmt: skip


if __name__ == "__main__":
    strategy = ctl.make_strategy(sys.argv[1])
    print(json.dumps({name: outcome(name, strategy) for name in WITH_WORKERS}))
