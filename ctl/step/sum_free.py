"""For measurements: steps without their sums over replicas, and those sums alone.

with without_sums(first=0) as sums:
    loop.trace(batches)                   # each replica keeps its own gradients
call = sums_alone(strategy, sums)         # (steps) -> runs as many sums as so many steps have
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.distribute.engine_all_reduce import wire_dtype_of


class SumOfStep(NamedTuple):
    """A tensor that a step sums over replicas.

    `graph`: that it belongs to. `call`: number of the call that sums it, together with others. `act`: what
    sends it instead, in a replica: tensor -> result.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    graph: Any
    call: int = 0
    act: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def without_sums(first: int) -> Iterator[list[SumOfStep]]:
    """What is traced within keeps what each replica has; the list tells of the sums that were left out.

    Args:
      first: number of this process's first replica, whose sums are told.
    """
    found: list[SumOfStep] = []
    kind: Any = tf.distribute.ReplicaContext
    own = vars(kind).get("all_reduce")

    def note(value: Any, act: Callable[[Any], Any]) -> None:
        graph, call = tf.compat.v1.get_default_graph(), found[-1].call + 1 if found else 0
        found.append(SumOfStep(value.shape, value.dtype, graph, call, act))

    def kept(context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if int(tf.get_static_value(context.replica_id_in_sync_group)) == first:
            graph = tf.compat.v1.get_default_graph()
            tensors = tf.nest.flatten(value, expand_composites=True)
            call = found[-1].call + 1 if found else 0
            found.extend(SumOfStep(t.shape, t.dtype, graph, call) for t in tensors)
        return value

    def kept_in_replica(value: Any) -> Any:
        return kept(tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM, value)

    kind.all_reduce = kept
    sum_of_tensors, replica_sum.sum_over_all_replicas = replica_sum.sum_over_all_replicas, kept_in_replica
    try:
        yield found
    finally:
        replica_sum.sum_over_all_replicas = sum_of_tensors
        if own is None:
            del kind.all_reduce
        else:
            kind.all_reduce = own


def of_last_trace(sums: Sequence[SumOfStep]) -> list[SumOfStep]:
    """Those of one step: a loop may be traced more than once."""
    return [s for s in sums if s.graph is sums[-1].graph and s.shape.is_fully_defined()]


def sums_alone(
    strategy: tf.distribute.Strategy, sums: Sequence[SumOfStep], wire_dtype: str | None = None
) -> Callable[[int], None]:
    """(steps) -> None: the sums of so many steps, one step after the other.

    Args:
      wire_dtype: type in which floating numbers are sent, where they travel through a wire.
    """
    wire = wire_dtype_of(strategy, wire_dtype)

    def on_replica(start: Any) -> Any:
        context = tf.distribute.get_replica_context()
        first = []
        for _, group in itertools.groupby(sums, key=lambda one: one.call):
            together, sent = list(group), []
            for one in together:
                value = tf.fill(one.shape, tf.cast(start, one.dtype))
                sent.append(tf.cast(value, wire) if wire is not None and one.dtype.is_floating else value)
            act = together[0].act
            if act is not None:
                totals = [act(sent[0])]
            else:
                totals = context.all_reduce(tf.distribute.ReduceOp.SUM, sent)
            first += [tf.cast(tf.reshape(total, [-1])[:1], tf.float64) for total in totals]
        return tf.reduce_sum(tf.concat(first, axis=0))

    def step(i: Any, last: Any) -> Any:
        total = strategy.run(on_replica, (last * 0.0,))
        return i + 1, strategy.experimental_local_results(total)[0]

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def several(steps: Any) -> Any:
        start = tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)
        return tf.while_loop(lambda i, _: i < steps, step, start, parallel_iterations=1)[1]

    def run(steps: int) -> None:
        several(tf.constant(steps, tf.int64)).numpy()

    return run
