"""Prepares a trainer: builds, checks and restores the model, and makes the graph loops."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from ctl import config
from ctl.callbacks.adapter import as_callbacks
from ctl.callbacks.protocol import Callback
from ctl.checkpoints import warm_start
from ctl.checkpoints.protocol import CheckpointManager, NullCheckpoints
from ctl.checkpoints.tracked_state import (
    TrackedState,
    collect_owners,
    is_model,
    is_optimizer,
    statistics_of,
    trained_weights_of,
    variables_of,
    weights_of,
)
from ctl.data.resume_position import SavedIterator
from ctl.distribute import (
    collective_debug,
    communication_choice,
    engine_all_reduce,
    parameter_servers,
    strategies,
)
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.keras_objects import layers_of, plain
from ctl.step import keras_metrics, randomness
from ctl.step.reducers.reducer import GradientReducer, ReducerInputs
from ctl.step.reducers.registry import create_reducer
from ctl.step.reducers.sum import SumReducer, sum_over_replicas
from ctl.step.replica_step import ReplicaStep, UserStep
from ctl.step.skip_nonfinite import Skipping
from ctl.step.step_times import StepTimes
from ctl.supervision import heartbeat
from ctl.training import (
    checkpoint_follower,
    error_translation,
    model_checks,
    model_directory,
    profile_report,
    resume,
    step_trace,
    validation,
)
from ctl.training.callback_runner import CallbackRunner
from ctl.training.compiled_loop import CompiledLoop
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import GraphLoop
from ctl.training.optional_methods import is_defined_by_user
from ctl.training.parameter_server_loop import ScheduledLoop
from ctl.training.session import Session, SessionOwner
from ctl.training.trainer_protocol import TrainerProtocol


def prepared(trainer: SessionOwner, checkpoints: CheckpointManager | None = None) -> Session:
    """Returns the trainer's session. The first call creates it; `checkpoints` replaces the trainer's."""
    if trainer._session is None:
        evaluates = trainer.topology.evaluates
        watched = checkpoint_follower.checkpoints(trainer) if evaluates else None
        with (
            heartbeat.current.limit_phase(trainer.step_timeout_secs),
            error_translation.peer_errors(trainer),
        ):
            trainer._session = prepare_session(trainer, watched or checkpoints or trainer._checkpoints)
    return trainer._session


def prepare_session(trainer: TrainerProtocol, checkpoints: CheckpointManager | None) -> Session:
    """Builds, checks and restores."""
    if not is_defined_by_user(trainer, "build"):
        validation.check_methods(trainer, "train")
    step_trace.check_trace(trainer)
    model_directory.check_model_directory(trainer.model_dir)
    randomness.seed_everything(trainer.seed)
    with strategies.place_of_counter(trainer.strategy):
        trainer.step_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        position = SavedIterator() if trainer.data_position == "iterator" else None
    place = trainer.topology
    if trainer.check_collectives:
        collective_debug.watch_collectives(place.num_workers, place.worker_index, trainer.step_variable)
    with strategies.scope(trainer.strategy):
        trainer.build()
        if "on_nonfinite" in trainer.config.given:  # `build` may have made its own Gradients
            policy = trainer.config.on_nonfinite
            trainer.gradients = dataclasses.replace(trainer.gradients, on_nonfinite=policy)
        trainer.jit_compile = config.jit_compile(trainer.jit_compile)  # `build` may have set True
        validation.check_trainable(trainer)
        model_checks.check_built(trainer)
        validation.check_optimizers(trainer)
        callbacks = as_callbacks(trainer.callbacks)
        if strategies.word_of(trainer.strategy) == "central_storage":
            keras_metrics.count_outside_replicas(keras_metrics.metrics_in(vars(trainer)))
    if trainer.topology.num_replicas > 1:
        randomness.differ_by_replica(collect_owners(trainer))
    objects = collect_owners(trainer) | ({} if position is None else {"data_iterator": position.variable})
    timer = _timer(trainer)
    reducer = create_reducer(_reducer_inputs(trainer, callbacks, timer))
    state = TrackedState(objects, trainer.step_variable, trainer.topology, reducer.tracked_variables())
    manager = NullCheckpoints() if checkpoints is None else checkpoints
    agreement = HostAllReduce(trainer.strategy, trainer.topology)
    resumed = resume.restore(trainer, manager, state, agreement)
    if resumed is None and trainer.init_from:
        models = [n for n, t in collect_owners(trainer).items() if is_model(t)]
        warm_start.load_initial_values(trainer.init_from, state, models, agreement)
    runner = CallbackRunner(trainer, callbacks, agreement)
    session = Session(state, manager, agreement, runner, reducer, timer, position)
    if resumed is None:
        reducer.begin(0)
    else:
        session.resume(resumed, trainer.global_batch_size)
    return session


def train_loop(trainer: TrainerProtocol, session: Session) -> GraphLoop:
    """Returns the loop of `train_step`, which is traced once per trainer."""
    is_one_program = config.jit_compile(trainer.jit_compile) == "loop"

    def create() -> GraphLoop:
        _choose_communication(trainer, session)
        step, counter, trained = (
            _train_step(trainer, session),
            session.state.step,
            lambda: _trainable(trainer),
        )
        if parameter_servers.is_used(trainer.strategy):
            return ScheduledLoop(trainer.strategy, step, counter=counter, trained=trained)
        if is_one_program:
            return CompiledLoop(trainer.strategy, step, counter=counter, trained=trained)
        return StepLoop(
            trainer.strategy,
            step,
            trainer.topology,
            counter=counter,
            single=trainer.intervals.steps_per_loop == 1,
            trained=trained,
        )

    return session.programs.train_loop(is_one_program, create)


def _choose_communication(trainer: TrainerProtocol, session: Session) -> None:
    """Installs the communication path of the restored checkpoint, or the faster one."""
    paths, topology, restored = communication_choice.PATHS, trainer.topology, 0
    choices = trainer.config.communication in ("auto", "tcp")
    if not choices or not engine_all_reduce.can_use_engine(trainer.strategy):
        return
    if topology.is_chief and session.resumed is not None:
        world = session.resumed.world
        before = world.get("communication")
        if before in paths and world.get("workers") == topology.num_workers:
            restored = 1 + paths.index(before)
    (restored,) = map(int, session.agreement.sum([float(restored)]))
    models = [thing for thing in collect_owners(trainer).values() if is_model(thing)]
    weights = {id(plain(v)): plain(v) for m in models for v in getattr(m, "trainable_variables", ())}
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in weights.values()]
    communication_choice.choose_communication(
        trainer.strategy,
        topology,
        specs or [tf.TensorSpec([1], tf.float32)],
        lambda tensors: sum_over_replicas(tensors, trainer.gradients.cast_dtype),
        restored_path=paths[restored - 1] if restored else "",
        limits=engine_all_reduce.PeerLimits(
            trainer.config.heartbeat_secs, trainer.config.collective_timeout_secs
        ),
    )


def _train_step(trainer: TrainerProtocol, session: Session) -> ReplicaStep:
    """Returns the execution of `train_step` on one replica."""

    def compiles() -> bool:
        return config.jit_compile(trainer.jit_compile) == "step"

    policy = lambda: trainer.gradients.on_nonfinite  # noqa: E731
    skipping = Skipping(policy, lambda: statistics_of(trainer), session.state.step)
    settings = lambda: trainer.gradients  # noqa: E731
    user_step = UserStep(
        function=trainer.train_step, settings=settings, is_compiled=compiles, metrics=_metrics(trainer)
    )
    return _replica_step(trainer, user_step, session.reducer, skipping, session.step_times)


def eval_loop(trainer: TrainerProtocol, session: Session) -> StepLoop:
    """Returns the loop of `eval_step`, which is traced once per trainer."""

    def create() -> StepLoop:
        user_step = UserStep(function=trainer.eval_step, metrics=_metrics(trainer))
        step = _replica_step(trainer, user_step, SumReducer(), Skipping())
        return StepLoop(strategies.local(trainer.strategy), step, trainer.topology)

    return session.programs.eval_loop(create)


def _trainable(trainer: TrainerProtocol) -> tuple[int, ...]:
    """Which variables of the models are trained; a layer may be frozen between two loops."""
    models = tf.nest.flatten([thing for thing in vars(trainer).values() if is_model(thing)])
    return tuple(id(plain(v)) for m in models for v in getattr(m, "trainable_variables", ()))


def _metrics(trainer: TrainerProtocol) -> list:
    """Returns the Keras metrics of a trainer, built outside of its steps."""
    metrics = keras_metrics.metrics_in(vars(trainer))
    keras_metrics.build_outside_steps(metrics, strategies.local(trainer.strategy))
    return metrics


def _replica_step(
    trainer: TrainerProtocol,
    user_step: UserStep,
    reducer: GradientReducer,
    skipping: Skipping,
    timer: StepTimes | None = None,
) -> ReplicaStep:
    num_replicas = trainer.topology.num_replicas
    return ReplicaStep(
        user_step,
        reducer=reducer,
        num_replicas=num_replicas,
        full_rows=trainer.global_batch_size // num_replicas // user_step.settings().accumulate_steps,
        skipping=skipping,
        timer=timer,
    )


def _timer(trainer: TrainerProtocol) -> StepTimes | None:
    """Creates the timer of workers in step, or for `ctl profile`; None where steps cannot be timed."""
    topology = trainer.topology
    is_wanted = topology.num_workers > 1 or profile_report.requested() is not None
    if not is_wanted or trainer.jit_compile == "loop" or parameter_servers.is_used(trainer.strategy):
        return None
    return StepTimes(topology.worker_index * topology.num_local_replicas)


def _reducer_inputs(
    trainer: TrainerProtocol, callbacks: Sequence[Callback], timer: StepTimes | None
) -> ReducerInputs:
    owned = collect_owners(trainer)
    models = [thing for thing in owned.values() if is_model(thing)]
    optimizers = {name: thing for name, thing in vars(trainer).items() if is_optimizer(thing)}
    trainable = {id(v): v for m in models for v in getattr(m, "trainable_variables", ())}
    slots = {id(plain(v)): plain(v) for t in owned.values() if is_optimizer(t) for v in variables_of(t)}

    def weights(is_trained: bool) -> list[tf.Variable]:
        chosen = trained_weights_of if is_trained else weights_of
        variables = {id(plain(v)): plain(v) for t in collect_owners(trainer).values() for v in chosen(t)}
        return [v for v in variables.values() if v.dtype.is_floating]

    return ReducerInputs(
        config=trainer.config,
        settings=trainer.gradients,
        strategy=trainer.strategy,
        topology=trainer.topology,
        optimizers=optimizers,
        layers=[layer for thing in owned.values() for layer in layers_of(thing)],
        trainable_variables=list(trainable.values()),
        weights=weights,
        optimizer_variables=list(slots.values()),
        jit_compile=trainer.jit_compile,
        can_roll_back=any(callback.rollback for callback in callbacks),
        has_moving_averages=is_defined_by_user(trainer, "moving_averages"),
        timer=timer,
    )
