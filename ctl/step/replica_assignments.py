"""Refusal of assignments that would make a variable differ between replicas.

TensorFlow lets a step assign a variable that has no aggregation. Each replica then keeps a value of its
own, and checkpoints contain the value of the first replica only.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

# These modules assign equal values on all replicas, or synchronize the values themselves.
_TRUSTED_MODULES = tuple(
    f"{package}.src.{module}"
    for package in ("keras", "tf_keras")
    for module in ("random", "layers.normalization", "layers.regularization", "optimizers")
)
_KERAS_VARIABLES = ("keras.src.backend.common.variables", "keras.src.backend.tensorflow")
_NO_AGGREGATION = (
    "the step assigns {0}, which has no aggregation: each of {1} replicas would keep a value of its own, "
    "and a checkpoint would contain only one of them. Declare how the values are combined: "
    "tf.Variable(..., synchronization=tf.VariableSynchronization.ON_READ, "
    "aggregation=tf.VariableAggregation.SUM) for a count, MEAN for a running mean, ONLY_FIRST_REPLICA for "
    'a value that is equal on all replicas; in a Keras layer self.add_weight(..., aggregation="mean"). '
    "For a count in a Keras layer use a Keras metric."
)
_KERAS_SUM = (
    "the step adds to {0}, whose aggregation is SUM. Keras assigns the new total, so the totals of {1} "
    'replicas would be added up. Write keras.Variable(..., aggregation="sum", '
    'synchronization="on_read"), or use a Keras metric.'
)
_NORMALIZATION = "keras.src.layers.normalization.batch_normalization"
_UNSYNCHRONIZED = (
    "the layer {0!r} would normalize the examples of each of {1} replicas by themselves, so the model "
    "would be trained with other numbers than on one device. Write BatchNormalization(synchronized=True), "
    "or call ctl.synchronize_batch_norm(model) in build(), or ctl.fit(..., sync_batch_norm=True): on one "
    "device the layer is the same."
)
_MASKED = (
    "the layer {0!r} normalizes inputs with a mask, which Keras does on each of {1} replicas by itself, "
    "also with synchronized=True. Use keras.layers.LayerNormalization, or train on one device."
)
_install_lock = threading.Lock()


class _ThreadState(threading.local):
    """The number of replicas of the step that this thread traces; 1 while assignments are allowed."""

    num_replicas = 1


_state = _ThreadState()


@contextlib.contextmanager
def refused(num_replicas: int) -> Iterator[None]:
    """Within the block, assigning a variable without aggregation in replica context raises UsageError.

    With one replica every assignment is allowed.
    """
    if num_replicas > 1:
        _install()
    with _num_replicas_set(num_replicas):
        yield


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Suspends `refused`, for code that assigns equal values on all replicas, such as an optimizer."""
    with _num_replicas_set(1):
        yield


@contextlib.contextmanager
def _num_replicas_set(num_replicas: int) -> Iterator[None]:
    previous, _state.num_replicas = _state.num_replicas, num_replicas
    try:
        yield
    finally:
        _state.num_replicas = previous


def _install() -> None:
    """Replaces the private method through which mirrored variables are assigned in replica context."""
    from tensorflow.python.distribute import values

    with _install_lock:
        original = values.MirroredVariable._update_replica
        if getattr(original, "is_checked_by_ctl", False):
            return

        def update_replica(self: Any, update_fn: Any, value: Any, **kwargs: Any) -> Any:
            _check(self, value)
            return original(self, update_fn, value, **kwargs)

        update_replica.is_checked_by_ctl = True  # type: ignore[attr-defined]
        values.MirroredVariable._update_replica = update_replica


def _check(variable: Any, value: Any) -> None:
    if _state.num_replicas == 1:
        return
    _check_normalization()
    if variable.aggregation == tf.VariableAggregation.NONE and not (
        _is_made_of_variables(value, variable) or _is_called_by(_TRUSTED_MODULES)
    ):
        raise UsageError(_NO_AGGREGATION.format(_described(variable), _state.num_replicas))
    if variable.aggregation == tf.VariableAggregation.SUM and _is_called_by(_KERAS_VARIABLES, "assign_"):
        raise UsageError(_KERAS_SUM.format(_described(variable), _state.num_replicas))


def _check_normalization() -> None:
    """Raises UsageError if a BatchNormalization assigns statistics of one replica's examples."""
    frame = _calling_frame((_NORMALIZATION,), "call")
    layer = None if frame is None else frame.f_locals.get("self")
    if frame is None or layer is None:
        return
    if not getattr(layer, "synchronized", True):
        raise UsageError(_UNSYNCHRONIZED.format(layer.name, _state.num_replicas))
    if frame.f_locals.get("mask") is not None:
        raise UsageError(_MASKED.format(layer.name, _state.num_replicas))


def _is_made_of_variables(value: Any, variable: Any) -> bool:
    """Returns True if `value` depends on another variable and, besides variables, on constants only.

    All replicas compute the same value then, as in `slow.assign(0.9 * slow + 0.1 * fast)`. A constant
    alone does not count: it may be the static number of rows of one replica.
    """
    if not tf.is_tensor(value):
        return False
    graph = value.graph
    own_handle = graph.capture(variable._get_on_device_or_primary().handle)
    handles, pending, visited = set(), [value], set()
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if operation.type == "ReadVariableOp":
            handles.add(operation.inputs[0].ref())
        elif operation.name not in visited:
            if operation.type == "Placeholder" or operation.op_def.is_stateful:
                return False
            visited.add(operation.name)
            pending += operation.inputs
    return bool(handles - {own_handle.ref()})


def _described(variable: Any) -> str:
    return f"the variable {variable.name!r} (shape {variable.shape}, {variable.dtype.name})"


def _is_called_by(modules: tuple[str, ...], function: str = "") -> bool:
    """Returns True if a frame of the stack is in one of `modules`, in a function with that prefix."""
    return _calling_frame(modules, function) is not None


def _calling_frame(modules: tuple[str, ...], function: str = "") -> Any:
    """Returns the innermost frame in one of `modules` and in a function with that prefix, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if name.startswith(modules) and code.co_name.startswith(function):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return None
