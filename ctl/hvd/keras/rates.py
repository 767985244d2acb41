"""Callbacks that set the learning rate per epoch, or per batch during the warm-up."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd import process
from ctl.tensorflow_patches import optimizer_attributes


class TwoKerasCallback(tf.keras.callbacks.Callback):
    """Base class of callbacks for `fit` of Keras 3 and of tf_keras."""

    _chief_worker_only = None
    _supports_tf_logs = False

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class LearningRateScheduleCallback(TwoKerasCallback):
    """A callback that sets the rate to `initial_lr * multiplier` from `start_epoch` to `end_epoch`.

    When the rate changes, the optimizer's momentum is scaled by the same factor, because it contains
    steps at the old rate (Goyal et al. 2017, arXiv:1706.02677, section 2.1).

    Args:
      initial_lr: Learning rate at the start.
      multiplier: A function of the epoch. A number `m` represents `m ** (epoch - start_epoch)`.
      start_epoch: The first epoch.
      end_epoch: The first epoch after the schedule; None for no end.
      staircase: If True, the rate changes with the epoch, otherwise with every batch. `multiplier` then
        gets fractions of epochs.
      momentum_correction: If True, scales the momentum.
      steps_per_epoch: Batches per epoch. Required for `staircase=False` if `fit` cannot determine it.

    Raises UsageError for an optimizer without an assignable learning rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is None; expected the learning rate at the start.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        """Determines the number of batches per epoch, if it is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"{type(self).__name__} cannot determine the number of batches per epoch; expected "
                    "the argument steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Mapping | None = None) -> None:
        """Stores the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Mapping | None = None) -> None:
        """Sets the rate."""
        has_ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or has_ended:
            return
        if not self.staircase:
            self._adjust_rate(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: MutableMapping | None = None) -> None:
        """Adds the rate to the logs, as `lr`."""
        if logs is not None:
            logs["lr"] = _read_rate(self.model.optimizer)

    def _adjust_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = _read_rate(optimizer), float(self.initial_lr * self.multiplier(epoch))
        if old == new:
            return
        _set_rate(optimizer, new)
        if self.momentum_correction and old:
            for momentum in _find_momentum_variables(optimizer):
                momentum.assign(momentum * tf.cast(new / old, momentum.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """A callback that increases the learning rate from `initial_lr / size` to `initial_lr`.

    Args:
      initial_lr: The rate after the warm-up, for all ranks: `rate of one process * hvd.size()`.
      warmup_epochs: Duration of the warm-up (epochs).
      momentum_correction, steps_per_epoch: See `LearningRateScheduleCallback`.
      verbose: If 1, rank 0 prints a message at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            size = process.size()
            epoch += 1.0 / (self.steps_per_epoch or 1)  # the last batch of an epoch gets a whole number
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: MutableMapping | None = None) -> None:
        """Adds the rate to the logs, and prints a message at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == (self.end_epoch or 0) - 1 and process.rank() == 0:
            rate = _read_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _read_rate(optimizer: Any) -> float:
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def _set_rate(optimizer: Any, value: float) -> None:
    """Assigns the variable that a compiled step reads."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate: Any = optimizer_attributes.legacy_learning_rate(inner)
    if not hasattr(rate, "assign"):
        if not isinstance(rate, (int, float)):
            raise UsageError(
                f"the optimizer's learning rate is a {type(rate).__name__}, which this callback cannot "
                "set; expected a constant rate, such as keras.optimizers.SGD(0.1). Otherwise remove the "
                "callback."
            )
        optimizer.learning_rate = value
        return
    rate.assign(value)


def _find_momentum_variables(optimizer: Any) -> list[Any]:
    """Returns the momentum variables: none before the first step, or without momentum."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(inner, "momentum"):
        return []
    variables = optimizer_attributes.momentums(inner)
    if not variables and hasattr(inner, "get_slot_names") and "momentum" in inner.get_slot_names():
        variables = [v for v in inner.weights if "/momentum" in v.name]
    return [variable for variable in variables or [] if variable is not None]
