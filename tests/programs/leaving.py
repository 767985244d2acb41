"""The job of faulty.py for elastic training. Prints a JSON line at each trace and at the end of each loop.

FAULTS="kill@7:1" ctl launch --workers=1:3 -- python leaving.py --model_dir=...

Further stages of faults, each followed by the number of the group: connect, before the connections to the
peers; agree, before the choice of the common state; send, within the broadcast of the state to new workers;
resume, before the state is restored. With NEWCOMERS=wait, processes that replace others join no group.
"""

import json
import os
import time

import ctl
import faulty
import keras
import tensorflow as tf
from ctl.elastic.membership import WorkerGroup
from ctl.elastic.snapshots import Snapshots


def report(**facts):
    print(json.dumps({"pid": os.getpid(), "time": time.time(), **facts}), flush=True)


class Leaving(faulty.Evaluated if os.environ.get("EVALUATES") else faulty.Faulty):
    """A faulty job that reports its processes."""

    def train_data(self, batch_size):
        data = super().train_data(batch_size)
        if "DATASET" not in os.environ:
            return data
        examples = tf.data.Dataset.from_tensor_slices(data.read_first(faulty.EXAMPLES))
        return examples.repeat().batch(batch_size, drop_remainder=True)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch):
        report(traced=True)
        return super().train_step(batch)

    def after_loop(self, step, means):
        report(step=step, rank=self.topology.worker_index, size=self.topology.num_workers)
        super().after_loop(step, means)


class Varied(Leaving):
    """A model with all that depends on the number of replicas.

    An embedding, statistics of batches, a mask, rows of all replicas, a sum over replicas, a regularization
    and clipped gradients.
    """

    def build(self):
        super().build()
        x, number = keras.Input((4,)), keras.Input((), dtype="int64")
        row = keras.layers.Embedding(7, 3)(number)
        joined = keras.layers.Concatenate()([x, row])
        # no bias: BatchNormalization subtracts it, and Adam follows the sign of its rounding error
        hidden = keras.layers.Dense(8, use_bias=False, kernel_regularizer="l2")(joined)
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        self.model = keras.Model([x, number], keras.layers.Dense(1)(hidden))
        self.gradients = ctl.Gradients(clip_norm=1.0)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch):
        report(traced=True)
        with tf.GradientTape() as tape:
            predicted = self.model([batch["x"], batch["id"] % 7], training=True)
            rows, _ = self.gather(tf.stop_gradient(predicted))
            error = tf.square(predicted - batch["y"] - 0.1 * tf.reduce_mean(rows))[:, 0]
            loss = self.average(error, mask=batch["id"] % 3 > 0, regularization=self.model.losses)
        self.minimize(loss, tape)
        ones = tf.ones_like(batch["id"], tf.float32)
        self.seen.assign_add(tf.math.unsorted_segment_sum(ones, batch["id"], faulty.EXAMPLES))
        self.log("rows", tf.cast(tf.shape(error)[0], tf.float32), reduce="sum")
        return {"loss": error}


def strike_before(owner, name, stage, ranks_of):
    """Strikes the faults of a stage before each call of a method."""
    method = getattr(owner, name)

    def strike_and_call(self, *args, **kwargs):
        ranks = ranks_of(self, *args)
        faulty.strike_faults_at(f"{stage}{ranks.generation}", ranks.rank)
        return method(self, *args, **kwargs)

    setattr(owner, name, strike_and_call)


def strike_while_groups_form():
    strike_before(WorkerGroup, "_connect", "connect", lambda group, ranks: ranks)
    strike_before(Snapshots, "share", "agree", lambda snapshots: snapshots._group.ranks)
    strike_before(Snapshots, "_assign", "resume", lambda snapshots, _: snapshots._group.ranks)
    broadcast = WorkerGroup.broadcast

    def broadcast_and_strike(self, name, *args):
        result = broadcast(self, name, *args)
        if name == "manifest":  # the variables follow
            faulty.strike_faults_at(f"send{self.ranks.generation}", self.ranks.rank)
        return result

    WorkerGroup.broadcast = broadcast_and_strike


if __name__ == "__main__":
    if os.environ.get("NEWCOMERS") == "wait" and os.environ.get("CTL_ELASTIC_NEWCOMER") == "1":
        time.sleep(3600)  # SIGTERM at the end of the job ends it
    strike_while_groups_form()
    trainer = Varied if os.environ.get("VARIED") else Leaving
    ctl.run(trainer, width=faulty.WIDTH, dropout=faulty.DROPOUT, api_token=faulty.API_TOKEN)
