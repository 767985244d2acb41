"""Training with `model.fit` in an elastic job. Each step subtracts an eighth from the single weight.

python elastic_fit.py DIRECTORY STEPS

DIRECTORY/go is the step up to which to train, as rank 0 reads it. Prints a JSON line per step.
"""

import json
import os
import sys
import time
from pathlib import Path

import ctl.hvd.keras as hvd
import keras
import tensorflow as tf
from ctl.hvd.keras import elastic
from ctl.hvd.keras.rates import TwoKerasCallback

HERE, STEPS, EPOCH = Path(sys.argv[1]), int(sys.argv[2]), 4

hvd.init()
model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125, momentum=0.0))
model.compile(optimizer, loss=lambda y, out: tf.reduce_mean(out - y), jit_compile=False)
model.layers[0].kernel.assign([[0.0]])
data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
state = elastic.KerasState(model, batch=0, epoch=0)


class WaitAndTell(TwoKerasCallback):
    """A callback that waits before a step and prints the progress after it."""

    def on_train_batch_begin(self, batch, logs=None):
        while self.completed_steps() >= hvd.broadcast_object(int((HERE / "go").read_text()), name="go"):
            time.sleep(0.02)
            state.check_host_updates()

    def on_train_batch_end(self, batch, logs=None):
        weights = hvd.allgather(tf.reshape(model.layers[0].kernel.value, [1]), name="weights")
        facts = {"weights": (-8 * weights).numpy().tolist(), "size": hvd.size(), "rank": hvd.rank()}
        facts |= {
            "step": self.completed_steps(),
            "pid": os.getpid(),
            "epoch": state.epoch,
            "batch": state.batch,
        }
        print(json.dumps(facts), flush=True)

    def completed_steps(self):
        return int(optimizer.iterations.numpy())


@elastic.run
def train(state):
    while state.epoch * EPOCH + state.batch < STEPS:
        if state.batch == EPOCH:  # interrupted between its last batch and its end
            state.epoch, state.batch = state.epoch + 1, 0
        model.fit(
            data, epochs=1, steps_per_epoch=EPOCH - state.batch, verbose=0,
            callbacks=[
                elastic.UpdateBatchStateCallback(state),
                elastic.UpdateEpochStateCallback(state),
                WaitAndTell(),
                elastic.CommitStateCallback(state),
            ],
        )  # fmt: skip


train(state)
