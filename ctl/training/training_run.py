"""Implementation of `Trainer.train`: from the checks before a run to its export."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctl.distribute import engine_all_reduce, exit_barrier
from ctl.elastic import recovery, requirements
from ctl.errors import UsageError
from ctl.metrics.protocol import Ended, Exported, RunEnd, RunInfo, Saved, Started
from ctl.metrics.results import Results
from ctl.supervision import heartbeat, signals
from ctl.supervision.lease import Lease
from ctl.training import (
    default_writers,
    ends,
    evaluation,
    input_pipeline,
    resume_checks,
    run_metadata,
    validation,
)
from ctl.training.active_run import ActiveRun
from ctl.training.loop_observers import watch_progress
from ctl.training.prepared import PreparedTrainer
from ctl.training.run import Run, note_epoch_length
from ctl.training.run_options import RunOptions


@dataclass(frozen=True)
class RunRequest:
    """Arguments of one call of `Trainer.train`.

    Attributes:
      steps: Total number of steps, or None.
      epochs: Total number of passes over the data, or None.
      formats: Formats of the export at the end.
      export: Exports the model in these formats, and returns the paths.
      lease: Lease of model_dir, on the chief of a run with a model_dir.
    """

    steps: int | None
    epochs: float | None
    formats: Sequence[str]
    export: Callable[[Sequence[str]], list[str]]
    lease: Lease | None

    def check_lease(self) -> None:
        """Raises LeaseLostError if another job has taken over model_dir."""
        if self.lease is not None:
            self.lease.check()


def train(prepared: PreparedTrainer, options: RunOptions, request: RunRequest) -> Results:
    """Implementation of `Trainer.train`."""
    run, info, resumed_from = _open(prepared, options, request)
    checkpointing, writers = prepared.checkpointing, run.writers
    start, start_secs = prepared.step, time.monotonic()
    run_metadata.write_config(prepared, options)
    validation.check_limits(prepared.config, can_save=checkpointing.can_save)
    writers.note(Started(start, run.total, info, resumed_from, compiles=not run.graph_loop.has_run))
    note_epoch_length(writers, options, run.batches)
    outcome, error_name, error_text, paths = RunEnd.FAILED, "", "", list[str]()
    interruption = signals.Interruption(prepared.config.max_secs)
    stack = contextlib.ExitStack()
    stack.enter_context(prepared.activity.running(ActiveRun(writers, interruption, info)))
    checkpointing.start_run()
    try:
        prepared.callbacks.notify("before_training", start, start)
        prepared.callbacks.raise_failure()
        with heartbeat.current.limit_phase(prepared.config.step_timeout_secs, heartbeat.COMPILING):
            run.graph_loop.trace(run.batches)  # a signal before this line finds no state to save
        fence = None if request.lease is None else request.lease.check_now
        end = _train_steps(run, prepared, interruption, fence)
        if end is RunEnd.DATA_ENDED and prepared.step == start and not checkpointing.progress.examples:
            raise UsageError("train_data ended before its first batch; expected at least one.")
        outcome = ends.precise_end(end, start, prepared.step, request.steps, interruption.received)
        if end is not RunEnd.SIGNAL and request.formats:
            if fence is not None:
                fence()
            paths = request.export(request.formats)
            writers.note(Exported(prepared.step, tuple(paths)))
    except BaseException as e:
        stack.enter_context(interruption)  # a signal does not prevent the report of the error
        outcome, error = recovery.outcome_of(e, prepared.world), ends.error_to_raise(e, prepared)
        if outcome is RunEnd.FAILED:
            error_name, error_text = type(error).__name__, ends.describe(error)
        if error is not e:
            raise error from e
        raise
    finally:
        secs = time.monotonic() - start_secs
        result, directories = run.result(), (prepared.config.model_dir, options.log_dir)
        summary = run_metadata.summary_of(result, prepared.step - start, secs, directories, paths)
        ended = Ended(
            prepared.step, outcome, summary, result.sentences, request.steps, error_name, error_text
        )
        writers.note(ended)
        stack.close()
        run.graph_loop.release()
    if end is not RunEnd.SIGNAL:
        checkpointing.manager.succeeded(prepared.state)
    evaluation.leave_together(prepared.world)  # when the chief has closed its writers too
    if outcome is RunEnd.SIGNAL and interruption.received is not None:
        can_resume = bool(prepared.config.model_dir)
        raise ends.stopped_error(prepared.step, interruption.received, can_resume=can_resume)
    if outcome is RunEnd.TIME_LIMIT and request.lease is not None:
        request.lease.record_end(outcome.value)
    return result.results(outcome)


def _train_steps(
    run: Run,
    prepared: PreparedTrainer,
    interruption: signals.Interruption,
    fence: Callable[[], None] | None,
) -> RunEnd:
    """Trains and saves within the handlers of signals, the hang detector and the checkpoint manager."""

    def notify_saved(step: int, path: str) -> None:
        run.writers.note(Saved(step, path))

    with (
        interruption,
        watch_progress(prepared),
        prepared.checkpointing.opened(notify_saved, fence),
        run.observers.closing(),
    ):
        end = run.train(interruption)
        if end is not RunEnd.SIGNAL:
            run.restore_best_weights()
    return end


def _open(
    prepared: PreparedTrainer, options: RunOptions, request: RunRequest
) -> tuple[Run, RunInfo, str | None]:
    """Checks a run and opens its data.

    Returns:
      The run, its description, and a line about the resumed checkpoint.
    """
    exit_barrier.disarm()
    config, task, checkpointing = prepared.config, prepared.task, prepared.checkpointing
    is_chief = prepared.world.is_chief
    validation.check_methods(task, "train")
    validation.check_export(task, config.model_dir, request.formats)
    validation.check_train_data(task)
    validation.check_evaluation_methods(task, options, checkpointing.manager, is_chief=is_chief)
    with heartbeat.current.limit_phase(config.step_timeout_secs):
        evaluation.check_evaluation(prepared, options)
        total, batches = input_pipeline.open_train_batches(prepared, request.steps, request.epochs)
    configuration, resumed = run_metadata.plain_configuration(prepared, options), checkpointing.resumed
    resume_checks.check_configuration(config, prepared.world.topology, resumed, batches, configuration)
    if resumed is not None and not config.allow_config_change:
        engine_all_reduce.use_recorded_network(prepared.world.strategy, resumed.world)
    if is_chief and validation.has_variable_learning_rate(task.optimizer):
        rate = run_metadata.learning_rates(task).get("learning_rate")
        resume_checks.warn_of_restored_rate(resumed, configuration, rate)
    writers = default_writers.writers_of_run(
        config.model_dir, options, is_chief=is_chief, check_lease=request.check_lease
    )
    requirements.check_run(config, task, batches, can_roll_back=prepared.callbacks.rolls_back)
    run = Run(prepared, options, batches, writers, total, request.check_lease)
    resumed_from = run_metadata.resumed_line(resumed, total)
    return run, run_metadata.run_info(prepared, options, batches), resumed_from
