"""Loss and sent bytes of two workers, by the steps between averages (--sync_every) and by wire_dtype.

    python tests/benchmarks/sync_every.py --model=text --steps=1200

`mnist` is models.mnist with the digits in the repository; `text` is a transformer of 120,000 parameters
that predicts the next byte of Python's help texts (pydoc_data.topics), evaluated on their last tenth. The
table has for each variant the loss of the evaluation after the last step, the megabytes that a worker sent
during training, and the ratios of both to sums in every step.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYNC_EVERY = (1, 4, 16, 64)
CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["mnist", "text"], default="text")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--every", type=int, nargs="+", default=SYNC_EVERY)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--outer", nargs="*", default=("0.7,0.9",), help="pairs of outer rate,momentum")
    parser.add_argument("--wire", nargs="*", default=(), help="wire_dtype for sums in every step")
    parser.add_argument("--only", help="output file of this worker")
    flags = parser.parse_args()
    if flags.only:
        Path(flags.only).write_text(json.dumps(figures(flags)))
        return
    results = run(flags)
    first = results[0][0]["loss"], mean_bytes(results, 0)
    print(f"{flags.model}, {flags.steps} steps, 2 workers, batch {flags.batch}, {flags.seeds} seed(s)")
    print(f"{'variant':26}{'loss':>9}{'ratio':>8}{'MB sent':>10}{'ratio':>8}")
    for i, row in enumerate(results[0]):
        sent = mean_bytes(results, i)
        ratios = row["loss"] / first[0], sent / first[1]
        print(f"{row['name']:26}{row['loss']:9.4f}{ratios[0]:8.3f}{sent / 1e6:10.2f}{ratios[1]:8.3f}")


def mean_bytes(results, i):
    return sum(worker[i]["bytes"] for worker in results) / len(results)


def run(flags):
    """Returns the figures of both workers, which run in separate processes."""
    sys.path[:0] = [str(ROOT)]
    from ctl.launch.ports import free_ports

    addresses = [f"localhost:{port}" for port in free_ports(2)]
    with tempfile.TemporaryDirectory() as folder:
        started, outs = [], [Path(folder, f"{i}.json") for i in range(2)]
        for i, out in enumerate(outs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
            environ["TF_CONFIG"] = json.dumps(config)
            if flags.wire:  # wire_dtype has no effect in shared memory
                environ["CTL_COLLECTIVES"] = "tcp"
            command = [sys.executable, __file__, *sys.argv[1:], f"--only={out}"]
            started.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"exit codes {codes}")
        return [json.loads(out.read_text()) for out in outs]


def figures(flags):
    """Measures all variants sequentially in this worker."""
    import ctl

    strategy = ctl.make_strategy("multi_worker", communication="tcp")
    variants = [("sums of every step", {})]
    variants += [(dtype, {"wire_dtype": dtype}) for dtype in flags.wire]
    for every in flags.every:
        if every > 1:
            variants.append((f"average of {every} steps", {"sync_every": every}))
        for pair in flags.outer if every > 1 else ():
            rate, momentum = map(float, pair.split(","))
            outer = {"outer_learning_rate": rate, "outer_momentum": momentum}
            variants.append((f"DiLoCo({rate:g}, {momentum:g}) of {every}", {"sync_every": every, **outer}))
    return [{"name": name, **figure(strategy, flags, options)} for name, options in variants]


def figure(strategy, flags, options):
    """Returns means over the seeds."""
    from ctl.distribute.engine_all_reduce import engine_of

    losses, sent = [], 0
    for seed in range(flags.seeds):
        trainer = model_of(flags)(
            strategy=strategy, global_batch_size=flags.batch, seed=seed, steps_per_loop=64,
            log_every_steps=0, writers=[], **options,
        )  # fmt: skip
        trainer.prepare()
        bytes_before = engine_of(strategy).bytes_sent
        trainer.train(flags.steps)
        sent += engine_of(strategy).bytes_sent - bytes_before
        losses.append(trainer.evaluate()["loss"])
    return {"loss": sum(losses) / len(losses), "bytes": sent / len(losses)}


def model_of(flags):
    """Returns a trainer class with the setting `wire_dtype`."""
    import ctl
    import keras
    import numpy as np
    import tensorflow as tf

    from models.mnist import Mnist

    def with_wire_dtype(base):
        class WithWireDtype(base):
            def __init__(self, wire_dtype=None, **options):
                self.wire_dtype = wire_dtype
                super().__init__(**options)

            def build(self):
                super().build()
                self.gradients = dataclasses.replace(self.gradients, wire_dtype=self.wire_dtype)

        return WithWireDtype

    if flags.model == "mnist":
        return with_wire_dtype(Mnist)

    layers = keras.layers

    class NextByte(ctl.Trainer):
        """A model of the next byte of a text. Batches are bytes `[b, CONTEXT + 1]`."""

        def build(self):
            token_ids = keras.Input((CONTEXT,), dtype="int32")
            position_embeddings = layers.Embedding(CONTEXT, WIDTH)(tf.range(CONTEXT)[None])
            x = layers.Embedding(128, WIDTH)(token_ids) + position_embeddings
            for _ in range(LAYERS):
                y = layers.LayerNormalization()(x)
                x += layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
                y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
                x += layers.Dense(WIDTH)(y)
            self.model = keras.Model(token_ids, layers.Dense(128)(layers.LayerNormalization()(x)))
            rate = keras.optimizers.schedules.CosineDecay(2e-3, flags.steps)
            self.optimizer = keras.optimizers.Adam(rate)

        def train_data(self, batch_size):
            return ctl.from_arrays(rows()[0], batch_size)

        def eval_data(self, batch_size):
            return ctl.from_arrays(rows()[1], batch_size)

        def score(self, batch, training):
            token_ids = tf.cast(batch, tf.int32)
            logits = self.model(token_ids[:, :-1], training=training)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(token_ids[:, 1:], logits)
            return {"loss": tf.reduce_mean(loss, axis=1)}

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                scores = self.score(batch, training=True)
                loss = self.average(scores["loss"])
            self.minimize(loss, tape)
            return scores

        def eval_step(self, batch):
            return self.score(batch, training=False)

    def rows():
        from pydoc_data.topics import topics

        text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        text_bytes = np.frombuffer(text, np.uint8)
        num_rows = len(text_bytes) // (CONTEXT + 1)
        all_rows = text_bytes[: num_rows * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
        return all_rows[: num_rows * 9 // 10], all_rows[num_rows * 9 // 10 :]

    return with_wire_dtype(NextByte)


if __name__ == "__main__":
    main()
