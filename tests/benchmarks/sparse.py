"""Step time of an embedding with a sparse gradient, compared with a dense gradient.

    python tests/benchmarks/sparse.py --rounds=5

Two workers on loopback, batches without a static size, SGD. Each round runs all cases sequentially. The
table has medians over rounds (milliseconds per step) and their ratio.
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
CASES = {"50,000 x 8, 512 rows": (50_000, 8, 512), "1,000,000 x 16, 4,096 rows": (1_000_000, 16, 4_096)}
STEPS = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["rows", "dense"])
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--out")
    flags = parser.parse_args()
    if flags.only:
        measure(flags.only == "dense", *CASES[flags.case], flags.out)
        return
    print(f"{'table':30} {'rows ms':>9} {'dense ms':>9} {'rows/dense':>11}")
    for case in [flags.case] if flags.case else CASES:
        times_by_format = {"rows": [], "dense": []}
        for _ in range(flags.rounds):
            for gradient_format, times in times_by_format.items():
                times.append(run(gradient_format, case))
        rows, dense = (statistics.median(times) for times in times_by_format.values())
        print(f"{case:30} {rows:9.2f} {dense:9.2f} {rows / dense:11.3f}")


def run(gradient_format, case):
    with tempfile.TemporaryDirectory() as folder:
        output_path = Path(folder, "ms")
        subprocess.run(
            [sys.executable, "-m", "ctl.launch", "--workers=2", "--", sys.executable, __file__,
             f"--only={gradient_format}", f"--case={case}", f"--out={output_path}"],
            check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(output_path.read_text())


def measure(dense, num_tokens, width, rows, out):
    import ctl
    import numpy as np
    import tensorflow as tf
    from ctl.step.reducers import sum as sum_reducer

    if dense:
        sum_reducer.can_sum = lambda gradient, variable: False

    class Table(ctl.Trainer):
        def build(self):
            table = tf.keras.layers.Embedding(num_tokens, width)
            self.model = tf.keras.Sequential([tf.keras.Input((8,)), table])
            self.optimizer = tf.keras.optimizers.SGD(0.1)
            self.times = []

        def train_data(self, batch_size):
            ids = np.random.default_rng(0).integers(0, num_tokens, (16 * batch_size, 8))
            return tf.data.Dataset.from_tensor_slices(ids).batch(batch_size).repeat()

        def train_step(self, ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.model(ids) ** 2, axis=[1, 2])
                mean = self.average(loss)
            self.minimize(mean, tape)
            return {"loss": loss}

        def after_loop(self, step, metrics):
            self.times.append(time.perf_counter())

    intervals = ctl.Intervals(steps_per_loop=STEPS, save=ctl.Every(), log=ctl.Every(steps=STEPS))
    batch_size = 2 * rows // 8  # 8 token ids per example, two workers
    trainer = Table(strategy="multi_worker", global_batch_size=batch_size, writers=[], intervals=intervals)
    trainer.train(6 * STEPS)
    if trainer.topology.is_chief:
        loops = np.diff(trainer.times)[1:]
        Path(out).write_text(str(1e3 * statistics.median(loops) / STEPS))


if __name__ == "__main__":
    main()
