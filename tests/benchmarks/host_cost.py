"""Host cost of a run: metric writers, and the time to the first step.

    python tests/benchmarks/host_cost.py [--rounds=9] [--steps=1000] [--only=metrics|start|launch]

metrics: three trainers run alternately in one process, with steps of about a millisecond. One returns the
loss and has no writers; one returns ten values per example and has no writers; one returns ten values and
writes to TensorBoard, metrics.jsonl and a progress bar on a terminal.
start: time from the start of a process to the end of the first step, compared with a script that trains the
same model in a hand-written loop. launch: `ctl launch --workers=2`, compared with two such scripts in
parallel, and with two scripts with a MultiWorkerMirroredStrategy.
"""

import argparse
import functools
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

ROUNDS, NUM_VALUES = 9, 10
HERE = pathlib.Path(__file__).resolve()

TENSORFLOW_SCRIPT = """
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
os.read(0, 1)  # the exit of a worker would abort the step of the other one
os._exit(0)
"""

CTL_SCRIPT = """
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
    parser.add_argument("--steps", type=int, default=1000, help="steps per measurement of metrics")
    flags = parser.parse_args()
    parts = {"metrics": functools.partial(metrics, flags.steps), "start": start, "launch": launch}
    for name, part in parts.items():
        if flags.only in (None, name):
            part(flags.rounds)


def interleaved(variants, rounds):
    """Returns the median seconds by name, without the first call of each."""
    times_by_name = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, measure in variants.items():
            times_by_name[name].append(measure())
    return {name: statistics.median(seconds[1:]) for name, seconds in times_by_name.items()}


def show(title, medians, per=1.0, unit="s"):
    print(f"\n{title}\n{'':34}{unit:>10}{'ratio':>8}")
    first = next(iter(medians.values()))
    for name, seconds in medians.items():
        print(f"{name:34}{seconds * per:10.3f}{seconds / first:8.3f}", flush=True)


def metrics(steps, rounds):
    import ctl
    import keras
    import overhead
    import tensorflow as tf

    class Larger(overhead.Tiny):
        has_many_values = False

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
            columns = tf.unstack(logits, axis=1)[: NUM_VALUES - 1] if self.has_many_values else []
            return {"loss": losses, **{f"logit_{i}": column for i, column in enumerate(columns)}}

    terminal, console = pty.openpty()
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()

    def variant(has_many_values, has_writers):
        directory = tempfile.mkdtemp()
        gate = overhead.Gate()
        writers = [
            ctl.ConsoleWriter(os.fdopen(os.dup(console), "w"), live=True),
            ctl.JsonlWriter(f"{directory}/metrics.jsonl"),
            ctl.TensorBoardWriter(directory),
        ]
        trainer = Larger(
            strategy="default", global_batch_size=64, writers=[gate, *(writers if has_writers else [])],
            intervals=ctl.Intervals(save=ctl.Every()),
        )  # fmt: skip
        trainer.has_many_values = has_many_values
        gate.allowed = 1
        threading.Thread(target=trainer.train, args=(2**40,), daemon=True).start()

        def measure():
            start_secs, before = time.perf_counter(), gate.step
            gate.advance(steps)
            return (time.perf_counter() - start_secs) / (gate.step - before)

        measure()
        return measure

    variants = {
        "loss, no writers": variant(False, False),
        "ten values, no writers": variant(True, False),
        "ten values, all writers": variant(True, True),
    }
    show("metrics: ms per step", interleaved(variants, rounds), 1e3, "ms")


def drain(terminal):
    while os.read(terminal, 1 << 16):
        pass


def to_first_line(commands, environments=(None,)):
    """Returns seconds from the start of processes until each has printed its loss."""
    # installed packages have byte code
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
    start_secs = time.perf_counter()
    running = [
        subprocess.Popen(command, env=environ | (variables or {}), **streams)
        for command, variables in zip(commands, environments, strict=True)
    ]
    for process in running:
        if not any("loss" in line for line in process.stdout):
            raise SystemExit(f"{process.args} ended without a step")
    seconds = time.perf_counter() - start_secs
    for process in running:
        process.stdin.close()
    for process in running:
        process.stdout.read()
        process.wait()
    return seconds


def programs(directory):
    names = "without_ctl.py", "workers.py", "ctl_script.py"
    tensorflow_script, workers, ctl_script = (pathlib.Path(directory) / name for name in names)
    tensorflow_script.write_text(TENSORFLOW_SCRIPT.format(strategy="tf.distribute.get_strategy()"))
    workers.write_text(TENSORFLOW_SCRIPT.format(strategy="tf.distribute.MultiWorkerMirroredStrategy()"))
    ctl_script.write_text(CTL_SCRIPT)
    flags = [str(ctl_script), "--global_batch_size=64", "--train_steps=1"]
    scripts = [[str(tensorflow_script)], [str(workers)], flags]
    return [[sys.executable, *script] for script in scripts]


def start(rounds):
    with tempfile.TemporaryDirectory() as directory:
        tensorflow_script, _, ctl_script = programs(directory)
        variants = {
            "TensorFlow script": lambda: to_first_line([tensorflow_script]),
            "ctl": lambda: to_first_line([[*ctl_script, f"--model_dir={tempfile.mkdtemp(dir=directory)}"]]),
        }
        show("start: to the first step", interleaved(variants, rounds))


def launch(rounds):
    with tempfile.TemporaryDirectory() as directory:
        tensorflow_script, workers, ctl_script = programs(directory)

        def launched():
            model_dir = tempfile.mkdtemp(dir=directory)
            command = [sys.executable, "-m", "ctl", "launch", "--workers=2", "--", *ctl_script]
            return to_first_line([[*command, f"--model_dir={model_dir}"]])

        variants = {
            "two TensorFlow scripts": lambda: to_first_line([tensorflow_script] * 2, (None, None)),
            "two scripts with MWMS": lambda: to_first_line([workers, workers], cluster()),
            "ctl launch --workers=2": launched,
        }
        show("launch: to the first step", interleaved(variants, rounds))


def cluster():
    import json

    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        hosts = [f"127.0.0.1:{server.getsockname()[1]}" for server in (first, second)]
    configs = [{"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}} for i in range(2)]
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


if __name__ == "__main__":
    main()
