"""Helpers for tests of a trainer: training steps without files, and a comparison of one device with two.

from ctl import testing

losses, trainer = testing.run_steps(Mnist(global_batch_size=8), steps=3)
testing.assert_same_on_replicas(Mnist, global_batch_size=8)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from ctl import setting_values
from ctl.checkpoints.protocol import NullCheckpoints
from ctl.checkpoints.tracked_state import collect_owners, is_model
from ctl.distribute import devices
from ctl.distribute.keras_objects import unwrap
from ctl.distribute.strategies import make_strategy
from ctl.errors import UsageError
from ctl.trainer_checks import check_factory, check_instance
from ctl.training import input_pipeline, validation
from ctl.training.loop_length import Interval
from ctl.training.task import Task


@dataclass(frozen=True)
class StepsResult:
    """Result of `run_steps`. It unpacks as `losses, trainer`.

    Attributes:
      losses: "loss" of each step, a mean over the global batch. Empty if the step returns no "loss".
      trainer: The trainer after the steps.
      metrics: All metrics that `train_step` returns, by name, for each step.
    """

    losses: list[float]
    trainer: Any
    metrics: list[dict[str, float]]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.losses, self.trainer))


def run_steps(trainer: Any, steps: int = 1) -> StepsResult:
    """Runs training steps of a trainer, compiled as in `Trainer.train`, without the surrounding loop.

    Builds the model, opens `train_data` and runs the steps. Restores and writes no files, calls no writers,
    hooks or callbacks, and installs no signal handlers. The weights change.

    Args:
      trainer: New `ctl.Trainer`. Its `model_dir` has no effect.
      steps: Number of steps, each with the next global batch.

    Raises UsageError as `Trainer.train` does, and if the data ends early.

    >>> losses, trainer = run_steps(Mnist(global_batch_size=8), steps=3)
    >>> assert losses[-1] < losses[0]
    """
    check_instance("run_steps", trainer)
    setting_values.check_integer("steps", steps, 1)
    task = Task.of(trainer)
    validation.check_methods(task, "train")
    validation.check_train_data(task)
    prepared = trainer._prepare_trainer(NullCheckpoints())
    graph_loop = prepared.programs.train_loop(None)
    first = prepared.step
    total, batches = input_pipeline.open_train_batches(prepared, first + steps, None)
    if total is not None and total < first + steps:
        raise UsageError(f"train_data ends after {total - first} steps; expected {steps}.")
    interval, metrics = Interval(graph_loop.totals), []
    try:
        for number in range(steps):
            interval.begin_steps()
            packed, ran = graph_loop.run(batches, 1, interval.packed)
            if not ran:
                raise UsageError(f"train_data ended after {number} steps; expected {steps}.")
            interval.add(packed, ran, None)
            interval.fetch(prepared.world.host_all_reduce.sum)
            metrics.append(interval.means())
            interval.clear()
    finally:
        graph_loop.release()
    return StepsResult([m["loss"] for m in metrics if "loss" in m], trainer, metrics)


def assert_same_on_replicas(
    make_trainer: Callable[..., Any],
    *,
    steps: int = 3,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **settings: Any,
) -> None:
    """Asserts that a trainer computes the same values on one device and on two virtual replicas.

    Compares all metrics that `train_step` returns after each step, and all weights after the last step.
    Disable random operations such as dropout, because each replica draws different numbers.

    Args:
      make_trainer: Subclass of `ctl.Trainer`, or a function with the arguments `strategy` and `settings`.
      steps: Number of steps to compare.
      rtol: Relative tolerance.
      atol: Absolute tolerance.
      settings: Arguments of `make_trainer`, such as `global_batch_size=8`.

    Raises AssertionError with the name of the first different value, and UsageError if TensorFlow has
    started without a second device: call `use_virtual_devices(2)` first, e.g. in `conftest.py`.
    """
    check_factory("assert_same_on_replicas", make_trainer)
    results = [
        run_steps(make_trainer(strategy=strategy, **settings), steps)
        for strategy in (_two_replicas(), "default")
    ]
    for number in range(steps):
        replicas, device = (result.metrics[number] for result in results)
        _compare(replicas, device, f"after step {number + 1}", rtol, atol)
    weights_of_replicas, weights = (_weights(result.trainer) for result in results)
    _compare(weights_of_replicas, weights, f"after {steps} steps", rtol, atol)


def use_virtual_devices(count: int = 2) -> None:
    """Splits the CPU into `count` devices. Raises UsageError if TensorFlow started with another number."""
    devices.split_cpu(count)


def _two_replicas() -> tf.distribute.Strategy:
    try:
        return make_strategy("mirrored", num_virtual_devices=2)
    except UsageError:
        if len(tf.config.list_logical_devices("CPU")) < 2:
            raise UsageError(
                "TensorFlow has started with one CPU device; expected two. Call "
                "ctl.testing.use_virtual_devices(2) before the first tensor, e.g. in conftest.py."
            ) from None
    return make_strategy("mirrored", devices=["cpu:0", "cpu:1"])


def _weights(trainer: Any) -> dict[str, np.ndarray]:
    """Returns the trainable variables of the models of a trainer by name."""
    models = {name: part for name, part in collect_owners(vars(trainer)).items() if is_model(part)}
    return {
        f"{name}, weight {i} {tuple(variable.shape)}": unwrap(variable).numpy()
        for name, model in models.items()
        for i, variable in enumerate(model.trainable_variables)
    }


def _compare(
    replicas: Mapping[str, Any], device: Mapping[str, Any], moment: str, rtol: float, atol: float
) -> None:
    """Raises AssertionError for the first value that differs."""
    if replicas.keys() != device.keys():
        raise AssertionError(f"two replicas have {sorted(replicas)}, one device has {sorted(device)}")
    for name, expected in device.items():
        actual = np.asarray(replicas[name])
        if not np.allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True):
            worst = float(np.max(np.abs(actual - expected)))
            values = f" ({actual:g} and {expected:g})" if actual.ndim == 0 else ""
            raise AssertionError(
                f"{name} differs by {worst:g} between two replicas and one device {moment}{values}. Means "
                "over the batch need self.average(...); random numbers differ by replica."
            )
