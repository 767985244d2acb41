"""Properties of a `tf.data` pipeline that affect the order and the content of its examples."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.tensorflow_patches import dataset_attributes
from ctl.tensorflow_patches.dataset_attributes import pipeline_parts

PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
RANDOM_OPS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "SampleDistortedBoundingBoxV2",
}
_STATEFUL = RANDOM_OPS | {  # one element changes their result for the next, e.g. seed generators of layers
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "RngReadAndSkip",
    "RngSkip",
    "StatefulUniform",
    "StatefulStandardNormalV2",
}
_SEED_INPUTS = ("seed", "seed2")  # inputs of some random operations, attributes of RANDOM_OPS
_IGNORE_STATE = 1  # random operations and tables start anew in each process that reads the graph
_functions_of = operator.attrgetter("library.function")  # of a GraphDef
_MAX_BYTES = 1 << 28  # a larger pipeline is not serialized for its operations

_Nodes = list[Any]  # NodeDefs of a graph or a function


def serialized_graph(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the dataset as a serialized GraphDef, string `[]`.

    Raises:
      tf.errors.OpError, ValueError: An operation of the dataset cannot be serialized.
    """
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
        strip_device_assignment=True,
    )


def operation_types(graph: tf.Tensor) -> set[str]:
    """Returns the types of all operations of a serialized graph, including its functions."""
    nodes, functions = nodes_of_graph(tf.compat.v1.GraphDef.FromString(graph.numpy()))
    return {node.op for body in (nodes, *functions.values()) for node in body}


class Unseeded(NamedTuple):
    """An operation that gives another order in each process.

    Attributes:
      cause: Predicate of a sentence about the dataset.
      fix: Code to write instead.
    """

    cause: str
    fix: str


_SHUFFLED = Unseeded("is shuffled without a seed", "shuffle(n, seed=0)")
_DRAWN = Unseeded(
    "is drawn by random numbers without a seed (Dataset.random, sample_from_datasets)",
    "sample_from_datasets(..., seed=0)",
)
_FILTERED = Unseeded(
    "is filtered by random numbers without a seed", "the seed of the random operation, as seed=0"
)


class Traits:
    """Properties of a pipeline. They are empty for a pipeline that cannot be inspected.

    Attributes:
      operations: Types of its operations.
      unordered_reason: Setting or source that allows any order of the examples, as a sentence, or "".
      reads_service: True if it reads from the tf.data service.
      has_parallel_state: True if several calls at a time change variables or draw random numbers, so that
        the number that an example gets differs from run to run.
      unseeded: An operation that gives other examples, or another order, in each process, or None.
    """

    def __init__(self, dataset: tf.data.Dataset):
        nodes, functions = _nodes(dataset)
        all_nodes = [n for body in (nodes, *functions.values()) for n in body]
        self.operations = {node.op for node in all_nodes}
        self.unordered_reason = ""
        if dataset.options().deterministic is False:
            self.unordered_reason = "its options have deterministic=False"
        elif any(n.attr["deterministic"].s == b"false" for n in all_nodes):
            self.unordered_reason = "one of its operations has deterministic=False"
        self.reads_service = any(op.startswith("DataServiceDataset") for op in self.operations)
        if self.reads_service:
            self.unordered_reason = "it reads from the tf.data service, whose workers keep no common order"
        # TensorFlow ignores the options of datasets that functions make, which are always in order.
        parallel = [n for n in all_nodes if n.op.startswith("Parallel") or "MapAndBatch" in n.op]
        self.has_parallel_state = any(_called_operations(n, functions) & _STATEFUL for n in parallel)
        self.unseeded = _unseeded(nodes, functions)


def make_deterministic(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with sequential calls of functions that have a state."""
    return dataset_attributes.optimized_dataset(dataset, "make_deterministic")


def _nodes(dataset: tf.data.Dataset) -> tuple[_Nodes, dict[str, _Nodes]]:
    """Returns the nodes of the pipeline, and the nodes of each of its functions by name."""
    with contextlib.suppress(tf.errors.OpError, ValueError):
        if _bytes_in_memory(dataset) <= _MAX_BYTES:
            return nodes_of_graph(tf.compat.v1.GraphDef.FromString(serialized_graph(dataset).numpy()))
    with contextlib.suppress(tf.errors.OpError, ValueError):
        return _nodes_of_objects(dataset)
    return [], {}


def _nodes_of_objects(dataset: Any) -> tuple[_Nodes, dict[str, _Nodes]]:
    """Returns the same as `_nodes`, for a pipeline that is too large to serialize: a node per dataset."""
    nodes: _Nodes = []
    functions: dict[str, _Nodes] = {}
    for part in pipeline_parts(dataset):
        node = tf.compat.v1.NodeDef(op=type(part).__name__.strip("_"))
        node.attr["deterministic"].s = dataset_attributes.determinism_of(part).encode()
        seeds = dataset_attributes.seeds_of(part, _SEED_INPUTS)
        if seeds is not None:
            for name, seed in zip(_SEED_INPUTS, seeds, strict=True):
                node.attr[name].i = seed
        for i, function in enumerate(dataset_attributes.functions_of(part)):
            called = node.attr[f"function_{i}"].func
            called.name = function.name
            body, inner = nodes_of_graph(function.graph.as_graph_def())
            functions |= {**inner, called.name: body}
        nodes.append(node)
    return nodes, functions


def nodes_of_graph(graph: Any) -> tuple[_Nodes, dict[str, _Nodes]]:
    """Returns the nodes of a GraphDef, and the nodes of each of its functions by name."""
    return list(graph.node), {f.signature.name: list(f.node_def) for f in _functions_of(graph)}


def _unseeded(nodes: _Nodes, functions: dict[str, _Nodes]) -> Unseeded | None:
    """Returns the first operation without a seed. With a global seed every operation has one."""
    drawing = [n for body in (nodes, *functions.values()) for n in body if _draws_unseeded(n, body)]
    types = {n.op for n in drawing if "Dataset" in n.op or "SeedGenerator" in n.op}
    if any("Shuffle" in op for op in types):
        return _SHUFFLED
    if types:
        return _DRAWN
    for body in (nodes, *functions.values()):
        for node in (n for n in body if "Filter" in n.op):
            if any(_draws_unseeded(n, b) for b in _called_functions(node, functions) for n in b):
                return _FILTERED
    return None


def _draws_unseeded(node: Any, body: _Nodes) -> bool:
    """Returns True if an operation draws random numbers with both seeds 0. `body` contains the node."""
    if all(name in node.attr for name in _SEED_INPUTS):
        return not any(node.attr[name].i for name in _SEED_INPUTS)
    names = dataset_attributes.input_names(node.op)
    if len(node.input) < len(names) or any(name not in names for name in _SEED_INPUTS):
        return False
    inputs = [node.input[names.index(name)].partition(":")[0] for name in _SEED_INPUTS]
    constants = {n.name: n.attr["value"].tensor for n in body if n.op == "Const" and n.name in inputs}
    return all(i in constants and not tf.make_ndarray(constants[i]).any() for i in inputs)


def _called_functions(
    node: Any, functions: dict[str, _Nodes], visited: frozenset = frozenset()
) -> Iterator[_Nodes]:
    """Yields the nodes of each function that a node calls, directly or indirectly."""
    for value in node.attr.values():
        names = [value.func.name, *(f.name for f in value.list.func)]
        for name in (n for n in names if n in functions and n not in visited):
            yield functions[name]
            for inner in functions[name]:
                yield from _called_functions(inner, functions, visited | {name})


def _called_operations(node: Any, functions: dict[str, _Nodes]) -> set[str]:
    return {inner.op for body in _called_functions(node, functions) for inner in body}


def _bytes_in_memory(dataset: Any) -> int:
    """Returns the size of the tensors in the pipeline, which a serialized graph would contain."""
    sizes = [
        (t.shape.num_elements() or 0) * t.dtype.size
        for part in pipeline_parts(dataset)
        for t in dataset_attributes.tensors_of(part)
        if tf.is_tensor(t)
    ]
    return sum(sizes)
