"""Small models of docs/gallery.md. As a program, a worker that trains each for three steps."""

import json
import sys

import ctl
import keras
import tensorflow as tf
from example_models import import_model
from small_models import every_step

Language = import_model("language").Language
ResNet = import_model("resnet").ResNet
Recommender = import_model("recommender").Recommender
SimClr = import_model("simclr").SimClr

SMALL = {"context": 16, "layers": 1, "width": 8, "heads": 2, "ema": 0.5, "show_every_steps": 0}
STEPS = 3


class SameViews(SimClr):
    """Views without randomness, because random views differ between replicas."""

    def build(self):
        super().build()
        numbers = iter(range(1000))
        self.views = lambda x, training: tf.roll(x, next(numbers) % 2, axis=1)


class PreciseResNet(ResNet):
    """A ResNet in float64. Rounding in float32 moves ReLU inputs across zero; gradients differ by 1 %."""

    def build(self):
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        try:
            super().build()
        finally:
            keras.config.set_dtype_policy(policy)

    def score(self, logits, label):
        return super().score(tf.cast(logits, tf.float32), label)


CASES = {
    "language": (Language, {**SMALL, "accumulate_steps": 2, "decay_steps": 10, "warmup_steps": 2}),
    "resnet": (PreciseResNet, {"width": 2, "blocks": 1, "shift": 0.0}),
    "recommender": (Recommender, {"rows": 1000}),
    "simclr": (SameViews, {"features": 8}),
}


def losses(model, strategy, steps=STEPS, **options):
    """Returns the loss of each step."""
    writer = ctl.MemoryWriter()
    trainer_options = {"strategy": strategy, "writers": [writer], "intervals": every_step(), **options}
    trainer = model(global_batch_size=8, **trainer_options)
    trainer.train(steps)
    losses_by_step = [values["loss"] for run, _, values in writer.rows if run == "train"]
    assert not losses_by_step or len(set(losses_by_step)) == steps
    if model is ResNet and strategy != "default":  # its hook reads a matrix of all workers on each worker
        trainer.arrays["test"] = {k: v[:20] for k, v in trainer.arrays["test"].items()}
        assert trainer.evaluate()["confusion"].sum() == 20
    return losses_by_step


if __name__ == "__main__":
    strategy = ctl.make_strategy("multi_worker")
    names = sys.argv[1:] or CASES
    print(json.dumps({name: losses(CASES[name][0], strategy, **CASES[name][1]) for name in names}))
