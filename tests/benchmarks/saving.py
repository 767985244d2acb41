"""Time for which a save blocks training: synchronous and background saves.

    python tests/benchmarks/saving.py [--rounds=9] [--every=40] [--directory=/tmp/bench]

A network of 10 M parameters with Adam (a state of 126 MB) trains in one process; both modes of saving
alternate. The table has medians: the time of the save call, which blocks the loop; the time until the
checkpoint is complete; and the step time with and without a save in progress. The first save of each mode
allocates memory and is excluded.
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


class TimedManager(ctl.CheckpointManager):
    """A checkpoint manager that measures the time of each save call and until its completion."""

    def __init__(self, manager):
        self._manager, self.calls, self.complete, self._start_secs = manager, [], [], 0.0

    def save(self, state, manifest):
        self._start_secs = time.perf_counter()
        path = self._manager.save(state, manifest)
        self.calls.append(time.perf_counter() - self._start_secs)
        if path is not None:
            self.complete.append(self.calls[-1])
        return path

    def restore(self, state, step=None):
        return None

    def begin(self, state, on_complete):
        def record_completion(step, path):
            self.complete.append(time.perf_counter() - self._start_secs)
            on_complete(step, path)

        self._manager.begin(state, record_completion)

    def finish(self):
        self._manager.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=40, help="steps between saves")
    parser.add_argument("--directory", help="checkpoint directory; default: a temporary directory")
    options = parser.parse_args()
    directory = options.directory or tempfile.mkdtemp()
    steps = {True: [], False: []}  # by whether a save is in progress
    loop_ends = []

    class Timed(Large):
        def after_loop(self, step, means):
            now_secs = time.perf_counter()
            if loop_ends and step % options.every > 1:
                background = timed_managers.get("background")
                is_saving = background is not None and len(background.calls) > len(background.complete)
                steps[is_saving].append(now_secs - loop_ends[-1])
            loop_ends.append(now_secs)

    managers_by_mode = {
        mode: ctl.ChiefOnlyCheckpoints(
            f"{directory}/{mode}", keep=ctl.Keep(newest=1), background=mode == "background"
        )
        for mode in ("at once", "background")
    }
    timed_managers = {mode: TimedManager(manager) for mode, manager in managers_by_mode.items()}
    trainer = Timed(
        strategy="default", global_batch_size=BATCH, writers=[], checkpoints=timed_managers["at once"],
        intervals=ctl.Intervals(steps_per_loop=1, save=ctl.Every(steps=options.every)),
    )  # fmt: skip
    trainer.prepare()
    num_steps = 0
    for _ in range(options.rounds + 1):
        for mode in managers_by_mode:
            trainer._prepared_trainer.checkpointing.manager = timed_managers[mode]
            num_steps += options.every
            trainer.train(num_steps + options.every // 2)  # half an interval after the save
            num_steps += options.every // 2
            num_steps += -num_steps % options.every
            trainer._prepared_trainer.checkpointing.manager = ctl.NullCheckpoints()
            trainer.train(num_steps)
    show(timed_managers, steps, trainer)
    if options.directory is None:
        shutil.rmtree(directory)


def show(timed_managers, steps, trainer) -> None:
    variables = trainer._prepared_trainer.state.variables.values()
    size = sum(int(np.prod(v.shape)) * v.dtype.size for v in variables)
    print(f"state {size / 1e6:.0f} MB, step {1e3 * statistics.median(steps[False]):.1f} ms"
          + (f", {1e3 * statistics.median(steps[True]):.1f} ms while a save is written"
             if steps[True] else ""))  # fmt: skip
    blocked = {mode: statistics.median(w.calls[2:]) for mode, w in timed_managers.items()}
    print("| mode | loop blocked, ms | ratio to at once | complete after, ms |\n|---|---:|---:|---:|")
    for mode, w in timed_managers.items():
        ratio = blocked[mode] / blocked["at once"]
        complete = 1e3 * statistics.median(w.complete[2:])
        print(f"| {mode} | {1e3 * blocked[mode]:.1f} | {ratio:.3f} | {complete:.1f} |")


if __name__ == "__main__":
    main()
