"""Steps of one call of `Trainer.train`, with logs, evaluations and saves."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ctl.callbacks.best_value import BestRecord
from ctl.callbacks.protocol import EVENTS
from ctl.callbacks.schedule import NO_ACTION, Action, Every, combined
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.keras_objects import failed_callback
from ctl.metrics.figures import array_event
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunEnd, Saved, Started
from ctl.step.finiteness import SKIPPED
from ctl.supervision import heartbeat, signals
from ctl.training import evaluation, resume_checks, run_metadata
from ctl.training.callback_runner import BestWeights, CallbackRunner
from ctl.training.kept_best import KeptBest
from ctl.training.loop import Interrupted, Loop, LoopHooks, RollBack, TrainLoop
from ctl.training.loop_length import Interval
from ctl.training.loop_observers import create_observers, create_profiler
from ctl.training.marks import Marks
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.run_result import RunResult

_log = logging.getLogger("ctl")
_EVALUATION = Action.EVALUATE | Action.WITHOUT_CALLBACKS
_NAME_IN_MANIFEST = {Action.EVALUATE: "evaluate", Action.WITHOUT_CALLBACKS: "unwatched"}


class Run:
    """The steps of one call of `Trainer.train`, and the execution of due actions.

    Attributes:
      batches: Training data.
      writers: Metric writers.
      total: Step at which the run ends; None: at the end of the data.
      loop, observers, profiler: Training loop, its observers, and the one of `ctl profile`.
    """

    def __init__(
        self,
        prepared: PreparedTrainer,
        options: RunOptions,
        batches: Batches,
        writers: WriterGroup,
        total: int | None,
        check_lease: Callable[[], None],
    ):
        self._prepared, self._options = prepared, options
        self.batches, self.writers, self.total = batches, writers, total
        self._callbacks, self._checkpointing = prepared.callbacks, prepared.checkpointing
        self._all_reduce, task, world = prepared.world.host_all_reduce, prepared.task, prepared.world
        self._evaluates = evaluation.is_due(task, options)
        self._rolls_back_on_nonfinite = resume_checks.rolls_back_on_nonfinite(task)
        if self._rolls_back_on_nonfinite or self._callbacks.rolls_back:
            resume_checks.check_can_roll_back(world, task)
        self.graph_loop = graph_loop = prepared.programs.train_loop(
            self._checkpointing.resumed, is_single=options.intervals.steps_per_loop == 1
        )
        self.profiler = profiler = create_profiler(prepared, options, writers)
        self.observers = create_observers(
            prepared, graph_loop, batches, profiler, writers, options.log_dir, check_lease, self._manifest
        )
        save_request = prepared.activity.save_request
        self.loop = TrainLoop(
            graph_loop,
            batches,
            Marks(options.intervals, has_epoch_events=self._callbacks.wants("after_epoch")),
            self._all_reduce,
            is_chief=world.is_chief,
            writers=writers,
            observers=self.observers,
            hooks=LoopHooks(
                after_loop=self._after_loop if "after_loop" in task.methods else None,
                observes_weights=any(map(self._callbacks.wants, EVENTS)),
                requested_actions=lambda: Action.SAVE if save_request.take() else NO_ACTION,
            ),
        )
        self._interval = self.loop.interval
        self._metrics, self._means = dict[str, float](), dict[str, float]()
        self._best: BestWeights | None = None
        self._kept_best = KeptBest(self._checkpointing.manager, prepared.callbacks.best_values)
        self._rates: list[tuple[int, float]] = []
        self._rates_before_hook: dict[
            str, float
        ] = {}  # learning rates, before a hook may have changed them
        self._saved_at = self._evaluated_at = -1
        self._pending = NO_ACTION  # evaluation that a signal has prevented
        self._remarks: tuple[str, ...] = ()
        self._wants_stop = False  # requested by a callback
        self._evaluation_was_interrupted = False  # a signal has ended an evaluation
        self._in_pass = 0  # steps of the first pass over data of unknown length
        progress = self._checkpointing.progress
        self._restore(prepared.step, progress.loop_state, progress.metrics)

    def restore_best_weights(self) -> None:
        """Restores the best weights, if a callback has kept them. Their metrics become the results."""
        callbacks = self._callbacks
        callbacks.end()
        if callbacks.stop_reason:
            self._remarks = (f"Stopped at step {self._prepared.step}: {callbacks.stop_reason}.",)
        if callbacks.best is not None:
            self._best = callbacks.best
            self._remarks += (f"Restored the weights of step {self._best.step}.",)
            self._metrics = dict(self._best.values) if self._best.run == "eval" else self._metrics
            self._means = dict(self._best.values) if self._best.run == "train" else self._means

    def result(self) -> RunResult:
        """Returns the newest metrics, or those of the restored weights."""
        restored, best = self._best, self._kept_best.best()
        if restored is not None:
            best = BestRecord(restored.step, restored.run, restored.values)
        is_restored = restored is not None
        return RunResult(self._means, self._metrics, best, is_restored, self._remarks, tuple(self._rates))

    def _after_loop(self, step: int, means: dict[str, float]) -> Any:
        self._rates_before_hook = run_metadata.learning_rates(self._prepared.task)
        return self._prepared.task.methods["after_loop"](step, means)

    @property
    def _failure(self) -> Exception | None:
        return self.loop.failure or self._callbacks.failure

    def _restore(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Restores the loop state and the metrics of a checkpoint of `step`."""
        self._interval.restore(state.get("interval", {}))
        self._kept_best.restore(state.get("kept_best"))
        names = state.get("pending", ())
        self._pending = combined(action for action, name in _NAME_IN_MANIFEST.items() if name in names)
        self._metrics = dict(metrics)
        self._evaluated_at = step if metrics else -1

    def train(self, interruption: signals.Interruption) -> RunEnd:
        """Trains until all steps are complete, the data ends or the run is stopped, and saves."""
        first = step = self._saved_at = self._prepared.step
        if self._callbacks.stopped:
            self.total = first  # the resumed run was stopped by a callback, which is final
        data_end = None if self.batches.steps is None else first + self.batches.steps
        pending, self._pending = self._pending, NO_ACTION
        with interruption.without_time_limit():  # else each run could repeat the same part of an evaluation
            self._save_and_evaluate(step, pending)
        end = None
        while end is None:
            try:
                step, end = self._train_from(step, interruption)
                if end is RunEnd.DATA_ENDED and self.batches.passes is not None:
                    end = self._end_pass(step)
            except RollBack as back:
                step = back.manifest.step
                if data_end is not None:  # consumed data stay consumed, so the end is at an earlier step
                    data_end -= back.step - step
                    self.total = data_end if self.total is None else min(self.total, data_end)
        is_time_limit = end is RunEnd.SIGNAL and interruption.received == signals.TIME_LIMIT
        self._finish(step, end, has_trained=step > first, is_time_limit=is_time_limit)
        if (failure := self._failure) is not None:
            method = "after_loop" if self.loop.failure else self._callbacks.failed
            method = failed_callback(failure) or method
            saves = " after a last save" if self._checkpointing.can_save else ""
            _log.error("%s failed at step %d; the run ends%s.", method, step, saves)
            self.loop.take_failure()
            self._callbacks.take_failure()
            raise failure
        return RunEnd.SIGNAL if self._evaluation_was_interrupted else end

    def _train_from(self, step: int, interruption: signals.Interruption) -> tuple[int, RunEnd]:
        """Executes the due actions after each loop. Returns the last step and the reason of the end."""
        if not self._evaluation_was_interrupted:
            _notify_begin(self._callbacks, step, self.total)
        loops = self.loop.loops(step, self.total, interruption) if self._early_end() is None else ()
        for loop in loops:
            step = loop.step
            self._in_pass += loop.steps
            nonfinite = self._rolls_back_on_nonfinite and _has_skipped_steps(
                loop, self._interval, self._all_reduce
            )
            due = NO_ACTION if nonfinite else loop.due
            if due and Action.LOG in due:
                self._log(step)
            if due and Action.END_EPOCH in due:
                self._end_epoch(step)
            self._roll_back_if_requested(loop, nonfinite)
            if loop.end is not None:
                self._pending = loop.due & _EVALUATION if loop.end is RunEnd.SIGNAL else NO_ACTION
                return step, loop.end
            if self._failure is None:
                self._save_and_evaluate(step, loop.due)
            if loop.due and self._early_end() is None:
                _notify_begin(self._callbacks, step, self.total)
            if self._early_end() is not None:
                break
        return step, self._early_end() or RunEnd.DONE

    def _early_end(self) -> RunEnd | None:
        """Returns the reason why the run ends before its last step, or None."""
        if self._evaluation_was_interrupted:
            return RunEnd.SIGNAL
        return RunEnd.STOPPED if self._wants_stop or self._failure is not None else None

    def _end_pass(self, step: int) -> RunEnd | None:
        """Ends the first pass over data of unknown length. Returns None if the run continues."""
        passes = self.batches.passes
        assert passes is not None
        if not self._checkpointing.progress.examples + self._in_pass:
            return RunEnd.DATA_ENDED
        self.batches = passes.open_next(self._in_pass)
        self._checkpointing.record_pass(int(self.batches.steps_per_epoch or 0))
        self.loop.continue_with(self.batches)
        note_epoch_length(self.writers, self._options, self.batches)
        if passes.is_last or self._failure is not None:
            if Action.END_EPOCH in self.loop.due(step):
                self._end_epoch(step)
            return RunEnd.DATA_ENDED
        if self.batches.steps is not None:
            end = step + self.batches.steps
            self.total = end if self.total is None else min(self.total, end)
        by_epochs = (a for a, every in self._options.intervals.by_action.items() if every.epochs)
        due = self.loop.due(step) & combined([Action.END_EPOCH, *by_epochs])
        if Action.LOG in due:
            self._log(step)
        if Action.END_EPOCH in due:
            self._end_epoch(step)
        self._save_and_evaluate(step, due)
        return self._early_end()

    def _save_and_evaluate(self, step: int, due: Action) -> None:
        if not due:
            return
        evaluation_due = due & _EVALUATION
        if Action.SAVE in due or evaluation_due:
            self.profiler.pause()
        if Action.SAVE in due:
            self._save(step, evaluation_due)
        if evaluation_due:
            self._evaluate(step, evaluation_due)

    def _finish(self, step: int, end: RunEnd, *, has_trained: bool, is_time_limit: bool) -> None:
        """Saves the last checkpoint. Before, logs and evaluates unless a signal or error ended the run.

        After the end by the time limit it logs, and the next run evaluates.
        """
        if (end is not RunEnd.SIGNAL or is_time_limit) and self._failure is None:
            intervals, steps_per_epoch = self._options.intervals, self.batches.steps_per_epoch
            marks = intervals.due(step, steps_per_epoch)
            if self._interval.steps and has_trained:  # a longer run continues this interval
                self._log(step, clear=False, notifies_callbacks=Action.LOG in marks)
            if intervals.evaluate != Every() and not is_time_limit:
                first = intervals.evaluate.next_mark(0, steps_per_epoch)
                only_at_end = first is not None and first > step
                is_due = only_at_end or Action.EVALUATE in marks
                self._evaluate(step, Action.EVALUATE if is_due else _EVALUATION)
        self._save(step, self._pending)

    def _roll_back_if_requested(self, loop: Loop, nonfinite: bool) -> None:
        """Raises RollBack if it is requested, unless the run stops."""
        is_requested = self._callbacks.take_roll_back
        if loop.end in (RunEnd.STOPPED, RunEnd.SIGNAL) or not (nonfinite or is_requested()):
            return
        self._interval.clear()
        resume_checks.check_can_roll_back(self._prepared.world, self._prepared.task)
        manifest = self._checkpointing.roll_back(loop.step, self.batches)
        self._callbacks.restore(manifest.state.get("watchers", {}))
        info = None if self._prepared.activity.run is None else self._prepared.activity.run.info
        if info is not None:
            detail = f"rolling back from step {loop.step}"
            self.writers.note(Started(manifest.step, self.total, info, detail))
            note_epoch_length(self.writers, self._options, self.batches)
        self._restore(manifest.step, manifest.state, manifest.metrics)
        self._pending, self._saved_at = NO_ACTION, manifest.step
        raise RollBack(loop.step, manifest)

    def _end_epoch(self, step: int) -> None:
        epoch = round(step / (self.batches.steps_per_epoch or step) + 1e-9)
        self._wants_stop |= self._callbacks.notify("after_epoch", step, epoch, step, dict(self._means))

    def _log(self, step: int, clear: bool = True, notifies_callbacks: bool = True) -> None:
        interval = self._interval
        interval.fetch(self._all_reduce.sum)
        self._means = interval.means()
        values, per_step = dict(self._means), interval.num_examples() / max(1, interval.steps)
        if self.writers:
            rate = interval.steps_per_sec()
            values |= self._rates_before_hook or run_metadata.learning_rates(self._prepared.task)
            if rate is not None:
                values |= {"steps_per_sec": rate, "examples_per_sec": rate * per_step}
                self._rates.append((interval.timed_steps, interval.secs))
            self.writers.write(step, values, "train")
            for name, array in interval.arrays.items():
                self.writers.note(array_event(step, name, array, "train"))
        if (
            notifies_callbacks
        ):  # at marks only, so that a resumed run notifies the callbacks at the same steps
            self._wants_stop |= self._callbacks.notify("on_metrics", step, step, self._means, "train")
        check = self._prepared.activity.batch_size_check
        sizes = self._prepared.config.global_batch_size, self._prepared.world.topology.num_replicas
        check.after_log(*sizes, self.batches, interval)
        if clear:
            interval.clear()

    def _evaluate(self, step: int, requested: Action) -> None:
        """Saves a checkpoint and evaluates, once per step. `requested` may contain WITHOUT_CALLBACKS."""
        if not self._evaluates or self._evaluated_at == step:
            return
        self._save(step, requested)
        before, notify = self._prepared.state.small_values(), self._callbacks.notify
        applies = Action.WITHOUT_CALLBACKS not in requested
        if applies and notify("on_begin", step, step, "eval") and self._failure is not None:
            return  # the checkpoint lists the evaluation as pending
        try:
            with heartbeat.current.enter_phase(heartbeat.EVALUATING):
                result = evaluation.evaluate_trainer(
                    self._prepared, self._options, applies_decisions=applies
                )
                self._metrics = dict(result.means)
        except Interrupted:
            self._pending, self._evaluation_was_interrupted = requested, True
            return
        if applies:
            self._wants_stop |= notify("on_metrics", step, step, self._metrics, "eval")
        if self._failure is None:
            self._evaluated_at = step
            self._kept_best.note(step, self._metrics)
            self._complete(step, before)

    def _complete(self, step: int, before: list) -> None:
        """Adds the metrics to the checkpoint of this step, or saves it again if the state has changed."""
        after = self._prepared.state.small_values()
        is_unchanged = len(before) == len(after) and all(map(np.array_equal, before, after))
        if is_unchanged and self._prepared.world.is_chief:
            is_unchanged = self._checkpointing.manager.amend(step, self._metrics, self._state(NO_ACTION))
        if self._all_reduce.sum([0.0 if is_unchanged else 1.0])[0]:
            self._saved_at = -1
            self._save(step)

    def _save(self, step: int, pending: Action = NO_ACTION) -> None:
        """Saves once per step. A run that resumes there first executes the `pending` actions."""
        if self._saved_at == step:
            return
        self._saved_at = step
        self._manifest(step, pending)
        with heartbeat.current.enter_phase(heartbeat.SAVING), self.profiler.saving():
            configuration = run_metadata.plain_configuration(self._prepared, self._options)
            path = self._checkpointing.save(step, configuration, has_data=True)
        if path is not None:
            self.writers.note(Saved(step, path))

    def _manifest(self, step: int, pending: Action = NO_ACTION) -> Manifest:
        """Records the state after `step`, and returns its manifest without settings. Collective."""
        if self._interval.steps:
            self._interval.fetch(self._all_reduce.sum)
        metrics = self._metrics if self._evaluated_at == step else {}
        self._checkpointing.record_state(metrics, self._state(pending))
        self._checkpointing.record_data(step, self.batches)
        return self._checkpointing.manifest(step, {})

    def _state(self, pending: Action) -> dict[str, Any]:
        """Returns the state for the manifest: sums since the last log, pending actions, callbacks."""
        return {
            "interval": self._interval.state(),
            "pending": sorted(name for action, name in _NAME_IN_MANIFEST.items() if action in pending),
            "watchers": self._callbacks.state(),
            "kept_best": self._kept_best.state(),
        }


def _has_skipped_steps(loop: Loop, interval: Interval, all_reduce: HostAllReduce) -> bool:
    """Returns True if a step of the loop was skipped as not finite. Collective."""
    interval.fetch(all_reduce.sum)
    return interval.means_since(loop.before).get(SKIPPED, 0.0) > 0.0


def note_epoch_length(writers: WriterGroup, options: RunOptions, batches: Batches) -> None:
    """Sends the number of steps per epoch to the writers, unless the data have no length."""
    length = options.intervals.epoch_length(batches.steps_per_epoch)
    if length is not None:
        writers.note(length)


def _notify_begin(callbacks: CallbackRunner, step: int, total: int | None) -> None:
    """Notifies the callbacks that training steps follow `step`, unless it is the last one."""
    if step != total:
        callbacks.notify("on_begin", step, step, "train")
