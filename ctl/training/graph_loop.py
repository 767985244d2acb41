"""Many steps in one graph call: the part of the loop that runs inside TensorFlow.

`StepLoop` runs a `ReplicaStep` over batches under a strategy and adds up the numbers. Nothing is
fetched and nothing is reduced over workers here: that happens when somebody asks for the means.
"""

import contextlib
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
from ctl.step import keras_metrics
from ctl.step.averaging import ROWS
from ctl.step.replica_step import ReplicaStep
from ctl.training import step_mistakes
from ctl.training.error_translation import ours

_log = logging.getLogger("ctl")
_SHAPES = tf.TensorShape([]), tf.TensorShape([None, 2]), tf.TensorShape([])
TRACED_AGAIN = "The trainable variables have changed: the step is traced again."


@contextlib.contextmanager
def errors_of_a_trace(spec: Any) -> Iterator[None]:
    """Within the block a step is traced, for batches of `spec`; its errors come in words."""
    try:
        yield
    except Exception as e:
        known = ours(e)
        error_report.mark_as_common(known or e)
        if known is e:
            raise
        if known is not None:
            raise known from None  # AutoGraph wraps errors of classes it does not know
        explained = step_mistakes.explain_step_error(e, describe_element(spec), _keys(spec))
        if explained is None:
            error_report.add_note(e, f"The batch is {describe_element(spec)}.")
            raise
        error_report.mark_as_common(explained)
        raise explained from e


def _keys(spec: Any) -> tuple[str, ...]:
    """Returns the keys of a batch that is a dictionary."""
    if isinstance(spec, tuple) and spec and isinstance(spec[0], dict):  # with the number of real rows
        spec = spec[0]
    return tuple(map(str, spec)) if isinstance(spec, dict) else ()


class StepLoop:
    """Runs a `ReplicaStep` over batches; one trace whatever the number of steps.

    Args:
      counter: a variable of int64 that counts completed steps, or None.
      single: steps always come one at a time; saves the loop around them.
      trained: () -> what a trace depends on: which variables are trained, as a tuple.
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
        self.has_run = False  # what is traced; else the next call also compiles
        self._replica: Any = None  # the step of one replica, while it is traced
        self._bound: tuple = (None, None)  # the batches of the last call, their function
        self._lengths: dict[int, tf.Tensor] = {}
        self.totals, self.reducer = step.totals, step.reducer

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs up to `steps` steps; returns (packed + their totals, steps that were run).

        Fewer steps than asked means that the data ended, on all workers at the same step.
        """
        kind = "evaluation" if self._counter is None else "training"
        collective_debug.announce(f"{steps} {kind} steps")
        if self._bound[0] is not batches:
            self.trace(batches)
        function, self.has_run = self._bound[1], True
        if batches.has_unknown_end:
            packed, done = function(batches.iterator, self._length(steps), packed)
            return packed, int(done)
        if self._single:
            for _ in range(steps):
                packed = function(batches.iterator, packed)
        else:
            packed = function(batches.iterator, self._length(steps), packed)
        return packed, steps

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def trace(self, batches: Batches) -> None:
        """Traces what `run` calls for these batches, if need be: a concrete function, without dispatch."""
        key = self._key(batches)
        if key not in self._functions:
            if any(known[:4] == key[:4] for known in self._functions):
                _log.info(TRACED_AGAIN)
            packed, steps = tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([], tf.int64)
            several = self._until_end if batches.has_unknown_end else self._many
            single = self._single and not batches.has_unknown_end
            self._replica, self.has_run = (
                self._step.function(batches.share_of, batches.has_even_shares),
                False,
            )
            function = tf.function(self._one if single else several, autograph=False)
            with errors_of_a_trace(batches.iterator.element_spec):
                self._functions[key] = function.get_concrete_function(key[0], *[steps][single:], packed)
        self._bound = batches, self._functions[key]

    def _key(self, batches: Batches) -> tuple:
        """What a trace depends on."""
        spec = tf.type_spec_from_value(batches.iterator)
        return spec, batches.has_unknown_end, batches.share_of, batches.has_even_shares, self._trained()

    def names(self, batches: Batches) -> list[str]:
        """What a step returns, from its trace for such batches; nothing is run. For all workers."""
        self.trace(batches)
        return [
            *(n for n in self.totals.names if n != ROWS),
            *keras_metrics.metric_results(self.totals.metrics)[0],
        ]

    def communicates(self, batches: Batches) -> bool:
        """Whether workers wait for each other within a call of `run`, from the trace."""
        self.trace(batches)
        nodes, functions = dataset_traits.nodes_of_graph(self._bound[1].graph.as_graph_def())
        everywhere = itertools.chain(nodes, *functions.values())
        return any(node.op.startswith("Collective") or NODE_NAME in node.name for node in everywhere)

    def refresh(self) -> None:
        """The user's code has run, and may have changed which variables are trained."""
        batches = self._bound[0]
        if batches is not None and self._key(batches) not in self._functions:
            self.has_run = False
        self._bound = None, None

    def release(self) -> None:
        """Forgets the batches of the last call, so that their pipeline can end."""
        self._bound = None, None

    def graph_def(self) -> Any:
        """The graph of the step as a GraphDef, once something ran; None before."""
        for function in self._functions.values():
            return function.graph.as_graph_def()
        return None

    def _length(self, steps: int) -> tf.Tensor:
        if steps not in self._lengths:
            if len(self._lengths) > 100:  # automatic lengths vary without end
                self._lengths.clear()
            self._lengths[steps] = tf.constant(steps, tf.int64)
        return self._lengths[steps]

    def _one(self, iterator: Any, packed: Any) -> Any:
        return packed + self._summed(self._strategy.run(self._replica, (self._next(iterator),)))

    def _many(self, iterator: Any, steps: Any, packed: Any) -> Any:
        def step(done: Any, packed: Any) -> tuple[Any, Any]:
            result = self._strategy.run(self._replica, (self._next(iterator),))
            return done + 1, packed + self._summed(result)

        start = tf.constant(0, tf.int64), packed
        return tf.while_loop(lambda done, _: done < steps, step, start, _SHAPES[:2])[1]

    def _until_end(self, iterator: Any, steps: Any, packed: Any) -> Any:
        def step(done: Any, packed: Any, _: Any) -> tuple[Any, Any, Any]:
            element = self._next_if_any(iterator)
            more = self._everywhere(element.has_value(), iterator)

            def act() -> tuple[Any, Any]:
                result = self._strategy.run(self._replica, (element.get_value(),))
                return done + 1, packed + self._summed(result)

            done, packed = tf.cond(more, act, lambda: (done, packed))
            return done, packed, more

        start = tf.constant(0, tf.int64), packed, tf.constant(True)
        done, packed, _ = tf.while_loop(lambda n, _, more: more & (n < steps), step, start, _SHAPES)
        return packed, done

    def _next(self, iterator: Any) -> Any:
        timer = self._step.timer
        return next(iterator) if timer is None else timer.of_input(lambda: next(iterator))

    def _next_if_any(self, iterator: Any) -> Any:
        timer, found = self._step.timer, []
        if timer is None:
            return iterator.get_next_as_optional()

        def take() -> Any:
            found.append(iterator.get_next_as_optional())
            return found[0].has_value()

        timer.of_input(take)
        return found[0]

    def _summed(self, result: Any) -> Any:
        """`[m, 2]`, the sum over the replicas of this process; counts the step."""
        local = self._strategy.experimental_local_results(result)
        if self._counter is not None:
            with tf.control_dependencies(local):  # a step that fails is not counted
                self._counter.assign_add(1, read_value=False)
            self._step.reducer.after_step(self._counter)
        return local[0] if len(local) == 1 else tf.add_n(local)

    def _everywhere(self, here: Any, iterator: Any) -> Any:
        """True if every worker has a batch; TensorFlow's distributed iterators agree by themselves."""
        if self._workers == 1 or not isinstance(iterator, tf.data.Iterator):
            return here

        def count(value: Any) -> Any:
            return replica_sum.sum_over_all_replicas(tf.cast(value, tf.int32))

        timer = self._step.timer
        act = lambda: self._strategy.run(count, (here,))  # noqa: E731
        total = act() if timer is None else timer.of_sum([here], act)
        return tf.equal(total, self._workers)
