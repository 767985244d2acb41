"""A user's typed model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ctl
import ctl.hvd as hvd
import keras
import numpy as np
import tensorflow as tf
from absl import flags

if TYPE_CHECKING:
    from typing_extensions import Unpack

WIDTH = flags.DEFINE_integer("width", 4, "Number of inputs.")


class Typed(ctl.Trainer):
    """A model with annotations."""

    def __init__(
        self, config: ctl.Config | None = None, *, width: int = 4, **options: Unpack[ctl.TrainerOptions]
    ) -> None:
        super().__init__(config, **options)
        self.width = width

    def build(self) -> None:
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)
        self.gradients = ctl.Gradients(clip_norm=1.0)

    def train_data(self, batch_size: int) -> Any:
        x = np.zeros((8, 4), np.float32)
        return ctl.from_arrays((x, x[:, 0]), batch_size)

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = (self.model(batch[0], training=True)[:, 0] - batch[1]) ** 2
            loss = self.average(losses)
        self.minimize(loss, tape)
        self.log("size", tf.size(losses))
        return {"loss": losses}

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": (self.model(batch[0])[:, 0] - batch[1]) ** 2}

    def predict(self) -> Iterator[dict[str, Any]]:
        yield {"output": self.model(np.zeros((1, 4), np.float32))}

    def after_loop(self, step: int, means: dict[str, float]) -> bool | None:
        return means["loss"] < 0.1

    def signatures(self) -> Mapping[str, Any]:
        return {}


class Printer(ctl.Callback):
    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> ctl.Decision | None:
        return ctl.Decision(stop=True) if values["loss"] < 0.1 else None


config = ctl.Config(train_steps=10, devices=["cpu:0"]).with_settings(keep="5")
trainer = Typed(
    config,
    model_dir="/tmp/x",
    callbacks=[Printer(), ctl.EarlyStopping("loss")],
    intervals=ctl.Intervals(log=ctl.Every(steps=1)),
    writers=[ctl.ConsoleWriter(live=False)],
    global_batch_size=4,
)
results: ctl.Results = trainer.train(10)
metrics: dict[str, Any] = results
end: ctl.RunEnd | None = results.end
step: int = trainer.step
model_dir: str | None = trainer.model_dir
seed: int = trainer.seed
path: str | None = trainer.save()
rank: int = trainer.topology.worker_index
paths: list[str] = trainer.export("keras")
names: Iterator[str] = iter(paths)
hvd.init()
size: int = hvd.size()
compiled = ctl.KerasTrainer(keras.Sequential, train=None, config=config, seed=1)
losses, tested = ctl.testing.run_steps(Typed(seed=1), steps=3)
if __name__ == "__main__":
    ctl.run(Typed, width=WIDTH, global_batch_size=8, train_steps=10)
