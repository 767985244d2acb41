"""One call of `Trainer.train`: from the data that are opened to the last checkpoint and the export."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.callbacks.protocol import EVENTS
from ctl.callbacks.schedule import NO_ACTION, Action, Every, combined
from ctl.data.batches import Batches
from ctl.distribute import exit_barrier, parameter_servers
from ctl.errors import UsageError
from ctl.metrics.figures import array_event
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, RunEnd, Started
from ctl.step.finiteness import SKIPPED
from ctl.supervision import heartbeat, signals
from ctl.training import default_writers, ends, evaluation, input_pipeline, resume, run_metadata, validation
from ctl.training.active_run import ActiveRun
from ctl.training.callback_runner import BestWeights
from ctl.training.loop import Interrupted, Loop, LoopHooks, RollBack, TrainLoop
from ctl.training.loop_observers import create_observers, watch_progress
from ctl.training.marks import Marks
from ctl.training.optional_methods import is_defined_by_user
from ctl.training.parameter_server_loop import RoundLoop
from ctl.training.preparation import train_loop
from ctl.training.session import Session
from ctl.training.step_profiler import StepProfiler
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")
_EVALUATION = Action.EVALUATE | Action.WITHOUT_CALLBACKS
_NAME_IN_MANIFEST = {Action.EVALUATE: "evaluate", Action.WITHOUT_CALLBACKS: "unwatched"}


def train(
    trainer: TrainerProtocol, session: Session, *, steps: int | None, epochs: float | None, formats: tuple
) -> dict[str, float]:
    """One call of `Trainer.train`."""
    exit_barrier.disarm()
    validation.check_methods(trainer, "train")
    validation.check_export(trainer, formats)
    validation.check_train_data(trainer)
    validation.check_evaluation_methods(trainer, session.manager)
    with heartbeat.current.limit_phase(trainer.step_timeout_secs):
        evaluation.check_evaluation(trainer, session)
        total, batches = input_pipeline.open_train_batches(trainer, session, steps, epochs)
    resume.check_configuration(trainer, session.resumed, batches, run_metadata.plain_configuration(trainer))
    writers = default_writers.writers_of_run(trainer, session.check_lease)
    run = Run(trainer, session, batches, writers, total)
    start, start_secs = session.step, time.monotonic()
    run_metadata.write_config(trainer)
    info = run_metadata.run_info(trainer, session.state, batches)
    resumed_from = run_metadata.resumed_line(session.resumed, total)
    writers.note(Started(start, total, info, resumed_from, compiles=not run.graph_loop.has_run))
    outcome, error_name, paths = RunEnd.FAILED, "", list[str]()
    active = ActiveRun(writers, received := signals.Signals(), info)
    stack = contextlib.ExitStack()
    stack.enter_context(session.running(active))
    try:
        session.callbacks.notify("before_training", start, start)
        session.callbacks.raise_failure()
        with heartbeat.current.limit_phase(trainer.step_timeout_secs, heartbeat.COMPILING):
            run.graph_loop.trace(batches)  # until here a signal finds nothing to save
        with (
            received,
            watch_progress(trainer, session),
            resume.saving_checkpoints(session, writers),
            run.observers.closing(),
        ):
            end = run.train(received)
            if end is not RunEnd.SIGNAL:
                run.restore_best_weights()
        if end is RunEnd.DATA_ENDED and session.step == start and not session.progress.examples:
            raise UsageError("train_data ended before its first batch; expected at least one.")
        outcome = ends.precise_end(end, start, session.step, steps)
        paths = ends.export_at_end(trainer, session, formats if end is not RunEnd.SIGNAL else ())
    except BaseException as e:
        outcome, error = RunEnd.FAILED, ends.error_to_raise(e, trainer, session)
        error_name = type(error).__name__
        if error is not e:
            raise error from e
        raise
    finally:
        secs = time.monotonic() - start_secs
        summary = run_metadata.summary_of(trainer, _measurements(run), session.step - start, secs, paths)
        writers.note(Ended(session.step, outcome, summary, run.sentences, steps, error_name))
        stack.close()
        run.graph_loop.release()
    if end is not RunEnd.SIGNAL:
        session.manager.succeeded(session.state)
    evaluation.leave_together(session)  # when the chief has closed its writers too
    if end is RunEnd.SIGNAL and received.received is not None:
        raise ends.stopped_error(trainer, session.step, received.received)
    return run.results()


class Run:
    """The steps of one call of `train`, and the execution of due actions.

    Attributes:
      means: Means of the newest log.
      metrics: Metrics of the newest evaluation.
      rates: Pairs (steps, seconds) of each log, of training alone.
      best: Origin of the weights that were restored at the end, or None.
      sentences: Sentences about the end for the user.
      loop, observers, profiler: Training loop, its observers, and the one of `ctl profile`.
    """

    def __init__(
        self,
        trainer: TrainerProtocol,
        session: Session,
        batches: Batches,
        writers: WriterGroup,
        total: int | None,
    ):
        self._trainer, self._session, self._batches, self._writers = trainer, session, batches, writers
        self._callbacks = session.callbacks
        self._total = total  # steps to complete; None: until the data end
        self._evaluates = evaluation.is_due(trainer)
        self._rolls_back_on_nonfinite = resume.rolls_back_on_nonfinite(trainer)
        resume.check_rollback(trainer, by_callback=session.callbacks.rolls_back)
        self.graph_loop = graph_loop = train_loop(trainer, session)
        self.profiler = StepProfiler(trainer, session)
        self.observers = create_observers(trainer, session, writers, graph_loop, self.profiler)
        self.loop = (RoundLoop if parameter_servers.is_used(trainer.strategy) else TrainLoop)(
            graph_loop,
            batches,
            Marks(trainer.intervals, has_epoch_events=session.callbacks.wants("after_epoch")),
            session.agreement,
            is_chief=trainer.topology.is_chief,
            writers=writers,
            observers=self.observers,
            hooks=LoopHooks(
                after_loop=self._after_loop if is_defined_by_user(trainer, "after_loop") else None,
                observes_weights=any(map(session.callbacks.wants, EVENTS)),
                requested_actions=lambda: Action.SAVE if session.save_request.take() else NO_ACTION,
            ),
        )
        self._interval = self.loop.interval
        self.metrics, self.means = dict[str, float](), dict[str, float]()
        self.best: BestWeights | None = None
        self.rates: list[tuple[int, float]] = []
        self._rates_used: dict[str, float] = {}  # learning rates, before a hook may have changed them
        self._saved_at = self._evaluated_at = -1
        self._pending = NO_ACTION  # evaluation that a signal has prevented
        self.sentences: tuple[str, ...] = ()
        self._wants_stop = self._interrupted = False  # by a callback; an evaluation, by a signal
        self._in_pass = 0  # steps of the first pass over data of unknown length
        self._restore(session.step, session.progress.loop_state, session.progress.metrics)

    def restore_best_weights(self) -> None:
        """Restores the best weights, if a callback has kept them. Their metrics become the results."""
        callbacks = self._callbacks
        callbacks.end()
        if callbacks.stop_reason:
            self.sentences = (f"Stopped at step {self._session.step}: {callbacks.stop_reason}.",)
        if callbacks.best is not None:
            self.best = callbacks.best
            self.sentences += (f"Restored the weights of step {self.best.step}.",)
            self.metrics = dict(self.best.values) if self.best.run == "eval" else self.metrics
            self.means = dict(self.best.values) if self.best.run == "train" else self.means

    def results(self) -> dict[str, float]:
        """Returns the newest metrics, or those of the restored weights with their step, `best_step`."""
        best = {} if self.best is None else {"best_step": self.best.step}
        return {**self.means, **{f"eval_{name}": value for name, value in self.metrics.items()}, **best}

    def _after_loop(self, step: int, means: dict[str, float]) -> Any:
        self._rates_used = run_metadata.learning_rates(self._trainer)
        return self._trainer.after_loop(step, means)

    @property
    def _failure(self) -> Exception | None:
        return self.loop.failure or self._callbacks.failure

    def _restore(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Restores the loop state and the metrics of a checkpoint of `step`."""
        self._interval.restore(state.get("interval", {}))
        names = state.get("pending", ())
        self._pending = combined(action for action, name in _NAME_IN_MANIFEST.items() if name in names)
        self.metrics = dict(metrics)
        self._evaluated_at = step if metrics else -1

    def train(self, received: signals.Signals) -> RunEnd:
        """Trains until all steps are complete, the data ends or the run is stopped, and saves."""
        first = step = self._saved_at = self._session.step
        if self._callbacks.stopped:
            self._total = first  # the resumed run was stopped by a callback, which is final
        data_end = None if self._batches.steps is None else first + self._batches.steps
        pending, self._pending = self._pending, NO_ACTION
        self._save_and_evaluate(step, pending)
        end = None
        while end is None:
            try:
                step, end = self._train_from(step, received)
                if end is RunEnd.DATA_ENDED and self._batches.passes is not None:
                    end = self._end_pass(step)
            except RollBack as back:
                step = back.manifest.step
                if data_end is not None:  # consumed data stay consumed, so the end is at an earlier step
                    data_end -= back.step - step
                    self._total = data_end if self._total is None else min(self._total, data_end)
        self._finish(step, end, anything_new=step > first)
        if (failure := self._failure) is not None:
            method = "after_loop" if self.loop.failure else self._callbacks.failed
            _log.error("%s failed at step %d; the run ends after a last save.", method, step)
            self.loop.take_failure()
            self._callbacks.take_failure()
            raise failure
        return RunEnd.SIGNAL if self._interrupted else end

    def _train_from(self, step: int, received: signals.Signals) -> tuple[int, RunEnd]:
        """Executes the due actions after each loop. Returns the last step and the reason of the end."""
        if not self._interrupted:
            _notify_begin(self._session, step, self._total)
        loops = self.loop.loops(step, self._total, received) if self._over() is None else ()
        for loop in loops:
            step = loop.step
            self._in_pass += loop.steps
            nonfinite = self._found_nonfinite(loop)
            if Action.LOG in loop.due and not nonfinite:
                self._log(step)
            if Action.END_EPOCH in loop.due and not nonfinite:
                self._end_epoch(step)
            self._roll_back_if_asked(loop, nonfinite)
            if loop.end is not None:
                self._pending = loop.due & _EVALUATION if loop.end is RunEnd.SIGNAL else NO_ACTION
                return step, loop.end
            if self._failure is None:
                self._save_and_evaluate(step, loop.due)
            if loop.due and self._over() is None:
                _notify_begin(self._session, step, self._total)
            if self._over() is not None:
                break
        return step, self._over() or RunEnd.DONE

    def _over(self) -> RunEnd | None:
        """Returns the reason why the run ends before its last step, or None."""
        if self._interrupted:
            return RunEnd.SIGNAL
        return RunEnd.STOPPED if self._wants_stop or self._failure is not None else None

    def _end_pass(self, step: int) -> RunEnd | None:
        """Ends the first pass over data of unknown length. Returns None if the run continues."""
        passes = self._batches.passes
        assert passes is not None
        if not self._session.progress.examples + self._in_pass:
            return RunEnd.DATA_ENDED
        self._batches = passes.open_next(self._in_pass)
        self._session.record_pass(int(self._batches.steps_per_epoch or 0))
        self.loop.continue_with(self._batches)
        if passes.is_last or self._failure is not None:
            if Action.END_EPOCH in self.loop.due(step):
                self._end_epoch(step)
            return RunEnd.DATA_ENDED
        if self._batches.steps is not None:
            end = step + self._batches.steps
            self._total = end if self._total is None else min(self._total, end)
        by_epochs = (a for a, every in self._trainer.intervals.by_action.items() if every.epochs)
        due = self.loop.due(step) & combined([Action.END_EPOCH, *by_epochs])
        if Action.LOG in due:
            self._log(step)
        if Action.END_EPOCH in due:
            self._end_epoch(step)
        self._save_and_evaluate(step, due)
        return self._over()

    def _save_and_evaluate(self, step: int, due: Action) -> None:
        evaluation_due = due & _EVALUATION
        if Action.SAVE in due or evaluation_due:
            self.profiler.pause()
        if Action.SAVE in due:
            self._save(step, evaluation_due)
        if evaluation_due:
            self._evaluate(step, evaluation_due)

    def _finish(self, step: int, end: RunEnd, *, anything_new: bool) -> None:
        """Logs, evaluates, except after a signal, and saves the last checkpoint of the run."""
        if end is not RunEnd.SIGNAL and self._failure is None:
            intervals, steps_per_epoch = self._trainer.intervals, self._batches.steps_per_epoch
            marks = intervals.due(step, steps_per_epoch)
            if self._interval.steps and anything_new:  # a longer run continues this interval
                self._log(step, clear=False, watched=Action.LOG in marks)
            if intervals.evaluate != Every():
                first = intervals.evaluate.next_mark(0, steps_per_epoch)
                only_at_end = first is not None and first > step
                is_due = only_at_end or Action.EVALUATE in marks
                self._evaluate(step, Action.EVALUATE if is_due else _EVALUATION)
        self._save(step, self._pending)

    def _found_nonfinite(self, loop: Loop) -> bool:
        """Returns True if a step was left out as not finite, and the policy is to roll back."""
        if not (self._rolls_back_on_nonfinite and loop.steps):
            return False
        self._interval.fetch(self._session.agreement.sum)
        return self._interval.means_since(loop.before).get(SKIPPED, 0.0) > 0.0

    def _roll_back_if_asked(self, loop: Loop, nonfinite: bool) -> None:
        """Raises RollBack if it is requested, unless the run stops."""
        is_requested = self._callbacks.take_roll_back
        if loop.end in (RunEnd.STOPPED, RunEnd.SIGNAL) or not (nonfinite or is_requested()):
            return
        self._interval.clear()
        manifest = resume.roll_back(self._trainer, self._session, self._batches, loop.step)
        self._restore(manifest.step, manifest.state, manifest.metrics)
        self._pending, self._saved_at = NO_ACTION, manifest.step
        raise RollBack(loop.step, manifest)

    def _end_epoch(self, step: int) -> None:
        epoch = round(step / (self._batches.steps_per_epoch or step) + 1e-9)
        self._wants_stop |= self._callbacks.notify("after_epoch", step, epoch, step, dict(self.means))

    def _log(self, step: int, clear: bool = True, watched: bool = True) -> None:
        interval = self._interval
        interval.fetch(self._session.agreement.sum)
        self.means = interval.means()
        values, per_step = dict(self.means), interval.num_examples() / max(1, interval.steps)
        if self._writers:
            rate = interval.steps_per_sec()
            values |= self._rates_used or run_metadata.learning_rates(self._trainer)
            if rate is not None:
                values |= {"steps_per_sec": rate, "examples_per_sec": rate * per_step}
                self.rates.append((interval.timed_steps, interval.secs))
            self._writers.write(step, values, "train")
            for name, array in interval.arrays.items():
                self._writers.note(array_event(step, name, array, "train"))
        if watched:  # at marks only, so that a resumed run notifies the callbacks at the same steps
            self._wants_stop |= self._callbacks.notify("on_metrics", step, step, self.means, "train")
        self._session.batch_size_check.after_log(self._trainer, self._batches, interval)
        if clear:
            interval.clear()

    def _evaluate(self, step: int, requested: Action) -> None:
        """Saves a checkpoint and evaluates, once per step. `requested` may contain WITHOUT_CALLBACKS."""
        if not self._evaluates or self._evaluated_at == step:
            return
        self._save(step, requested)
        before, notify = self._session.state.small_values(), self._callbacks.notify
        applies = Action.WITHOUT_CALLBACKS not in requested
        if applies and notify("on_begin", step, step, "eval") and self._failure is not None:
            return  # the checkpoint lists the evaluation as pending
        try:
            with heartbeat.current.enter_phase(heartbeat.EVALUATING):
                self.metrics = evaluation.evaluate_session(
                    self._trainer, self._session, applies_decisions=applies
                )
        except Interrupted:
            self._pending, self._interrupted = requested, True
            return
        if applies:
            self._wants_stop |= notify("on_metrics", step, step, self.metrics, "eval")
        if self._failure is None:
            self._evaluated_at = step
            self._complete(step, before)

    def _complete(self, step: int, before: list) -> None:
        """Adds the metrics to the checkpoint of this step, or saves it again if the state has changed."""
        after = self._session.state.small_values()
        same = len(before) == len(after) and all(map(np.array_equal, before, after))
        if same and self._trainer.topology.is_chief:
            same = self._session.manager.amend(step, self.metrics, self._state(NO_ACTION))
        if self._session.agreement.sum([0.0 if same else 1.0])[0]:
            self._saved_at = -1
            self._save(step)

    def _save(self, step: int, pending: Action = NO_ACTION) -> None:
        """Saves once per step. A run that resumes there first executes the `pending` actions."""
        if self._saved_at == step:
            return
        self._saved_at = step
        if self._interval.steps:
            self._interval.fetch(self._session.agreement.sum)
        metrics = self.metrics if self._evaluated_at == step else {}
        self._session.record_state(metrics, self._state(pending))
        with heartbeat.current.enter_phase(heartbeat.SAVING), self.profiler.saving():
            resume.save(self._trainer, self._session, self._batches, step)

    def _state(self, pending: Action) -> dict[str, Any]:
        """Returns the state for the manifest; docs/decisions/0021 describes its use."""
        return {
            "interval": self._interval.state(),
            "pending": sorted(name for action, name in _NAME_IN_MANIFEST.items() if action in pending),
            "watchers": self._callbacks.state(),
        }


def _measurements(run: Run) -> run_metadata.Measurements:
    """Returns the values of a run for its summary."""
    best_step = None if run.best is None else run.best.step
    return run_metadata.Measurements(run.rates, run.means, run.metrics, best_step)


def _notify_begin(session: Session, step: int, total: int | None) -> None:
    """Notifies the callbacks that training steps follow `step`, unless it is the last one."""
    if step != total:
        session.callbacks.notify("on_begin", step, step, "train")
