"""Prepares a trainer: builds, checks and restores the model, and makes the graph loops."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl import config
from ctl.callbacks.adapter import as_callbacks
from ctl.checkpoints import tracked_state, warm_start
from ctl.checkpoints.protocol import CheckpointManager, NullCheckpoints
from ctl.checkpoints.tracked_state import TrackedState, collect, is_model, statistics_of
from ctl.data.resume_position import SavedIterator
from ctl.distribute import (
    collective_debug,
    communication_choice,
    engine_all_reduce,
    parameter_servers,
    strategies,
)
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.keras_objects import plain
from ctl.step import gradients, keras_metrics, randomness
from ctl.step.replica_step import ReplicaStep
from ctl.step.skip_nonfinite import Skipping
from ctl.step.step_times import StepTimes
from ctl.supervision import heartbeat
from ctl.training import (
    checkpoint_follower,
    eight_bit_sums,
    error_translation,
    local_training,
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
        with heartbeat.here.limited(trainer.step_timeout_secs), error_translation.peer_errors(trainer):
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
        local_training.check_trainer(trainer, callbacks)
        if strategies.word_of(trainer.strategy) == "central_storage":
            keras_metrics.count_outside_replicas(keras_metrics.found_in(vars(trainer)))
    if trainer.topology.num_replicas > 1:
        randomness.differ_by_replica(collect(trainer))
    objects = collect(trainer) | ({} if position is None else {"data_iterator": position.variable})
    local = local_training.local_training(trainer)
    eight_bit = eight_bit_sums.eight_bit_sums(trainer)
    more = {} if local is None else local.tracked()
    if eight_bit is not None:
        more[tracked_state.LEFT_OUT_OF_SUMS] = eight_bit.state.variables
    state = TrackedState(objects, trainer.step_variable, trainer.topology, more)
    manager = NullCheckpoints() if checkpoints is None else checkpoints
    agreement = HostAllReduce(trainer.strategy, trainer.topology)
    resumed = resume.restore(trainer, manager, state, agreement)
    if resumed is None and trainer.init_from:
        models = [n for n, t in collect(trainer).items() if is_model(t)]
        warm_start.load(trainer.init_from, state, models, agreement)
    runner = CallbackRunner(trainer, callbacks, agreement)
    session = Session(state, manager, agreement, runner, position, local=local, eight_bit=eight_bit)
    session.begin_from(0 if resumed is None else resumed.step)
    timed = place.num_workers > 1 or profile_report.requested() is not None
    if timed and trainer.jit_compile != "loop" and not parameter_servers.is_used(trainer.strategy):
        session.step_times = StepTimes(place.worker_index * place.num_local_replicas)
    if resumed is not None:
        session.take(resumed, trainer.global_batch_size)
    return session


def train_loop(trainer: TrainerProtocol, session: Session) -> GraphLoop:
    """What runs `train_step`, traced once per trainer."""
    in_program = config.jit_compile(trainer.jit_compile) == "loop"
    if session.train_loop is None or isinstance(session.train_loop, CompiledLoop) != in_program:
        _choose_communication(trainer, session)
        counter, trained = session.state.step, lambda: _trainable(trainer)
        if parameter_servers.is_used(trainer.strategy):
            step = _train_step(trainer, session, None)
            session.train_loop = ScheduledLoop(trainer.strategy, step, counter=counter, trained=trained)
        elif in_program:
            step = _train_step(trainer, session, False)
            session.train_loop = CompiledLoop(trainer.strategy, step, counter=counter, trained=trained)
        else:
            session.train_loop = new_train_loop(trainer, session)
    return session.train_loop


def _choose_communication(trainer: TrainerProtocol, session: Session) -> None:
    """The path and buckets of the checkpoint that the run goes on from, or what is faster."""
    paths, topology, known = communication_choice.PATHS, trainer.topology, [0.0, 0.0]
    choices = trainer.config.communication in ("auto", "tcp")
    if not choices or not engine_all_reduce.can_use_engine(trainer.strategy):
        return
    if topology.is_chief and session.resumed is not None:
        world = session.resumed.world
        before = world.get("communication")
        if before in paths and world.get("workers") == topology.num_workers:
            known = [1.0 + paths.index(before), float(world.get("bucket_bytes", 0))]
    chosen, bucket_bytes = map(int, session.agreement.sum(known))
    models = [thing for thing in collect(trainer).values() if is_model(thing)]
    weights = {id(plain(v)): plain(v) for m in models for v in getattr(m, "trainable_variables", ())}
    wire = trainer.gradients.wire_dtype
    summed_as = "bfloat16" if wire == "int8" else wire  # both paths gain alike
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in weights.values()]
    communication_choice.choose_communication(
        trainer.strategy,
        topology,
        specs or [tf.TensorSpec([1], tf.float32)],
        lambda tensors: gradients.sum_over_replicas(tensors, summed_as),
        wire_bytes=sum(s.shape.num_elements() * tf.as_dtype(wire or s.dtype).size for s in specs),
        known=communication_choice.Path(paths[chosen - 1], bucket_bytes)
        if chosen
        else communication_choice.Path(),
        limits=engine_all_reduce.PeerLimits(
            trainer.config.heartbeat_secs, trainer.config.collective_timeout_secs
        ),
    )


def new_train_loop(
    trainer: TrainerProtocol, session: Session, *, jit_compile: bool | None = None
) -> StepLoop:
    """What runs `train_step` on workers in step, with traces of its own."""
    return StepLoop(
        trainer.strategy,
        _train_step(trainer, session, jit_compile),
        trainer.topology,
        counter=session.state.step,
        single=trainer.intervals.steps_per_loop == 1,
        trained=lambda: _trainable(trainer),
    )


def _train_step(trainer: TrainerProtocol, session: Session, jit_compile: bool | None) -> ReplicaStep:
    """`jit_compile` in place of the trainer's, if it is given."""

    def compiles() -> bool:
        return config.jit_compile(trainer.jit_compile) == "step" if jit_compile is None else jit_compile

    policy = lambda: trainer.gradients.on_nonfinite  # noqa: E731
    skipping = Skipping(policy, lambda: statistics_of(trainer), session.state.step)
    made = _replica_step(trainer, trainer.train_step, lambda: trainer.gradients, skipping, compiles)
    made.times = session.step_times
    if session.local is not None and session.local.steps is not None:
        made.local, session.local.steps.times = session.local.steps, made.times
    made.eight_bit = session.eight_bit
    return made


def eval_loop(trainer: TrainerProtocol, session: Session) -> StepLoop:
    """What runs `eval_step`, traced once per trainer."""
    if session.eval_loop is None:
        step = _replica_step(trainer, trainer.eval_step, gradients.Gradients, Skipping())
        session.eval_loop = StepLoop(strategies.local(trainer.strategy), step, trainer.topology)
    return session.eval_loop


def _trainable(trainer: TrainerProtocol) -> tuple[int, ...]:
    """Which variables of the models are trained; a layer may be frozen between two loops."""
    models = tf.nest.flatten([thing for thing in vars(trainer).values() if is_model(thing)])
    return tuple(id(plain(v)) for m in models for v in getattr(m, "trainable_variables", ()))


def _replica_step(
    trainer: TrainerProtocol,
    step: Callable[[Any], Any],
    how: Callable[[], Any],
    skipping: Skipping,
    compiles: Callable[[], bool] = lambda: False,
) -> ReplicaStep:
    keras_metrics.build_outside_steps(
        keras_metrics.found_in(vars(trainer)), strategies.local(trainer.strategy)
    )
    made = ReplicaStep(
        step,
        recorder=trainer._recorder,
        how=how,
        num_replicas=trainer.topology.num_replicas,
        jit_compile=compiles,
        metrics=keras_metrics.found_in(vars(trainer)),
        skipping=skipping,
    )
    made.totals.full = trainer.global_batch_size // trainer.topology.num_replicas // how().accumulate_steps
    return made
