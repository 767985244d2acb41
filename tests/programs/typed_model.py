"""A user's typed model."""

from collections.abc import Iterator, Mapping
from typing import Any

import ctl
import ctl.hvd as hvd
import keras
import numpy as np
import tensorflow as tf


class Typed(ctl.Trainer):
    """A model with annotations."""

    def __init__(self, config: ctl.Config | None = None, *, width: int = 4, **options: Any) -> None:
        super().__init__(config, **options)
        self.width = width

    def build(self) -> None:
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)
        self.gradients = ctl.Gradients(clip_norm=1.0)

    def train_data(self, batch_size: int) -> tf.data.Dataset:
        x = np.zeros((8, 4), np.float32)
        return ctl.from_arrays((x, x[:, 0]), batch_size)

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = (self.model(batch[0], training=True)[:, 0] - batch[1]) ** 2
            loss = self.average(losses)
        self.minimize(loss, tape)
        self.log("size", tf.size(losses))
        return {"loss": losses}

    def after_loop(self, step: int, means: dict[str, float]) -> bool | None:
        return means["loss"] < 0.1

    def signatures(self) -> Mapping[str, Any]:
        return {}


class Printer(ctl.Callback):
    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> ctl.Decision | None:
        return ctl.Decision(stop=True) if values["loss"] < 0.1 else None


trainer = Typed(model_dir="/tmp/x", callbacks=[Printer(), ctl.EarlyStopping("loss")], global_batch_size=4)
metrics: dict[str, Any] = trainer.train(10)
step: int = trainer.step
path: str | None = trainer.save()
rank: int = trainer.topology.worker_index
paths: list[str] = trainer.export("keras")
names: Iterator[str] = iter(paths)
hvd.init()
size: int = hvd.size()
