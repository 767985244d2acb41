"""What a run costs beside its steps: metrics and pictures of them, and the time to the first step.

    python tests/benchmarks/host_cost.py [--rounds=9] [--only=metrics|start|launch]

metrics: two trainers take turns in one process, on steps of about a millisecond: one returns the loss and
tells nobody; the other returns ten numbers per example and has TensorBoard, metrics.jsonl and the bar on a
terminal. A third returns the ten numbers and tells nobody.
start: from the start of a process to the end of the first step, beside a plain script that trains the same
model in a loop of its own. launch: `ctl launch --workers=2`, beside two such plain scripts at once, and
beside two scripts of a MultiWorkerMirroredStrategy.
"""

import argparse
import os
import pathlib
import pty
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROUNDS, STEPS, TEN = 9, 1000, 10
HERE = pathlib.Path(__file__).resolve()

PLAIN = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf
x = np.zeros((4096, 32), np.float32)
y = np.zeros(4096, np.int64)
strategy = {strategy}
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096).repeat().batch(64).prefetch(1)
data = iter(strategy.experimental_distribute_dataset(data))
with strategy.scope():
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
def step(batch):
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.nn.compute_average_loss(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), global_batch_size=64)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
@tf.function
def train_step(batch):
    return strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None)
print("loss", float(train_step(next(data))), flush=True)
os.read(0, 1)  # a worker that ends before the other's step is done takes it along
os._exit(0)
"""

OURS = """
import ctl
import keras, numpy as np, tensorflow as tf
class Tiny(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        self.optimizer = keras.optimizers.Adam(1e-3)
    def train_data(self, batch_size):
        x, y = np.zeros((4096, 32), np.float32), np.zeros(4096, np.int64)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096).repeat().batch(batch_size)
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss_each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
            loss = self.average(loss_each)
        self.minimize(loss, tape)
        return {"loss": loss_each}
    def after_loop(self, step, means):
        print("loss", means["loss"], flush=True)
if __name__ == "__main__":
    ctl.run(Tiny)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=("metrics", "start", "launch"))
    flags = parser.parse_args()
    for part in (metrics, start, launch):
        if flags.only in (None, part.__name__):
            part(flags.rounds)


def interleaved(variants, rounds):
    """name -> median seconds of calls that return seconds; the first of each is left out."""
    found = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, measured in variants.items():
            found[name].append(measured())
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def show(title, medians, per=1.0, unit="s"):
    print(f"\n{title}\n{'':34}{unit:>10}{'ratio':>8}")
    first = next(iter(medians.values()))
    for name, seconds in medians.items():
        print(f"{name:34}{seconds * per:10.3f}{seconds / first:8.3f}", flush=True)


def metrics(rounds):
    import ctl
    import keras
    import overhead
    import tensorflow as tf

    class Larger(overhead.Tiny):
        many = False

        def build(self):
            layers = [keras.layers.Dense(512, "relu") for _ in range(2)]
            self.model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(10)])
            self.optimizer = keras.optimizers.SGD(1e-3)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                logits = self.model(x, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss = self.average(losses)
            self.minimize(loss, tape)
            columns = tf.unstack(logits, axis=1)[: TEN - 1] if self.many else []
            return {"loss": losses, **{f"logit_{i}": column for i, column in enumerate(columns)}}

    terminal, shown = pty.openpty()
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()

    def variant(many, told):
        directory = tempfile.mkdtemp()
        gate = overhead.Gate()
        writers = [
            ctl.ConsoleWriter(os.fdopen(os.dup(shown), "w"), live=True),
            ctl.JsonlWriter(f"{directory}/metrics.jsonl"),
            ctl.TensorBoardWriter(directory),
        ]
        trainer = Larger(
            strategy="default", global_batch_size=64, writers=[gate, *(writers if told else [])],
            intervals=ctl.Intervals(save=ctl.Every()),
        )  # fmt: skip
        trainer.many = many
        gate.allowed = 1
        threading.Thread(target=trainer.train, args=(2**40,), daemon=True).start()

        def measured():
            began, before = time.perf_counter(), gate.step
            gate.advance(STEPS)
            return (time.perf_counter() - began) / (gate.step - before)

        measured()
        return measured

    variants = {
        "loss, told nobody": variant(False, False),
        "ten numbers, told nobody": variant(True, False),
        "ten numbers, everything on": variant(True, True),
    }
    show("metrics: ms per step", interleaved(variants, rounds), 1e3, "ms")


def drain(terminal):
    while os.read(terminal, 1 << 16):
        pass


def to_first_line(commands, environments=(None,)):
    """Seconds from the start of processes until each has printed its loss."""
    known = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as installed
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
    began = time.perf_counter()
    running = [
        subprocess.Popen(command, env=known | (more or {}), **streams)
        for command, more in zip(commands, environments, strict=True)
    ]
    for process in running:
        if not any("loss" in line for line in process.stdout):
            raise SystemExit(f"{process.args} ended without a step")
    seconds = time.perf_counter() - began
    for process in running:
        process.stdin.close()
    for process in running:
        process.stdout.read()
        process.wait()
    return seconds


def programs(directory):
    names = "plain.py", "workers.py", "ours.py"
    plain, workers, ours = (pathlib.Path(directory) / name for name in names)
    plain.write_text(PLAIN.format(strategy="tf.distribute.get_strategy()"))
    workers.write_text(PLAIN.format(strategy="tf.distribute.MultiWorkerMirroredStrategy()"))
    ours.write_text(OURS)
    flags = [str(ours), "--global_batch_size=64", "--train_steps=1"]
    return [[sys.executable, str(plain)], [sys.executable, str(workers)], [sys.executable, *flags]]


def start(rounds):
    with tempfile.TemporaryDirectory() as directory:
        plain, _, ours = programs(directory)
        variants = {
            "plain script": lambda: to_first_line([plain]),
            "ctl": lambda: to_first_line([[*ours, f"--model_dir={tempfile.mkdtemp(dir=directory)}"]]),
        }
        show("start: to the first step", interleaved(variants, rounds))


def launch(rounds):
    with tempfile.TemporaryDirectory() as directory:
        plain, workers, ours = programs(directory)

        def launched():
            model_dir = tempfile.mkdtemp(dir=directory)
            command = [sys.executable, "-m", "ctl", "launch", "--workers=2", "--", *ours]
            return to_first_line([[*command, f"--model_dir={model_dir}"]])

        variants = {
            "two plain scripts": lambda: to_first_line([plain, plain], (None, None)),
            "two scripts of MWMS": lambda: to_first_line([workers, workers], cluster()),
            "ctl launch --workers=2": launched,
        }
        show("launch: to the first step", interleaved(variants, rounds))


def cluster():
    import json

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        hosts = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, two)]
    configs = [{"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}} for i in range(2)]
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


if __name__ == "__main__":
    main()
