"""Loop of many steps in one graph call.

`StepLoop` runs a `ReplicaStep` over batches under a strategy and sums the values of the steps on the
device. The caller fetches the sums and reduces them over workers.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from ctl.collectives.graph_nodes import NODE_NAME
from ctl.data import dataset_traits
from ctl.data.batches import Batches
from ctl.data.dataset_checks import describe_element
from ctl.distribute import collective_debug, replica_sum
from ctl.distribute.topology import Topology
from ctl.io import error_report
from ctl.io.error_report import ctl_error_in
from ctl.step import keras_metrics, step_mistakes
from ctl.step.averaging import ROWS
from ctl.step.replica_step import RETRACE_MESSAGE, ReplicaStep
from ctl.training.pacing import SynchronousPacing

_log = logging.getLogger("ctl")
_SHAPES = tf.TensorShape([]), tf.TensorShape([None, 2]), tf.TensorShape([])


@contextlib.contextmanager
def errors_of_a_trace(spec: Any) -> Iterator[None]:
    """Explains errors of a trace within the block; `spec` is the type of the batches."""
    try:
        yield
    except Exception as e:
        own_error = ctl_error_in(e)
        error_report.mark_as_common(own_error or e)
        if own_error is e:
            raise
        if own_error is not None:
            raise own_error from None  # AutoGraph wraps errors of unknown classes
        explained = step_mistakes.explain_step_error(e, describe_element(spec), _keys(spec))
        if explained is None:
            error_report.add_note(e, f"The batch is {describe_element(spec)}.")
            raise
        error_report.mark_as_common(explained)
        raise explained from e


def _unpacked(iterator_spec: Any, handles: list[Any]) -> Any:
    """Returns the iterator with these tensors."""
    return tf.nest.pack_sequence_as(iterator_spec, handles, expand_composites=True)


def _keys(spec: Any) -> tuple[str, ...]:
    """Returns the keys of a batch that is a dictionary."""
    if isinstance(spec, tuple) and spec and isinstance(spec[0], dict):  # with the number of real rows
        spec = spec[0]
    return tuple(map(str, spec)) if isinstance(spec, dict) else ()


class StepLoop:
    """Loop of steps with one trace for any number of steps.

    Args:
      strategy: Strategy of the job.
      step: Step of a replica.
      topology: Topology of the job.
      counter: int64 variable with the number of completed steps, or None.
      single: True if each call runs one step, which needs no loop in the graph.
      trained: Returns the identities of the trained variables, on which a trace depends.

    Attributes:
      has_run: False if the next call compiles.
      totals: Names and packing of the values.
      reducer: Reducer of the gradients.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: ReplicaStep,
        topology: Topology,
        *,
        counter: tf.Variable | None = None,
        single: bool = False,
        trained: Callable[[], tuple] = tuple,
    ):
        self._strategy = strategy
        self._step = step
        self._counter = counter
        self._single = single
        self._trained = trained
        self._workers = topology.num_workers
        self._functions: dict = {}
        self.has_run = False
        self._replica: Any = None  # function of one replica, while it is traced
        self._bound: tuple = (None, None)  # batches of the newest call, function with their iterator
        # automatic lengths vary without end
        self._length = functools.lru_cache(maxsize=100)(lambda steps: tf.constant(steps, tf.int64))
        self.totals, self.reducer = step.totals, step.reducer

    def pacing(self) -> SynchronousPacing:
        """Returns the lengths of graph calls."""
        return SynchronousPacing()

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs up to `steps` steps; fewer if the data ends, on all workers at the same step.

        Returns:
          `packed` plus the totals of the steps, and the number of steps.
        """
        purpose = "evaluation" if self._counter is None else "training"
        collective_debug.announce(f"{steps} {purpose} steps")
        if self._bound[0] is not batches:
            self.trace(batches)
        function, self.has_run = self._bound[1], True
        if batches.has_unknown_end:
            packed, ran = function(self._length(steps), packed)
            return packed, int(ran)
        if self._single:
            for _ in range(steps):
                packed = function(packed)
        else:
            packed = function(self._length(steps), packed)
        return packed, steps

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def trace(self, batches: Batches) -> None:
        """Traces the concrete function for these batches, unless it exists."""
        key = self._key(batches)
        if key not in self._functions:
            if any(other[:4] == key[:4] for other in self._functions):
                _log.info(RETRACE_MESSAGE)
            packed, steps = tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([], tf.int64)
            run_many = self._until_end if batches.has_unknown_end else self._many
            single = self._single and not batches.has_unknown_end
            self._replica, self.has_run = (
                self._step.function(batches.share_of, batches.has_even_shares),
                False,
            )
            # Passed as tensors, as TensorFlow takes several microseconds to check an iterator at each call.
            iterator_spec, handles = key[0], tf.nest.flatten(key[0], expand_composites=True)
            run = functools.partial(self._run_one if single else run_many, iterator_spec)
            function = tf.function(run, autograph=False)
            with errors_of_a_trace(batches.iterator.element_spec):
                self._functions[key] = function.get_concrete_function(*handles, *[steps][single:], packed)
        handles = tf.nest.flatten(batches.iterator, expand_composites=True)
        self._bound = batches, functools.partial(self._functions[key], *handles)

    def _key(self, batches: Batches) -> tuple:
        """Returns the values on which a trace depends."""
        spec = tf.type_spec_from_value(batches.iterator)
        return spec, batches.has_unknown_end, batches.share_of, batches.has_even_shares, self._trained()

    def names(self, batches: Batches) -> list[str]:
        """Returns the names of the values of a step from its trace. All workers call it."""
        self.trace(batches)
        return [
            *(n for n in self.totals.names if n != ROWS),
            *keras_metrics.metric_results(self.totals.metrics)[0],
        ]

    def communicates(self, batches: Batches) -> bool:
        """Returns True if the traced function contains collectives."""
        self.trace(batches)
        graph = self._functions[self._key(batches)].graph
        nodes, functions = dataset_traits.nodes_of_graph(graph.as_graph_def())
        all_nodes = itertools.chain(nodes, *functions.values())
        return any(node.op.startswith("Collective") or NODE_NAME in node.name for node in all_nodes)

    def refresh(self) -> None:
        """Called after user code, which may have changed the set of trained variables."""
        batches = self._bound[0]
        if batches is not None and self._key(batches) not in self._functions:
            self.has_run = False
        self._bound = None, None

    def release(self) -> None:
        """Releases the batches of the newest call, so that their pipeline can end."""
        self._bound = None, None

    def graph_def(self) -> Any:
        """Returns the graph of the step as a GraphDef, after the first call."""
        return next(iter(self._functions.values())).graph.as_graph_def()

    def _run_one(self, iterator_spec: Any, *arguments: Any) -> Any:
        *handles, packed = arguments
        iterator = _unpacked(iterator_spec, handles)
        return packed + self._summed(self._strategy.run(self._replica, (self._next(iterator),)))

    def _many(self, iterator_spec: Any, *arguments: Any) -> Any:
        *handles, steps, packed = arguments
        iterator = _unpacked(iterator_spec, handles)

        def step(ran: Any, packed: Any) -> tuple[Any, Any]:
            result = self._strategy.run(self._replica, (self._next(iterator),))
            return ran + 1, packed + self._summed(result)

        start = tf.constant(0, tf.int64), packed
        return tf.while_loop(lambda ran, _: ran < steps, step, start, _SHAPES[:2])[1]

    def _until_end(self, iterator_spec: Any, *arguments: Any) -> Any:
        *handles, steps, packed = arguments
        iterator = _unpacked(iterator_spec, handles)

        def step(ran: Any, packed: Any, _: Any) -> tuple[Any, Any, Any]:
            element = self._next_if_any(iterator)
            has_batch = self._on_all_workers(element.has_value(), iterator)

            def run() -> tuple[Any, Any]:
                result = self._strategy.run(self._replica, (element.get_value(),))
                return ran + 1, packed + self._summed(result)

            ran, packed = tf.cond(has_batch, run, lambda: (ran, packed))
            return ran, packed, has_batch

        start = tf.constant(0, tf.int64), packed, tf.constant(True)
        ran, packed, _ = tf.while_loop(
            lambda ran, _, has_batch: has_batch & (ran < steps), step, start, _SHAPES
        )
        return packed, ran

    def _next(self, iterator: Any) -> Any:
        timer = self._step.timer
        return next(iterator) if timer is None else timer.of_input(lambda: next(iterator))

    def _next_if_any(self, iterator: Any) -> Any:
        timer, elements = self._step.timer, []
        if timer is None:
            return iterator.get_next_as_optional()

        def take() -> Any:
            elements.append(iterator.get_next_as_optional())
            return elements[0].has_value()

        timer.of_input(take)
        return elements[0]

    def _summed(self, result: Any) -> Any:
        """Returns the sum `[m, 2]` over the replicas of this process, and counts the step."""
        local = self._strategy.experimental_local_results(result)
        if self._counter is not None:
            with tf.control_dependencies(local):  # a step that fails is not counted
                self._counter.assign_add(1, read_value=False)
            self._step.reducer.after_step(self._counter)
        return local[0] if len(local) == 1 else tf.add_n(local)

    def _on_all_workers(self, has_batch: Any, iterator: Any) -> Any:
        """Returns True if every worker has a batch. TensorFlow's distributed iterators agree already."""
        if self._workers == 1 or not isinstance(iterator, tf.data.Iterator):
            return has_batch

        def count(value: Any) -> Any:
            return replica_sum.sum_over_all_replicas(1 - tf.cast(value, tf.int32))

        timer = self._step.timer
        exchange = lambda: self._strategy.run(count, (has_batch,))  # noqa: E731
        total = exchange() if timer is None else timer.of_sum([has_batch], exchange)
        return tf.equal(total, 0)
