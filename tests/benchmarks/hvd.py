"""Communication of `ctl.hvd` compared with TensorFlow's collectives and Horovod on loopback.

    python tests/benchmarks/hvd.py --rounds=5
    python tests/benchmarks/hvd.py --rounds=3 --horovod=PATH/bin/python --ranks=3

Each round runs all sides sequentially as processes on loopback. The table has medians over rounds of the
medians over calls, their ratios (below 1 if `ctl.hvd` is faster), and in brackets the smallest and the
largest ratio of one round. --horovod specifies a Python interpreter that can import `horovod.tensorflow`.
Without it, the last column is an estimate: the ratio to TensorFlow divided by the recorded ratio of Horovod
0.28.1 (with Gloo) to the same collectives on another machine. --busy adds one busy process per core.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES_KB = [1, 64, 1024, 16384, 65536]
LARGE_KB = 262144
# ms, two processes, TensorFlow 2.21: (Horovod with Gloo, TensorFlow's ring over gRPC)
RECORDED = {
    "1 KB eager": (3.22, 1.31), "1 KB in a function": (2.88, 1.63), "64 KB eager": (1.81, 1.56),
    "1024 KB eager": (3.23, 3.13), "16384 KB eager": (17.4, 37.0), "65536 KB eager": (52.5, 245.5),
    "100 x 4 KB separate": (6.4, 123.9), "100 x 4 KB grouped": (8.9, 4.8), "CNN step": (34.9, 38.1),
}  # fmt: skip
LIMITS = {"calls": 60}  # of each case
MODULES = {"ours": "ctl.hvd", "horovod": "horovod.tensorflow"}
SIDES = ["ours", "tensorflow", "horovod", "plain"]  # "plain": TensorFlow without communication


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--horovod", metavar="PYTHON", help="Python with horovod.tensorflow")
    parser.add_argument("--sides", nargs="+", choices=SIDES)
    parser.add_argument(
        "--calls", type=int, default=LIMITS["calls"], help="maximum number of calls per case"
    )
    parser.add_argument("--large", action="store_true", help="also measure 256 MB")
    parser.add_argument("--busy", action="store_true", help="run one busy process per core")
    parser.add_argument("--only", choices=SIDES, help="run one side in this process")
    parser.add_argument("--out", help="output file of rank 0")
    flags = parser.parse_args()
    if flags.only:
        LIMITS["calls"] = flags.calls
        sizes = SIZES_KB + [LARGE_KB] * flags.large
        if flags.only == "plain":
            figures = local_steps()
        elif flags.only == "tensorflow":
            figures = tensorflow(sizes)
        else:
            figures = horovod(MODULES[flags.only], sizes)
        if figures:
            Path(flags.out).write_text(json.dumps(figures))
        return
    if "horovod" in (flags.sides or ()) and not flags.horovod:
        parser.error("--sides has horovod; expected --horovod=PYTHON with a Python that can import it")
    sides = flags.sides or ["ours", "tensorflow", *(["horovod"] if flags.horovod else [])]
    rounds = {side: [] for side in sides}
    with background_load(flags.busy):
        for _ in range(flags.rounds):
            for side, results in rounds.items():
                results.append(run(side, flags))
    report(rounds)


@contextlib.contextmanager
def background_load(busy):
    """Runs processes that use all cores within the block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(os.cpu_count() if busy else 0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(side, flags):
    ranks = ["-np", str(flags.ranks)]
    starter, python = [sys.executable, "-m", "ctl.launch.horovodrun_cli", *ranks], sys.executable
    if side == "horovod":
        call = "from horovod.runner.launch import run_commandline; run_commandline()"
        starter, python = [flags.horovod, "-c", call, *ranks, "--gloo"], flags.horovod
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        options = [f"--calls={flags.calls}", *["--large"] * flags.large]
        subprocess.run(
            [*starter, python, __file__, f"--only={side}", f"--out={out}", *options],
            check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(out.read_text())


def report(rounds):
    """Prints the milliseconds of each side, and the ratios of ours to the other sides."""
    medians = {
        side: {case: statistics.median(result[case] for result in results) for case in results[0]}
        for side, results in rounds.items()
    }
    peers = [side for side in rounds if side != "ours"]
    estimates = peers == ["tensorflow"]
    heads = [f"{side + ' ms':>14} {'ours/ (spread)':>21}" for side in peers]
    print(f"{'case':28} {'ours ms':>9}", *heads, *(["  est. ours/Horovod"] if estimates else []))
    for case, ms in medians["ours"].items():
        cells = [f"{case:28} {ms:9.2f}"]
        for side in peers:
            other_ms = medians[side].get(case)
            if other_ms is None:
                cells.append(" " * 36)
                continue
            pairs = zip(rounds["ours"], rounds[side], strict=True)
            ratios = sorted(ours[case] / other[case] for ours, other in pairs)
            spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(f"{other_ms:14.2f} {ms / other_ms:5.2f} {spread:>15}")
        if estimates and case in RECORDED:
            horovod_ms, ring_ms = RECORDED[case]
            cells.append(f"{ms / medians['tensorflow'][case] / (horovod_ms / ring_ms):18.2f}")
        print(*cells)


def timed(call, num_calls):
    """Returns the median milliseconds of a call. The number of calls is the same on all ranks."""
    for _ in range(3):
        call()
    seconds = []
    for _ in range(min(num_calls, LIMITS["calls"])):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def repeats(kb):
    return 60 if kb <= 1024 else 20 if kb <= 16384 else 7


def horovod(module, sizes):
    hvd = importlib.import_module(module)
    import tensorflow as tf

    start = time.perf_counter()
    hvd.init()
    figures = {"hvd.init": 1e3 * (time.perf_counter() - start)}
    hvd.allreduce(tf.ones([1]))
    figures["init and first all-reduce"] = 1e3 * (time.perf_counter() - start)
    for kb in sizes:
        x = tf.ones([kb * 256])
        for mode, op in (("eager", hvd.Sum), ("eager, Average", hvd.Average)):
            figures[f"{kb} KB {mode}"] = timed(lambda x=x, op=op: hvd.allreduce(x, op=op), repeats(kb))
    x, function = tf.ones([256]), tf.function(lambda t: hvd.allreduce(t, op=hvd.Sum))
    figures["1 KB in a function"] = timed(lambda: function(x), 60)
    many = [tf.ones([1024])] * 100
    separate = tf.function(lambda ts: [hvd.allreduce(t, op=hvd.Sum) for t in ts])
    grouped = tf.function(lambda ts: hvd.grouped_allreduce(ts, op=hvd.Sum))
    figures["100 x 4 KB separate"] = timed(lambda: separate(many), 20)
    figures["100 x 4 KB grouped"] = timed(lambda: grouped(many), 20)
    figures["100 x 4 KB grouped, eager"] = timed(lambda: hvd.grouped_allreduce(many, op=hvd.Sum), 20)
    for kb in (1024, 16384):
        x = tf.ones([kb * 256])
        figures[f"{kb} KB broadcast"] = timed(lambda x=x: hvd.broadcast(x, 0), repeats(kb))
    variables = [tf.Variable(tf.ones([128, 128])) for _ in range(20)]
    figures["20 variables broadcast"] = timed(lambda: hvd.broadcast_variables(variables, 0), 20)
    figures |= local_steps()
    for name in ("none", "fp16"):
        compression = getattr(hvd.Compression, name)

        def gradients(tape, loss, variables, compression=compression):
            return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

        suffix = f", {name}" if name != "none" else ""
        figures["CNN step" + suffix] = timed(cnn_step(gradients), 40)
        figures["161 variables" + suffix] = timed(deep_step(gradients), 15)
    return figures if hvd.rank() == 0 else None


def local_steps():
    """Measures steps without sums over ranks, and counts the threads of the process."""

    def gradients(tape, loss, variables):
        return tape.gradient(loss, variables)

    return {
        "CNN step, no sum": timed(cnn_step(gradients), 40),
        "161 variables, no sum": timed(deep_step(gradients), 15),
        "threads of the process": float(len(os.listdir("/proc/self/task"))),
    }


def tensorflow(sizes):
    import itertools

    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    is_first, ranks = strategy.cluster_resolver.task_id == 0, strategy.num_replicas_in_sync

    def summed(t):
        tensors = tf.nest.map_structure(tf.identity, t)  # assigns a device
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    keys = itertools.count(1)

    def reduced(t):  # the bare operation: `strategy.run` is several times slower
        return collective_ops.all_reduce_v2(
            t, ranks, 77, next(keys), merge_op="Add", final_op="Id", communication_hint="ring"
        )

    figures = {}
    for kb in sizes:
        x = tf.ones([kb * 256])
        figures[f"{kb} KB eager"] = timed(lambda x=x: reduced(x), repeats(kb))
    x, function = tf.ones([256]), tf.function(lambda t: strategy.run(summed, args=(t,)))
    figures["1 KB in a function"] = timed(lambda: function(x), 60)
    many = [tf.ones([1024])] * 100
    separate = tf.function(lambda ts: strategy.run(lambda inner: [summed(t) for t in inner], args=(ts,)))
    grouped = tf.function(lambda ts: strategy.run(summed, args=(ts,)))
    figures["100 x 4 KB separate"] = timed(lambda: separate(many), 20)
    figures["100 x 4 KB grouped"] = timed(lambda: grouped(many), 20)
    with strategy.scope():
        step = cnn_step(lambda tape, loss, variables: summed(tape.gradient(loss, variables)))
        run_step = tf.function(lambda: strategy.run(step.python_function))
    figures["CNN step"] = timed(run_step, 40)
    return figures if is_first else None


def cnn_step(gradients):
    """Returns a step of a network of 2.8 million parameters, with batches of 32 images and SGD."""
    import tensorflow as tf

    def variable(*shape):
        return tf.Variable(tf.random.stateless_normal(shape, [1, 2]) * 0.05)

    kernels = [variable(3, 3, 1, 32), variable(3, 3, 32, 64), variable(9216, 296), variable(296, 10)]
    biases = [variable(32), variable(64), variable(296), variable(10)]
    images, labels = tf.random.normal([32, 28, 28, 1]), tf.zeros([32], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            x = tf.nn.relu(tf.nn.conv2d(images, kernels[0], 1, "VALID") + biases[0])
            x = tf.nn.relu(tf.nn.conv2d(x, kernels[1], 1, "VALID") + biases[1])
            x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), [32, -1])
            x = tf.nn.relu(x @ kernels[2] + biases[2])
            logits = x @ kernels[3] + biases[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        variables = kernels + biases
        for variable, gradient in zip(variables, gradients(tape, loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    return tf.function(step)


def deep_step(gradients):
    """Returns a step of a network with 161 layers and 25.6 million parameters, with batches of 32."""
    import tensorflow as tf

    shapes = [(400, 400)] * 160 + [(400, 10)]
    kernels = [tf.Variable(tf.random.stateless_normal(shape, [1, 2]) * 0.07) for shape in shapes]
    images, labels = tf.random.normal([32, 400]), tf.zeros([32], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            x = images
            for kernel in kernels[:-1]:
                x = tf.nn.relu(x @ kernel)
            logits = x @ kernels[-1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip(kernels, gradients(tape, loss, kernels), strict=True):
            variable.assign_sub(0.001 * gradient)
        return loss

    return tf.function(step)


if __name__ == "__main__":
    main()
