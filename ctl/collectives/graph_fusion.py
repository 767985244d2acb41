"""Fusion of the separate all-reduces of a function while the function is traced.

TensorFlow does not report the end of a trace. The nodes of a fusion therefore have a capacity: unused
inputs are empty tensors, and the capacity doubles when all inputs are in use. The results that the program
already uses then read the outputs of the new nodes. The old nodes have no consumer and never run. The
number of nodes is linear in the number of tensors. A tensor that depends on a result of the fusion starts
a new fusion.
"""

import abc
import weakref
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import graph_inputs

_MAX_TENSORS = 128


@dataclass
class TracedCollectives:
    """Fusions of a function that is being traced.

    Attributes:
      fusions: Fusions by type, reduction and scale. Further all-reduces may join them.
      group: Group of ranks of these fusions.
    """

    fusions: dict[Any, "GraphFusion"] = field(default_factory=dict)
    group: Any = None

    @classmethod
    def get_or_create(cls, graph: Any) -> "TracedCollectives":
        """Returns the fusions of a graph. They are stored as an attribute of the graph."""
        if not hasattr(graph, "_ctl_collectives"):
            graph._ctl_collectives = cls()
        return graph._ctl_collectives


def can_fuse(graph: Any) -> bool:
    """Returns True if collectives of the graph can be fused. Graphs of sessions are immutable."""
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    return is_function and graph_inputs.can_update_inputs()


class FusedNodes(abc.ABC):
    """Nodes that exchange the joined tensor of a fusion.

    Attributes:
      dtype: Type of the tensors.
      names: Names of the all-reduces.
      shapes: Shapes of their tensors.
    """

    def __init__(self, dtype: tf.DType):
        self.dtype = dtype
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    @abc.abstractmethod
    def add_request(self, joined: tf.Tensor, token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds the node that requests the exchange.

        Returns:
          The number of the pending collective, `[]` int64, and the serialized handle of its queue.
        """

    @abc.abstractmethod
    def add_wait(self, handle: tf.Tensor) -> tf.Operation:
        """Adds an operation that completes with the exchange. It also runs if its result is unused."""

    @abc.abstractmethod
    def add_take(
        self, number: tf.Tensor, signal: tf.Operation, capacity: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds the node that takes the result after the signal.

        Returns:
          The result, `[n]`, and the number of elements of each tensor, `[capacity]` int64.
        """


class GraphFusion:
    """Fusion of the tensors of one type into one exchange.

    Args:
      graph: Graph of the function that is being traced.
      nodes: Factory of the nodes of the exchange.
      max_bytes: Maximum total size of the tensors.
    """

    def __init__(self, graph: Any, nodes: FusedNodes, max_bytes: int):
        self._nodes = nodes
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._parts: list[tf.Tensor] = []
        self._results: list[tf.Tensor] = []
        self._capacity = 0
        self._token = tf.timestamp()  # prevents constant folding
        self._empty = _without_shape(tf.zeros([0], nodes.dtype))
        self._number = _without_shape(tf.zeros([], tf.int64))
        self._handle = _without_shape(tf.constant(""))
        self._signal = nodes.add_wait(self._handle)
        self._joined = self._empty
        self._shape_constants: dict[tuple[int, ...], tf.Tensor] = {}
        self._descendants = _Descendants(graph, self._signal)

    def extend(self, name: str, tensor: tf.Tensor) -> tf.Tensor | None:
        """Adds a tensor. Returns its result, or None if it cannot join the previous tensors."""
        size = tensor.shape.num_elements() * tensor.dtype.size
        count = len(self._parts)
        if count and (self._num_bytes + size > self._max_bytes or count == _MAX_TENSORS):
            return None
        part = tensor if tensor.shape.rank == 1 else self._reshape(tensor, (-1,))
        if self._descendants.include(part.op):
            return None
        self._parts.append(part)
        self._num_bytes += size
        self._nodes.names.append(name)
        self._nodes.shapes.append(tuple(tensor.shape.as_list()))
        if count < self._capacity:
            graph_inputs.update_input(self._joined.op, count, part)
        else:
            self._add_nodes(max(1, 2 * self._capacity))
        result = self._reshape(self._outputs[count], self._nodes.shapes[-1])
        result.set_shape(tensor.shape)
        self._results.append(result)
        self._descendants.add(result.op)
        return result

    def _reshape(self, tensor: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
        """Reshapes a tensor. Equal shapes share one constant."""
        if shape not in self._shape_constants:
            self._shape_constants[shape] = tf.constant(shape, tf.int32)
        return tf.raw_ops.Reshape(tensor=tensor, shape=self._shape_constants[shape])

    def _add_nodes(self, capacity: int) -> None:
        """Replaces the nodes of the exchange by nodes for `capacity` tensors."""
        self._capacity = capacity
        if capacity == 1:
            self._joined = tf.identity(self._parts[0])
        else:
            unused = [self._empty] * (capacity - len(self._parts))
            self._joined = tf.concat([*self._parts, *unused], axis=0)
        number, handle = self._nodes.add_request(self._joined, self._token)
        graph_inputs.update_input(self._number.op, 0, number)
        graph_inputs.update_input(self._handle.op, 0, handle)
        total, sizes = self._nodes.add_take(self._number, self._signal, capacity)
        if capacity == 1:
            self._outputs = [total]
        else:
            self._outputs = tf.raw_ops.SplitV(value=total, size_splits=sizes, axis=0, num_split=capacity)
        for result, output in zip(self._results, self._outputs, strict=False):
            graph_inputs.update_input(result.op, 0, output)


def _without_shape(tensor: tf.Tensor) -> tf.Tensor:
    """Removes the static shape of a tensor, because `update_input` does not change it."""
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape(None))


class _Descendants:
    """Set of the nodes that depend on the results of a fusion.

    It includes the control dependencies that TensorFlow adds at the end of the trace. A node with a side
    effect runs after all previous nodes, or after the nodes that use the same resource.
    """

    def __init__(self, graph: Any, root: tf.Operation):
        self._graph = weakref.ref(graph)
        self._num_checked = len(_operations(graph))
        self._members = {root}
        self._resources: set[Any] = set()
        self._all = False

    def add(self, operation: tf.Operation) -> None:
        """Adds a node."""
        self._members.add(operation)

    def include(self, operation: tf.Operation) -> bool:
        """Returns True if the node is a descendant."""
        graph = self._graph()
        operations = _operations(graph) if graph is not None else []
        for index in range(self._num_checked, len(operations)):
            node = operations[index]
            if node not in self._members and self._needs_results(node):
                self._members.add(node)
                resources = [t.ref() for t in node.inputs if t.dtype == tf.resource]
                self._resources.update(resources)
                self._all |= bool(node.op_def.is_stateful) and not resources
        self._num_checked = len(operations)
        return self._all or operation in self._members

    def _needs_results(self, node: tf.Operation) -> bool:
        predecessors = (*(tensor.op for tensor in node.inputs), *node.control_inputs)
        return any(operation in self._members for operation in predecessors) or (
            bool(self._resources) and any(t.ref() in self._resources for t in node.inputs)
        )


def _operations(graph: Any) -> Any:
    """Returns the nodes of a graph, without a copy of the list if TensorFlow provides one."""
    operations = getattr(graph, "operations", None)
    return operations if isinstance(operations, list) else graph.get_operations()
