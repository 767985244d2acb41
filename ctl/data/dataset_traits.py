"""What a `tf.data` pipeline is made of, as far as the order and the content of its examples go."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
RANDOM_OPS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "SampleDistortedBoundingBoxV2",
}
_STATEFUL = RANDOM_OPS | {  # what one element changes for the next: seed generators of layers, and the like
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "RngReadAndSkip",
    "RngSkip",
    "StatefulUniform",
    "StatefulStandardNormalV2",
}
_IGNORE_STATE = 1  # of random operations and tables: they start anew wherever the graph is read
_MOST_BYTES = 1 << 28  # of a pipeline that is serialized to look at its operations


def made_of(dataset: Any) -> Iterator[Any]:
    """A dataset and all that it is made of."""
    yield dataset
    for part in dataset._inputs():
        yield from made_of(part)


def graph_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """The dataset as a serialized graph, `[]` string; raises an OpError or ValueError if it has none."""
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
        strip_device_assignment=True,
    )


def operations(graph: tf.Tensor) -> set[str]:
    """The types of all operations of a serialized graph, those within its functions included."""
    nodes, functions = _parsed(tf.compat.v1.GraphDef.FromString(graph.numpy()))
    return {node.op for node in (*nodes, *(n for body in functions.values() for n in body))}


class Traits:
    """What is known about a pipeline; empty for one that cannot be looked at.

    Attributes:
      operations: their types.
      any_order: how it says that the order of its examples may be any, or "".
      parallel_state: it changes variables or draws random numbers in several calls at a time, so which
        example gets which number differs from run to run.
    """

    def __init__(self, dataset: tf.data.Dataset):
        nodes, functions = _nodes(dataset)
        bodies = [n for body in functions.values() for n in body]
        self.operations = {node.op for node in (*nodes, *bodies)}
        self.any_order = ""
        if dataset.options().deterministic is False:
            self.any_order = "its options say deterministic=False"
        elif any(n.attr["deterministic"].s == b"false" for n in (*nodes, *bodies)):
            self.any_order = "an operation in it says deterministic=False"
        parallel = [n for n in (*nodes, *bodies) if n.op.startswith("Parallel") or "MapAndBatch" in n.op]
        self.parallel_state = any(_reached(n, functions) & _STATEFUL for n in parallel)


def is_unseeded_shuffle(dataset: Any) -> bool:
    """Whether a dataset is a shuffle that was made without any seed."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if "Shuffle" not in type(dataset).__name__ or not all(
        isinstance(s, tf.Tensor) and hasattr(s, "numpy") for s in seeds
    ):
        return False
    return not any(int(s.numpy()) for s in seeds if s is not None)


def repeatable(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same, with what has a state called for one example after the other, in their order."""
    from tensorflow.python.data.ops import dataset_ops

    variant = tf.raw_ops.OptimizeDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        optimizations=tf.constant(["make_deterministic"]),
        optimization_configs=[],
        **dataset._flat_structure,
    )
    made = dataset_ops._VariantDataset(variant, dataset.element_spec)
    made.made_of = dataset  # which owns the variables of its functions
    return made.with_options(dataset.options())


def _nodes(dataset: tf.data.Dataset) -> tuple[list[Any], dict[str, list[Any]]]:
    """All nodes of the pipeline, and those of its functions by name."""
    try:
        if _bytes_in_memory(dataset) <= _MOST_BYTES:
            return _parsed(tf.compat.v1.GraphDef.FromString(graph_of(dataset).numpy()))
        return _from_objects(dataset)
    except (tf.errors.OpError, ValueError):
        pass
    return [], {}


def _from_objects(dataset: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """The same for a pipeline that holds too many bytes to be serialized: a node for each of its parts."""
    nodes: list[Any] = []
    functions: dict[str, list[Any]] = {}
    for part in made_of(dataset):
        node = tf.compat.v1.NodeDef(op=type(part).__name__.strip("_"))
        node.attr["deterministic"].s = str(getattr(part, "_deterministic", "")).encode()
        for i, wrapper in enumerate(part._functions()):
            called = node.attr[f"function_{i}"].func
            called.name = wrapper.function.name
            body, inner = _parsed(wrapper.function.graph.as_graph_def())
            functions |= {**inner, called.name: body}
        nodes.append(node)
    return nodes, functions


def _parsed(graph: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    return list(graph.node), {f.signature.name: list(f.node_def) for f in graph.library.function}


def _reached(node: Any, functions: dict[str, list[Any]], seen: frozenset = frozenset()) -> set[str]:
    """The types of operations within the functions that a node calls, however deep."""
    found: set[str] = set()
    for value in node.attr.values():
        names = [value.func.name, *(f.name for f in value.list.func)]
        for name in (n for n in names if n in functions and n not in seen):
            for inner in functions[name]:
                found |= {inner.op} | _reached(inner, functions, seen | {name})
    return found


def _bytes_in_memory(dataset: Any) -> int:
    """Of the tensors that the pipeline begins with; they would be part of its serialized graph."""
    tensors = [t for t in getattr(dataset, "_tensors", ()) if tf.is_tensor(t)]
    own = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    return own + sum(_bytes_in_memory(part) for part in dataset._inputs())
