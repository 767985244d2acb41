"""Keras metrics (3 or tf_keras) that a step returns: read over all replicas, set aside for an evaluation.

    self.auc.update_state(labels, scores)      # in the step, on each replica
    return {"loss": loss, "auc": self.auc}     # reported, then reset, when the numbers are

A metric holds one part of its state per replica; reading it adds them up, so every worker reads.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3
from tensorflow.python.ops import resource_variable_ops


def is_metric(thing: Any) -> bool:
    """True for a Keras metric object."""
    methods = ("update_state", "result", "reset_state")
    return all(callable(attribute(thing, m)) for m in methods)


def found_in(thing: Any) -> list[Any]:
    """The metrics among a trainer's attributes, also in lists and dictionaries; private ones too."""
    if is_metric(thing):
        return [thing]
    if isinstance(thing, Mapping):
        return [m for item in thing.values() for m in found_in(item)]
    if isinstance(thing, (list, tuple)):
        return [m for item in thing for m in found_in(item)]
    return []


def metric_results(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """name -> metric becomes name -> number; and name -> array, of metrics of rank 1 and more.

    A sum over replicas and workers for each variable: to be called on all workers alike.
    """
    found: dict[str, float] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, metric in metrics.items():
        for part, number in _numbers_of(name, metric.result()):
            array = np.asarray(number)
            if array.ndim == 0:
                found[part] = float(array)
            else:
                arrays[part] = array
    return found, arrays


def _numbers_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers of a result by their innermost names, as Keras does."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _numbers_of(part, inner)
    else:
        yield name, value


def reset(metrics: Iterable[Any]) -> None:
    """Starts every metric anew."""
    for metric in metrics:
        metric.reset_state()


def parts_of(metrics: Iterable[Any]) -> list[tf.Variable]:
    """The variables of metrics on this process's replicas, each part by itself."""
    found: dict[int, tf.Variable] = {}
    for metric in metrics:
        for variable in metric.variables:
            value = variable.value if is_keras3(variable) else variable
            for part in getattr(value, "values", None) or (value,):
                found[id(part)] = part
    return list(found.values())


def count_outside_replicas(metrics: Iterable[Any]) -> None:
    """Gives Keras 3 metrics plain variables, for central storage.

    Keras adds to a variable by reading and assigning it, and central storage adds up what replicas
    assign: old values would count once for each replica (measured: a loss of 1.23 for 1.28). Updates
    of a plain variable follow each other in the step's graph.
    """
    for metric in metrics:
        for variable in metric.variables:
            if is_keras3(variable) and "Aggregating" in type(variable.value).__name__:
                variable._value = resource_variable_ops.ResourceVariable(
                    variable.value.numpy(), trainable=False, name=variable.name
                )


def build_outside_steps(metrics: Iterable[Any], strategy: tf.distribute.Strategy) -> None:
    """Metrics that make variables at their first update, such as F1Score, make them outside the trace.

    Within it, replicas would each make their own, which TensorFlow cannot.
    """
    for metric in metrics:
        if not getattr(metric, "_built", True) and callable(getattr(metric, "_build", None)):
            object.__setattr__(metric, "update_state", _built_first(metric, strategy))


def _built_first(metric: Any, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """`update_state` of a metric, which builds it from the shapes of what it gets."""
    update_state = metric.update_state
    names = list(inspect.signature(type(metric).update_state).parameters)[1:]
    wanted = len(inspect.signature(metric._build).parameters)

    @tf.autograph.experimental.do_not_convert
    def built_first(*args: Any, **named: Any) -> Any:
        if not metric._built:
            given = dict(zip(names, args, strict=False)) | named
            used = [given[n] for n in ("y_true", "y_pred") if n in given] or list(given.values())[:1]
            shapes = [tf.convert_to_tensor(value).shape for value in used]
            across_replicas(strategy, functools.partial(metric._build, *shapes[-wanted:]))
        return update_state(*args, **named)

    return built_first


def across_replicas(strategy: tf.distribute.Strategy, make: Callable[[], Any]) -> None:
    """Makes variables once for all replicas, outside the graph; in replica context."""

    def made(_: Any = None) -> None:
        with tf.init_scope(), strategy.scope():
            make()

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        made()
    else:
        context.merge_call(made)


class SetAside:
    """Inside its `with` block metrics count something else; afterwards they go on where they were.

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
        reset(self._metrics)  # also what was made meanwhile
        for part, value in zip(self._parts, self._values, strict=True):
            part.assign(value)
