"""A small job with the faults in FAULTS. Each fault occurs once, also if the job is restarted.

    FAULTS="kill@7:1 term@12 raise@20:0!" FAULTS_DIR=/tmp/x python faulty.py --model_dir=...

A fault is action@step[:worker][!]: at the end of that step, on that worker (by default the chief).
With "!" it occurs in every attempt. Actions:

A step may also be a stage before the first step: init, build, data, trace; choice, before the choice of
communication; eval_data and eval_trace, if EVALUATES=1. The stage "ended" is the report of a run's end.

    kill, stop, term, int, hup, usr1  the signal, to this process
    raise, exit             an exception of the hook; os._exit(7)
    hang                    sleeps, and never returns
    nan                     not an action: POISON=<id> makes the loss of that example NaN
"""

import os
import signal
import time
from pathlib import Path

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import flags
from ctl.distribute import communication_choice
from ctl.metrics.protocol import Ended

EXAMPLES = 480
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM,
           "int": signal.SIGINT, "hup": signal.SIGHUP, "usr1": signal.SIGUSR1}  # fmt: skip
WIDTH = flags.DEFINE_integer("width", 16, "Units of the hidden layer.")
API_TOKEN = flags.DEFINE_string("api_token", "", "Never used; must never be shown.")
DROPOUT = flags.DEFINE_float("dropout", 0.2, "Share that is dropped; 0 where replicas vary in number.")
POISON = int(os.environ.get("POISON", "-1"))
DECAY_STEPS = int(os.environ.get("DECAY_STEPS", "10"))  # of the learning rate, by 0.9
PAUSE_SECS = float(os.environ.get("PAUSE_SECS", "0"))  # after each step


def read_faults(worker: int) -> list[tuple[str, int | str, str]]:
    """Returns (action, step or stage, marker or "") of the faults of this worker."""
    faults = []
    for text in os.environ.get("FAULTS", "").split():
        action, _, position = text.rstrip("!").partition("@")
        step, _, fault_worker = position.partition(":")
        if int(fault_worker or 0) == worker:
            marker = "" if text.endswith("!") else text.replace("@", "-").replace(":", "-")
            faults.append((action, int(step) if step.isdigit() else step, marker))
    return faults


def strike_faults_at(position: int | str, worker: int) -> None:
    """Strikes the faults at this step or stage."""
    for action, fault_position, marker in read_faults(worker):
        if fault_position != position:
            continue
        fired = Path(os.environ.get("FAULTS_DIR", ".")) / f"fired-{marker}"
        if marker and fired.exists():
            continue
        if marker:
            fired.touch()
        print(f"fault: {action} at {position}", flush=True)
        perform_action(action)


def perform_action(action: str) -> None:
    if action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[action])
        time.sleep(0.2)  # a signal is delivered at once; its handler is processed after the loop
    elif action == "raise":
        raise RuntimeError("a fault that was asked for")
    elif action == "exit":
        os._exit(7)
    elif action == "hang":
        time.sleep(3600)


class Faulty(ctl.Trainer):
    """Regression with dropout. `seen` counts how often each example was used for an update."""

    def __init__(self, width=16, dropout=0.2, api_token="", **options):
        super().__init__(**options)
        self.width, self.dropout, self.api_token = width, dropout, api_token
        if "@ended" in os.environ.get("FAULTS", ""):
            self.extra_writers = (FaultyWriter(self.topology.worker_index),)
        strike_faults_at("init", self.topology.worker_index)

    def build(self):
        strike_faults_at("build", self.topology.worker_index)
        self.model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(self.width, activation="tanh"),
            keras.layers.Dropout(self.dropout, seed=3), keras.layers.Dense(1),
        ])  # fmt: skip
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, DECAY_STEPS, 0.9)
        self.optimizer = keras.optimizers.Adam(rate)
        self.seen = tf.Variable(
            tf.zeros([EXAMPLES]), trainable=False, aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )  # fmt: skip

    def train_data(self, batch_size):
        strike_faults_at("data", self.topology.worker_index)
        x = np.random.default_rng(0).normal(size=(EXAMPLES, 4)).astype(np.float32)
        arrays = {"id": np.arange(EXAMPLES), "x": x, "y": x.sum(axis=1, keepdims=True)}
        return ctl.from_arrays(arrays, batch_size)

    @tf.autograph.experimental.do_not_convert  # a fifth of the CPU time of a short run
    def train_step(self, batch):
        strike_faults_at("trace", self.topology.worker_index)
        with tf.GradientTape() as tape:
            error = tf.square(self.model(batch["x"], training=True) - batch["y"])[:, 0]
            error = tf.where(tf.equal(batch["id"], POISON), np.float32("nan"), error)
            loss = self.average(error)
        self.minimize(loss, tape)
        once = tf.math.unsorted_segment_sum(tf.ones_like(batch["id"], tf.float32), batch["id"], EXAMPLES)
        self.seen.assign_add(once)
        return {"loss": error}

    def after_loop(self, step, means):
        time.sleep(PAUSE_SECS)
        strike_faults_at(step, self.topology.worker_index)


class FaultyWriter(ctl.MetricWriter):
    """A writer that strikes the faults of the stage "ended"."""

    def __init__(self, worker):
        self.worker = worker

    def write(self, step, values, run="train"):
        pass

    def note(self, event):
        if isinstance(event, Ended):
            strike_faults_at("ended", self.worker)


class Evaluated(Faulty):
    """A faulty job with an evaluation."""

    def eval_data(self, batch_size):
        strike_faults_at("eval_data", self.topology.worker_index)
        return super().train_data(batch_size)

    @tf.autograph.experimental.do_not_convert
    def eval_step(self, batch):
        strike_faults_at("eval_trace", self.topology.worker_index)
        return {"loss": tf.square(self.model(batch["x"]) - batch["y"])[:, 0]}


def strike_before_choice():
    """Strikes the faults at "choice" before the workers choose their communication."""
    choose = communication_choice.choose_communication

    def reach_and_choose(strategy, topology, *args, **kwargs):
        strike_faults_at("choice", topology.worker_index)
        return choose(strategy, topology, *args, **kwargs)

    communication_choice.choose_communication = reach_and_choose


if __name__ == "__main__":
    strike_before_choice()
    trainer = Evaluated if os.environ.get("EVALUATES") else Faulty
    ctl.run(trainer, width=WIDTH, dropout=DROPOUT, api_token=API_TOKEN)
