"""All-reduces that a function asks for one by one, as one node, joined while the function is traced.

TensorFlow does not say when a trace ends. So each further tensor makes new nodes for all tensors so far,
and what the program already holds, identities, gets these as its inputs; the nodes before are left
without a reader, and never run. A tensor that depends on a result of its predecessors begins anew.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's name for a resource of one step
_MOST_TENSORS = 128  # each makes nodes for all before it

# (names, their shapes, the joined tensor, what keeps it from being a constant) -> the joined result
_Exchange = Callable[[Sequence[str], Sequence[tf.TensorShape], tf.Tensor, tf.Tensor], tf.Tensor]


@dataclass
class TracedCollectives:
    """What is remembered of a function while it is traced.

    Attributes:
      last_takes: group -> the node after which the next result is taken.
      fusions: what further all-reduces may join, of one group at a time.
      group: that one.
    """

    last_takes: dict[Any, tf.Operation] = field(default_factory=dict)
    fusions: dict[Any, "GraphFusion"] = field(default_factory=dict)
    group: Any = None

    @classmethod
    def of(cls, graph: Any) -> "TracedCollectives":
        """That of a graph, with which it ends."""
        if not hasattr(graph, "_ctl_collectives"):
            graph._ctl_collectives = cls()
        return graph._ctl_collectives


def can_fuse(graph: Any) -> bool:
    """Whether nodes of the graph can be joined; those of TensorFlow 1's sessions are not."""
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    return is_function and hasattr(tf.Operation, "_update_input")


class GraphFusion:
    """Tensors of one type that travel together.

    Args:
      graph: of the function that is traced now.
      dtype: of the tensors.
      exchange: makes the nodes of the exchange.
      most_bytes: that travel together.

    Attributes:
      done: a node that runs once their results are there.
    """

    def __init__(self, graph: Any, dtype: tf.DType, exchange: _Exchange, most_bytes: int):
        self._exchange = exchange
        self._most_bytes = most_bytes
        self._bytes = 0
        self._names: list[str] = []
        self._shapes: list[tf.TensorShape] = []
        self._parts: list[tf.Tensor] = []
        self._shown: list[tf.Tensor] = []
        self._token = tf.timestamp()  # keeps TensorFlow from computing the result as a constant
        one_step = tf.raw_ops.VarHandleOp(dtype=dtype, shape=None, shared_name=_ANONYMOUS)
        nothing = _of_any_shape(tf.zeros([0], dtype))
        self.done = tf.raw_ops.AssignVariableOp(resource=one_step, value=nothing)  # runs in any case
        self._later = _Descendants(graph, self.done)

    def extended(self, name: str, tensor: tf.Tensor) -> tf.Tensor | None:
        """The result for one more tensor, in its shape; None if it has to go after the others."""
        size = tensor.shape.num_elements() * tensor.dtype.size
        if self._parts and (self._bytes + size > self._most_bytes or len(self._parts) == _MOST_TENSORS):
            return None
        parts = [*self._parts, tf.reshape(tensor, [-1])]
        joined = tf.concat(parts, axis=0) if len(parts) > 1 else tf.identity(parts[0])
        if self._later.include(joined.op):
            return None
        names, shapes = [*self._names, name], [*self._shapes, tensor.shape]
        total = self._exchange(names, shapes, joined, self._token)
        counts = [shape.num_elements() for shape in shapes]
        found = tf.split(total, counts) if len(counts) > 1 else [total]
        for shown, part in zip(self._shown, found, strict=False):
            shown.op._update_input(0, part)
        self.done._update_input(1, _of_any_shape(total))
        mine = tf.identity(found[-1])
        self._later.add(mine.op)
        self._names, self._shapes, self._parts = names, shapes, parts
        self._shown.append(mine)
        self._bytes += size
        return tf.reshape(mine, tensor.shape)


def _of_any_shape(tensor: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape(None))


class _Descendants:
    """Nodes that need the results of a fusion, as far as its graph has been made.

    What TensorFlow will order, once the function is traced, counts: a node with a side effect comes
    after all before it, or after those that use the same resource.
    """

    def __init__(self, graph: Any, root: tf.Operation):
        self._graph = weakref.ref(graph)
        self._seen = len(graph.get_operations())
        self._found = {root}
        self._resources: set[Any] = set()
        self._all = False

    def add(self, operation: tf.Operation) -> None:
        """It is one, and its descendants are."""
        self._found.add(operation)

    def include(self, operation: tf.Operation) -> bool:
        """Whether it is one."""
        graph = self._graph()
        operations = graph.get_operations() if graph is not None else []
        for one in operations[self._seen :]:
            if one not in self._found and self._needs_results(one):
                self._found.add(one)
                resources = [t.ref() for t in one.inputs if t.dtype == tf.resource]
                self._resources.update(resources)
                self._all |= bool(one.op_def.is_stateful) and not resources
        self._seen = len(operations)
        return self._all or operation in self._found

    def _needs_results(self, one: tf.Operation) -> bool:
        before = (*(tensor.op for tensor in one.inputs), *one.control_inputs)
        return any(operation in self._found for operation in before) or (
            bool(self._resources) and any(t.ref() in self._resources for t in one.inputs)
        )
