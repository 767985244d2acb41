"""Local SGD (`--sync_every=H`): workers train independently and average their weights every H-th step.

Between two averages each worker applies the gradients of its share of the global batch (Stich 2019,
arXiv:1805.09767). With an outer optimizer the difference of the workers' weights from the common weights is
a gradient for Nesterov momentum: DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

    common   weights after the newest average, equal on all workers
    outer    g = common - mean over workers;  m = momentum * m + g;
             common -= learning_rate * (g + momentum * m)
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.config import Config
from ctl.distribute.keras_objects import attribute, synchronized_layer
from ctl.errors import UsageError
from ctl.step import finiteness, optimizers
from ctl.step.context import StepContext
from ctl.step.reducers.reducer import GradientReducer, ReducedGradients, ReducerInputs, timed_exchange
from ctl.step.reducers.sum import SumReducer, existing_rows, sum_over_replicas, suspects_of
from ctl.step.reducers.worker_state import WorkerState, variable_like
from ctl.step.update_request import UpdateRequest

_log = logging.getLogger("ctl")
_CHECKPOINT_NAME = "sync_every"


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov momentum on differences of weights. The defaults make the new weights a plain mean."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    @property
    def averages(self) -> bool:
        """True if the new weights are the plain mean over the workers."""
        return self.learning_rate == 1.0 and self.momentum == 0.0


class OneWorkerReducer(SumReducer):
    """Reducer of a single worker with `sync_every`. Its checkpoints can be resumed by several workers."""

    worker_state: WorkerState

    def __init__(self, worker_state: WorkerState):
        self.worker_state = worker_state

    def tracked_variables(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Returns the state of this worker."""
        return {_CHECKPOINT_NAME: self.worker_state.variables}

    def begin(self, step: int) -> None:
        """Restores the state of this worker."""
        _scatter(self.worker_state, step)


class LocalSgdReducer(GradientReducer):
    """Does not reduce gradients; averages the weights of the workers after every `every`-th step.

    Args:
      inputs: Facts about the trainer.
      outer: Optimizer of the common weights.
      worker_state: Variables of the optimizers, which differ between workers.
    """

    worker_state: WorkerState

    def __init__(self, inputs: ReducerInputs, outer: OuterOptimizer, worker_state: WorkerState):
        self._strategy, self._outer, self._timer = inputs.strategy, outer, inputs.timer
        self._every, self._wire_dtype = inputs.config.sync_every, inputs.settings.cast_dtype
        self._weights = list(inputs.weights(False))
        self._trained_weights: Callable[[], Sequence[tf.Variable]] = lambda: inputs.weights(True)
        self.num_local_workers, self.worker_state = inputs.topology.num_workers, worker_state
        self._equal_at = 0  # a step after which weights are equal, besides multiples of `every`
        self._functions: dict[tuple, Any] = {}
        with tf.device("/cpu:0"):
            flags = tf.zeros([2 * self.num_local_workers])
            self._suspects = tf.Variable(flags, trainable=False, name="not_finite")
        copied = [] if outer.averages else self._weights
        self._common = [variable_like(self._local(w), "common") for w in copied]
        self._momenta = [variable_like(self._local(w), "momentum") for w in copied]
        self._take_common_weights()

    def reduce(self, request: UpdateRequest, context: StepContext) -> ReducedGradients:
        """Returns the gradients of this worker."""
        return ReducedGradients(existing_rows(request), suspects_of(request))

    def check_request(self, request: UpdateRequest) -> None:
        """Raises UsageError for variables that would never be averaged."""
        averaged = {id(weight) for weight in self._weights}
        for variable in request.variables:
            if id(getattr(variable, "value", variable)) not in averaged and id(variable) not in averaged:
                raise UsageError(
                    f"minimize() got the variable {variable.name!r}, which no attribute of the trainer "
                    "owns: with sync_every it would differ between workers. Set self.<name> in build()."
                )

    @tf.autograph.experimental.do_not_convert
    def after_updates(self, stop_conditions: Sequence[tuple[Any, Any]]) -> None:
        """Stores the flags of values that are not finite, which end the run at the next average."""
        for may_continue, suspects in stop_conditions:
            stopped = tf.cast(tf.logical_not(may_continue), tf.float32)
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            overflowed = stopped * (1.0 - tf.reduce_max(suspects))  # the norm of finite gradients
            gradient_flag = tf.one_hot(replica + self.num_local_workers, 2 * self.num_local_workers)
            self._suspects.assign_add(stopped * suspects + overflowed * gradient_flag, read_value=False)

    @tf.autograph.experimental.do_not_convert
    def after_step(self, step: tf.Variable) -> None:
        """Averages the weights if `step` is a multiple of `sync_every`."""

        def average() -> Any:
            self._average()
            return tf.constant(0)

        is_due = tf.equal(step.read_value() % self._every, 0)
        tf.cond(is_due, average, lambda: tf.constant(0))

    def tracked_variables(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Returns the state of this worker and of the outer optimizer."""
        return {_CHECKPOINT_NAME: [*self.worker_state.variables, *self._common, *self._momenta]}

    def begin(self, step: int) -> None:
        """Loads the restored state of this worker. Without one, the weights become the common ones."""
        if not _scatter(self.worker_state, step):
            self._take_common_weights()
        self._equal_at = step

    def loop_length(self, step: int, length: int) -> int:
        """Returns a length after which weights are averaged."""
        return length_to_average(step, length, self._every)

    def equalize_weights(self, step: int, is_required: bool) -> bool:
        """Returns True if equal weights are required after `step`, or it is a multiple of `sync_every`."""
        is_multiple = step % self._every == 0
        if is_multiple or not is_required:
            return is_multiple
        if step != self._equal_at:
            key = tuple(id(weight) for weight in self._trained_weights())
            if key not in self._functions:
                function = tf.function(self._average, autograph=False)
                self._functions[key] = function.get_concrete_function()
            self._functions[key]()
            self._equal_at = step
        return True

    def _take_common_weights(self) -> None:
        for common, momentum, weight in zip(self._common, self._momenta, self._weights, strict=False):
            common.assign(self._local(weight))
            momentum.assign(tf.zeros_like(momentum))

    def _average(self) -> None:
        trained = {id(weight) for weight in self._trained_weights()}
        indices = [i for i, weight in enumerate(self._weights) if id(weight) in trained]
        variables = [self._local(self._weights[i]) for i in indices]
        commons = [self._common[i] for i in indices] if self._common else []
        values = [variable.read_value() for variable in variables]
        if commons:
            values = [common - value for common, value in zip(commons, values, strict=True)]
        *means, suspects = self._means(values)
        is_finite, message = tf.reduce_sum(suspects) <= 0.0, finiteness.AT_AVERAGE
        with tf.control_dependencies([finiteness.stop_unless(is_finite, suspects, message)]):
            means = [tf.identity(mean) for mean in means]
        if not commons:
            for variable, mean in zip(variables, means, strict=True):
                variable.assign(mean)
            return
        rate, momentum = self._outer.learning_rate, self._outer.momentum
        for i, variable, mean in zip(indices, variables, means, strict=True):
            velocity = self._momenta[i].assign(momentum * self._momenta[i] + mean)
            variable.assign(self._common[i].assign(self._common[i] - rate * (mean + momentum * velocity)))

    def _means(self, values: list) -> list:
        """Returns means over the workers, and the sum of the flags of values that are not finite."""
        flags = self._suspects.read_value()
        if self.num_local_workers == 1:
            return [*values, flags]

        def summed(*arguments: Any) -> list:
            tensors = [tf.identity(tensor) for tensor in arguments]  # on the device of this replica
            return timed_exchange(
                self._timer, tensors, lambda: sum_over_replicas(tensors, self._wire_dtype)
            )

        totals = self._strategy.run(summed, args=(*values, flags))
        *sums, suspects = [self._strategy.experimental_local_results(total)[0] for total in totals]
        return [*(total / self.num_local_workers for total in sums), suspects]

    def _local(self, variable: tf.Variable) -> tf.Variable:
        """Returns the variable of this process for a variable of the strategy."""
        local: tf.Variable = self._strategy.experimental_local_results(variable)[0]
        return local


def length_to_average(step: int, length: int, every: int) -> int:
    """Returns the number of steps of a loop from `step`, about `length`, to a multiple of `every`."""
    return max(1, (step + length) // every - step // every) * every - step % every


def _scatter(state: WorkerState, step: int) -> int:
    """Loads restored optimizer variables; returns the number of workers that saved them, 0 for none."""
    rows, workers = state.scatter(), state.num_workers
    if rows not in (0, workers):
        _log.warning(
            "The checkpoint of step %d has the optimizers of %d workers, and this job has %d: each worker "
            "uses their mean.",
            *(step, rows, workers),
        )
    return rows


def create_local_sgd(inputs: ReducerInputs) -> GradientReducer | None:
    """Creates the reducer for `sync_every` > 1; None for 1.

    Raises:
      UsageError: If a setting, the strategy, an optimizer or a layer does not support it.
    """
    every, topology = inputs.config.sync_every, inputs.topology
    if every == 1:
        return None
    outer = OuterOptimizer(inputs.config.outer_learning_rate, inputs.config.outer_momentum)
    _check_strategy(inputs)
    _check_gradients(inputs, outer)
    _check_optimizers(inputs)
    _check_layers(inputs)
    state = WorkerState(inputs.strategy, topology, inputs.optimizer_variables)
    if topology.num_workers > 1 or not outer.averages:
        return LocalSgdReducer(inputs, outer, state)
    if not topology.evaluates:
        _log.info("sync_every=%d has no effect on one worker.", every)
    return OneWorkerReducer(state)


def check_outer_optimizer(config: Config) -> None:
    """Raises UsageError for settings of an outer optimizer that are invalid or have no effect."""
    rate, momentum = config.outer_learning_rate, config.outer_momentum
    if rate <= 0 or momentum >= 1:
        raise UsageError(
            f"outer_learning_rate={rate:g}, outer_momentum={momentum:g}: expected a rate > 0 and a "
            "momentum < 1, such as 0.7 and 0.9."
        )
    if config.sync_every == 1 and not OuterOptimizer(rate, momentum).averages:
        raise UsageError(
            f"outer_learning_rate={rate:g} and outer_momentum={momentum:g} are for --sync_every, which is "
            "1: gradients are summed in every step. Write --sync_every=16, or leave the others out."
        )


def _check_strategy(inputs: ReducerInputs) -> None:
    setting = f"sync_every={inputs.config.sync_every}"
    if not inputs.has_one_replica_per_worker:
        raise UsageError(
            f"{setting} with {inputs.description}; expected one replica per worker. Write "
            "--strategy=multi_worker with one device per worker, or leave sync_every out."
        )
    if inputs.jit_compile == "loop":
        raise UsageError(f"{setting} with jit_compile='loop', which has no collectives. Write 'step'.")


def _check_gradients(inputs: ReducerInputs, outer: OuterOptimizer) -> None:
    settings, setting = inputs.settings, f"sync_every={inputs.config.sync_every}"
    if settings.on_nonfinite == "rollback" or inputs.can_roll_back:
        raise UsageError(
            f"{setting} with rollback: each worker finds values that are not finite by itself, so the "
            "workers cannot return to a checkpoint together. Write on_nonfinite='skip' or 'stop'."
        )
    if settings.wire_dtype and outer.averages:
        raise UsageError(
            f"{setting} with wire_dtype={settings.wire_dtype!r} would round the weights. Leave it out, or "
            "send differences: write --outer_learning_rate=0.7 --outer_momentum=0.5."
        )
    if settings.wire_dtype != settings.cast_dtype:
        raise UsageError(
            f"{setting} with wire_dtype={settings.wire_dtype!r}; expected 'bfloat16' or 'float16'. Write "
            "wire_dtype='bfloat16', or leave one of the two out."
        )


def _check_optimizers(inputs: ReducerInputs) -> None:
    setting = f"sync_every={inputs.config.sync_every}"
    for name, optimizer in inputs.optimizers.items():
        if optimizers.skips_what_is_not_finite(optimizer):
            raise UsageError(
                f"{setting} with self.{name}, a LossScaleOptimizer: each worker would have its own scale "
                "and skip its own steps. Train with the policy 'mixed_bfloat16'."
            )
        if attribute(attribute(optimizer, "inner_optimizer") or optimizer, "use_ema"):
            raise UsageError(
                f"{setting} with use_ema=True of self.{name}: the averages would be those of one worker. "
                "Leave use_ema out."
            )
    if inputs.has_moving_averages:
        raise UsageError(
            f"{setting} with moving_averages(), which would return those of one worker. Leave it out."
        )


def _check_layers(inputs: ReducerInputs) -> None:
    layer = synchronized_layer(inputs.layers)
    if inputs.topology.num_replicas > 1 and layer is not None:
        raise UsageError(
            f"sync_every={inputs.config.sync_every} with the layer {layer.name!r}, which sums over workers "
            "in every step. Use another normalization, such as keras.layers.LayerNormalization."
        )
