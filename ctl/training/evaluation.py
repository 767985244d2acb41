"""Evaluation: one pass over the evaluation data, in graph calls of about half a second.

Workers agree on signals and errors between graph calls. So a signal can interrupt an evaluation, and an
error on one worker ends it on all workers at the same batch.
"""

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ctl.data import input_errors
from ctl.data.batches import Batches
from ctl.data.eval_sets import data_name, metric_name
from ctl.distribute import exit_barrier
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.metrics.figures import array_event
from ctl.metrics.protocol import Ended, EvaluationSets, RunEnd
from ctl.step import keras_metrics
from ctl.supervision import heartbeat
from ctl.supervision.signals import Interruption
from ctl.training import input_pipeline, run_metadata, validation
from ctl.training.default_writers import writers_of_run
from ctl.training.evaluation_observer import EvaluationObserver
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import FailedElsewhere, Interrupted
from ctl.training.loop_length import LoopLength
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.task import Task


@dataclass(frozen=True)
class EvaluationResult:
    """Results of one evaluation.

    Attributes:
      means: Means of the numbers of `eval_step`, and Keras metrics, by name.
      arrays: Results of Keras metrics that are arrays, by name.
    """

    means: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]


def evaluate_trainer(
    prepared: PreparedTrainer, options: RunOptions, *, applies_decisions: bool = False
) -> EvaluationResult:
    """Implementation of `Trainer.evaluate`. Within a run it also writes the metrics.

    Args:
      prepared: Trainer to evaluate.
      options: Options of the run.
      applies_decisions: True if decisions of hooks have an effect.

    Raises:
      Exception: Errors of hooks, except within a run, which they end.
    """
    exit_barrier.disarm()
    validation.check_methods(prepared.task, "evaluate")
    with prepared.peer_errors():
        return _evaluate(prepared, options, applies_decisions)


def _evaluate(prepared: PreparedTrainer, options: RunOptions, applies_decisions: bool) -> EvaluationResult:
    task, activity, step = prepared.task, prepared.activity, prepared.step
    means, arrays = dict[str, float](), dict[str, np.ndarray]()
    openers = _open_sets(prepared)
    with task.moving_averages.in_place(), keras_metrics.SetAside(task.metrics):
        for set_name, open_batches in openers.items():
            keras_metrics.reset(task.metrics)
            result = _evaluate_set(prepared, set_name, open_batches, options.evaluation_observer)
            means |= {metric_name(set_name, name): value for name, value in result.means.items()}
            arrays |= {metric_name(set_name, name): array for name, array in result.arrays.items()}
        activity.record_eval_data(openers)
        if activity.writers:
            activity.writers.note(EvaluationSets(activity.eval_set_names))
            activity.writers.write(step, means, "eval")
            for name, array in arrays.items():
                activity.writers.note(array_event(step, name, array, "eval"))
        metrics = prepared.programs.eval_loop(list(openers)[-1]).totals.metrics
        arguments = step, dict(means), dict(metrics)
        prepared.callbacks.notify("after_evaluation", step, *arguments, applies_decisions=applies_decisions)
    validation.check_best_metric(prepared.checkpointing.manager, means)
    validation.check_reported_metric(options.extra_writers, means)
    if activity.run is None:
        prepared.callbacks.raise_failure()
        leave_together(prepared.world)
    return EvaluationResult(means, arrays)


def _evaluate_set(
    prepared: PreparedTrainer,
    name: str,
    open_batches: Callable[[], Batches],
    observer: EvaluationObserver | None,
) -> EvaluationResult:
    """Evaluates one set."""
    all_reduce, loop = prepared.world.host_all_reduce, prepared.programs.eval_loop(name)
    with _together(all_reduce):
        batches = open_batches()
    source, is_chief = data_name(name), prepared.world.is_chief
    interruption = prepared.activity.interruption
    decides = is_chief or all_reduce.num_workers == 1  # an evaluator is no chief
    observation = None if observer is None else _Observation(observer, loop, all_reduce, decides)
    packed, ran = _run(loop, batches, all_reduce, source, is_chief, interruption, observation)
    if not ran:
        raise UsageError(f"{source} ended before its first batch; expected at least one.")
    return _result(loop, all_reduce, packed)


def _result(loop: StepLoop, all_reduce: HostAllReduce, packed: Any) -> EvaluationResult:
    """Returns the results of all workers. `packed` are the totals of this worker."""
    packed = all_reduce.sum(loop.totals.broadcast(packed).ravel())
    means = loop.totals.means(packed.reshape(-1, 2))
    numbers, arrays = keras_metrics.metric_results(loop.totals.metrics)
    return EvaluationResult({**means, **numbers}, arrays)


@dataclass(frozen=True)
class _Observation:
    """Calls of an observer around graph calls. Errors of one worker are raised on all workers."""

    observer: EvaluationObserver
    loop: StepLoop
    all_reduce: HostAllReduce
    decides: bool

    def begin(self, batch: int) -> None:
        with _together(self.all_reduce):
            self.observer.batch_begins(batch)

    def end(self, first_batch: int, packed: Any) -> bool:
        """Returns True on all workers if the observer of the chief ends the evaluation."""
        means = _result(self.loop, self.all_reduce, packed).means
        with _together(self.all_reduce):
            ends = self.observer.batch_ends(first_batch + self.observer.batches_per_call - 1, means)
        return bool(self.all_reduce.sum([float(ends and self.decides)])[0])


def _open_sets(prepared: PreparedTrainer) -> dict[str, Callable[[], Batches]]:
    """Calls `eval_data` on all workers. Returns a function for each set, which opens one pass over it.

    Raises:
      UsageError: If the evaluation sets of the workers differ in name or order.
    """
    all_reduce = prepared.world.host_all_reduce
    with _together(all_reduce):
        openers = input_pipeline.open_eval_sets(prepared)
    checksum = float(zlib.crc32(json.dumps(list(openers)).encode()))
    is_equal = abs(all_reduce.sum([checksum])[0] - all_reduce.num_workers * checksum) < 0.5
    with _together(all_reduce):
        if not is_equal:
            names = ", ".join(openers) or "a single set"
            raise UsageError(
                f"eval_data of this worker returned {names}; expected the evaluation sets of the other "
                "workers, in the same order."
            )
    return openers


def is_due(task: Task, options: RunOptions) -> bool:
    """Returns True if a run evaluates."""
    return task.can_evaluate and options.evaluates


def check_evaluation(prepared: PreparedTrainer, options: RunOptions) -> None:
    """Opens the data and traces the step, so that their errors are raised before training."""
    if not is_due(prepared.task, options):
        return
    batches_by_set = {name: open_batches() for name, open_batches in _open_sets(prepared).items()}
    prepared.activity.record_eval_data(batches_by_set)
    has_peers = prepared.world.topology.num_workers > 1
    manager, monitored = prepared.checkpointing.manager, prepared.callbacks.monitored
    if not has_peers and not validation.names_matter(options, manager, monitored):
        return
    names = [
        metric_name(set_name, name)
        for set_name, batches in batches_by_set.items()
        for name in prepared.programs.eval_loop(set_name).names(batches)
    ]
    validation.check_metric_names(names, options, manager, monitored)


def report_evaluation(prepared: PreparedTrainer, options: RunOptions, means: Mapping[str, float]) -> None:
    """Writes the results of an evaluation outside a run to the metric writers."""
    model_dir = prepared.config.model_dir
    writers = writers_of_run(model_dir, options, is_chief=prepared.world.is_chief)
    if writers and prepared.world.is_chief:
        writers.note(run_metadata.joined_run(prepared))
    writers.note(EvaluationSets(prepared.activity.eval_set_names))
    writers.write(prepared.step, means, "eval")
    writers.note(Ended(prepared.step, RunEnd.DONE, {**means, "model_dir": model_dir or None}))


def leave_together(world: World) -> None:
    """Last synchronization of the workers. Afterwards they may end, the chief after the other workers."""
    world.wait_for_all_workers()
    if world.topology.num_workers > 1:
        exit_barrier.arm(world.topology)


def _run(
    loop: StepLoop,
    batches: Batches,
    agreement: HostAllReduce,
    source: str,
    is_chief: bool,
    interruption: Interruption | None,
    observation: _Observation | None,
) -> tuple[Any, int]:
    """Runs all batches. `source` is the name of the data for messages.

    Returns:
      The packed totals of this worker, and the number of batches.

    Raises:
      Interrupted: On every worker, after a signal to one of them.
      CtlError: If the part of another worker failed.
    """
    length = LoopLength("auto" if observation is None else observation.observer.batches_per_call)
    packed, total = loop.totals.zeros(), 0
    remaining = 2**62 if batches.steps is None else batches.steps
    with _together(agreement):
        loop.trace(batches)
    try:
        while remaining > 0:
            num_steps, ran, error = min(length.length, remaining), 0, None
            if observation is not None:
                observation.begin(total)
            has_run, start = loop.has_run, time.perf_counter()
            try:
                packed, ran = loop.run(batches, num_steps, packed)
            except PEER_ERRORS:
                raise
            except Exception as original:
                e = input_errors.explain_input_error(original, source) or original
                if agreement.num_workers == 1 and e is not original:
                    raise e from original
                if agreement.num_workers == 1 or loop.communicates(batches):
                    raise  # the other workers wait within their graph call
                error = e
            if has_run:
                length.took(steps=ran, secs=time.perf_counter() - start)
            heartbeat.current.record_progress()
            total, remaining = total + ran, remaining - ran
            _agree(agreement, length, is_chief, interruption, error)
            if observation is not None and ran and observation.end(total - ran, packed):
                break
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
    interruption: Interruption | None,
    error: Exception | None,
) -> None:
    """Workers adopt the length of the chief. A signal or an error of one worker ends the evaluation."""
    signal_votes = interruption.votes() if interruption else [0.0, 0.0, 0.0]
    chooses_length = is_chief or agreement.num_workers == 1  # an evaluator is no chief
    vote = [float(length.proposed) if chooses_length else 0.0, float(error is not None), *signal_votes]
    steps, failed, *signal_votes = agreement.sum(vote)
    length.adopt(int(steps))
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere
    if interruption is not None and interruption.apply_votes(signal_votes):
        raise Interrupted
