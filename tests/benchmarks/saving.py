"""How long a save blocks training: at once, and in the background.

    python tests/benchmarks/saving.py [--rounds=9] [--every=40] [--directory=/tmp/bench]

A network of 10 M parameters with Adam (a state of 126 MB) trains in one process; the two ways of
saving take turns, round after round. Printed are medians: the time of the call that saves, which is
what the loop waits for; until the checkpoint is complete; and of a step while nothing is written and
while a save is. The first save of each way is left out: it sets up memory.
"""

import argparse
import shutil
import statistics
import tempfile
import time

import ctl
import keras
import numpy as np
import tensorflow as tf

FEATURES, HIDDEN, LAYERS, BATCH = 1000, 1500, 5, 8


class Large(ctl.Trainer):
    def build(self):
        layers = [keras.layers.Dense(HIDDEN) for _ in range(LAYERS)]
        self.model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        self.optimizer = keras.optimizers.Adam(1e-4)

    def train_data(self, batch_size):
        return ctl.from_arrays(np.zeros((64, FEATURES), np.float32), batch_size)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss_each = tf.reduce_mean(self.model(batch) ** 2, axis=1)
            loss = self.average(loss_each)
        self.minimize(loss, tape)
        return {"loss": loss_each}


class Watched(ctl.CheckpointManager):
    """A manager that takes the time: of each call, until told that it is complete, and of steps."""

    def __init__(self, manager):
        self._manager, self.calls, self.complete, self._began = manager, [], [], 0.0

    def save(self, state, manifest):
        self._began = time.perf_counter()
        path = self._manager.save(state, manifest)
        self.calls.append(time.perf_counter() - self._began)
        if path is not None:
            self.complete.append(self.calls[-1])
        return path

    def restore(self, state, step=None):
        return None

    def begin(self, state, told):
        def timed(step, path):
            self.complete.append(time.perf_counter() - self._began)
            told(step, path)

        self._manager.begin(state, timed)

    def finish(self):
        self._manager.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=40, help="steps between saves")
    parser.add_argument("--directory", help="where to write; by default a temporary one")
    options = parser.parse_args()
    directory = options.directory or tempfile.mkdtemp()
    steps = {True: [], False: []}  # while a save is written, or not
    marks = []

    class Timed(Large):
        def after_loop(self, step, means):
            now = time.perf_counter()
            if marks and step % options.every > 1:
                busy = watched.get("background") is not None and len(watched["background"].calls) > len(
                    watched["background"].complete
                )
                steps[busy].append(now - marks[-1])
            marks.append(now)

    ways = {
        way: ctl.ChiefOnlyCheckpoints(
            f"{directory}/{way}", keep=ctl.Keep(newest=1), background=way == "background"
        )
        for way in ("at once", "background")
    }
    watched = {way: Watched(manager) for way, manager in ways.items()}
    trainer = Timed(
        strategy="default", global_batch_size=BATCH, writers=[], checkpoints=watched["at once"],
        intervals=ctl.Intervals(steps_per_loop=1, save=ctl.Every(steps=options.every)),
    )  # fmt: skip
    trainer.prepare()
    done = 0
    for _ in range(options.rounds + 1):
        for way in ways:
            trainer._prepared_trainer.checkpointing.manager = watched[way]
            done += options.every
            trainer.train(done + options.every // 2)  # half an interval after the save
            done += options.every // 2
            done += -done % options.every
            trainer._prepared_trainer.checkpointing.manager = ctl.NullCheckpoints()
            trainer.train(done)
    show(watched, steps, trainer)
    if options.directory is None:
        shutil.rmtree(directory)


def show(watched, steps, trainer) -> None:
    variables = trainer._prepared_trainer.state.variables.values()
    size = sum(int(np.prod(v.shape)) * v.dtype.size for v in variables)
    print(f"state {size / 1e6:.0f} MB, step {1e3 * statistics.median(steps[False]):.1f} ms"
          + (f", {1e3 * statistics.median(steps[True]):.1f} ms while a save is written"
             if steps[True] else ""))  # fmt: skip
    blocked = {way: statistics.median(w.calls[2:]) for way, w in watched.items()}
    print("| saving | loop blocked, ms | of at once | complete after, ms |\n|---|---:|---:|---:|")
    for way, w in watched.items():
        ratio = blocked[way] / blocked["at once"]
        complete = 1e3 * statistics.median(w.complete[2:])
        print(f"| {way} | {1e3 * blocked[way]:.1f} | {ratio:.3f} | {complete:.1f} |")


if __name__ == "__main__":
    main()
