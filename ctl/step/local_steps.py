"""Steps of a worker on its own (`--sync_every=H`): weights are averaged over the workers every H-th step.

Between two averages each worker applies the gradients of its own share of the global batch: local SGD
(Stich 2019, arXiv:1805.09767). With an outer optimizer the difference that the workers made of the common
weights is taken as a gradient, which Nesterov's momentum applies: DiLoCo (Douillard et al. 2023,
arXiv:2311.08105).

    common   weights after the newest average, the same on all workers
    outer    g = common - mean over workers;  m = momentum * m + g;
             common -= learning_rate * (g + momentum * m)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute.engine_all_reduce import engine_of
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.step import finiteness
from ctl.step.gradients import Update, sum_over_replicas
from ctl.step.step_times import StepTimes
from ctl.step.worker_state import variable_like


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov's momentum on differences of weights; as it is made, weights become their mean."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def averages(self) -> bool:
        """Whether the new weights are the plain mean of the workers'."""
        return self.learning_rate == 1.0 and self.momentum == 0.0


class LocalSteps:
    """Averages the weights of workers whose steps are their own.

    Args:
      counter: completed steps; after each multiple of `every` weights are averaged.
      weights: all that may be trained; `trained`: () -> those of them that are, as variables of TensorFlow.
      wire_dtype: () -> in which differences of weights are sent.

    Attributes:
      workers: how many there are. equal_at: a step, if it is known that the workers' weights are equal
        after it; every multiple of `every` is one more.
      common, momenta: of the outer optimizer, by weight; empty if it averages.
      times: where the waits of this worker are added up, or None.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        topology: Topology,
        *,
        every: int,
        outer: OuterOptimizer,
        weights: Sequence[tf.Variable],
        trained: Callable[[], Sequence[tf.Variable]],
        wire_dtype: Callable[[], str | None] = lambda: None,
    ):
        self._strategy, self._every, self._outer = strategy, every, outer
        self._weights, self._trained, self._wire_dtype = list(weights), trained, wire_dtype
        self.workers, self.equal_at = topology.num_workers, 0
        self.times: StepTimes | None = None
        self._functions: dict[tuple, Any] = {}
        with tf.device("/cpu:0"):
            self._not_finite = tf.Variable(tf.zeros([2 * self.workers]), trainable=False, name="not_finite")
        copied = [] if outer.averages else self._weights
        self.common = [variable_like(self._here(w), "common") for w in copied]
        self.momenta = [variable_like(self._here(w), "momentum") for w in copied]
        self.begin()

    def begin(self) -> None:
        """The weights as they are now are the common ones."""
        for common, momentum, weight in zip(self.common, self.momenta, self._weights, strict=False):
            common.assign(self._here(weight))
            momentum.assign(tf.zeros_like(momentum))

    def check(self, update: Update) -> None:
        """Raises UsageError for variables of an update that would never be averaged."""
        known = {id(weight) for weight in self._weights}
        for variable in update.variables:
            if id(getattr(variable, "value", variable)) not in known and id(variable) not in known:
                raise UsageError(
                    f"minimize() got the variable {variable.name!r}, which no attribute of the trainer "
                    "owns: with sync_every it would differ between workers. Set self.<name> in build()."
                )

    @tf.autograph.experimental.do_not_convert
    def note_stops(self, stops: Sequence[tuple]) -> None:
        """Called in the trace of a step: (whether it was finite, by whom it was not), for the next average.

        The run ends there, on all workers alike.
        """
        for good, found in stops:
            bad = tf.cast(tf.logical_not(good), tf.float32)
            place = tf.distribute.get_replica_context().replica_id_in_sync_group + self.workers
            nobody = bad * (1.0 - tf.reduce_max(found))  # a norm may overflow by itself
            flags = bad * found + nobody * tf.one_hot(place, 2 * self.workers)
            self._not_finite.assign_add(flags, read_value=False)

    @tf.autograph.experimental.do_not_convert
    def after_step(self, counter: tf.Variable) -> None:
        """Called in the trace of a loop, where a step was counted."""

        def average() -> Any:
            self._average()
            return tf.constant(0)

        due = tf.equal(counter.read_value() % self._every, 0)
        tf.cond(due, average, lambda: tf.constant(0))

    def make_equal(self, step: int) -> None:
        """The workers' weights are equal after `step`; all workers call it there. Eager."""
        if step % self._every == 0 or step == self.equal_at:
            return
        key = tuple(id(weight) for weight in self._trained())
        if key not in self._functions:
            self._functions[key] = tf.function(self._average, autograph=False).get_concrete_function()
        self._functions[key]()
        self.equal_at = step

    def _average(self) -> None:
        trained = {id(weight) for weight in self._trained()}
        places = [i for i, weight in enumerate(self._weights) if id(weight) in trained]
        here = [self._here(self._weights[i]) for i in places]
        commons = [self.common[i] for i in places] if self.common else []
        values = [variable.read_value() for variable in here]
        if commons:
            values = [common - value for common, value in zip(commons, values, strict=True)]
        *means, found = self._means(values)
        fine, message = tf.reduce_sum(found) <= 0.0, finiteness.AT_AVERAGE
        with tf.control_dependencies([finiteness.stop_unless(fine, found, message)]):
            means = [tf.identity(mean) for mean in means]
        if not commons:
            for variable, mean in zip(here, means, strict=True):
                variable.assign(mean)
            return
        rate, momentum = self._outer.learning_rate, self._outer.momentum
        for i, variable, mean in zip(places, here, means, strict=True):
            speed = self.momenta[i].assign(momentum * self.momenta[i] + mean)
            variable.assign(self.common[i].assign(self.common[i] - rate * (mean + momentum * speed)))

    def _means(self, values: list) -> list:
        """Means over the workers, and the sum of who had what is not finite."""
        flags = self._not_finite.read_value()
        if self.workers == 1:
            return [*values, flags]

        def summed(*given: Any) -> list:
            tensors = [tf.identity(tensor) for tensor in given]  # on this replica's device
            act = lambda: sum_over_replicas(tensors, self._wire_dtype())  # noqa: E731
            asks = engine_of(self._strategy) is not None
            return act() if self.times is None else self.times.of_sum(tensors, act, asks=asks)

        totals = self._strategy.run(summed, args=(*values, flags))
        *sums, found = [self._strategy.experimental_local_results(total)[0] for total in totals]
        return [*(total / self.workers for total in sums), found]

    def _here(self, variable: tf.Variable) -> tf.Variable:
        """The variable of this process that a variable of the strategy stands for."""
        found: tf.Variable = self._strategy.experimental_local_results(variable)[0]
        return found
