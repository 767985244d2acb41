"""Gradients of collectives.

`tf.custom_gradient` registers a name for each traced call, which TensorFlow never removes, and searches the
graph for variables. In this module all nodes share one name, and the graph owns the gradient functions.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import gradient_recording

_ATTRIBUTE = "_ctl_gradient"
_NAME = "CtlCollective"
_numbers = itertools.count(1)
_gradient_by_number: "weakref.WeakValueDictionary[int, _Gradient]" = weakref.WeakValueDictionary()

_Forward = Callable[..., list[Any]]


def run_with_gradient(forward: _Forward, backward: _Forward, tensors: Sequence[Any]) -> list[Any]:
    """Calls `forward(*tensors)` and registers its gradient function.

    Args:
      forward: Returns the outputs.
      backward: Called with the outputs and their gradients. Returns the gradients of the tensors.
      tensors: Inputs of `forward`.

    Returns:
      The outputs of `forward`.
    """
    if not tf.executing_eagerly() and gradient_recording.can_record_operations():
        return _add_with_gradient(forward, backward, tensors)
    # this check is cheaper than the creation of a gradient function
    if tf.executing_eagerly() and not gradient_recording.may_be_recorded():
        return forward(*tensors)

    @tf.custom_gradient
    def with_gradient(*inputs: Any) -> Any:
        results = forward(*inputs)

        def gradients(*upstream: Any) -> Any:
            return backward(results, *upstream)

        return results, gradients

    return list(with_gradient(*tensors))


class _Gradient:
    """Gradient function of the node that follows a collective."""

    def __init__(self, results: list[Any], backward: _Forward):
        self._results = results
        self._backward = backward

    def __call__(self, *upstream: Any) -> list[Any]:
        count = len(self._results)
        gradients = self._backward(self._results, *upstream[:count])
        return [None] * count + list(gradients)


def _add_with_gradient(forward: _Forward, backward: _Forward, tensors: Sequence[Any]) -> list[Any]:
    graph: Any = tf.compat.v1.get_default_graph()
    with gradient_recording.stop_recording():
        results = forward(*tensors)
        inputs = [*results, *map(tf.convert_to_tensor, tensors)]
        with graph.gradient_override_map({"IdentityN": _register_gradient()}):
            outputs = tf.raw_ops.IdentityN(input=inputs)
    gradient, number = _Gradient(results, backward), next(_numbers)
    _gradient_by_number[number] = gradient
    if not hasattr(graph, "_ctl_gradients"):
        graph._ctl_gradients = []
    graph._ctl_gradients.append(gradient)
    gradient_recording.set_integer_attribute(outputs[0].op, _ATTRIBUTE, number)
    gradient_recording.record_operation(_NAME, outputs, inputs, gradient)
    return list(outputs[: len(results)])


@functools.cache
def _register_gradient() -> str:
    @tf.RegisterGradient(_NAME)
    def gradient_of_node(operation: Any, *upstream: Any) -> Any:
        return _gradient_by_number[operation.get_attr(_ATTRIBUTE)](*upstream)

    return _NAME
