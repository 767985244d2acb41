"""What a `tf.data` pipeline is made of, as far as the order and the content of its examples go."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

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
_STATEFUL = RANDOM_OPS | {  # what one element changes for the next: seed generators of layers, and the like
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "RngReadAndSkip",
    "RngSkip",
    "StatefulUniform",
    "StatefulStandardNormalV2",
}
_SEED_INPUTS = ("seed", "seed2")  # of operations that draw; attributes of RANDOM_OPS have the same names
_IGNORE_STATE = 1  # of random operations and tables: they start anew wherever the graph is read
_functions_of = operator.attrgetter("library.function")  # of a GraphDef
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
    nodes, functions = nodes_of(tf.compat.v1.GraphDef.FromString(graph.numpy()))
    return {node.op for node in (*nodes, *(n for body in functions.values() for n in body))}


class Unseeded(NamedTuple):
    """What draws another order in each process, as a part of a sentence, and what to write instead."""

    cause: str
    cure: str


_SHUFFLED = Unseeded("is shuffled without a seed", "shuffle(n, seed=0)")
_DRAWN = Unseeded(
    "is drawn by random numbers without a seed (Dataset.random, sample_from_datasets)",
    "sample_from_datasets(..., seed=0)",
)
_FILTERED = Unseeded(
    "is filtered by random numbers without a seed", "the seed of the random operation, as seed=0"
)


class Traits:
    """What is known about a pipeline; empty for one that cannot be looked at.

    Attributes:
      operations: their types.
      any_order: how it says that the order of its examples may be any, or "".
      parallel_state: it changes variables or draws random numbers in several calls at a time, so which
        example gets which number differs from run to run.
      unseeded: what gives other examples, or another order, in each process; None if nothing does.
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
        # TensorFlow ignores options of datasets that functions make: those are always in order.
        parallel = [n for n in (*nodes, *bodies) if n.op.startswith("Parallel") or "MapAndBatch" in n.op]
        self.parallel_state = any(_reached(n, functions) & _STATEFUL for n in parallel)
        self.unseeded = _unseeded(nodes, functions)


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
    with contextlib.suppress(tf.errors.OpError, ValueError):
        if _bytes_in_memory(dataset) <= _MOST_BYTES:
            return nodes_of(tf.compat.v1.GraphDef.FromString(graph_of(dataset).numpy()))
    with contextlib.suppress(tf.errors.OpError, ValueError):
        return _from_objects(dataset)
    return [], {}


def _from_objects(dataset: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """The same for a pipeline that is not serialized, as it holds too many bytes: a node for each part."""
    nodes: list[Any] = []
    functions: dict[str, list[Any]] = {}
    for part in made_of(dataset):
        node = tf.compat.v1.NodeDef(op=type(part).__name__.strip("_"))
        node.attr["deterministic"].s = str(getattr(part, "_deterministic", "")).encode()
        seeds: list[Any] = [getattr(part, f"_{name}", None) for name in _SEED_INPUTS]
        if all(isinstance(s, tf.Tensor) and hasattr(s, "numpy") for s in seeds):
            for name, seed in zip(_SEED_INPUTS, seeds, strict=True):
                node.attr[name].i = int(seed.numpy())
        for i, wrapper in enumerate(part._functions()):
            called = node.attr[f"function_{i}"].func
            called.name = wrapper.function.name
            body, inner = nodes_of(wrapper.function.graph.as_graph_def())
            functions |= {**inner, called.name: body}
        nodes.append(node)
    return nodes, functions


def nodes_of(graph: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """The nodes of a GraphDef, and those of each of its functions by name."""
    return list(graph.node), {f.signature.name: list(f.node_def) for f in _functions_of(graph)}


def _unseeded(nodes: list[Any], functions: dict[str, list[Any]]) -> Unseeded | None:
    """The first cause of another order in each process: with a global seed every operation has a seed."""
    drawing = [n for body in (nodes, *functions.values()) for n in body if _draws_unseeded(n, body)]
    orders = {n.op for n in drawing if "Dataset" in n.op or "SeedGenerator" in n.op}
    if any("Shuffle" in op for op in orders):
        return _SHUFFLED
    if orders:
        return _DRAWN
    for body in (nodes, *functions.values()):
        for node in (n for n in body if "Filter" in n.op):
            if any(_draws_unseeded(n, b) for b in _called(node, functions) for n in b):
                return _FILTERED
    return None


def _draws_unseeded(node: Any, body: list[Any]) -> bool:
    """Whether an operation draws random numbers with both seeds 0; `body` has what it is made from."""
    if all(name in node.attr for name in _SEED_INPUTS):
        return not any(node.attr[name].i for name in _SEED_INPUTS)
    definition = op_def_registry.get(node.op)
    names = [] if definition is None else [arg.name for arg in definition.input_arg]
    if len(node.input) < len(names) or any(name not in names for name in _SEED_INPUTS):
        return False
    inputs = [node.input[names.index(name)].partition(":")[0] for name in _SEED_INPUTS]
    constants = {n.name: n.attr["value"].tensor for n in body if n.op == "Const" and n.name in inputs}
    return all(i in constants and not tf.make_ndarray(constants[i]).any() for i in inputs)


def _called(
    node: Any, functions: dict[str, list[Any]], seen: frozenset = frozenset()
) -> Iterator[list[Any]]:
    """The functions that a node calls, however deep."""
    for value in node.attr.values():
        names = [value.func.name, *(f.name for f in value.list.func)]
        for name in (n for n in names if n in functions and n not in seen):
            yield functions[name]
            for inner in functions[name]:
                yield from _called(inner, functions, seen | {name})


def _reached(node: Any, functions: dict[str, list[Any]]) -> set[str]:
    """The types of operations within the functions that a node calls, however deep."""
    return {inner.op for body in _called(node, functions) for inner in body}


def _bytes_in_memory(dataset: Any) -> int:
    """Of the tensors that the pipeline begins with; they would be part of its serialized graph."""
    tensors = [t for t in getattr(dataset, "_tensors", ()) if tf.is_tensor(t)]
    own = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    return own + sum(_bytes_in_memory(part) for part in dataset._inputs())
