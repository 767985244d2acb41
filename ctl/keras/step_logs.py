"""Conversion of the dictionary that a custom `train_step` or `test_step` returns to values of a ctl step.

Keras reports the newest dictionary of an epoch. A value that is the result of a metric is read from the
metric when it is reported. For any other number, the value of the newest step is stored.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.step import keras_metrics
from ctl.tensorflow_patches.replaced_methods import replaced


class _Thread(threading.local):
    """Results of metrics that the step of this thread has read: (value, metric, key or None)."""

    results: list[tuple[Any, Any, str | None]] | None = None


_thread = _Thread()


class MetricPart:
    """One value of a metric that returns a dictionary, such as the compiled metrics of Keras."""

    def __init__(self, metric: Any, key: str):
        self._metric, self._key = metric, key
        self.update_state = metric.update_state

    @property
    def variables(self) -> Sequence[Any]:
        """Variables of the whole metric."""
        return self._metric.variables

    def result(self) -> Any:
        """Returns this part of the result of the metric."""
        return self._metric.result()[self._key]

    def reset_state(self) -> None:
        """Resets the metric."""
        self._metric.reset_state()


class NewestValue:
    """A number of the newest step, with the methods of a Keras metric. On several replicas, a mean.

    Args:
      metrics: Metrics that the value may depend on. They are reset with it, as Keras resets all metrics
        of a model at the start of an epoch.
    """

    def __init__(self, metrics: Sequence[Any]):
        self._metrics = list(metrics)
        variable_options = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        self._sum = tf.Variable(0.0, dtype=tf.float64, **variable_options)
        self._weight = tf.Variable(0.0, dtype=tf.float64, **variable_options)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the weighted sum."""
        return [self._sum, self._weight]

    def update_state(self, value: Any, weight: Any = 1.0) -> None:
        """Stores the value of this replica with its weight in the mean over replicas."""
        weight = tf.cast(weight, tf.float64)
        self._sum.assign(tf.reduce_mean(tf.cast(value, tf.float64)) * weight)
        self._weight.assign(weight)

    def result(self) -> Any:
        """Returns the weighted mean, `[]`."""
        return tf.cast(tf.math.divide_no_nan(self._sum, self._weight), tf.float32)

    def reset_state(self) -> None:
        """Resets the sum and the metrics."""
        for variable in self.variables:
            variable.assign(0.0)
        keras_metrics.reset(self._metrics)


class StepLogs:
    """A converter of the dictionaries that one method of a model returns.

    Args:
      metrics: () -> the metrics of the model.
      strategy: Strategy under which the method is traced.
    """

    def __init__(self, metrics: Any, strategy: tf.distribute.Strategy):
        self._metrics, self._strategy = metrics, strategy
        self._newest: dict[str, NewestValue] = {}

    @tf.autograph.experimental.do_not_convert
    def of(self, call: Any, weight: Any = 1.0) -> dict[str, Any] | None:
        """Calls `call()` in replica context and returns its values by name; None if it returns no mapping.

        Args:
          call: () -> dictionary of the step.
          weight: Weight of this replica in the mean over replicas, `[]`.
        """
        metrics = list(self._metrics())
        before, _thread.results = _thread.results, []
        try:
            with replaced(metrics, "result", _recording):
                logs = call()
            results = _thread.results
        finally:
            _thread.results = before
        if not isinstance(logs, Mapping):
            return None
        flat = dict(_flat(logs))
        values, reported = _of_metrics(flat, results)
        for name in sorted(flat.keys() - reported):
            if self._strategy.num_replicas_in_sync > 1:
                _check_independent(name, flat[name], metrics)
            newest = self._newest_value(name, metrics)
            newest.update_state(flat[name], weight)
            values[name] = newest
        return values

    def _newest_value(self, name: str, metrics: Sequence[Any]) -> NewestValue:
        if name not in self._newest:
            keras_metrics.across_replicas(
                self._strategy, lambda: self._newest.setdefault(name, NewestValue(metrics))
            )
        return self._newest[name]


def _recording(metric: Any, result: Any) -> Any:
    def recorded() -> Any:
        value = result()
        if _thread.results is not None:
            parts = value.items() if isinstance(value, Mapping) else [(None, value)]
            _thread.results += [(part, metric, key) for key, part in parts]
        return value

    return recorded


def _of_metrics(
    flat: Mapping[str, Any], results: Sequence[tuple[Any, Any, str | None]]
) -> tuple[dict[str, Any], set[str]]:
    """Returns the metrics that have results in `flat`, by name, and the names of these results."""
    origin = {id(value): (metric, key) for value, metric, key in results if tf.is_tensor(value)}
    metrics, reported = {}, set()
    for name, value in flat.items():
        if id(value) in origin:
            metric, key = origin[id(value)]
            metrics[name] = metric if key is None else MetricPart(metric, key)
            reported.add(name)
    for metric in {id(metric): metric for _, metric, key in results if key is not None}.values():
        keys = {key for _, m, key in results if m is metric and key is not None}
        if all(origin.get(id(flat.get(key))) == (metric, key) for key in keys):  # one read for all parts
            metrics = {name: part for name, part in metrics.items() if name not in keys}
            metrics[metric.name] = metric
    return metrics, reported


def _check_independent(name: str, value: Any, metrics: Sequence[Any]) -> None:
    """Raises UsageError if a value depends on a metric, which covers the examples of one replica only."""
    if not tf.is_tensor(value) or not hasattr(value, "graph"):
        return
    metric_handles = {value.graph.capture(part.handle).ref() for part in keras_metrics.parts_of(metrics)}
    visited, pending = set(), [value]
    while pending:
        tensor = pending.pop()
        if tensor.ref() in metric_handles:
            raise UsageError(
                f"the step returns {name!r}, which depends on the result of a metric: on several replicas "
                "that is the result of one replica's examples. Return the result itself, or write a metric."
            )
        if tensor.op.name not in visited:
            visited.add(tensor.op.name)
            pending += tensor.op.inputs


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in logs.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value
