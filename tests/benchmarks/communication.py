"""Step time of several workers on loopback, by the implementation of gradient sums.

    python tests/benchmarks/communication.py --rounds=3 --model=cnn --workers=2

Each round runs all variants sequentially. The table has medians over rounds of the median step time, and
their ratio to the first variant. `tutorial` is MultiWorkerMirroredStrategy with one call per step;
`ring` and `tcp` sum gradients over TensorFlow's ring and over the engine; `none` does not sum.
With --network=100mbit, as root, two workers run in network namespaces connected at that rate.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("tutorial", "ring", "tcp", "tcp,bfloat16", "tcp,int8", "none")
EXAMPLES_PER_WORKER = 32  # per batch
STEPS_PER_LOOP = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=["cnn", "deep"], default="cnn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--optimizer", choices=["SGD", "Adam"], default="SGD")
    parser.add_argument("--network", help="rate of a link between two namespaces, e.g. 1gbit")
    parser.add_argument("--plot", help="path of a chart (requires matplotlib)")
    parser.add_argument("--only", help="run one variant in this process")
    parser.add_argument("--out", help="output file of the first worker")
    parser.add_argument("--one_core", action="store_true", help="with --only: CPU time, on one core")
    flags = parser.parse_args()
    if flags.only:
        if flags.one_core:
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        seconds = tutorial(flags) if flags.only == "tutorial" else trained(flags)
        if flags.out:
            Path(flags.out).write_text(json.dumps(1e3 * statistics.median(seconds)))
        return
    times_by_variant = {variant: [] for variant in flags.variants}
    with network(flags) as workers:
        for _ in range(flags.rounds):
            for variant in flags.variants:
                times_by_variant[variant].append(run(variant, flags, workers))
    medians = {variant: statistics.median(times) for variant, times in times_by_variant.items()}
    suffix = f", {flags.network}" if flags.network else ""
    print(f"{flags.model}, {flags.workers} workers{suffix}\n{'variant':16}{'ms per step':>12}{'ratio':>8}")
    for variant, ms in medians.items():
        print(f"{variant:16}{ms:12.1f}{ms / medians[flags.variants[0]]:8.2f}")
    if flags.plot:
        plot(medians, f"{flags.model}, {flags.workers} workers{suffix}", flags.plot)


def plot(medians, title, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "communication"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 0.4 * len(medians) + 1))
    bars = axes.barh(list(medians)[::-1], list(medians.values())[::-1])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.margins(x=0.1)
    axes.set(xlabel="ms per step", title=title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


@contextlib.contextmanager
def network(flags):
    """Yields (address, command prefix) of each worker."""
    sys.path[:0] = [str(ROOT)]
    from ctl.launch.ports import free_ports

    if not flags.network:
        yield [(f"localhost:{port}", []) for port in free_ports(flags.workers)]
        return
    shape = ["root", "tbf", "rate", flags.network, "burst", "256k", "latency", "100ms"]
    with namespaces(lambda device, side: [["qdisc", "add", "dev", device, *shape]]) as prefixes:
        yield [(f"10.99.0.{i + 1}:2222", prefixes[i]) for i in (0, 1)]


@contextlib.contextmanager
def namespaces(shape):
    """Creates two connected network namespaces, 10.99.0.1 and 10.99.0.2.

    shape(device, 0 or 1) returns commands for `tc`. Yields the command prefix of each namespace. Exits if
    the user has no permission.
    """
    spaces = [f"ctl{os.getpid()}{side}" for side in "ab"]
    devices = [f"v{space[3:]}" for space in spaces]
    prefixes = [["ip", "netns", "exec", space] for space in spaces]
    setup = [
        *(["ip", "netns", "add", space] for space in spaces),
        ["ip", "link", "add", devices[0], "netns", spaces[0], "type", "veth",
         "peer", "name", devices[1], "netns", spaces[1]],
        *([*prefixes[i], "ip", "address", "add", f"10.99.0.{i + 1}/24", "dev", devices[i]] for i in (0, 1)),
        *([*prefixes[i], "ip", "link", "set", name, "up"] for i in (0, 1) for name in ("lo", devices[i])),
        *([*prefixes[i], "tc", *command] for i in (0, 1) for command in shape(devices[i], i)),
    ]  # fmt: skip
    try:
        for command in setup:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise SystemExit(f"skipped, {' '.join(command)}: {result.stderr.strip()}")
        yield prefixes
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def run(variant, flags, workers):
    addresses = [address for address, _ in workers]
    with tempfile.TemporaryDirectory() as folder:
        output_path = Path(folder, "figure.json")
        processes = []
        for i in range(flags.workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
            if flags.network:  # without this the processes share memory
                environ["CTL_COLLECTIVES"] = "tcp"
            if variant != "none":
                environ["TF_CONFIG"] = json.dumps(config)
            arguments = [f"--only={variant}", f"--model={flags.model}", f"--steps={flags.steps}"]
            arguments += [f"--workers={flags.workers}", f"--optimizer={flags.optimizer}"]
            arguments.append(f"--out={output_path if i == 0 else ''}")
            processes.append(
                subprocess.Popen(
                    [*workers[i][1], sys.executable, __file__, *arguments], env=environ,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{variant}: exit codes {codes}")
        return json.loads(output_path.read_text())


def optimizer_of(flags):
    import keras

    return getattr(keras.optimizers, flags.optimizer)(0.01)


def model_of(name):
    """Returns a model of 2.8 million parameters in 6 variables, or of 25 million in 160."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "cnn":
        inner = [
            layers.Conv2D(32, 3, activation="relu"), layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]  # fmt: skip
    else:
        inner = [layers.Flatten(), layers.Dense(560, activation="relu")]
        inner += [layers.Dense(560, activation="relu") for _ in range(78)]
    return keras.Sequential([layers.Input((28, 28, 1)), *inner, layers.Dense(10)])


def arrays():
    import numpy as np

    random = np.random.default_rng(0)
    return random.random((512, 28, 28, 1), np.float32), random.integers(0, 10, 512)


def losses_of(y, logits):
    import keras

    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def tutorial(flags):
    """Returns seconds per step of the hand-written loop of TensorFlow's guide."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    batch = EXAMPLES_PER_WORKER * flags.workers
    with strategy.scope():
        model, optimizer = model_of(flags.model), optimizer_of(flags)
    data = tf.data.Dataset.from_tensor_slices(arrays()).repeat().batch(batch)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @tf.function
    def step(iterator):
        def replica(x, y):
            with tf.GradientTape() as tape:
                losses = losses_of(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, next(iterator)), axis=None)

    seconds = []
    for number in range(flags.steps + STEPS_PER_LOOP):
        start_secs = time.perf_counter()
        step(iterator)
        if number >= STEPS_PER_LOOP:
            seconds.append(time.perf_counter() - start_secs)
    return seconds


def trained(flags):
    """Returns seconds per step of a Trainer."""
    import ctl
    import tensorflow as tf

    path, _, wire_dtype = flags.only.partition(",")
    batch = EXAMPLES_PER_WORKER * (1 if path == "none" else flags.workers)
    stamps, clock = [], time.process_time if flags.one_core else time.perf_counter

    class Job(ctl.Trainer):
        def build(self):
            self.model, self.optimizer = model_of(flags.model), optimizer_of(flags)
            dtype = wire_dtype if wire_dtype in ("bfloat16", "int8") else None
            self.gradients = ctl.Gradients(wire_dtype=dtype)

        def train_data(self, batch_size):
            return tf.data.Dataset.from_tensor_slices(arrays()).repeat().batch(batch_size)

        def train_step(self, example):
            x, y = example
            with tf.GradientTape() as tape:
                losses = losses_of(y, self.model(x, training=True))
                loss = self.average(losses)
            self.minimize(loss, tape, self.model.trainable_variables)
            return {"loss": losses}

        def after_loop(self, step, means):
            stamps.append(clock())

    settings = {"strategy": "default"}
    if path != "none":
        settings = {"strategy": "multi_worker", "communication": path}
    never = {name: ctl.Every() for name in ("log", "save", "evaluate")}
    intervals = ctl.Intervals(steps_per_loop=STEPS_PER_LOOP, **never)
    trainer = Job(**settings, global_batch_size=batch, writers=[], intervals=intervals)
    trainer.train(flags.steps + 2 * STEPS_PER_LOOP)
    return [(b - a) / STEPS_PER_LOOP for a, b in itertools.pairwise(stamps[1:])]


if __name__ == "__main__":
    main()
