"""Base class of gradient reducers.

class ClippedSum(SumReducer):
    def reduce(self, request, context):
        clipped = [tf.clip_by_value(g, -1.0, 1.0) for g in request.gradients]
        return super().reduce(dataclasses.replace(request, gradients=clipped), context)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.config import Config
from ctl.distribute.engine_all_reduce import engine_of
from ctl.distribute.strategy_kind import StrategyKind, kind_of, strategy_name
from ctl.distribute.topology import Topology
from ctl.step.context import StepContext
from ctl.step.gradient_settings import Gradients
from ctl.step.reducers.worker_state import WorkerState
from ctl.step.step_times import StepTimes
from ctl.step.update_request import UpdateRequest

_SHARED_VARIABLES = (StrategyKind.PARAMETER_SERVER, StrategyKind.CENTRAL_STORAGE, StrategyKind.TPU)


@dataclass(frozen=True)
class ReducedGradients:
    """Result of a reduction.

    Attributes:
      gradients: Gradients to apply, in the order of the request.
      suspects: `[2 * num_replicas]` flags of replicas with a loss or gradient that is not finite; see
        `finiteness.suspects`. Or a function that returns them for the gradient norm. None for one replica:
        its flag is computed from the norm.
      assignments: Pairs (variable, value) that are assigned with the update.
    """

    gradients: Sequence[Any]
    suspects: Any = None
    assignments: Sequence[tuple[tf.Variable, Any]] = ()


class GradientReducer:
    """Reduction of the gradients of replicas, and the state that it needs.

    Subclasses define `reduce`. The defaults of the other methods are no-ops.

    `reduce`, `after_updates` and `after_step` are called while a graph is traced, the other methods
    eagerly. All workers call each method at the same step.

    Attributes:
      num_local_workers: Number of workers that train independently between two exchanges. 0 if gradients
        are reduced in each step.
      worker_state: Values that differ between workers, for checkpoints. None if there are none.
    """

    num_local_workers: int = 0
    worker_state: WorkerState | None = None

    def reduce(self, request: UpdateRequest, context: StepContext) -> ReducedGradients:
        """Returns the gradients to apply. Called in replica context."""
        raise NotImplementedError

    def check_request(self, request: UpdateRequest) -> None:
        """Raises UsageError for an update that the reducer does not support."""

    def after_updates(self, stop_conditions: Sequence[tuple[Any, Any]]) -> None:
        """Called after the updates of a replica with pairs (may continue, suspects) of each update."""

    def after_step(self, step: tf.Variable) -> None:
        """Called after each step, once `step`, the number of completed steps, is increased."""

    def tracked_variables(self) -> Mapping[str, Sequence[tf.Variable]]:
        """Returns variables to save in checkpoints, by name."""
        return {}

    def begin(self, step: int) -> None:
        """Starts from the restored or initial state at `step`."""

    def loop_length(self, step: int, length: int) -> int:
        """Returns the number of steps of the next loop, about `length`."""
        return length

    def equalize_weights(self, step: int, is_required: bool) -> bool:
        """Returns True if all workers have equal weights after `step`; makes them equal if required."""
        return True


@dataclass(frozen=True, kw_only=True)
class ReducerInputs:
    """Facts about a built trainer from which a reducer is created.

    Attributes:
      config: Settings of the trainer.
      settings: Gradient settings, after `build`.
      strategy: Strategy of the job.
      topology: Topology of the job.
      optimizers: Optimizers by attribute name.
      layers: Keras layers of all models.
      trainable_variables: Trainable variables of the models.
      weights: Returns the floating-point parameters, all or only those that are trained now.
      optimizer_variables: Variables of the optimizers.
      jit_compile: "off", "step" or "loop".
      can_roll_back: True if a callback may return to a checkpoint.
      has_moving_averages: True if the trainer keeps moving averages of weights itself.
      timer: Sums of the waiting times of this worker, or None.
    """

    config: Config
    settings: Gradients
    strategy: tf.distribute.Strategy
    topology: Topology
    optimizers: Mapping[str, Any]
    layers: Sequence[Any]
    trainable_variables: Sequence[Any]
    weights: Callable[[bool], Sequence[tf.Variable]]
    optimizer_variables: Sequence[tf.Variable]
    jit_compile: str
    can_roll_back: bool
    has_moving_averages: bool
    timer: StepTimes | None

    @property
    def description(self) -> str:
        """Strategy, replicas and workers in an error message."""
        topology, strategy = self.topology, strategy_name(self.strategy)
        return (
            f"strategy {strategy!r} and {topology.num_replicas} replicas, workers: {topology.num_workers}"
        )

    @property
    def has_one_replica_per_worker(self) -> bool:
        """True if each worker updates its own variables with one replica."""
        return has_one_replica_per_worker(self.strategy, self.topology)


def has_one_replica_per_worker(strategy: tf.distribute.Strategy, topology: Topology) -> bool:
    """Returns True if each worker updates its own variables with one replica."""
    has_own_variables = kind_of(strategy) not in _SHARED_VARIABLES
    return has_own_variables and topology.num_replicas == topology.num_workers


def timed_exchange(timer: StepTimes | None, inputs: Sequence[Any], exchange: Callable[[], Any]) -> Any:
    """Returns `exchange()`, and adds the seconds that it waits for other workers to the timer."""
    if timer is None:
        return exchange()
    uses_engine = engine_of(tf.distribute.get_strategy()) is not None
    return timer.of_sum(inputs, exchange, is_split=uses_engine)
