"""A worker with divided data: one shard per worker, files, or example numbers only."""

import json
import sys
import tempfile

import ctl
import numpy as np
import tensorflow as tf
from inputs import CLASSES, FEATURES, Linear, outcome
from small_models import every_step


class Seen(Linear):
    """A trainer that records the examples of this worker by the number in the first feature."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def train_step(self, batch):
        tf.py_function(lambda x: self.seen.extend(x[:, 0].numpy().tolist()), [batch[0]], [])
        return super().train_step(batch)


def numbered(numbers):
    def example(i):
        return tf.cast(tf.fill([FEATURES], i), tf.float32), i % CLASSES

    return numbers.map(example)


class Sharded(Seen):
    """24 examples, of which each worker has one half in batches of one replica."""

    def train_data_fn(self, context):
        numbers = tf.data.Dataset.range(24)
        numbers = numbers.shard(context.num_input_pipelines, context.input_pipeline_id)
        size = context.get_per_replica_batch_size(4)
        return numbered(numbers.shuffle(24)).batch(size, drop_remainder=True)


class Overlapping(Sharded):
    def train_data_fn(self, context):
        return numbered(tf.data.Dataset.range(24)).batch(context.get_per_replica_batch_size(4))


class GlobalBatches(Sharded):
    def train_data_fn(self, context):
        return numbered(tf.data.Dataset.range(24)).batch(64, drop_remainder=True)


class Files(Linear):
    """Data sharded by files. The class attribute `count` is the number of files."""

    count = 4

    def train_data(self, batch_size):
        names = []
        for i in range(self.count):
            names.append(f"{tempfile.mkdtemp()}/part-{i}")
            with tf.io.TFRecordWriter(names[-1]) as writer:
                for n in range(6):
                    writer.write(np.float32(i * 6 + n).tobytes())

        def parsed(text):
            value = tf.io.decode_raw(text, tf.float32)[0]
            return tf.fill([FEATURES], value / 24), tf.cast(value, tf.int64) % CLASSES

        return ctl.shard(tf.data.TFRecordDataset(names).map(parsed).batch(batch_size), "file")


class OneFile(Files):
    count = 1


class NoData(Seen):
    """A step that generates examples from their numbers."""

    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)

    def train_step(self, numbers):
        seeds = tf.stack([numbers, numbers * 0 + 7], axis=1)
        x = tf.map_fn(lambda s: tf.random.stateless_normal([FEATURES - 1], s), seeds, tf.float32)
        x = tf.concat([tf.cast(numbers, tf.float32)[:, None] / 100, x], axis=1)
        return super().train_step((x, numbers % CLASSES))


def train_and_list_examples(trainer_class, strategy, steps):
    writer = ctl.MemoryWriter()
    trainer = trainer_class(
        strategy=strategy, global_batch_size=4, writers=[writer], intervals=every_step()
    )
    trainer.train(steps)
    weights = [float(w.sum()) for w in trainer.model.get_weights()]
    return {"seen": trainer.seen, "step": trainer.step, "weights": weights}


def main(strategy_name: str) -> None:
    strategy = ctl.make_strategy(strategy_name, num_virtual_devices=2 if strategy_name == "mirrored" else 0)
    result = {
        "sharded": train_and_list_examples(Sharded, strategy, 100),
        "no data": train_and_list_examples(NoData, strategy, 5),
        "global batches": outcome_of_mistake(GlobalBatches, strategy),
        "files": outcome(Files, strategy, 100),
    }
    if strategy_name == "multi_worker":
        result["overlapping"] = outcome_of_mistake(Overlapping, strategy)
        result["one file"] = outcome_of_mistake(OneFile, strategy)
    print(json.dumps(result))


def outcome_of_mistake(trainer_class, strategy):
    trainer = trainer_class(strategy=strategy, global_batch_size=4, writers=[])
    try:
        trainer.train(3)
    except ctl.UsageError as e:
        return {"error": str(e), "step": trainer.step}
    return {"error": "", "step": trainer.step}


if __name__ == "__main__":
    main(sys.argv[1])
