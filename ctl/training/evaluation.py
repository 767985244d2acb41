"""Evaluation: one pass over the evaluation data, in graph calls of about half a second.

Workers agree on signals and errors between graph calls. So a signal can interrupt an evaluation, and an
error on one worker ends it on all workers at the same batch.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ctl.callbacks.schedule import Every
from ctl.data import input_errors
from ctl.data.batches import Batches
from ctl.distribute import exit_barrier
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import UsageError
from ctl.metrics.figures import array_event
from ctl.metrics.protocol import Ended, RunEnd
from ctl.step import keras_metrics, moving_averages
from ctl.supervision import heartbeat
from ctl.supervision.signals import Signals
from ctl.training import error_translation, input_pipeline, validation
from ctl.training.default_writers import writers_of_run
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import FailedElsewhere, Interrupted
from ctl.training.loop_length import LoopLength
from ctl.training.preparation import eval_loop
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol


@error_translation.translates_peer_errors
def evaluate_session(
    trainer: TrainerProtocol, session: Session, *, applies_decisions: bool = False
) -> dict[str, float]:
    """Implementation of `Trainer.evaluate`. Within a run it also writes the metrics.

    Args:
      trainer: Trainer to evaluate.
      session: State of the trainer.
      applies_decisions: True if decisions of hooks have an effect.

    Returns:
      Means and Keras metrics by name. Errors of hooks are raised, except within a run, which they end.
    """
    exit_barrier.disarm()
    validation.check_methods(trainer, "evaluate")
    loop = eval_loop(trainer, session)
    with _together(session.agreement):
        batches = input_pipeline.open_eval_batches(trainer, session)
    with moving_averages.in_place(trainer), keras_metrics.SetAside(keras_metrics.metrics_in(vars(trainer))):
        is_chief = trainer.topology.is_chief
        packed, ran = _run(loop, batches, session.agreement, is_chief=is_chief, signals=session.signals)
        if not ran:
            raise UsageError("eval_data ended before its first batch; expected at least one.")
        packed = session.agreement.sum(loop.totals.broadcast(packed).ravel())
        means = loop.totals.means(packed.reshape(-1, 2))
        numbers, arrays = keras_metrics.metric_results(loop.totals.metrics)
        session.record_arrays(arrays)
        means |= numbers
        if session.writers:
            session.writers.write(session.step, means, "eval")
            for name, array in arrays.items():
                session.writers.note(array_event(session.step, name, array, "eval"))
        arguments = session.step, dict(means), dict(loop.totals.metrics)
        session.callbacks.notify(
            "after_evaluation", session.step, *arguments, applies_decisions=applies_decisions
        )
    validation.check_best_metric(session.manager, means)
    validation.check_reported_metric(trainer.extra_writers, means)
    if session.active is None:
        session.callbacks.raise_failure()
        leave_together(session)
    return means


def is_due(trainer: TrainerProtocol) -> bool:
    """Returns True if a run of this trainer evaluates."""
    return validation.evaluates_at_all(trainer) and trainer.intervals.evaluate != Every()


def check_evaluation(trainer: TrainerProtocol, session: Session) -> None:
    """Opens the data and traces the step, so that their errors are raised before training."""
    if not is_due(trainer):
        return
    batches = input_pipeline.open_eval_batches(trainer, session)
    has_peers = trainer.topology.num_workers > 1
    monitored = session.callbacks.monitored
    if not has_peers and not validation.names_matter(trainer, session.manager, monitored):
        return
    names = eval_loop(trainer, session).names(batches)
    validation.check_metric_names(trainer, session.manager, names, monitored)


def report_evaluation(trainer: TrainerProtocol, session: Session, means: Mapping[str, float]) -> None:
    """Writes the results of an evaluation outside a run to the metric writers."""
    writers = writers_of_run(trainer, session.check_lease)
    writers.write(session.step, means, "eval")
    writers.note(Ended(session.step, RunEnd.DONE, {**means, "model_dir": trainer.model_dir}))


def leave_together(session: Session) -> None:
    """Last synchronization of the workers. Afterwards they may end, the chief after the other workers."""
    session.agreement.sum([0.0])
    if session.agreement.num_workers > 1:
        exit_barrier.arm(session.state.topology)


def _run(
    loop: StepLoop, batches: Batches, agreement: HostAllReduce, *, is_chief: bool, signals: Signals | None
) -> tuple[Any, int]:
    """Runs all batches.

    Returns:
      The packed totals of this worker, and the number of batches.

    Raises:
      Interrupted: On every worker, after a signal to one of them.
      CtlError: If the part of another worker failed.
    """
    length, packed, total = LoopLength("auto"), loop.totals.zeros(), 0
    remaining = 2**62 if batches.steps is None else batches.steps
    with _together(agreement):
        loop.trace(batches)
    try:
        while remaining > 0:
            num_steps, ran, error = min(length.length, remaining), 0, None
            has_run, start = loop.has_run, time.perf_counter()
            try:
                packed, ran = loop.run(batches, num_steps, packed)
            except PEER_ERRORS:
                raise
            except Exception as original:
                e = input_errors.explain_input_error(original, "eval_data") or original
                if agreement.num_workers == 1 and e is not original:
                    raise e from original
                if agreement.num_workers == 1 or loop.communicates(batches):
                    raise  # the other workers wait within their graph call
                error = e
            if has_run:
                length.took(steps=ran, secs=time.perf_counter() - start)
            heartbeat.current.record_progress()
            total, remaining = total + ran, remaining - ran
            _agree(agreement, length, is_chief, signals, error)
            if ran < num_steps:
                break
    finally:
        loop.release()
    return packed, total


@contextlib.contextmanager
def _together(agreement: HostAllReduce) -> Iterator[None]:
    """Raises an error of one worker within the block on all workers. The block must not communicate."""
    error = None
    try:
        yield
    except PEER_ERRORS:
        raise
    except Exception as e:
        error = e
    failed = agreement.sum([float(error is not None)])[0]
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere


def _agree(
    agreement: HostAllReduce,
    length: LoopLength,
    is_chief: bool,
    signals: Signals | None,
    error: Exception | None,
) -> None:
    """Workers adopt the length of the chief. A signal or an error of one worker ends the evaluation."""
    signal_votes = signals.votes() if signals else [0.0, 0.0]
    chooses_length = is_chief or agreement.num_workers == 1  # an evaluator is no chief
    vote = [float(length.proposed) if chooses_length else 0.0, float(error is not None), *signal_votes]
    steps, failed, *signal_votes = agreement.sum(vote)
    length.adopt(int(steps))
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere
    if signals is not None and signals.apply_votes(signal_votes):
        raise Interrupted
