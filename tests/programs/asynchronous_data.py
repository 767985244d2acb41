"""Examples read by asynchronous workers, and the result of a convex problem, as one line of JSON."""

import json

import ctl
import keras
import numpy as np
import tensorflow as tf

STEPS, BATCH, FEATURES = 40, 8, 5


class Seen(ctl.Trainer):
    """A trainer that counts the uses of each example. The data suffice for one worker alone."""

    def __init__(self, form, **options):
        super().__init__(global_batch_size=BATCH, writers=[], **options)
        self.form = form

    def build(self):
        self.seen = tf.Variable(tf.zeros([2 * STEPS * BATCH], tf.int64), trainable=False)
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.0)

    def train_data(self, batch_size):
        ids = np.arange(2 * STEPS * BATCH)
        if self.form == "arrays":
            return ctl.from_arrays(ids, batch_size)
        same = tf.lookup.KeyValueTensorInitializer(ids, ids)
        table = tf.lookup.StaticHashTable(same, -1)  # workers receive tables with their content
        data = tf.data.Dataset.from_tensor_slices(ids).shuffle(len(ids)).batch(batch_size)
        return data.map(table.lookup)

    def train_step(self, batch):
        self.seen.scatter_nd_add(batch[:, None], tf.ones_like(batch))
        with tf.GradientTape() as tape:
            loss = self.average(self.model(tf.cast(batch[:, None], tf.float32))[:, 0] ** 2)
        self.minimize(loss, tape)
        return {}


class LeastSquares(ctl.Trainer):
    """A linear relation with noise. The optimum is the least squares solution."""

    def build(self):
        self.model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)
        self.gradients = ctl.Gradients(accumulate_steps=2, clip_norm=100.0)

    def train_data(self, batch_size):
        x = np.random.default_rng(0).normal(size=(200, FEATURES)).astype(np.float32)
        noise = np.random.default_rng(1).normal(size=200)
        return ctl.from_arrays((x, (x @ np.arange(FEATURES) + 1 + noise).astype(np.float32)), batch_size)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = (self.model(x)[:, 0] - y) ** 2
            loss_share = self.average(loss)
        self.minimize(loss_share, tape)
        return {"loss": loss}

    def whole_loss(self):
        x, y = tf.nest.flatten(self.train_data(200).rows.tensors())
        return float(tf.reduce_mean((self.model(x)[:, 0] - y) ** 2).numpy())


def count_examples(form, strategy):
    trainer = Seen(form, strategy=strategy)
    if form == "dataset":
        trainer.train(epochs=0.5)
    else:
        trainer.train(STEPS)
    counts = trainer.seen.numpy()
    return {"most": int(counts.max()), "all": int(counts.sum()), "step": trainer.step}


def optimum():
    x = np.random.default_rng(0).normal(size=(200, FEATURES)).astype(np.float32)
    y = x @ np.arange(FEATURES) + 1 + np.random.default_rng(1).normal(size=200)
    a = np.concatenate([x, np.ones((200, 1))], 1)
    w = np.linalg.lstsq(a, y, rcond=None)[0]
    return float(np.mean((a @ w - y) ** 2))


def get_error(strategy, trainer_class=Seen, steps=4, **changes):
    """Returns the error of a training run in which methods of the trainer are replaced."""
    changed = type("Changed", (trainer_class,), {k: staticmethod(v) for k, v in changes.items()})
    options = {"form": "arrays"} if trainer_class is Seen else {"global_batch_size": 200, "writers": []}
    try:
        changed(strategy=strategy, **options).train(steps)
    except ctl.CtlError as e:
        return f"{type(e).__name__}: {e}"


def generator(batch_size):
    spec = tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter([[1] * batch_size]), output_signature=spec)


def unknown(batch_size):
    return tf.data.Dataset.range(99).filter(lambda i: i < 50).batch(batch_size, drop_remainder=True)


def endless(batch_size):
    return unknown(batch_size).repeat()


def count_steps(strategy):
    """Returns the number of steps of two epochs of data of unknown length, and the batch size."""
    trainer = type("Counted", (Seen,), {"train_data": staticmethod(unknown)})("arrays", strategy=strategy)
    trainer.train(epochs=2)
    return trainer.step, trainer.global_batch_size


def broken(batch_size):
    return np.full([200, FEATURES], np.nan, np.float32), np.zeros(200, np.float32)


if __name__ == "__main__":
    strategy = ctl.make_strategy("auto")
    straight = LeastSquares(strategy=strategy, global_batch_size=200, writers=[])
    straight.train(150)
    straight.train(300)
    print(json.dumps({
        "arrays": count_examples("arrays", strategy), "dataset": count_examples("dataset", strategy),
        "loss": straight.whole_loss(), "optimum": optimum(),
        "iterations": int(straight.optimizer.iterations.numpy()),
        "python": get_error(strategy, train_data=generator),
        "list": get_error(strategy, train_step=lambda batch: []),
        "endless": get_error(strategy, train_data=endless, steps=None), "counted": count_steps(strategy),
        "file": get_error(strategy, train_data=lambda b: ctl.shard(unknown(b), "file")),
        "nan": get_error(strategy, LeastSquares, train_data=broken),
        "again": count_examples("arrays", strategy),
    }))  # fmt: skip
