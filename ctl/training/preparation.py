"""Preparation of a trainer: builds, checks and restores its model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.callbacks.adapter import as_callbacks
from ctl.callbacks.protocol import Callback
from ctl.checkpoints import warm_start
from ctl.checkpoints.protocol import CheckpointManager, NullCheckpoints
from ctl.checkpoints.tracked_state import (
    TrackedState,
    is_optimizer,
    trained_weights_of,
    variables_of,
    weights_of,
)
from ctl.config import Config
from ctl.data.resume_position import SavedIterator
from ctl.distribute import collective_debug, strategies
from ctl.distribute.keras_objects import layers_of, unwrap
from ctl.distribute.strategy_kind import StrategyKind
from ctl.distribute.world import World
from ctl.profiling import profile_report, trace_window
from ctl.step import keras_metrics, randomness
from ctl.step.reducers.reducer import ReducerInputs
from ctl.step.reducers.registry import create_reducer
from ctl.step.step_times import StepTimes
from ctl.supervision import heartbeat
from ctl.training import error_translation, model_checks, model_directory, precision, validation
from ctl.training.active_run import Activity
from ctl.training.callback_runner import CallbackRunner, handlers_of
from ctl.training.checkpointing import Checkpointing
from ctl.training.following import watched_checkpoints
from ctl.training.prepared import PreparedTrainer
from ctl.training.programs import ProgramCache
from ctl.training.run_options import RunOptions
from ctl.training.task import Task, settled_config


def prepare_trainer(
    trainer: Any, options: RunOptions, manager: CheckpointManager | None
) -> PreparedTrainer:
    """Builds, checks and restores a `ctl.Trainer`.

    Args:
      trainer: The trainer.
      options: Options of the first run.
      manager: Checkpoint manager, or None without checkpoints.

    Raises:
      UsageError: For an invalid trainer.
      CheckpointError: For a checkpoint of another model.
    """
    world, config = World.of(trainer.strategy, trainer.topology), settled_config(trainer)
    if world.topology.evaluates:
        manager = watched_checkpoints(Task.of(trainer), config.model_dir, manager)
    with (
        heartbeat.current.limit_phase(config.step_timeout_secs),
        error_translation.peer_errors(world, lambda: 0),
    ):
        counter, position = _before_build(trainer, config, world, options)
        callbacks = _build(trainer, world)
        config, task = settled_config(trainer), Task.of(trainer)
        validation.check_callbacks(task, config, callbacks, evaluates=options.evaluates)
        timer = _timer(config, world)
        reducer = create_reducer(_reducer_inputs(config, task, world, callbacks, timer))
        objects = task.owners | ({} if position is None else {"data_iterator": position.variable})
        state = TrackedState(objects, counter, world.topology, reducer.tracked_variables())
        checkpointing = Checkpointing(config, world, state, manager or NullCheckpoints(), reducer, position)
        manifest = checkpointing.restore_newest()
        if manifest is None and config.init_from:
            models = list(task.models)
            warm_start.load_initial_values(config.init_from, state, models, world.host_all_reduce)
        prepared = PreparedTrainer(
            config,
            task,
            world,
            state,
            checkpointing,
            CallbackRunner(task, config.model_dir, world, callbacks, handlers_of(trainer, task, callbacks)),
            ProgramCache(config, task, world, reducer=reducer, timer=timer, counter=counter),
            Activity(rows_may_vary=task.rows_may_vary),
        )
        if manifest is None:
            reducer.begin(0)
        else:
            prepared.resume(manifest)
        return prepared


def _before_build(
    trainer: Any, config: Config, world: World, options: RunOptions
) -> tuple[tf.Variable, SavedIterator | None]:
    """Checks a trainer before `build`. Returns the step counter and the position of the data iterator."""
    task, topology = Task.of(trainer), world.topology
    if "build" not in task.methods:
        validation.check_methods(task, "train")
    trace_window.check_trace(config.profile, options.log_dir, world)
    model_directory.check_model_directory(config.model_dir)
    randomness.seed_everything(config.seed)
    with world.counter_scope(is_compiled=config.jit_compile != "off"):
        counter = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
    with world.counter_scope(is_compiled=False):
        position = SavedIterator() if config.data_position == "iterator" else None
    trainer.step_variable = counter
    if config.check_collectives:
        collective_debug.watch_collectives(topology.num_workers, topology.worker_index, counter)
    return counter, position


def _build(trainer: Any, world: World) -> Sequence[Callback]:
    """Calls `build` and checks the created objects. Returns the callbacks of the trainer."""
    precision_name = str(trainer.config.precision)
    with strategies.scope(world.strategy), precision.default_policy(precision_name):
        trainer.build()
        scaled_optimizers = precision.scaled_optimizers(dict(vars(trainer)), precision_name)
        for name, optimizer in scaled_optimizers.items():
            setattr(trainer, name, optimizer)
        if "on_nonfinite" in trainer.config.explicit_names:  # `build` may have made its own Gradients
            policy = trainer.config.on_nonfinite
            trainer.gradients = dataclasses.replace(trainer.gradients, on_nonfinite=policy)
        task = Task.of(trainer)
        validation.check_trainable(task, world, str(settled_config(trainer).jit_compile))
        model_checks.check_built(task)
        validation.check_optimizers(task, world)
        callbacks = as_callbacks(trainer.callbacks)
        if world.kind is StrategyKind.CENTRAL_STORAGE:
            keras_metrics.count_outside_replicas(task.metrics)
    if world.topology.is_chief:
        precision.log_models_with_own_policy(task.models, precision_name)
    if world.topology.max_replicas > 1:
        randomness.differ_by_replica(task.owners)
    return callbacks


def _timer(config: Config, world: World) -> StepTimes | None:
    """Creates the timer of the steps, or returns None where steps cannot be timed."""
    topology = world.topology
    is_wanted = topology.num_workers > 1 or topology.is_elastic or profile_report.requested() is not None
    if not is_wanted or config.jit_compile == "loop" or world.is_asynchronous:
        return None
    return StepTimes(topology.first_replica)


def _reducer_inputs(
    config: Config, task: Task, world: World, callbacks: Sequence[Callback], timer: StepTimes | None
) -> ReducerInputs:
    owners = task.owners
    trainable = {id(v): v for m in task.models.values() for v in getattr(m, "trainable_variables", ())}
    slots = {id(unwrap(v)): unwrap(v) for o in owners.values() if is_optimizer(o) for v in variables_of(o)}

    def weights(is_trained: bool) -> list[tf.Variable]:
        chosen = trained_weights_of if is_trained else weights_of
        variables = {id(unwrap(v)): unwrap(v) for owner in task.owners.values() for v in chosen(owner)}
        return [v for v in variables.values() if v.dtype.is_floating]

    return ReducerInputs(
        config=config,
        settings=task.gradients,
        strategy=world.strategy,
        topology=world.topology,
        optimizers=task.optimizers,
        layers=[layer for owner in owners.values() for layer in layers_of(owner)],
        trainable_variables=list(trainable.values()),
        weights=weights,
        optimizer_variables=list(slots.values()),
        jit_compile=str(config.jit_compile),
        can_roll_back=any(callback.rollback for callback in callbacks),
        has_moving_averages="moving_averages" in task.methods,
        timer=timer,
    )
