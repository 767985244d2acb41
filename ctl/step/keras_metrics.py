"""Keras metrics (3 or tf_keras) that a step returns.

    self.auc.update_state(labels, scores)      # in the step, on each replica
    return {"loss": loss, "auc": self.auc}     # reported with the other values, then reset

A metric has one part of its state per replica. Reading sums the parts, so all workers read together.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3
from ctl.tensorflow_patches import metric_building, metric_values


def is_metric(value: Any) -> bool:
    """Returns True for a Keras metric object."""
    methods = ("update_state", "result", "reset_state")
    return all(callable(attribute(value, m)) for m in methods)


def metrics_in(value: Any) -> list[Any]:
    """Returns the metrics in an object, or in nested lists and dictionaries."""
    if is_metric(value):
        return [value]
    if isinstance(value, Mapping):
        return [m for item in value.values() for m in metrics_in(item)]
    if isinstance(value, (list, tuple)):
        return [m for item in value for m in metrics_in(item)]
    return []


def metric_results(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Reads metrics. All workers call it, since each variable is summed over replicas and workers.

    Returns:
      Numbers by name, and arrays by name for results of rank 1 or more.
    """
    numbers: dict[str, float] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, metric in metrics.items():
        for part, number in _numbers_of(name, metric.result()):
            array = np.asarray(number)
            if array.ndim == 0:
                numbers[part] = float(array)
            else:
                arrays[part] = array
    return numbers, arrays


def _numbers_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers of a result by their innermost names, as Keras does."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _numbers_of(part, inner)
    else:
        yield name, value


def reset(metrics: Iterable[Any]) -> None:
    """Resets every metric."""
    for metric in metrics:
        metric.reset_state()


def parts_of(metrics: Iterable[Any]) -> list[tf.Variable]:
    """Returns the variables of metrics on the replicas of this process."""
    part_by_id: dict[int, tf.Variable] = {}
    for metric in metrics:
        for variable in metric.variables:
            value = variable.value if is_keras3(variable) else variable
            for part in getattr(value, "values", None) or (value,):
                part_by_id[id(part)] = part
    return list(part_by_id.values())


def count_outside_replicas(metrics: Iterable[Any]) -> None:
    """Replaces the variables of Keras 3 metrics by plain variables, for central storage.

    Keras adds to a variable by reading and assigning it, and central storage sums the assigned values of
    the replicas, so old values would count once for each replica (measured: a loss of 1.23 instead of
    1.28). Updates of a plain variable run sequentially in the graph of the step.
    """
    for metric in metrics:
        for variable in metric.variables:
            if is_keras3(variable) and "Aggregating" in type(variable.value).__name__:
                metric_values.replace_value(variable)


def build_outside_steps(metrics: Iterable[Any], strategy: tf.distribute.Strategy) -> None:
    """Creates the variables of metrics that create them at their first update, such as F1Score.

    Within the trace each replica would create variables, which TensorFlow does not support.
    """
    for metric in metrics:
        metric_building.build_before_update(metric, functools.partial(across_replicas, strategy))


def across_replicas(strategy: tf.distribute.Strategy, create: Callable[[], Any]) -> None:
    """Calls `create` once for all replicas, outside the graph. Called in replica context."""

    def create_in_scope(_: Any = None) -> None:
        with tf.init_scope(), strategy.scope():
            create()

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        create_in_scope()
    else:
        context.merge_call(create_in_scope)


class SetAside:
    """Context manager that resets metrics, and restores their state afterwards.

    >>> with SetAside(totals.metrics.values()):
    ...     evaluate()
    """

    def __init__(self, metrics: Iterable[Any]):
        self._metrics = list(metrics)

    def __enter__(self) -> None:
        self._parts = parts_of(self._metrics)
        self._values = [part.numpy() for part in self._parts]
        reset(self._metrics)

    def __exit__(self, *_: Any) -> None:
        reset(self._metrics)  # includes variables that were created within the block
        for part, value in zip(self._parts, self._values, strict=True):
            part.assign(value)
