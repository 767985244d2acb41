"""Broadcast of variables from one rank to all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from ctl.collectives import tensor_ops
from ctl.collectives.calls import Call
from ctl.errors import UsageError
from ctl.hvd.process_sets import ProcessSet, check_set, global_process_set

_do_not_convert = tf.autograph.experimental.do_not_convert


@_do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assigns the values of `variables` on `root_rank` to the variables of every rank. Collective.

    Args:
      variables: Variables of TensorFlow, Keras 3 and tf_keras, which are broadcast in one exchange.
      root_rank: Rank in the job, also with a process set.
      process_set: Participating ranks.
      inplace: Ignored, because values are always assigned.

    Returns:
      In a graph of `tf.compat.v1` the operation that assigns the values, otherwise None.

    Raises:
      UsageError: If `variables` is not a list of variables.
      tf.errors.FailedPreconditionError: On every rank, if the variables of ranks differ in number, shape or
        type.
    """
    variable_list = _listed(variables)
    if not variable_list:
        return None if tf.compat.v1.executing_eagerly_outside_functions() else tf.no_op()
    values = _broadcast(variable_list, root_rank, None, process_set)
    assignments = [variable.assign(value) for variable, value in zip(variable_list, values, strict=True)]
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return tf.group(*_drop_none(assignments))


def _listed(variables: Any) -> list[Any]:
    is_list = isinstance(variables, Iterable) and not hasattr(variables, "assign")
    listed = list(variables) if is_list else []
    wrong = [v for v in listed if not hasattr(v, "assign")] if is_list else [variables]
    if wrong:
        raise UsageError(
            f"broadcast_variables got {wrong[0]!r:.80}; expected a list of variables, e.g. model.variables."
        )
    return listed


@_do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Broadcasts as `broadcast_variables`, and returns the new values as tensors.

    Args:
      variables: Variables to assign.
      root_rank: Rank in the job, also with a process set.
      name: Name that pairs the calls of different ranks.
      process_set: Participating ranks.
    """
    variable_list = list(variables)
    values = _broadcast(variable_list, root_rank, name, process_set) if variable_list else []
    assignments = [variable.assign(value) for variable, value in zip(variable_list, values, strict=True)]
    if tf.executing_eagerly():
        return list(values)
    with tf.control_dependencies(_drop_none(assignments)):
        return [tf.identity(value) for value in values]


def _drop_none(assignments: Sequence[Any]) -> list[Any]:
    """Returns the operations of assignments. They are None for Keras 3 variables."""
    return [operation for operation in assignments if operation is not None]


def _broadcast(variables: Any, root_rank: int, name: str | None, process_set: Any) -> Sequence[tf.Tensor]:
    call = Call("broadcast", "", check_set(process_set), root=root_rank)
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    default = "HorovodBroadcastVariables"
    if not tf.executing_eagerly():
        default += f"_{tensors[0].name}_{tensors[-1].name}".replace(":", "_").replace("/", "_")
    return tensor_ops.run_collective(call, tensors, name, default)
