"""Trainer of `ctl.predict`, for compiled and uncompiled Keras 3 models."""

import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.python_batches import example_batch
from ctl.errors import UsageError
from ctl.keras.argument_checks import check_is_model
from ctl.step.randomness import GeneratorStates
from ctl.trainer import Trainer


class KerasPredictor(Trainer):
    """A trainer that only predicts, for `ctl.predict`."""

    def __init__(self, model: Any, *, generator_states: GeneratorStates | None = None, **options: Any):
        """Validates and stores the model.

        Args:
          model: Keras 3 model, compiled or not.
          generator_states: See `ctl.KerasTrainer`.
          options: Options of `ctl.Trainer`, except `strategy`, which is that of the model.

        Raises UsageError if `model` is not a Keras 3 model.
        """
        check_is_model(model)
        super().__init__(strategy=model.distribute_strategy or tf.distribute.get_strategy(), **options)
        self._given, self._generator_states = model, generator_states

    def build(self) -> None:
        """Sets the given model."""
        if self._generator_states is not None:
            self._generator_states.restore()
        self.model = self._given

    def predict(self, data: Any = None) -> Any:
        """Returns the outputs of the model for all inputs of `data`; see `Trainer.predict`."""
        self._create_variables(data)
        return super().predict(data)

    def predict_batches(self, data: Any, callbacks: Any) -> Any:
        """Returns `predict(data)`, and calls a `CallbackList` at each batch, as `Model.predict` does.

        A callback ends the prediction if it sets `model.stop_predicting`.
        """
        self._create_variables(data)
        model, outputs = self._given, []
        model.stop_predicting = False
        steps = int(getattr(model, "steps_per_execution", 1) or 1)
        if not isinstance(data, tf.data.Dataset):
            data = data.in_order().replica_batches(
                seed=0, start=0, total=data.num_examples, replicas=range(1), num_replicas=1
            )
        batches = iter(data)
        for first in itertools.count(0, steps):
            execution = list(itertools.islice(batches, steps))
            if not execution:
                break
            callbacks.on_predict_batch_begin(first)
            parts = [super(KerasPredictor, self).predict(_only(batch)) for batch in execution]
            outputs.append(tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts))
            callbacks.on_predict_batch_end(first + steps - 1, {"outputs": outputs[-1]})
            if model.stop_predicting:
                break
        if not outputs:
            raise UsageError("x ended before its first batch; expected at least one.")
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *outputs)

    def _create_variables(self, data: Any) -> None:
        """Creates the variables of an unbuilt model, as replicas cannot create variables."""
        if self._given.built:
            return
        batch = example_batch(data) if isinstance(data, tf.data.Dataset) else data.read_first(1)
        if batch is not None:
            inputs = batch[0] if isinstance(batch, tuple) else batch
            with self.strategy.scope():
                self._given(tf.nest.map_structure(lambda part: part[:1], inputs))


def _only(batch: Any) -> tf.data.Dataset:
    """Returns a dataset of one batch."""
    return tf.data.Dataset.from_tensors(batch)
