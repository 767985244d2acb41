"""One call of `Trainer.train`: from the data that are opened to the last checkpoint and the export."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.callbacks.schedule import Every
from ctl.checkpoints import saving
from ctl.data.batches import Batches
from ctl.distribute import exit_barrier, parameter_servers
from ctl.errors import Stopped, UsageError
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Ended, Saved, Started
from ctl.step.finiteness import SKIPPED
from ctl.supervision import heartbeat, signals
from ctl.training import error_translation, evaluation, input_pipeline, resume, run_metadata, validation
from ctl.training.loop import End, Interrupted, Loop, RollBack, TrainLoop
from ctl.training.parameter_server_loop import RoundLoop
from ctl.training.preparation import train_loop
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")
_EVALUATION = frozenset({"evaluate", "unwatched"})  # the second: no callback is called


def train(
    trainer: TrainerProtocol, session: Session, *, steps: int | None, epochs: float | None, formats: tuple
) -> dict[str, float]:
    """One call of `Trainer.train`."""
    exit_barrier.disarm()
    validation.methods(trainer, "train")
    validation.check_export(trainer, formats)
    validation.data(trainer)
    validation.evaluation(trainer, session.manager)
    with heartbeat.here.limited(trainer.step_timeout_secs):
        evaluation.check_evaluation(trainer, session)
        total, batches = input_pipeline.open_train_batches(trainer, session, steps, epochs)
    resume.check_configuration(trainer, session.resumed, batches, run_metadata.plain_configuration(trainer))
    writers = session.running = run_metadata.writers_of(trainer)
    run = Run(trainer, session, batches, writers, total)
    start, started = session.step, time.time()
    run_metadata.write_config(trainer)
    session.info = info = run_metadata.run_info(trainer, session.state, batches)
    writers.note(Started(start, total, info, run_metadata.resumed_line(session.resumed, total)))
    session.resumed = None  # said once
    reason, paths = "failed", []
    try:
        with heartbeat.here.limited(trainer.step_timeout_secs, heartbeat.COMPILING):
            run.graph_loop.trace(batches)  # until here a signal finds nothing to save
        with signals.Signals() as received, _watched(trainer, session), _saving(session, writers):
            session.signals = received
            end = run.train(received)
            if end is not End.SIGNAL:
                session.callbacks.end()
        if end is End.DATA_ENDED and session.step == start and not session.examples:
            raise UsageError("train_data ended before its first batch; expected at least one.")
        reason = run_metadata.end_of(end, start, session.step, steps)
        paths = _export(trainer, session, formats if end is not End.SIGNAL else ())
    except BaseException as e:
        error = _explained(e, trainer, session)
        reason = f"failed: {type(error).__name__}"
        if error is not e:
            raise error from e
        raise
    finally:
        session.signals = None
        seen = run_metadata.summary_of(trainer, run, session.step - start, time.time() - started, paths)
        writers.note(Ended(session.step, reason, seen))
        session.running = None
        run.graph_loop.release()
    if end is not End.SIGNAL and hasattr(session.manager, "succeeded"):
        session.manager.succeeded(session.state)
    evaluation.leave_together(session)  # when the chief has closed its writers too
    if end is End.SIGNAL and received.received is not None:
        raise _stopped(trainer, session.step, received.received)
    return {**run.means, **{f"eval_{k}": v for k, v in run.metrics.items()}}


class Run:
    """The steps of one call of `train`, and what is done about them.

    Attributes:
      means: of the newest log; metrics: of the newest evaluation.
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
        self._total = total  # steps to complete; None: until the data end
        self._evaluates = evaluation.is_due(trainer)
        self._rolls_back_on_nonfinite = resume.rolls_back_on_nonfinite(trainer)
        resume.check_rollback(trainer)
        self.graph_loop = graph_loop = train_loop(trainer, session)
        kind = RoundLoop if parameter_servers.is_used(trainer.strategy) else TrainLoop
        self._loop = kind(
            graph_loop,
            batches,
            trainer.intervals,
            session.agreement,
            is_chief=trainer.topology.is_chief,
            writers=writers,
            check_lease=session.lease.check if session.lease else lambda: None,
            after_loop=trainer.after_loop if validation.is_written(trainer, "after_loop") else None,
        )
        self._interval = self._loop.interval
        self._loop.asked = self._asked
        self.metrics: dict[str, float] = {}
        self.means: dict[str, float] = {}
        self._rates: list[tuple[int, float]] = []  # (steps, seconds) of each log
        self._saved_at = self._evaluated_at = -1
        self._pending: frozenset[str] = frozenset()  # due, put off by a signal
        self._wants_stop = False  # a callback
        self._interrupted = False  # an evaluation, by a signal
        self._restore(session.step, session.loop_state, session.metrics)

    def _asked(self) -> frozenset[str]:
        """What `Trainer.save` has asked for since the last look."""
        asked, self._session.save_asked = self._session.save_asked, False
        return frozenset({"save"}) if asked else frozenset()

    def _restore(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Goes on at `step`, where the loop state and the evaluation of a checkpoint were taken."""
        self._interval.restore(state.get("interval", {}))
        self._pending = frozenset(state.get("pending", ()))
        self.metrics = dict(metrics)
        self._evaluated_at = step if metrics else -1

    def train(self, received: signals.Signals) -> End:
        """Trains until all steps are complete, the data end, or somebody asks to stop; then saves."""
        first = step = self._saved_at = self._session.step
        if self._session.callbacks.stopped:
            self._total = first  # the run that is resumed was stopped early, and stays so
        data_end = None if self._batches.steps is None else first + self._batches.steps
        pending, self._pending = self._pending, frozenset()
        self._save_and_evaluate(step, pending)
        end = None
        while end is None:
            try:
                step, end = self._train_from(step, received)
            except RollBack as back:
                step = back.manifest.step
                if data_end is not None:  # the data go on from here, so they end that much earlier
                    data_end -= back.step - step
                    self._total = data_end if self._total is None else min(self._total, data_end)
        self._finish(step, end, anything_new=step > first)
        if self._loop.failure is not None:
            _log.error("after_loop failed at step %d; the run ends after a last save.", step)
            raise self._loop.failure
        return End.SIGNAL if self._interrupted else end

    def _train_from(self, step: int, received: signals.Signals) -> tuple[int, End]:
        """The order of things, loop after loop; returns the last step, and why it is. Raises RollBack."""
        if self._interrupted:
            return step, End.SIGNAL
        self._begin(step)
        for loop in self._loop.loops(step, self._total, received):
            step = loop.step
            nonfinite = self._found_nonfinite(loop)
            if "log" in loop.due and not nonfinite:
                self._log(step)
            self._roll_back_if_asked(loop, nonfinite)
            if loop.end is not None:
                self._pending = loop.due & _EVALUATION if loop.end is End.SIGNAL else frozenset()
                return step, loop.end
            self._save_and_evaluate(step, loop.due)
            if self._interrupted or self._wants_stop:
                return step, End.SIGNAL if self._interrupted else End.STOPPED
            if loop.due:
                self._begin(step)
        return step, End.DONE

    def _begin(self, step: int) -> None:
        """Tells the callbacks that steps follow, if they do."""
        if step != self._total:
            self._session.callbacks.on_begin(step, "train")

    def _save_and_evaluate(self, step: int, due: frozenset[str]) -> None:
        owed = due & _EVALUATION
        if "save" in due:
            self._save(step, owed)
        if owed:
            self._evaluate(step, owed)

    def _finish(self, step: int, end: End, *, anything_new: bool) -> None:
        """Last numbers, evaluation (not when a signal presses) and checkpoint of the run."""
        if end is not End.SIGNAL and self._loop.failure is None:
            intervals, steps_per_epoch = self._trainer.intervals, self._batches.steps_per_epoch
            marks = intervals.due(step, steps_per_epoch)
            if self._interval.steps and anything_new:
                # a longer run goes on with the same interval
                self._log(step, clear=False, watched="log" in marks)
            if intervals.evaluate != Every():
                first = intervals.evaluate.next_mark(0, steps_per_epoch)
                only = first is not None and first > step  # evaluated at the end only
                self._evaluate(
                    step, frozenset({"evaluate"}) if only or "evaluate" in marks else _EVALUATION
                )
        self._save(step, self._pending)

    def _found_nonfinite(self, loop: Loop) -> bool:
        """Whether a step of the loop was left out as not finite, where that takes the run back."""
        if not (self._rolls_back_on_nonfinite and loop.steps):
            return False
        self._interval.fetch(self._session.agreement.sum)
        return self._interval.means_since(loop.before).get(SKIPPED, 0.0) > 0.0

    def _roll_back_if_asked(self, loop: Loop, nonfinite: bool) -> None:
        """Raises RollBack; a run that stops does not go back."""
        asked = self._session.callbacks.take_roll_back
        if loop.end in (End.STOPPED, End.SIGNAL) or not (nonfinite or asked()):
            return
        self._interval.clear()
        manifest = resume.roll_back(self._trainer, self._session, self._batches, loop.step)
        self._restore(manifest.step, manifest.state, manifest.metrics)
        self._pending, self._saved_at = frozenset(), manifest.step
        raise RollBack(loop.step, manifest)

    def _log(self, step: int, clear: bool = True, watched: bool = True) -> None:
        interval = self._interval
        interval.fetch(self._session.agreement.sum)
        self.means = interval.means()
        values, per_step = dict(self.means), interval.num_examples() / max(1, interval.steps)
        if self._writers:
            rate = interval.steps_per_sec()
            learning_rate = run_metadata.learning_rate_of(self._trainer.optimizer)
            if learning_rate is not None:
                values["learning_rate"] = learning_rate
            if rate is not None:
                values |= {"steps_per_sec": rate, "examples_per_sec": rate * per_step}
                self._rates.append((interval.timed_steps, interval.secs))
            self._writers.write(step, values, "train")
        if watched:  # at marks only: else a resumed run would have been told more than an unbroken one
            self._wants_stop |= self._session.callbacks.on_metrics(step, self.means, "train")
        input_pipeline.warn_of_small_batches(self._trainer, self._batches, per_step)
        if clear:
            interval.clear()

    def _evaluate(self, step: int, owed: frozenset[str]) -> None:
        """Evaluates once per step; steps are never lost by it, whatever happens meanwhile."""
        if not self._evaluates or self._evaluated_at == step:
            return
        self._save(step, owed)
        before = self._session.state.small_values()
        if "unwatched" not in owed:
            self._session.callbacks.on_begin(step, "eval")
        try:
            with heartbeat.here.doing(heartbeat.EVALUATING):
                self.metrics = evaluation.evaluate_session(self._trainer, self._session)
        except Interrupted:
            self._pending, self._interrupted = owed, True
            return
        self._evaluated_at = step
        if "unwatched" not in owed:
            self._wants_stop |= self._session.callbacks.on_metrics(step, self.metrics, "eval")
        self._complete(step, before)

    def _complete(self, step: int, before: list) -> None:
        """The checkpoint of this step learns about the evaluation; it is written anew if need be."""
        after = self._session.state.small_values()
        same = len(before) == len(after) and all(map(np.array_equal, before, after))
        if self._session.agreement.sum([0.0 if same and self._amended(step) else 1.0])[0]:
            self._saved_at = -1
            self._save(step)

    def _amended(self, step: int) -> bool:
        """Whether the checkpoint that was just written could take in the evaluation that followed it."""
        manager = self._session.manager
        if not self._trainer.topology.is_chief:
            return True
        return hasattr(manager, "amend") and manager.amend(step, self.metrics, self._state(frozenset()))

    def _save(self, step: int, owed: frozenset[str] = frozenset()) -> None:
        """Saves once per step; `owed`: what a run that goes on from there does first."""
        if self._saved_at == step:
            return
        self._saved_at = step
        if self._interval.steps:
            self._interval.fetch(self._session.agreement.sum)
        self._session.loop_state = self._state(owed)
        self._session.metrics = self.metrics if self._evaluated_at == step else {}
        with heartbeat.here.doing(heartbeat.SAVING):
            resume.save(self._trainer, self._session, self._batches, step)

    def _state(self, owed: frozenset[str]) -> dict[str, Any]:
        """For the manifest; see docs/decisions/0021 for what it is needed for."""
        return {
            "interval": self._interval.state(),
            "pending": sorted(owed),
            "watchers": self._session.callbacks.state(),
        }

    def steps_per_sec(self) -> float | None:
        """Over the whole run, training time alone."""
        secs = np.sum([s for _, s in self._rates])
        return float(np.sum([n for n, _ in self._rates]) / secs) if secs else None


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
    topology = trainer.topology
    return error_translation.explained(
        error,
        step=session.step,
        manager=session.manager,
        batch_size=trainer.global_batch_size,
        topology=topology,
        several=topology.num_workers > 1 or parameter_servers.is_used(trainer.strategy),
    )
