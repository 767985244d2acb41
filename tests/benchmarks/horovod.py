"""Communication of `ctl.hvd` beside TensorFlow's own collectives, between the same processes.

    python tests/benchmarks/horovod.py --rounds=5

Each round runs both, one after the other, as two processes on loopback; printed are medians over
rounds of the medians over calls, and their ratios. The last column divides that ratio by what
Horovod 0.28.1 (with Gloo) was measured at beside the same TensorFlow collectives on another machine:
an estimate of ours / Horovod, below 1 where ours is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES_KB = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
# ms, two processes, TensorFlow 2.21: (Horovod with Gloo, TensorFlow's ring over gRPC)
RECORDED = {
    "1 KB eager": (3.22, 1.31), "1 KB in a function": (2.88, 1.63), "4 KB eager": (1.54, 1.32),
    "16 KB eager": (1.24, 1.32), "64 KB eager": (1.81, 1.56), "256 KB eager": (2.24, 1.96),
    "1024 KB eager": (3.23, 3.13), "4096 KB eager": (6.39, 15.4), "16384 KB eager": (17.4, 37.0),
    "65536 KB eager": (52.5, 245.5), "100 x 4 KB separate": (6.4, 123.9),
    "100 x 4 KB grouped": (8.9, 4.8), "CNN step": (34.9, 38.1),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=["ours", "tensorflow"], help="one side, in this process")
    parser.add_argument("--out", help="where rank 0 writes its figures")
    flags = parser.parse_args()
    if flags.only:
        figures = (ours if flags.only == "ours" else tensorflow)()
        if figures:
            Path(flags.out).write_text(json.dumps(figures))
        return
    rounds = {"ours": [], "tensorflow": []}
    for _ in range(flags.rounds):
        for side, found in rounds.items():
            found.append(run(side, flags.ranks))
    report(
        *(
            {k: statistics.median(one[k] for one in found) for k in found[0]}
            for found in rounds.values()
        )
    )


def run(side, ranks):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        subprocess.run(
            [sys.executable, "-m", "ctl.launch.horovodrun_cli", "-np", str(ranks), sys.executable, __file__,
             f"--only={side}", f"--out={out}"],
            check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(out.read_text())


def report(mine, theirs):
    print(f"{'case':28} {'ours ms':>9} {'TF ms':>9} {'ours/TF':>8} {'est. ours/Horovod':>18}")
    for case, ms in mine.items():
        beside = case.split(",")[0]
        line = f"{case:28} {ms:9.2f}"
        if beside in theirs:
            ratio = ms / theirs[beside]
            line += f" {theirs[beside]:9.2f} {ratio:8.2f}"
            if beside in RECORDED:
                horovod, ring = RECORDED[beside]
                line += f" {ratio / (horovod / ring):18.2f}"
        print(line)


def timed(call, most=60, secs=3.0):
    """Median milliseconds of a call."""
    for _ in range(3):
        call()
    found, end = [], time.perf_counter() + secs
    while len(found) < most and (time.perf_counter() < end or len(found) < 5):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e3 * statistics.median(found)


def calls_of(number):
    """The same number of calls on all ranks: decided before, never by a clock."""
    return {"most": number, "secs": 1e9}


def repeats(kb):
    return 60 if kb <= 1024 else 20 if kb <= 16384 else 7


def ours():
    import ctl.hvd as hvd
    import tensorflow as tf

    hvd.init()
    figures = {}
    for kb in SIZES_KB:
        x = tf.ones([kb * 256])
        function = tf.function(lambda t: hvd.allreduce(t, op=hvd.Sum))
        figures[f"{kb} KB eager"] = timed(
            lambda x=x: hvd.allreduce(x, op=hvd.Sum), **calls_of(repeats(kb))
        )
        figures[f"{kb} KB in a function"] = timed(
            lambda x=x, f=function: f(x), **calls_of(repeats(kb))
        )
    many = [tf.ones([1024])] * 100
    separate = tf.function(lambda ts: [hvd.allreduce(t, op=hvd.Sum) for t in ts])
    grouped = tf.function(lambda ts: hvd.grouped_allreduce(ts, op=hvd.Sum))
    figures["100 x 4 KB separate"] = timed(lambda: separate(many), **calls_of(20))
    figures["100 x 4 KB grouped"] = timed(lambda: grouped(many), **calls_of(20))
    for name in ("none", "fp16", "bf16"):
        compression = getattr(hvd.Compression, name)

        def gradients(tape, loss, variables, compression=compression):
            return hvd.DistributedGradientTape(tape, compression=compression).gradient(
                loss, variables
            )

        step = cnn_step(gradients)
        figures["CNN step" + (f", {name}" if name != "none" else "")] = timed(step, **calls_of(40))
    return figures if hvd.rank() == 0 else None


def tensorflow():
    import itertools

    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    is_first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0

    def summed(t):
        here = tf.nest.map_structure(tf.identity, t)  # which gives it a device
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here)

    keys = itertools.count(1)

    def reduced(t):  # the operation itself: `strategy.run` costs several times as much
        return collective_ops.all_reduce_v2(
            t, 2, 77, next(keys), merge_op="Add", final_op="Id", communication_hint="ring"
        )

    figures = {}
    for kb in SIZES_KB:
        x = tf.ones([kb * 256])
        function = tf.function(lambda t: strategy.run(summed, args=(t,)))
        eager = timed(lambda x=x: reduced(x), **calls_of(repeats(kb)))
        figures[f"{kb} KB eager"] = eager
        figures[f"{kb} KB in a function"] = timed(
            lambda x=x, f=function: f(x), **calls_of(repeats(kb))
        )
    many = [tf.ones([1024])] * 100
    separate = tf.function(
        lambda ts: strategy.run(lambda inner: [summed(t) for t in inner], args=(ts,))
    )
    grouped = tf.function(lambda ts: strategy.run(summed, args=(ts,)))
    figures["100 x 4 KB separate"] = timed(lambda: separate(many), **calls_of(20))
    figures["100 x 4 KB grouped"] = timed(lambda: grouped(many), **calls_of(20))
    with strategy.scope():
        step = cnn_step(lambda tape, loss, variables: summed(tape.gradient(loss, variables)))
        run_step = tf.function(lambda: strategy.run(step.python_function))
    figures["CNN step"] = timed(run_step, **calls_of(40))
    return figures if is_first else None


def cnn_step(gradients):
    """A step of a network of 2.8 million parameters, batches of 32 images, plain SGD."""
    import tensorflow as tf

    def variable(*shape):
        return tf.Variable(tf.random.stateless_normal(shape, [1, 2]) * 0.05)

    kernels = [
        variable(3, 3, 1, 32),
        variable(3, 3, 32, 64),
        variable(9216, 296),
        variable(296, 10),
    ]
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
        for one, gradient in zip(variables, gradients(tape, loss, variables), strict=True):
            one.assign_sub(0.01 * gradient)
        return loss

    return tf.function(step)


if __name__ == "__main__":
    main()
