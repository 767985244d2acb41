"""Refusal of assignments that would make a variable differ between replicas.

TensorFlow lets a step assign a variable that has no aggregation. Each replica then keeps a value of its
own, and checkpoints contain the value of the first replica only.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.tensorflow_patches import keras_stack_frames, mirrored_assignments
from ctl.tensorflow_patches.keras_stack_frames import TRUSTED_MODULES, VARIABLE_MODULES, is_called_by

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


# number of replicas of the step that this thread traces; 1 while assignments are allowed
_num_replicas: ContextVar[int] = ContextVar("num_replicas_of_assignments", default=1)


@contextlib.contextmanager
def refused(num_replicas: int) -> Iterator[None]:
    """Within the block, assigning a variable without aggregation in replica context raises UsageError.

    With one replica every assignment is allowed.
    """
    if num_replicas > 1:
        mirrored_assignments.check_assignments(_check)
    with _num_replicas_set(num_replicas):
        yield


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Suspends `refused`, for code that assigns equal values on all replicas, such as an optimizer."""
    with _num_replicas_set(1):
        yield


@contextlib.contextmanager
def _num_replicas_set(num_replicas: int) -> Iterator[None]:
    token = _num_replicas.set(num_replicas)
    try:
        yield
    finally:
        _num_replicas.reset(token)


def _check(variable: Any, value: Any) -> None:
    if _num_replicas.get() == 1:
        return
    _check_normalization()
    if variable.aggregation == tf.VariableAggregation.NONE and not (
        _is_made_of_variables(value, variable) or is_called_by(TRUSTED_MODULES)
    ):
        raise UsageError(_NO_AGGREGATION.format(_described(variable), _num_replicas.get()))
    if variable.aggregation == tf.VariableAggregation.SUM and is_called_by(VARIABLE_MODULES, "assign_"):
        raise UsageError(_KERAS_SUM.format(_described(variable), _num_replicas.get()))


def _check_normalization() -> None:
    """Raises UsageError if a BatchNormalization assigns statistics of one replica's examples."""
    call = keras_stack_frames.normalization_call()
    if call is None:
        return
    layer, has_mask = call
    if not getattr(layer, "synchronized", True):
        raise UsageError(_UNSYNCHRONIZED.format(layer.name, _num_replicas.get()))
    if has_mask:
        raise UsageError(_MASKED.format(layer.name, _num_replicas.get()))


def _is_made_of_variables(value: Any, variable: Any) -> bool:
    """Returns True if `value` depends on another variable and, besides variables, on constants only.

    All replicas compute the same value then, as in `slow.assign(0.9 * slow + 0.1 * fast)`. A constant
    alone does not count: it may be the static number of rows of one replica.
    """
    if not tf.is_tensor(value):
        return False
    graph = value.graph
    own_handle = mirrored_assignments.captured_handle(variable, graph)
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
