"""Many steps in one graph call: the part of the loop that runs inside TensorFlow.

`ReplicaStep` is what one replica does with its share of a batch; `StepLoop` runs it over batches
under a strategy and adds up the numbers. Nothing is fetched and nothing is reduced over workers
here: that happens when somebody asks for the means.
"""

import threading
from collections.abc import Callable

import tensorflow as tf
from ctl import gradients as gradient_path
from ctl.averaging import Totals
from ctl.data import Batches, num_rows, take_rows
from ctl.errors import CtlError, UsageError
from ctl.strategies import placement


class Recorder(threading.local):
    """What `minimize` does during one replica's trace; replicas trace in threads of their own."""

    def __init__(self):
        self.updates: list[gradient_path.Update] = []  # waiting for the other parts of the batch
        self.norms: list[tf.Tensor] = []  # of the updates that were applied
        self.averaged = False  # `average` was called in this step
        self.parts = 1  # parts a replica's batch is split into

    def begin(self, parts: int) -> None:
        """A step begins, on one of `parts` parts of the batch."""
        self.updates, self.norms, self.parts, self.averaged = [], [], parts, False

    def minimize(self, update: gradient_path.Update, how: gradient_path.Gradients) -> None:
        """Applies the update now, or keeps it until all parts were seen."""
        if self.parts > 1:
            self.updates.append(update)
        else:
            self.norms.append(gradient_path.apply(update, how))


class ReplicaStep:
    """A person's step for one replica, as a function from a batch to a packed vector `[m, 2]`.

    With `accumulate_steps`, parts of the batch run one after the other, their gradients are added
    up, and the updates come after the last part.
    """

    def __init__(self, step: Callable, *, recorder: Recorder, how: Callable):
        self._step = step
        self._recorder = recorder
        self._how = how
        self.totals = Totals()

    def __call__(self, batch):
        parts = self._how().accumulate_steps
        if parts == 1:
            self._recorder.begin(1)
            return self._pack(self._step(batch), batch, self._recorder.norms)
        return self._accumulate(batch, parts)

    def _accumulate(self, batch, parts):
        rows = num_rows(batch)
        self._recorder.begin(parts)
        first = take_rows(batch, 0, rows // parts)
        packed = self._pack(self._step(first), first)
        updates = self._recorder.updates
        sums = _dense(updates)
        for i in tf.range(1, parts):
            self._recorder.begin(parts)
            part = take_rows(batch, rows * i // parts, rows * (i + 1) // parts)
            packed += self._pack(self._step(part), part)
            sums = _added(sums, _dense(self._recorder.updates))
        self._recorder.begin(1)
        return self._updated(packed, updates, sums)

    @tf.autograph.experimental.do_not_convert
    def _updated(self, packed, updates, sums):
        for update, gradients in zip(updates, sums, strict=True):
            update.gradients = gradients
            self._recorder.minimize(update, self._how())
        return self.totals.append(packed, self._recorder.norms)

    @tf.autograph.experimental.do_not_convert
    def _pack(self, scores, batch, norms=()):
        if not isinstance(scores, dict):
            raise UsageError(
                f"the step returned {type(scores).__name__}; expected a dictionary from names to one "
                'number per example, e.g. return {"loss": per_example}.'
            )
        return self.totals.pack(scores, num_rows(batch), norms)


@tf.autograph.experimental.do_not_convert
def _dense(updates: list) -> list:
    return [[tf.convert_to_tensor(g) for g in u.gradients] for u in updates]


@tf.autograph.experimental.do_not_convert
def _added(sums: list, more: list) -> list:
    return [
        [a + b for a, b in zip(total, part, strict=True)]
        for total, part in zip(sums, more, strict=True)
    ]


def _ours(error: BaseException | None) -> CtlError | None:
    """The error of `ctl` in a chain of errors, or None."""
    while error is not None and not isinstance(error, CtlError):
        error = error.__cause__ or error.__context__
    return error


class StepLoop:
    """Runs a `ReplicaStep` over batches; one trace whatever the number of steps.

    Args:
      counter: a variable of int64 that counts completed steps, or None.
      single: steps always come one at a time; saves the loop around them.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, step: ReplicaStep, *,
        counter: tf.Variable | None = None, single: bool = False,
    ):  # fmt: skip
        self._strategy = strategy
        self._step = step
        self._counter = counter
        self._single = single
        self._workers = placement(strategy).num_workers
        self._functions: dict = {}
        self._bound: tuple = (None, None)  # the batches of the last call, their function
        self._lengths: dict[int, tf.Tensor] = {}
        self.totals = step.totals

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs up to `steps` steps; returns (packed + their totals, steps that were run).

        Fewer steps than asked means that the data ended, on all workers at the same step.
        """
        bound, function = self._bound
        if bound is not batches:
            function = self._function(batches)
            self._bound = batches, function
        if batches.ends_unknown:
            packed, done = function(batches.iterator, self._length(steps), packed)
            return packed, int(done)
        if self._single:
            for _ in range(steps):
                packed = function(batches.iterator, packed)
        else:
            packed = function(batches.iterator, self._length(steps), packed)
        return packed, steps

    def release(self) -> None:
        """Forgets the batches of the last call, so that their pipeline can end."""
        self._bound = None, None

    @property
    def is_traced(self) -> bool:
        """False until the first call, which also traces and compiles."""
        return bool(self._functions)

    def graph_def(self):
        """The graph of the step as a GraphDef, once something ran; None before."""
        for function in self._functions.values():
            return function.graph.as_graph_def()
        return None

    def _function(self, batches: Batches):
        """The concrete function for this type of iterator; calling it skips tf.function's dispatch."""
        spec = tf.type_spec_from_value(batches.iterator)
        key = batches.ends_unknown, spec
        if key not in self._functions:
            try:
                self._functions[key] = self._trace(spec, batches.ends_unknown)
            except Exception as e:
                ours = _ours(e)
                if ours is None or ours is e:
                    raise
                raise ours from None  # AutoGraph wraps errors of classes it does not know
        return self._functions[key]

    def _trace(self, spec, ends_unknown: bool):
        packed = tf.TensorSpec([None, 2], tf.float64)
        length = tf.TensorSpec([], tf.int64)
        if ends_unknown:
            return tf.function(self._until_end).get_concrete_function(spec, length, packed)
        if self._single:
            return tf.function(self._one).get_concrete_function(spec, packed)
        return tf.function(self._many).get_concrete_function(spec, length, packed)

    def _length(self, steps: int) -> tf.Tensor:
        if steps not in self._lengths:
            if len(self._lengths) > 100:  # automatic lengths vary without end
                self._lengths.clear()
            self._lengths[steps] = tf.constant(steps, tf.int64)
        return self._lengths[steps]

    def _one(self, iterator, packed):
        return packed + self._replicas(next(iterator))

    def _many(self, iterator, steps, packed):
        for _ in tf.range(steps):
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(packed, tf.TensorShape([None, 2]))]
            )
            packed = packed + self._replicas(next(iterator))
        return packed

    def _until_end(self, iterator, steps, packed):
        done = tf.constant(0, tf.int64)
        more = tf.constant(True)
        while more and done < steps:
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(packed, tf.TensorShape([None, 2]))]
            )
            element = iterator.get_next_as_optional()
            more = self._everywhere(element.has_value(), iterator)
            if more:
                packed = packed + self._replicas(element.get_value())
                done += 1
        return packed, done

    def _replicas(self, batch):
        """One step on every replica of this process; `[m, 2]`, the sum over them."""
        result = self._strategy.run(self._step, (batch,))
        local = self._strategy.experimental_local_results(result)
        if self._counter is not None:
            with tf.control_dependencies(local):  # a step that fails is not counted
                self._counter.assign_add(1, read_value=False)
        return local[0] if len(local) == 1 else tf.add_n(local)

    @tf.autograph.experimental.do_not_convert
    def _everywhere(self, here, iterator):
        """True if every worker has a batch; TensorFlow's distributed iterators agree by themselves."""
        if self._workers == 1 or not isinstance(iterator, tf.data.Iterator):
            return here

        def count(value):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(value, tf.int32))

        total = self._strategy.run(count, (here,))
        return tf.equal(total, self._workers)
