"""Execution of a custom `train_step` or `test_step` of a model, with the interface of the Keras loop.

On several replicas every replica calls the step with its part of the batch (`own_step="mean"`). The losses
are means over a replica's examples, so gradients, values and updates of `Mean` metrics are averaged over
replicas in proportion to their numbers of examples.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import layers_of
from ctl.errors import UsageError
from ctl.keras.step_logs import StepLogs
from ctl.step import finiteness
from ctl.step.keras_losses import GlobalMeans, undivided_means
from ctl.step.keras_metrics import across_replicas
from ctl.step.optimizers import WITHOUT_SUM
from ctl.step.traced_step import TracedStep
from ctl.step.update_request import create_update
from ctl.tensorflow_patches import keras_models, optimizer_attributes
from ctl.tensorflow_patches.replaced_methods import recorded_calls, replaced
from ctl.tensorflow_patches.weighted_means import weighted_means

OWN_STEP_MEAN = "mean"


class _Thread(threading.local):
    """Means over replicas for the step that this thread traces. None on one replica."""

    means: "ReplicaMeans | None" = None


_thread = _Thread()


def has_own(model: Any, method: str) -> bool:
    """Returns True if the class of the model overrides a method of `keras.Model`."""
    return not getattr(getattr(type(model), method, None), "__module__", "keras.").startswith("keras.")


class ReplicaMeans:
    """Means over replicas in proportion to their examples, while one replica's step is traced.

    Args:
      means: Numbers of examples of this replica and of all replicas.
      step: The traced step, which applies updates.
      optimizers: Optimizers of the model by name. The name of `model.optimizer` is an empty string.
    """

    def __init__(self, means: GlobalMeans, step: TracedStep, optimizers: Mapping[str, Any]):
        self._step = step
        self.optimizers = [o for o in optimizers.values() if o is not None]
        self._labels = {id(optimizer): name for name, optimizer in optimizers.items()}
        self.share = tf.convert_to_tensor(means.share_of_rows(tf.constant(1.0)))  # of the global batch

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Applies the mean of the gradients over replicas. Variables without a gradient do not change."""
        _check_not_clipped(optimizer, gradients)
        num_local_workers = self._step.context.num_local_workers
        factor = self.share * num_local_workers if num_local_workers else self.share
        scaled = [
            (_times(gradient, factor), variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if not scaled:
            raise UsageError(
                f"{type(optimizer).__name__}.apply got no gradient for any of {len(variables)} variables; "
                "expected a loss that depends on them."
            )
        loss_flag, label = finiteness.flag_of(tf.constant(0.0)), self._labels.get(id(optimizer), "")
        request = create_update(scaled, optimizer, loss_flag, self._step.context)
        self._step.update(dataclasses.replace(request, label=label))


_CLIPPING = ("ClipByValue", "Minimum", "Maximum", "Sqrt", "Rsqrt", "L2Loss", "Sign")


def _is_clipped(gradient: Any) -> bool:
    """Returns True if a gradient was clipped or normalized after the tape computed it."""
    queue, visited = [gradient.op], set()
    while queue:
        operation = queue.pop()
        if operation.name in visited or "gradient_tape/" in operation.name:
            continue
        visited.add(operation.name)
        if operation.type in _CLIPPING:
            return True
        queue += [tensor.op for tensor in operation.inputs if tensor.dtype != tf.resource]
    return False


def _check_not_clipped(optimizer: Any, gradients: Sequence[Any]) -> None:
    """Raises UsageError if the step has clipped a gradient."""
    for gradient in gradients:
        tensor = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if tensor is not None and _is_clipped(tensor):
            name = type(optimizer).__name__
            raise UsageError(
                f"the step clips gradients before it calls {name}.apply, so each replica would clip its "
                "own gradients instead of their mean. Let the optimizer clip the mean: "
                f"{name}(global_clipnorm=...), {name}(clipnorm=...) or {name}(clipvalue=...)."
            )


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


@tf.autograph.experimental.do_not_convert
def call_own_step(
    method: Any, data: Any, logs: StepLogs, means: ReplicaMeans | None = None
) -> dict[str, Any]:
    """Calls `train_step` or `test_step` and returns its values by name.

    Args:
      method: Bound method of the model.
      data: Batch of this replica.
      logs: Converter of the dictionary that the method returns.
      means: Means over replicas. None on one replica.

    Raises UsageError if the method does not return a dictionary.
    """
    if means is None:
        values = logs.of(lambda: method(data))
    else:
        with _averaged(means):
            values = logs.of(lambda: method(data), means.share)
    if values is None:
        raise UsageError(
            f"{method.__qualname__} did not return a dictionary; expected a dictionary from names to "
            "numbers, e.g. {m.name: m.result() for m in self.metrics}."
        )
    return values


@contextlib.contextmanager
def _averaged(means: ReplicaMeans) -> Iterator[None]:
    """Makes optimizers and `Mean` metrics average over replicas within the block."""
    before, _thread.means = _thread.means, means
    try:
        with (
            undivided_means(),
            replaced(means.optimizers, "apply", _apply_mean),
            weighted_means(means.share),
        ):
            yield
    finally:
        _thread.means = before


def _apply_mean(optimizer: Any, apply: Callable) -> Callable:
    @functools.wraps(apply)
    def apply_mean(gradients: Any, trainable_variables: Any = None) -> None:
        if _thread.means is None:
            return apply(gradients, trainable_variables)
        if trainable_variables is None:
            trainable_variables = optimizer_attributes.trainable_variables(optimizer)
        return _thread.means.apply(optimizer, list(gradients), list(trainable_variables))

    setattr(apply_mean, WITHOUT_SUM, apply)
    return apply_mean


def calls_model(model: Any, method: str, replicas: int) -> bool:
    """Returns True if `method` ("train_step" or "test_step") of the model must be called, as in Keras.

    A custom `compute_metrics` returns custom values. On several replicas, a custom `compute_loss` may be
    any function of the batch.
    """
    if has_own(model, method) or has_own(model, "compute_metrics"):
        return True
    return replicas > 1 and has_own(model, "compute_loss")


def build_by_tracing(
    model: Any, data: Any, strategy: tf.distribute.Strategy, metrics: Sequence[Any] = ()
) -> list[tuple[Any, tuple]]:
    """Creates the variables of a model, its metrics and its optimizers by a trace of its step.

    Args:
      model: Compiled Keras model.
      data: Example batch, as `train_step` receives it on one replica.
      strategy: Strategy of the model.
      metrics: Metrics to record on several replicas.

    Returns the recorded metrics with the arguments of their `update_state`.
    Raises UsageError on several replicas for unbuilt layers, as replicas cannot create variables.
    """
    replicas = strategy.num_replicas_in_sync

    def step(batch: Any) -> None:
        model.train_step(batch)

    if replicas == 1:
        tf.function(step, autograph=False).get_concrete_function(data)
        return []
    if type(model).call.__qualname__ not in ("Layer.call", "Model.call"):  # the class defines `call`
        keras_models.build_symbolically(model, data)  # a no-op for a built model
    optimizers = [o for o in (model.optimizer, *own_optimizers(model).values()) if o is not None]

    def on_replicas(batch: Any) -> None:
        strategy.run(step, (batch,))

    with (
        replaced(optimizers, "apply", functools.partial(_build_only, strategy)),
        recorded_calls(metrics, "update_state") as calls,
    ):
        unbuilt = [layer for layer in layers_of(model)[1:] if not layer.built]
        try:
            tf.function(on_replicas, autograph=False).get_concrete_function(data)
        except Exception as e:
            if not unbuilt or isinstance(e, UsageError):
                raise
            raise UsageError(
                f"the layer {unbuilt[0].name!r} of {type(model).__name__} has no variables yet, and a step "
                f"on {replicas} replicas cannot create them. Begin its model with keras.Input(shape), or "
                "call build(shape) before training."
            ) from e
    return calls


def _build_only(strategy: Any, optimizer: Any, _: Callable) -> Callable:
    def build(gradients: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None and not optimizer.built:
            across_replicas(strategy, lambda: optimizer.build(list(trainable_variables)))

    return build


def own_optimizers(model: Any) -> dict[str, Any]:
    """Returns the optimizers that are attributes of a model, by name, except `model.optimizer`."""
    return {
        name: value
        for name, value in vars(model).items()
        if hasattr(value, "apply_gradients") and value is not model.optimizer
    }


def check_own_step(value: str | None) -> None:
    """Raises UsageError for an invalid value of the argument `own_step`."""
    if value not in (None, OWN_STEP_MEAN):
        raise UsageError(
            f"own_step is {value!r}; expected {OWN_STEP_MEAN!r}, for a step whose loss is a mean over the "
            "batch, or None."
        )


def check_several_replicas(
    model: Any, replicas: int, own_step: str | None, *, trains: bool, evaluates: bool
) -> None:
    """Raises UsageError for custom methods on several replicas if `own_step` is None.

    Args:
      model: Compiled Keras model.
      replicas: Number of replicas.
      own_step: The argument of `ctl.fit`.
      trains: True if `train_step` will be called.
      evaluates: True if `test_step` will be called.
    """
    used = {"train_step": trains, "test_step": evaluates, "compute_loss": True, "compute_metrics": True}
    overridden = [method for method, is_used in used.items() if is_used and has_own(model, method)]
    if overridden and own_step is None:
        raise UsageError(
            f"{type(model).__name__} has its own {' and '.join(overridden)}, and the strategy has "
            f"{replicas} replicas, which each get a part of the batch. If its losses are means over the "
            'batch, write ctl.fit(..., own_step="mean"): gradients and values are then averaged over '
            "replicas. Otherwise write a ctl.Trainer with that step, or train on one device."
        )


def check_targets(model: Any, batch: Any, *, trains: bool) -> None:
    """Raises UsageError if a batch has no targets for the compiled loss of a model.

    Args:
      model: Compiled model.
      batch: Batch of the training or the evaluation, or None without data.
      trains: True for a batch of the training.
    """
    is_custom = has_own(model, "compute_loss") or has_own(model, "train_step" if trains else "test_step")
    if batch is None or is_custom or keras_models.compiled_loss(model) is None:
        return
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or batch[1] is None:
        raise UsageError(
            f"the {'training' if trains else 'evaluation'} data have inputs and no targets, and "
            f"{type(model).__name__} was compiled with a loss; expected (x, y) or (x, y, sample_weight), "
            "as arrays or as batches of a dataset."
        )
