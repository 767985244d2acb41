"""Training of a small model as the task of TF_CONFIG. The chief prints its results as JSON."""

import json
import logging
import sys

import ctl
import tf_keras
from ctl.distribute.keras_objects import unwrap
from small_models import CLASSES, FEATURES, HIDDEN, Small, losses

options = json.loads(sys.argv[1])
logging.basicConfig(format="%(message)s")
logging.getLogger("ctl").setLevel(logging.INFO)
every = {k: ctl.Every(steps=n) for k, n in options.pop("every", {}).items()}
steps_per_loop = options.pop("steps_per_loop", "auto")
steps, epochs = options.pop("steps", 100), options.pop("epochs", None)
formats = options.pop("export", [])
writer = ctl.MemoryWriter()
partition = options.pop("variable_partitioner", "")
if partition:
    options["strategy"] = ctl.make_strategy("parameter_server", variable_partitioner=partition)


class Task(Small):
    """A trainer that keeps the initial values of sharded variables, because tf_keras may partition them."""

    def build(self):
        if not (partition and self.framework == "tf_keras"):
            super().build()
            return
        layers = [tf_keras.layers.Dense(HIDDEN, activation="tanh"), tf_keras.layers.Dense(CLASSES)]
        self.model = tf_keras.Sequential([tf_keras.layers.InputLayer((FEATURES,)), *layers])
        self.optimizer = getattr(tf_keras.optimizers, self.word)(0.02)


class Watched(Task):
    """A task that reports each loop to the parent process and freezes the first layer after 100 steps."""

    def after_loop(self, step, means):
        print(f"joined at {step}", flush=True)
        layer = self.model.layers[0]
        if step >= 100 and layer.trainable:
            layer.trainable, self._frozen_at = False, layer.get_weights()


trainer = (Watched if options.pop("watched", False) else Task)(
    writers=[writer], intervals=ctl.Intervals(steps_per_loop=steps_per_loop, **every), **options
)
print(f"building at {trainer.step}", flush=True)
trainer.prepare()
resumed = trainer.step
print(f"ready at {resumed}", flush=True)
means = trainer.train(None if epochs else steps, epochs=epochs, export=formats)
counts = trainer.optimizer.iterations if hasattr(trainer.optimizer, "iterations") else None
frozen = None
if hasattr(trainer, "_frozen_at"):
    pairs = zip(trainer._frozen_at, trainer.model.layers[0].get_weights(), strict=True)
    frozen = all((old == new).all() for old, new in pairs)
print(json.dumps({
    "step": trainer.step,
    "iterations": None if counts is None else int(unwrap(counts).numpy()),
    "resumed": resumed,
    "logged": [s for run, s, _ in writer.rows if run == "train"],
    "evaluated": [s for run, s, _ in writer.rows if run == "eval"],
    "losses": losses(writer), "means": means, "frozen": frozen,
    "examples": trainer._prepared_trainer.checkpointing.progress.examples,
}))  # fmt: skip
