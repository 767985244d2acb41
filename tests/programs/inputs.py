"""A worker that trains on inputs of every kind and prints the results as JSON."""

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
    """A linear classifier of `[b, 4]`. Subclasses define the data."""

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
    """22 examples of unknown cardinality: 6 batches of 4, the last with 2 rows."""

    def train_data(self, batch_size):
        def rows():
            for i in range(22):
                yield np.full([FEATURES], i / 10, np.float32), i % CLASSES

        signature = (tf.TensorSpec([FEATURES]), tf.TensorSpec([], tf.int64))
        return tf.data.Dataset.from_generator(rows, output_signature=signature).batch(batch_size)

    eval_data = train_data


class Uneven(Linear):
    """Different numbers of batches per worker. All workers stop after the shortest input."""

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
    """NaN in row 42: batch 11 of 4, in the share of one replica."""

    def train_data(self, batch_size):
        x = np.ones([100, FEATURES], np.float32)
        x[42] = np.nan
        return tf.data.Dataset.from_tensor_slices((x, np.arange(100) % CLASSES)).batch(batch_size)


class Rows:
    """A random-access source of 22 examples."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return np.full([FEATURES], index / 10, np.float32), index % CLASSES


class Source(Linear):
    """Examples of a random-access source, shuffled."""

    def train_data(self, batch_size):
        return ctl.from_source(Rows(), batch_size)

    eval_data = train_data


class PythonBatches(Linear):
    """The batches of `Generator` as a generator of global batches."""

    def train_data(self, batch_size):
        rows = [Rows()[i] for i in range(22)]
        for first in range(0, 22, batch_size):
            x, y = zip(*rows[first : first + batch_size], strict=True)
            yield np.stack(x), np.array(y)

    eval_data = train_data


class PyDataset(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = zip(*(Rows()[i] for i in range(4 * index, min(22, 4 * index + 4))), strict=True)
        return np.stack(x), np.array(y)


class KerasBatches(Linear):
    """Shuffled batches of a PyDataset."""

    def train_data(self, batch_size):
        return PyDataset()

    eval_data = train_data


def delay(x):
    """Returns `x` after a delay (0.15 s)."""
    return tf.ensure_shape(tf.numpy_function(lambda a: time.sleep(0.15) or a, [x], tf.float32), x.shape)


class SlowInput(Linear):
    """Batches of unknown number that are late on the second worker."""

    def train_data(self, batch_size):
        data = tf.data.Dataset.range(400).map(lambda i: (tf.ones([FEATURES]), i % CLASSES))
        data = data.batch(batch_size, drop_remainder=True).filter(lambda x, y: True)
        return data if self.topology.is_chief else data.map(lambda x, y: (delay(x), y))


class SlowStep(Finite):
    """Steps that take longer on the second worker."""

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x if self.topology.is_chief else delay(x), y))


def slow_worker_messages(trainer_class, strategy):
    """Returns the log messages about slow workers, with short windows."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ctl").addHandler(handler)
    stragglers._WINDOW_SECS, stragglers._WINDOWS_ON_ONE_HOST = 0.0, 3
    outcome(trainer_class, strategy, 24)
    return [message for message in messages if "slower than the others" in message]


def outcome(trainer_class, strategy, steps, **options):
    writer = ctl.MemoryWriter()
    options = {"intervals": every_step(), **options}
    trainer = trainer_class(strategy=strategy, global_batch_size=4, writers=[writer], **options)
    result = {}
    try:
        trainer.train(steps)
        if trainer_class in (Generator, Ragged, Source, PythonBatches, KerasBatches):
            result["eval"] = trainer.evaluate()["loss"]
    except ctl.CtlError as e:
        result["error"] = f"{type(e).__name__}: {e}"
    weights = [float(w.sum()) for w in trainer.model.get_weights()]
    return {**result, "step": trainer.step, "losses": losses(writer), "weights": weights}


def main(strategy_name: str) -> None:
    strategy = ctl.make_strategy(strategy_name, num_virtual_devices=2 if strategy_name == "mirrored" else 0)
    every_fifth_step = every_step(steps_per_loop=5, log=ctl.Every(), save=ctl.Every(steps=5))
    every_microsecond = every_step(save=ctl.Every(secs=1e-6), steps_per_loop=1)
    saved = ctl.MemoryCheckpoints(keep=ctl.Keep(newest=0))
    result = {
        "generator": outcome(Generator, strategy, 100),
        "ragged": outcome(Ragged, strategy, 100),
        "finite": outcome(Finite, strategy, 100),
        "source": outcome(Source, strategy, 9),
        "python batches": outcome(PythonBatches, strategy, 100),
        "py dataset": outcome(KerasBatches, strategy, 100),
        "one bad row": outcome(
            OneBadRow, strategy, 25, intervals=every_fifth_step, checkpoints=ctl.MemoryCheckpoints()
        ),
        "by the clock": outcome(Finite, strategy, 10, intervals=every_microsecond, checkpoints=saved),
    }
    result["by the clock"]["saved"] = saved.steps()
    if strategy_name == "multi_worker":
        result["slow"] = [
            slow_worker_messages(trainer_class, strategy) for trainer_class in (SlowInput, SlowStep)
        ]
        result["uneven"] = outcome(Uneven, strategy, 100)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
