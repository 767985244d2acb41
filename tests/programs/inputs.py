"""A worker: trains on inputs of every kind and prints what came of each as JSON."""

import json
import logging
import sys
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from ctl.profiling import stragglers
from small_models import every_step, losses

CLASSES, FEATURES = 3, 4


class Linear(ctl.Trainer):
    """A linear classifier of `[b, 4]`; subclasses say where batches come from."""

    def build(self):
        self.model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def features(self, batch):
        return batch[0], batch[1]

    def score(self, batch, training):
        x, y = self.features(batch)
        logits = self.model(x, training=training)
        return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)}

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        return self.score(batch, training=False)


class Generator(Linear):
    """22 examples of unknown number: 6 batches of 4, the last with 2 rows."""

    def train_data(self, batch_size):
        def rows():
            for i in range(22):
                yield np.full([FEATURES], i / 10, np.float32), i % CLASSES

        signature = (tf.TensorSpec([FEATURES]), tf.TensorSpec([], tf.int64))
        return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(batch_size)

    eval_data = train_data


class Uneven(Linear):
    """Another number of batches on each worker: all are to stop at the shortest."""

    def train_data(self, batch_size):
        count = 5 if self.topology.is_chief else 3
        data = tf.data.Dataset.range(100).map(lambda i: (tf.ones([FEATURES]), i % CLASSES))
        return data.batch(batch_size).take(count).filter(lambda x, y: True)


class Ragged(Linear):
    def train_data(self, batch_size):
        rows = tf.ragged.constant([[1.0] * (i % FEATURES + 1) for i in range(13)])
        data = tf.data.Dataset.from_tensor_slices({"row": rows, "label": np.arange(13) % CLASSES})
        return data.batch(batch_size)

    eval_data = train_data

    def features(self, batch):
        return batch["row"].to_tensor(shape=[None, FEATURES]), batch["label"]


class Finite(Linear):
    def train_data(self, batch_size):
        x = np.ones([100, FEATURES], np.float32)
        return tf.data.Dataset.from_tensor_slices((x, np.arange(100) % CLASSES)).batch(batch_size)


class OneBadRow(Finite):
    """Row 42 is NaN: batch 11 of 4, in the share of one replica."""

    def train_data(self, batch_size):
        x = np.ones([100, FEATURES], np.float32)
        x[42] = np.nan
        return tf.data.Dataset.from_tensor_slices((x, np.arange(100) % CLASSES)).batch(batch_size)


def slowly(x):
    """`x`, later than on the first worker."""
    return tf.ensure_shape(tf.numpy_function(lambda a: time.sleep(0.15) or a, [x], tf.float32), x.shape)


class SlowInput(Linear):
    """The second worker's batches come late; nobody knows how many there are."""

    def train_data(self, batch_size):
        data = tf.data.Dataset.range(400).map(lambda i: (tf.ones([FEATURES]), i % CLASSES))
        data = data.batch(batch_size, drop_remainder=True).filter(lambda x, y: True)
        return data if self.topology.is_chief else data.map(lambda x, y: (slowly(x), y))


class SlowStep(Finite):
    """The second worker's steps take longer."""

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x if self.topology.is_chief else slowly(x), y))


def named(kind, strategy):
    """What the log says of slow workers, with short windows."""
    seen, handler = [], logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("ctl").addHandler(handler)
    stragglers._WINDOW_SECS, stragglers._WINDOWS_ON_ONE_HOST = 0.0, 3
    outcome(kind, strategy, 24)
    return [message for message in seen if "slower than the others" in message]


def outcome(kind, strategy, steps, **options):
    writer = ctl.MemoryWriter()
    options = {"intervals": every_step(), **options}
    trainer = kind(strategy=strategy, global_batch_size=4, writers=[writer], **options)
    result = {}
    try:
        trainer.train(steps)
        if kind in (Generator, Ragged):
            result["eval"] = trainer.evaluate()["loss"]
    except ctl.CtlError as e:
        result["error"] = f"{type(e).__name__}: {e}"
    weights = [float(w.sum()) for w in trainer.model.get_weights()]
    return {**result, "step": trainer.step, "losses": losses(writer), "weights": weights}


def main(word: str) -> None:
    strategy = ctl.make_strategy(word, num_virtual_devices=2 if word == "mirrored" else 0)
    fives = every_step(steps_per_loop=5, log=ctl.Every(), save=ctl.Every(steps=5))
    quick = every_step(save=ctl.Every(secs=1e-6), steps_per_loop=1)
    saved = ctl.MemoryCheckpoints(keep=ctl.Keep(newest=0))
    result = {
        "generator": outcome(Generator, strategy, 100),
        "ragged": outcome(Ragged, strategy, 100),
        "finite": outcome(Finite, strategy, 100),
        "one bad row": outcome(
            OneBadRow, strategy, 25, intervals=fives, checkpoints=ctl.MemoryCheckpoints()
        ),
        "by the clock": outcome(Finite, strategy, 10, intervals=quick, checkpoints=saved),
    }
    result["by the clock"]["saved"] = saved.steps()
    if word == "multi_worker":
        result["slow"] = [named(kind, strategy) for kind in (SlowInput, SlowStep)]
        result["uneven"] = outcome(Uneven, strategy, 100)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
