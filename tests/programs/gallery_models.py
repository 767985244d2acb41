"""The models of docs/gallery.md, small; as a program, a worker that trains each for three steps."""

import json
import sys

import ctl
import keras
import tensorflow as tf
from example_models import imported
from small_models import every_step

Language = imported("language").Language
ResNet = imported("resnet").ResNet
Recommender = imported("recommender").Recommender
SimClr = imported("simclr").SimClr

SMALL = {"context": 16, "layers": 1, "width": 8, "heads": 2, "ema": 0.5, "show_every_steps": 0}
STEPS = 3


class SameViews(SimClr):
    """Views without randomness, which differs between replicas."""

    def build(self):
        super().build()
        numbers = iter(range(1000))
        self.views = lambda x, training: tf.roll(x, next(numbers) % 2, axis=1)


class PreciseResNet(ResNet):
    """In float64: in float32 rounding moves inputs of ReLU across zero, and gradients differ by 1 %."""

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
    "resnet": (ResNet, {"width": 2, "blocks": 1, "shift": 0.0}),
    "recommender": (Recommender, {"rows": 1000}),
    "simclr": (SameViews, {"features": 8}),
}


def losses(model, strategy, steps=STEPS, **options):
    """The loss of each step."""
    writer = ctl.MemoryWriter()
    of_run = {"strategy": strategy, "writers": [writer], "intervals": every_step(), **options}
    trainer = model(global_batch_size=8, **of_run)
    trainer.train(steps)
    found = [values["loss"] for run, _, values in writer.rows if run == "train"]
    assert not found or len(set(found)) == steps
    if model is ResNet and strategy != "default":  # its hook reads a matrix of all workers, on each of them
        trainer.arrays["test"] = {k: v[:20] for k, v in trainer.arrays["test"].items()}
        assert trainer.evaluate()["confusion"].sum() == 20
    return found


if __name__ == "__main__":
    made = ctl.make_strategy("multi_worker")
    wanted = sys.argv[1:] or CASES
    print(json.dumps({name: losses(CASES[name][0], made, **CASES[name][1]) for name in wanted}))
