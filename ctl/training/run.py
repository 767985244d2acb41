"""One trainer at work: prepared once, then trained and evaluated any number of times.

Functions here take the trainer; what they keep between calls is a `Session`.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from ctl.callbacks.schedule import Every
from ctl.checkpoints import saving, warm_start
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.protocol import CheckpointManager, NullCheckpoints
from ctl.checkpoints.tracked_state import State, collect, is_model, statistics_of
from ctl.data.batches import Batches
from ctl.data.resume_position import SavedIterator
from ctl.distribute import collective_debug, exit_barrier, parameter_servers, strategies
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import Stopped, UsageError
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, Saved, Started
from ctl.step import gradients, keras_metrics, randomness
from ctl.step.replica_step import ReplicaStep
from ctl.step.skip_nonfinite import Skipping
from ctl.supervision import heartbeat, signals
from ctl.training import (
    checkpoint_follower,
    error_translation,
    evaluation,
    input_pipeline,
    resume,
    run_metadata,
    validation,
)
from ctl.training.callback_runner import CallbackRunner
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import Actions, Synchronous
from ctl.training.parameter_server_loop import Asynchronous, ScheduledLoop
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")


def prepared(trainer: TrainerProtocol) -> Session:
    """The trainer's session, made on the first call."""
    if trainer._session is None:
        evaluates = trainer.topology.evaluates
        watched = checkpoint_follower.checkpoints(trainer) if evaluates else None
        with heartbeat.here.limited(trainer.step_timeout_secs):
            trainer._session = prepare(trainer, watched or trainer._checkpoints)
    return trainer._session


def prepare(trainer: TrainerProtocol, checkpoints: CheckpointManager | None) -> Session:
    """Builds, checks and restores."""
    if not validation.is_written(trainer, "build"):
        validation.methods(trainer, "train")
    validation.directory(trainer.model_dir)
    randomness.seed_everything(trainer.seed)
    with strategies.place_of_counter(trainer.strategy):
        trainer.step_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        position = SavedIterator() if trainer.data_position == "iterator" else None
    place = trainer.topology
    if trainer.check_collectives:
        collective_debug.watch(place.num_workers, place.worker_index, trainer.step_variable)
    with strategies.scope(trainer.strategy):
        trainer.build()
        validation.model(trainer)
        validation.optimizers(trainer)
        if strategies.word_of(trainer.strategy) == "central_storage":
            keras_metrics.count_outside_replicas(keras_metrics.found_in(vars(trainer)))
    if trainer.topology.num_replicas > 1:
        randomness.differ_by_replica(collect(trainer))
    objects = collect(trainer) | ({} if position is None else {"data_iterator": position.variable})
    state = State(objects, trainer.step_variable, trainer.topology)
    manager = checkpoints
    if manager is None:
        own = f"{trainer.model_dir}/checkpoints"
        manager = ChiefOnlyCheckpoints(own) if trainer.model_dir else NullCheckpoints()
    agreement = HostAllReduce(trainer.strategy, trainer.topology)
    resumed = resume.restore(trainer, manager, state, agreement)
    if resumed is None and trainer.init_from:
        models = [n for n, t in collect(trainer).items() if is_model(t)]
        warm_start.load(trainer.init_from, state, models, agreement)
    callbacks = CallbackRunner(trainer, agreement)
    session = Session(state, manager, agreement, callbacks, resumed, position)
    if resumed is not None:
        session.callbacks.restore(resumed.state.get("watchers", {}))
        session.loop_state, session.at = resumed.state, resumed.step
        session.saved = resumed.step
        session.metrics = resumed.metrics
        counted = resumed.step * trainer.global_batch_size
        session.examples = int(resumed.data.get("examples", counted))
    return session


def train(
    trainer: TrainerProtocol, session: Session, *, steps: int | None, epochs: float | None, formats: tuple
) -> dict[str, float]:
    """One call of `Trainer.train`."""
    exit_barrier.disarm()
    validation.methods(trainer, "train")
    validation.export(trainer, formats)
    validation.data(trainer)
    validation.evaluation(trainer, session.manager)
    with heartbeat.here.limited(trainer.step_timeout_secs):
        if _evaluates(trainer):
            _check_evaluation(trainer, session)
        total, batches = input_pipeline.open_train(trainer, session, steps, epochs)
    resume.check_configuration(trainer, session.resumed, batches, run_metadata.plain_configuration(trainer))
    writers = session.running = run_metadata.writers_of(trainer)
    run = _synchronous(trainer, session, batches, writers)
    start, started = session.step, time.time()
    run_metadata.write_config(trainer)
    session.info = info = run_metadata.run_info(trainer, session.state, batches)
    writers.note(Started(start, total, info, run_metadata.resumed_line(session.resumed, total)))
    session.resumed = None  # said once
    reason, paths = "failed", []
    try:
        with heartbeat.here.limited(trainer.step_timeout_secs, heartbeat.COMPILING):
            session.loops["train"].trace(batches)  # until here a signal finds nothing to save
        with signals.Signals() as received, _watched(trainer, session), _saving(session, writers):
            session.signals = received
            if session.callbacks.stopped:
                total = start  # the run that is resumed was stopped early, and stays so
            reason = run.run(batches, step=start, steps=total, signals=received)
            if reason != "signal":
                session.callbacks.end()
        if reason == "data ended" and session.step == start and not session.examples:
            raise UsageError("train_data ended before its first batch; expected at least one.")
        reason = run_metadata.end_of(reason, start, session.step, steps)
        paths = _export(trainer, session, formats if reason != "signal" else ())
    except BaseException as e:
        error = _explained(e, trainer, session)
        reason = f"failed: {type(error).__name__}"
        if error is not e:
            raise error from e
        raise
    finally:
        session.signals = None
        seen = run_metadata.summary_of(trainer, run, session.step - start, time.time() - started, paths)
        how = "stopped by a signal" if reason == "signal" else reason
        writers.note(Ended(session.step, how, seen))
        session.running = None
        session.loops["train"].release()
    if reason != "signal" and hasattr(session.manager, "succeeded"):
        session.manager.succeeded(session.state)
    leave_together(session)  # when the chief has closed its writers too
    if reason == "signal" and received.received is not None:
        raise _stopped(trainer, session.step, received.received)
    return {**run.means, **{f"eval_{k}": v for k, v in run.metrics.items()}}


def _check_evaluation(trainer: TrainerProtocol, session: Session) -> None:
    """Opens the data and traces the step: a mistake in them is to be found now, not after hours."""
    batches, several = input_pipeline.open_eval(trainer), trainer.topology.num_workers > 1
    if not several and not validation.names_matter(trainer, session.manager):
        return
    loop = _loop(trainer, session, "eval")
    validation.evaluated_names(trainer, session.manager, loop.names(batches))


def leave_together(session: Session) -> None:
    """The last that workers do together; afterwards they may end, the chief after the others."""
    session.agreement.sum([0.0])
    if session.agreement.num_workers > 1:
        exit_barrier.arm(session.state.topology)


def _watched(trainer: TrainerProtocol, session: Session) -> contextlib.AbstractContextManager[None]:
    """Somebody looks whether steps go on; those within a long graph call count."""
    heartbeat.here.reached(session.step)
    served = parameter_servers.is_used(trainer.strategy)
    look = None if served else lambda: int(session.state.step.numpy())
    return heartbeat.here.watched(trainer.step_timeout_secs, look)


def _saving(session: Session, writers: WriterGroup) -> contextlib.AbstractContextManager[None]:
    """The manager tidies up before the steps, and has written everything after them."""
    if session.lease is not None and hasattr(session.manager, "fence"):
        session.manager.fence(session.lease.check_now)

    def told(step: int, path: str) -> None:
        session.saved = step
        writers.note(Saved(step, path))

    return saving.around(session.manager, session.state, told)


def _export(trainer: TrainerProtocol, session: Session, formats: tuple) -> list[str]:
    if session.lease is not None:
        session.lease.check_now()
    return trainer.export(*formats) if formats else []


def _stopped(trainer: TrainerProtocol, step: int, signal: int) -> Stopped:
    after = "; the same command goes on from there." if trainer.model_dir else "."
    return Stopped(f"Stopped by {signals.name(signal)} at step {step}{after}", signals.exit_code(signal))


def _explained(error: BaseException, trainer: TrainerProtocol, session: Session) -> BaseException:
    return error_translation.explained(
        error,
        step=session.step,
        manager=session.manager,
        batch_size=trainer.global_batch_size,
        place=trainer.topology,
        several=several_processes(trainer),
    )


def several_processes(trainer: TrainerProtocol) -> bool:
    """Whether other processes take part, so that some errors may be theirs."""
    return trainer.topology.num_workers > 1 or parameter_servers.is_used(trainer.strategy)


def _synchronous(
    trainer: TrainerProtocol, session: Session, batches: Batches, writers: WriterGroup
) -> Synchronous:
    """The loop of one call of `train`, where a restored one was left."""
    kind = Asynchronous if parameter_servers.is_used(trainer.strategy) else Synchronous
    run = kind(
        loop=_loop(trainer, session, "train"),
        intervals=trainer.intervals,
        agreement=session.agreement,
        is_chief=trainer.topology.is_chief,
        writers=writers,
        actions=Actions(
            evaluate=(lambda: evaluate(trainer, session)) if _evaluates(trainer) else None,
            check_lease=session.lease.check if session.lease else lambda: None,
            check_examples=lambda n: input_pipeline.warn_of_small_batches(trainer, batches, n),
            save=lambda *what: _save(trainer, session, batches, *what),
            learning_rate=lambda: run_metadata.learning_rate_of(trainer.optimizer),
            several=several_processes(trainer),
            after_loop=trainer.after_loop if validation.is_written(trainer, "after_loop") else None,
            amend=lambda *what: _amend(trainer, session, *what),
            small_values=session.state.small_values,
            on_metrics=session.callbacks.on_metrics,
            callback_state=session.callbacks.state,
            roll_back=resume.rolling_back(trainer, session, batches),
            rolls_back_on_nonfinite=resume.rolls_back_on_nonfinite(trainer),
            take_roll_back=session.callbacks.take_roll_back,
        ),
    )
    run.restore(session.step, session.loop_state, session.metrics)
    return run


def evaluate(trainer: TrainerProtocol, session: Session) -> dict[str, float]:
    """One call of `Trainer.evaluate`; inside a run, the run's writers are told."""
    exit_barrier.disarm()
    validation.methods(trainer, "evaluate")
    loop = _loop(trainer, session, "eval")
    with evaluation.together(session.agreement):
        batches = input_pipeline.open_eval(trainer)
    with keras_metrics.SetAside(keras_metrics.found_in(vars(trainer))):
        packed, done = evaluation.run(
            loop, batches, session.agreement, is_chief=trainer.topology.is_chief, signals=session.signals
        )
        if not done:
            raise UsageError("eval_data ended before its first batch; expected at least one.")
        packed = session.agreement.sum(loop.totals.full(packed).ravel())
        means = loop.totals.means(packed.reshape(-1, 2))
        means |= keras_metrics.results(loop.totals.metrics)
    validation.best_is_known(session.manager, means)
    validation.reported_is_known(trainer.extra_writers, means)
    if session.running is not None:
        session.running.write(session.step, means, "eval")
    else:
        leave_together(session)
    return means


def _evaluates(trainer: TrainerProtocol) -> bool:
    written = validation.is_written(trainer, "eval_data") and validation.is_written(trainer, "eval_step")
    return written and trainer.intervals.evaluate != Every()


def report_evaluation(trainer: TrainerProtocol, session: Session, means: Mapping[str, float]) -> None:
    """Tells the writers about an evaluation outside a run."""
    writers = run_metadata.writers_of(trainer)
    writers.write(session.step, means, "eval")
    writers.note(Ended(session.step, "done", {**means, "model_dir": trainer.model_dir}))


def _loop(trainer: TrainerProtocol, session: Session, kind: str) -> Any:
    """The graph loop for "train" or "eval", traced once per trainer."""
    if kind not in session.loops:
        train_kind = kind == "train"
        step = ReplicaStep(
            trainer.train_step if train_kind else trainer.eval_step,
            recorder=trainer._recorder,
            how=(lambda: trainer.gradients) if train_kind else gradients.Gradients,
            num_replicas=trainer.topology.num_replicas,
            jit_compile=lambda: train_kind and trainer.jit_compile,
            metrics=keras_metrics.found_in(vars(trainer)),
            skipping=Skipping(
                lambda: trainer.gradients.on_nonfinite,
                lambda: statistics_of(trainer),
                session.state.step if train_kind else None,
            ),
        )
        if train_kind and parameter_servers.is_used(trainer.strategy):
            session.loops[kind] = ScheduledLoop(trainer.strategy, step, counter=session.state.step)
            return session.loops[kind]
        session.loops[kind] = StepLoop(
            strategies.local(trainer.strategy),
            step,
            trainer.topology,
            counter=session.state.step if train_kind else None,
            single=train_kind and trainer.intervals.steps_per_loop == 1,
        )
    return session.loops[kind]


def _amend(trainer: TrainerProtocol, session: Session, *what: Any) -> bool:
    """Whether the checkpoint that was just written could take in the evaluation that followed it."""
    if not trainer.topology.is_chief:
        return True
    return hasattr(session.manager, "amend") and session.manager.amend(*what)


def _save(
    trainer: TrainerProtocol, session: Session, batches: Any, step: int, metrics: Any, loop_state: Any
) -> None:
    session.advance(step, trainer.global_batch_size, batches.examples)
    session.loop_state, session.metrics = loop_state, metrics
    manifest = resume.manifest_of(trainer, session, batches, step)
    if session.position is not None:
        session.position.take()
    path = session.manager.save(session.state, manifest)
    if path is not None:
        session.saved = step
    if path is not None and session.running is not None:
        session.running.note(Saved(step, path))
