"""The training loop for one process and for workers in step.

for each loop until `steps`:
    run k steps in one graph call
    log, evaluate, save: each when its `Every` says so
    after_loop(step, means)        # the one hook; may ask to stop
save
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ctl.callbacks.schedule import Every, Intervals, Timers
from ctl.checkpoints.protocol import Manifest
from ctl.data.pipeline import Batches
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import EXIT_RETRY, CtlError
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Progressed, Traced
from ctl.step.finiteness import SKIPPED
from ctl.supervision import heartbeat
from ctl.supervision.signals import Signals
from ctl.training.loop_length import Interval, Pace

_log = logging.getLogger("ctl")
_EVALUATION = frozenset({"evaluate", "unwatched"})  # the second: no callback is called
_AGREE_SECS = 0.5  # how often workers compare notes when nothing else makes them


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What the loop asks of its owner.

    Attributes:
      evaluate: () -> means of the evaluation, reported already; None if there is none.
      save: (step, metrics, loop state) -> nothing; all workers call it at the same step.
      learning_rate: () -> the current one, or None.
      check_examples: (examples per step since the last log) -> nothing.
      check_lease: raises if another job has taken model_dir over; comes before anything is written.
      after_loop: (step, means of the loop) -> whether to stop; None if nobody listens.
      amend: (step, metrics, loop state) -> whether the checkpoint of this step took them in.
      small_values: () -> what variables hold that are quickly read: an evaluation may change them.
      on_metrics: (step, values, "train" or "eval") -> whether to stop, the same on every worker.
      callback_state: () -> the JSON-able state of the callbacks.
      roll_back: (step) -> the manifest of the checkpoint that the run goes back to; None: never.
      rolls_back_on_nonfinite: a step that was left out as not finite takes the run back.
      take_roll_back: () -> whether a callback wants to go back.
      several: other processes take part: an error of a peer is none that a save can follow.
    """

    evaluate: Callable[[], dict] | None
    save: Callable[[int, Mapping[str, float], Mapping[str, Any]], None]
    learning_rate: Callable[[], float | None]
    after_loop: Callable[[int, dict], Any] | None
    check_examples: Callable[[float], None]
    check_lease: Callable[[], None] = lambda: None
    amend: Callable[[int, Mapping[str, float], Mapping[str, Any]], bool] = lambda *_: False
    small_values: Callable[[], list] = list
    on_metrics: Callable[[int, Mapping[str, float], str], bool] = lambda step, values, run: False
    callback_state: Callable[[], Mapping[str, Any]] = dict
    roll_back: Callable[[int], Manifest] | None = None
    rolls_back_on_nonfinite: bool = False
    take_roll_back: Callable[[], bool] = lambda: False
    several: bool = False


class Interrupted(Exception):
    """A signal came during an evaluation, the same on every worker."""


class FailedElsewhere(CtlError):
    """Another worker's error ended the evaluation; its exit code is the one that counts."""

    exit_code = EXIT_RETRY

    def __init__(self) -> None:
        super().__init__("The evaluation failed on another worker; its log says why.")


class Synchronous:
    """One call of `train`; `run` returns why it ended: "done", "data ended", "stopped", "signal"."""

    def __init__(
        self,
        *,
        loop: Any,
        intervals: Intervals,
        agreement: HostAllReduce,
        is_chief: bool,
        writers: WriterGroup,
        actions: Actions,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._loop = loop
        self._intervals = intervals
        self._agreement = agreement
        self._is_chief = is_chief
        self._writers = writers
        self._actions = actions
        self._clock = clock
        self.interval = Interval(loop.totals)
        self.metrics: dict[str, float] = {}  # of the newest evaluation
        self.means: dict[str, float] = {}  # of the newest log
        self._rates: list[tuple[int, float]] = []
        self._rate = 0.0  # steps per second, the newest known
        self._saved_at = self._evaluated_at = -1
        self._pending: frozenset[str] = frozenset()  # due, put off by a signal
        self._enough = False  # a callback wants to stop
        self._interrupted = False  # an evaluation, by a signal
        self._signalled = False  # and the workers know it of each other
        self._failure: Exception | None = None  # of the hook

    def restore(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Goes on at `step`, where the loop state and the evaluation of a checkpoint were taken."""
        self.interval.restore(state.get("interval", {}))
        self._pending = frozenset(state.get("pending", ()))
        self.metrics = dict(metrics)
        self._evaluated_at = step if metrics else -1

    def run(self, batches: Batches, *, step: int, steps: int | None, signals: Signals) -> str:
        """Trains from `step` to `steps` completed steps, or to the end of the data if None."""
        pace = Pace(self._intervals.steps_per_loop)
        timers = Timers(self._intervals, self._clock())
        agree_at, reason, self._saved_at, first = step, "done", step, step
        pending, self._pending = self._pending, frozenset()
        self._act(step, pending)
        mark = self._intervals.next_mark(step, batches.steps_per_epoch)
        data_end = None if batches.steps is None else step + batches.steps
        while not self._interrupted and (steps is None or step < steps):
            asked = self._length(pace, step, mark, steps)
            before = self.interval.sums()
            compiled, start = self._loop.has_run, self._clock()
            with heartbeat.here.doing(heartbeat.TRAINING if compiled else heartbeat.COMPILING):
                self.interval.packed, ran = self._loop.run(batches, asked, self.interval.packed)
            step += ran
            self._actions.check_lease()
            self._took(ran, self._clock() - start, compiled, pace)
            self._writers.note(Progressed(step))
            heartbeat.here.reached(step)
            stop = self._hook(step, ran)
            due: frozenset[str] = frozenset()
            if step == mark:
                due = self._intervals.due(step, batches.steps_per_epoch)
                mark = self._intervals.next_mark(step, batches.steps_per_epoch)
            if self._agreement.num_workers == 1:
                due |= timers.due(self._clock()) if timers else due
                pace.length = pace.proposed
                self._signalled = signals.received is not None
                stop = stop or self._signalled
            elif step >= agree_at or due or self._actions.after_loop is not None:
                stop, due, agree_at = self._agree(pace, timers, step, stop, due, signals)
            behind = self._log_or_go_back(step, ran, due, before, stop)
            if behind is not None:
                if data_end is not None:  # the data go on from here, so they end that much earlier
                    data_end -= step - behind
                    steps = data_end if steps is None else min(steps, data_end)
                step = agree_at = behind
                mark = self._intervals.next_mark(step, batches.steps_per_epoch)
                continue
            if ran < asked or stop:
                reason = self._why(ran < asked)
                self._pending = due & _EVALUATION if reason == "signal" else frozenset()
                break
            if steps is not None and step >= steps and due & _EVALUATION:
                due |= {"save"}  # the last step is saved anyway, and so before its evaluation
            self._act(step, due)
            if self._enough:
                reason = "stopped"
                break
        reason = "signal" if self._interrupted else reason
        self._finish(step, reason, batches.steps_per_epoch, anything_new=step > first)
        reason = "signal" if self._interrupted else reason
        if self._failure is not None:
            _log.error("after_loop failed at step %d; the run ends after a last save.", step)
            raise self._failure
        return reason

    def _took(self, ran: int, secs: float, compiled: bool, pace: Pace) -> None:
        """Notes how long a graph call took; the first one also compiled."""
        self.interval.ran(ran, secs if compiled else None)
        if compiled:
            pace.took(steps=ran, secs=secs)
        else:
            self._writers.note(Traced(self._loop.graph_def()))

    def _length(self, pace: Pace, step: int, mark: int | None, steps: int | None) -> int:
        ends = [e - step for e in (mark, steps) if e is not None]
        return max(1, min([pace.length, *ends]))

    def _agree(self, pace: Any, timers: Any, step: Any, stop: Any, due: Any, signals: Any) -> Any:
        """Workers compare notes: anybody's wish to stop counts, the chief's clock and pace hold."""
        names = ("log", "evaluate", "save")
        ready = timers.due(self._clock()) if timers and self._is_chief else frozenset()
        self._rate = self.interval.steps_per_sec() or self._rate
        mine = [pace.proposed, self._rate * _AGREE_SECS, *(n in ready for n in names)]
        wish = [float(stop), *signals.wishes()]
        total = self._agreement.sum([*(mine if self._is_chief else [0.0] * len(mine)), *wish])
        pace.length = int(total[0])
        due |= frozenset(n for n, said in zip(names, total[2:5], strict=True) if said)
        wait = max(1, int(total[1]))
        self._signalled = signals.agree(total[6:8])
        return self._signalled or bool(total[5]), due, step + wait

    def _log_or_go_back(
        self, step: int, ran: int, due: frozenset[str], before: Any, stop: bool
    ) -> int | None:
        """Logs what is due; the step of the checkpoint that the run went back to, or None.

        `before` is what had been summed up before the last loop. A run that stops does not go back.
        """
        bad = False
        if self._actions.rolls_back_on_nonfinite and ran:
            self.interval.fetch(self._agreement.sum)
            bad = self.interval.means_since(before).get(SKIPPED, 0.0) > 0.0
        if "log" in due and not bad:
            self._log(step)
        if stop or self._actions.roll_back is None or not (bad or self._actions.take_roll_back()):
            return None
        self.interval.clear()
        manifest = self._actions.roll_back(step)
        self.restore(manifest.step, manifest.state, manifest.metrics)
        self._pending, self._saved_at = frozenset(), manifest.step
        return manifest.step

    def _hook(self, step: int, ran: int) -> bool:
        if self._actions.after_loop is None or not ran:
            return False
        before = self.interval.sums()
        self.interval.fetch(self._agreement.sum)
        means = self.interval.means_since(before)
        try:
            return bool(self._actions.after_loop(step, means))
        except Interrupted:  # by a signal, in an evaluation of the hook's own
            return True
        except Exception as e:
            if isinstance(e, CtlError) and not isinstance(e, FailedElsewhere):
                raise
            if self._actions.several and isinstance(e, PEER_ERRORS):
                raise
            self._failure = e  # all workers stop at this step, and what was done is saved
            return True

    def _act(self, step: int, due: frozenset[str]) -> None:
        owed = due & _EVALUATION
        if "save" in due:
            self._save(step, owed)
        if owed:
            self._evaluate(step, owed)

    def _finish(self, step: int, reason: str, steps_per_epoch: float | None, *, anything_new: bool) -> None:
        """Last numbers, evaluation (not when a signal presses) and checkpoint of the run."""
        if reason != "signal" and self._failure is None:
            marks = self._intervals.due(step, steps_per_epoch)
            if self.interval.steps and anything_new:
                # a longer run goes on with the same interval
                self._log(step, clear=False, watched="log" in marks)
            if self._intervals.evaluate != Every():
                first = self._intervals.evaluate.next_mark(0, steps_per_epoch)
                only = first is not None and first > step  # evaluated at the end only
                owed = _EVALUATION if not (only or "evaluate" in marks) else frozenset({"evaluate"})
                if self._actions.evaluate is not None and self._evaluated_at != step:
                    self._save(step, owed)
                    self._evaluate(step, owed)
        self._save(step, self._pending)

    def _log(self, step: int, clear: bool = True, watched: bool = True) -> None:
        self.interval.fetch(self._agreement.sum)
        self.means = self.interval.means()
        values = dict(self.means)
        if self._writers:
            rate = self.interval.steps_per_sec()
            learning_rate = self._actions.learning_rate()
            if learning_rate is not None:
                values["learning_rate"] = learning_rate
            if rate is not None:
                values["steps_per_sec"] = rate
                per_step = self.interval.num_examples() / max(1, self.interval.steps)
                values["examples_per_sec"] = rate * per_step
                self._rates.append((self.interval.timed_steps, self.interval.secs))
            self._writers.write(step, values, "train")
        if watched:  # at marks only: else a resumed run would have been told more than an unbroken one
            self._enough |= self._actions.on_metrics(step, self.means, "train")
        self._actions.check_examples(self.interval.num_examples() / max(1, self.interval.steps))
        if clear:
            self.interval.clear()

    def _evaluate(self, step: int, owed: frozenset[str]) -> None:
        """Evaluates once per step; steps are never lost by it, whatever happens meanwhile."""
        if self._actions.evaluate is None or self._evaluated_at == step:
            return
        self._save(step, owed)  # whatever happens meanwhile, the steps are there
        before = self._actions.small_values()
        try:
            with heartbeat.here.doing(heartbeat.EVALUATING):
                self.metrics = self._actions.evaluate()
        except Interrupted:
            self._pending, self._interrupted = owed, True
            return
        self._evaluated_at = step
        if "unwatched" not in owed:
            self._enough |= self._actions.on_metrics(step, self.metrics, "eval")
        self._complete(step, before)

    def _complete(self, step: int, before: list) -> None:
        """The checkpoint of this step learns about the evaluation; it is written anew if need be."""
        after = self._actions.small_values()
        same = len(before) == len(after) and all(map(np.array_equal, before, after))
        good = same and self._actions.amend(step, self.metrics, self._state(frozenset()))
        if self._agreement.sum([0.0 if good else 1.0])[0]:
            self._saved_at = -1
            self._save(step)

    def _save(self, step: int, owed: frozenset[str] = frozenset()) -> None:
        """Saves once per step; `owed`: what a run that goes on from there does first."""
        if self._saved_at == step:
            return
        self._saved_at = step
        if self.interval.steps:
            self.interval.fetch(self._agreement.sum)
        metrics = self.metrics if self._evaluated_at == step else {}
        with heartbeat.here.doing(heartbeat.SAVING):
            self._actions.save(step, metrics, self._state(owed))

    def _state(self, owed: frozenset[str]) -> dict[str, Any]:
        return {
            "interval": self.interval.state(),
            "pending": sorted(owed),
            "watchers": self._actions.callback_state(),
        }

    def steps_per_sec(self) -> float | None:
        """Over the whole run, training time alone."""
        secs = np.sum([s for _, s in self._rates])
        return float(np.sum([n for n, _ in self._rates]) / secs) if secs else None

    def _why(self, data_ended: bool) -> str:
        """The same on every worker: a signal counts once they have agreed on it."""
        if data_ended:
            return "data ended"
        return "signal" if self._signalled else "stopped"
