"""Two workers that read separate data, stopped and resumed, and the examples that they used.

own_files.py <directory> <steps> [<steps of the resumed run>]
"""

import json
import sys
from pathlib import Path

import ctl
import numpy as np
import tensorflow as tf
from inputs import CLASSES, FEATURES
from parts import Seen
from small_models import every_step

FILES, RECORDS = 4, 20


def write_files(directory: Path) -> list[str]:
    """Writes files with the same content for every worker. Each worker writes a separate copy."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [str(directory / f"part-{i}") for i in range(FILES)]
    for i, name in enumerate(names):
        with tf.io.TFRecordWriter(name) as writer:
            for n in range(RECORDS):
                writer.write(np.float32(i * RECORDS + n).tobytes())
    return names


class OwnFiles(Seen):
    """80 records in four files, in global batches of 8."""

    names: tuple[str, ...] = ()
    policy = "file"

    def train_data(self, batch_size):
        data = tf.data.TFRecordDataset(self.names)
        if self.policy == "off":
            data = data.shard(self.topology.num_workers, self.topology.worker_index)
        data = data.map(self.parsed).batch(batch_size, drop_remainder=True)
        return ctl.shard(data, self.policy)

    def parsed(self, text):
        value = tf.io.decode_raw(text, tf.float32)[0]
        return tf.fill([FEATURES], value), tf.cast(value, tf.int64) % CLASSES


class OwnShard(OwnFiles):
    policy = "off"


def trained(trainer_class: type, steps: int) -> dict:
    trainer = trainer_class(
        strategy=STRATEGY, global_batch_size=8, writers=[], intervals=every_step(),
        model_dir=f"{sys.argv[1]}/{trainer_class.policy}",
    )  # fmt: skip
    try:
        trainer.train(steps)
    except ctl.UsageError as error:
        return {"error": str(error)}
    return {"seen": trainer.seen, "step": trainer.step}


STRATEGY = ctl.make_strategy("auto")
if __name__ == "__main__":
    resolver = STRATEGY.cluster_resolver
    OwnFiles.names = write_files(Path(sys.argv[1]) / f"files-{resolver.task_id if resolver else 0}")
    lengths = [int(n) for n in sys.argv[2:]]
    result = {k.policy: [trained(k, n) for n in lengths] for k in (OwnFiles, OwnShard)}
    print(json.dumps(result))
