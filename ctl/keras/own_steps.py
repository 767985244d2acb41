"""A model's own `train_step` and `test_step`: called as Keras's loop does, on one replica."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError


def has_own(model: Any, method: str) -> bool:
    """Whether the model's class overrides a method of `keras.Model`."""
    return not getattr(getattr(type(model), method, None), "__module__", "keras.").startswith("keras.")


@tf.autograph.experimental.do_not_convert
def call_own_step(method: Any, data: Any, metrics: Sequence[Any]) -> dict[str, Any]:
    """Calls `train_step` or `test_step`; what it returns, as values of a step.

    A metric that the step has updated stands for the numbers of its name; other numbers are averaged.
    """
    with _updates(metrics) as updated:
        logs = method(data)
    if not isinstance(logs, Mapping):
        raise UsageError(
            f"{method.__qualname__} returned {type(logs).__name__}; expected a dictionary from names to "
            "numbers, e.g. {m.name: m.result() for m in self.metrics}."
        )
    values = dict(_flat(logs))
    found = {}
    for metric in metrics:
        if id(metric) not in updated:
            continue
        result = metric.result()
        names = set(result) if isinstance(result, Mapping) else {metric.name}
        if names <= set(values):
            found[metric.name] = metric
            values = {name: value for name, value in values.items() if name not in names}
    return {**values, **found}


@contextlib.contextmanager
def _updates(metrics: Sequence[Any]) -> Iterator[set[int]]:
    """The ids of the metrics that are updated within the block."""
    seen: set[int] = set()

    def noted(metric: Any) -> Any:
        update = metric.update_state

        def update_state(*args: Any, **kwargs: Any) -> Any:
            seen.add(id(metric))
            return update(*args, **kwargs)

        return update_state

    for metric in metrics:
        object.__setattr__(metric, "update_state", noted(metric))
    try:
        yield seen
    finally:
        for metric in metrics:
            object.__delattr__(metric, "update_state")


def _flat(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in logs.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value


def build_by_tracing(model: Any, data: Any) -> None:
    """Makes the variables of a model, its metrics and its optimizers: traces the step, and runs nothing."""
    step = tf.function(lambda batch: call_own_step(model.train_step, batch, ()), autograph=False)
    step.get_concrete_function(data)


def own_optimizers(model: Any) -> dict[str, Any]:
    """Optimizers that are attributes of a model, by name, such as those of a GAN; not `optimizer`."""
    return {
        name: value
        for name, value in vars(model).items()
        if hasattr(value, "apply_gradients") and value is not model.optimizer
    }


def check_one_replica(model: Any, replicas: int) -> None:
    """Raises UsageError for own steps on several replicas."""
    own = [m for m in ("train_step", "test_step") if has_own(model, m)]
    if own:
        raise UsageError(
            f"{type(model).__name__} has a {' and a '.join(own)} of its own, which trains on one replica; "
            f"here are {replicas}. Its loss would be a mean over one replica's rows, and the sum of their "
            "gradients depends on how rows are shared. Write a ctl.Trainer with that step: self.average "
            "for the mean, self.minimize for the update."
        )
