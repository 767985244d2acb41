"""Traced loops and functions of a trainer."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import statistics_of
from ctl.config import Config
from ctl.distribute import communication_choice, engine_all_reduce
from ctl.distribute.keras_objects import unwrap
from ctl.distribute.world import World
from ctl.parameter_server.scheduled_loop import ScheduledLoop
from ctl.step import keras_metrics
from ctl.step.reducers.reducer import GradientReducer
from ctl.step.reducers.sum import SumReducer, sum_over_replicas
from ctl.step.replica_step import ReplicaStep, UserStep
from ctl.step.skip_nonfinite import Skipping
from ctl.step.step_times import StepTimes
from ctl.training.compiled_loop import CompiledLoop
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import GraphLoop
from ctl.training.task import Task


class ProgramCache:
    """Loops and functions that are traced once per trainer.

    Args:
      config: Settings of the trainer.
      task: Methods and objects of the user.
      world: Processes of the job.
      reducer: Reducer of gradients.
      timer: Timer of the steps, for several workers or for `ctl profile`. None where steps cannot be timed.
      counter: Number of completed steps.

    Attributes:
      timer, reducer: See the arguments.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        world: World,
        *,
        reducer: GradientReducer,
        timer: StepTimes | None,
        counter: tf.Variable,
    ):
        self.reducer, self.timer = reducer, timer
        self._config, self._task, self._world, self._counter = config, task, world, counter
        self._train_loop: GraphLoop | None = None
        self._has_communication = False
        self._eval_loops: dict[str, StepLoop] = {}  # by the name of the evaluation set
        self._predict: tuple[Any, Any] = (None, None)  # model, function

    def train_loop(self, resumed: Manifest | None, *, is_single: bool = False) -> GraphLoop:
        """Returns the loop of training steps, created by the first call.

        Args:
          resumed: Manifest of the restored checkpoint, which determines the communication path, or None.
          is_single: True if each graph call runs one step.
        """
        if self._train_loop is None:
            self._prepare_communication(resumed)
            self._train_loop = self._create_train_loop(is_single)
        return self._train_loop

    def separate_train_loop(self, resumed: Manifest | None) -> GraphLoop:
        """Returns another loop of training steps, so that `train_loop` has its own trace.

        Args:
          resumed: See `train_loop`.
        """
        self._prepare_communication(resumed)
        return self._create_train_loop(is_single=True)

    def eval_loop(self, set_name: str = "") -> StepLoop:
        """Returns the loop of evaluation steps of a set, created by the first call.

        Each set has a loop, as `eval_step` may return other values for it.
        """
        if set_name not in self._eval_loops:
            user_step = UserStep(function=self._task.methods["eval_step"], metrics=self._built_metrics())
            step = self._replica_step(user_step, SumReducer(), Skipping())
            loop = StepLoop(self._world.local_strategy, step, self._world.topology)
            self._eval_loops[set_name] = loop
        return self._eval_loops[set_name]

    def predict_function(self, model: Any, create: Callable[[], Any]) -> Any:
        """Returns the function that calls `model`, created at first and for another model."""
        if self._predict[0] is not model:
            self._predict = model, create()
        return self._predict[1]

    def _create_train_loop(self, is_single: bool) -> GraphLoop:
        strategy, step = self._world.strategy, self._train_step()
        arguments: dict[str, Any] = {"counter": self._counter, "trained": self._trained_variables}
        if self._world.is_asynchronous:
            return ScheduledLoop(strategy, step, **arguments)
        if self._config.jit_compile == "loop":
            return CompiledLoop(strategy, step, **arguments)
        topology = self._world.topology
        is_single = is_single and not topology.is_elastic  # a call of a loop may run no step
        return StepLoop(strategy, step, topology, single=is_single, **arguments)

    def _train_step(self) -> ReplicaStep:
        """Returns the execution of `train_step` on one replica."""
        task = self._task
        skipping = Skipping(
            lambda: task.gradients.on_nonfinite, lambda: statistics_of(task.attributes), self._counter
        )
        user_step = UserStep(
            function=task.methods["train_step"],
            settings=lambda: task.gradients,
            is_compiled=lambda: self._config.jit_compile == "step",
            metrics=self._built_metrics(),
        )
        return self._replica_step(user_step, self.reducer, skipping, self.timer)

    def _replica_step(
        self,
        user_step: UserStep,
        reducer: GradientReducer,
        skipping: Skipping,
        timer: StepTimes | None = None,
    ) -> ReplicaStep:
        num_replicas = self._world.topology.max_replicas
        batch_size, accumulate_steps = self._config.global_batch_size, user_step.settings().accumulate_steps
        return ReplicaStep(
            user_step,
            reducer=reducer,
            num_replicas=num_replicas,
            full_rows=batch_size // num_replicas // accumulate_steps,
            skipping=skipping,
            timer=timer,
        )

    def _trained_variables(self) -> tuple[int, ...]:
        """Returns the identities of the variables that are trained; a layer may be frozen between loops."""
        models = tf.nest.flatten(list(self._task.models.values()))
        return tuple(id(unwrap(v)) for m in models for v in getattr(m, "trainable_variables", ()))

    def _built_metrics(self) -> list[Any]:
        """Returns the Keras metrics of the trainer, built outside of its steps."""
        metrics = self._task.metrics
        keras_metrics.build_outside_steps(metrics, self._world.local_strategy)
        return metrics

    def _prepare_communication(self, resumed: Manifest | None) -> None:
        """Chooses the communication path once."""
        if not self._has_communication:
            self._choose_communication(resumed)
            self._has_communication = True

    def _choose_communication(self, resumed: Manifest | None) -> None:
        """Installs the communication path of the restored checkpoint, or the faster one."""
        config, world, topology = self._config, self._world, self._world.topology
        if config.communication not in ("auto", "tcp") or topology.is_elastic:
            return
        if not engine_all_reduce.can_use_engine(world.strategy):
            return
        paths, restored = communication_choice.PATHS, 0
        if topology.is_chief and resumed is not None:
            before = resumed.world.get("communication")
            if before in paths and resumed.world.get("workers") == topology.num_workers:
                restored = 1 + paths.index(before)
        (restored,) = map(int, world.host_all_reduce.sum([float(restored)]))
        communication_choice.choose_communication(
            world.strategy,
            topology,
            self._gradient_specs(),
            lambda tensors: sum_over_replicas(tensors, self._task.gradients.cast_dtype),
            restored_path=paths[restored - 1] if restored else "",
            limits=engine_all_reduce.PeerLimits(config.heartbeat_secs, config.collective_timeout_secs),
        )

    def _gradient_specs(self) -> Sequence[tf.TensorSpec]:
        """Returns the shapes and dtypes of the gradients of a step."""
        models = self._task.models.values()
        weights = {id(unwrap(v)): unwrap(v) for m in models for v in getattr(m, "trainable_variables", ())}
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in weights.values()]
        return specs or [tf.TensorSpec([1], tf.float32)]
