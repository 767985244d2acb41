"""Calls a trainer's callbacks and carries their decisions out, the same on all workers."""

import functools
import json
import logging
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.callbacks.protocol import EVENTS, Callback, Decision
from ctl.checkpoints import export as export_lib
from ctl.checkpoints.tracked_state import variables_of
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.keras_objects import unwrap
from ctl.distribute.world import World
from ctl.errors import UsageError
from ctl.io import paths
from ctl.training import validation
from ctl.training.loop import FailedElsewhere, Interrupted
from ctl.training.task import Task

_log = logging.getLogger("ctl")
_HOOKS = ("before_training", "after_epoch", "after_evaluation")  # of the trainer and of callbacks
_BEST_WEIGHTS = "best_weights"  # key in the manifest, beside the names of callbacks


@dataclass(frozen=True)
class BestWeights:
    """The origin of the weights that the model gets at the end of a run.

    Attributes:
      step: The step after which the weights were copied.
      run: "eval" or "train": the kind of metrics that were the best; "" if a hook decided.
      values: All metrics of that kind at this step.
    """

    step: int
    run: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


class CallbackRunner:
    """Execution of the callbacks and hooks of one trainer.

    Attributes:
      rolls_back: True if a callback may restore the newest checkpoint.
      best_values: The best values of the callbacks that compare a metric.
      monitored: The metrics of the evaluation that callbacks compare.
      stopped: True if a callback has stopped the run, or the resumed run.
      stop_reason: Message of the callback that stopped the run, or an empty string.
      best: Step and metrics of the weights that `end` restores, or None.
      failure: Error of a callback or a hook on any worker, which ends the run, or None.
      failed: Event for which the failed method was called.
    """

    def __init__(
        self,
        task: Task,
        model_dir: str,
        world: World,
        callbacks: Sequence[Callback],
        handlers: Mapping[str, Sequence[Callable[..., Any]]],
    ):
        """Stores the arguments.

        Args:
          task: Methods and objects of the user.
          model_dir: Directory of the run, or an empty string.
          world: Processes of the job.
          callbacks: Callbacks.
          handlers: Methods to call for each event; see `handlers_of`.
        """
        self._task, self._model_dir, self._world = task, model_dir, world
        self._all_reduce = world.host_all_reduce
        self._callbacks = _by_name_in_checkpoints(callbacks)
        self._handlers = handlers
        self.rolls_back = any(callback.rollback for callback in callbacks)
        self.best_values = [c.monitored for c in callbacks if c.monitored is not None]
        self.monitored = [value for value in self.best_values if value.run == "eval"]
        self._best_weights: list[np.ndarray] | None = None
        self.best: BestWeights | None = None
        self.stopped = False
        self.stop_reason = ""
        self.failure: Exception | None = None
        self.failed = ""
        self._has_roll_back = False

    def take_roll_back(self) -> bool:
        """Returns True if a callback has requested a rollback since the last call."""
        is_requested, self._has_roll_back = self._has_roll_back, False
        return is_requested

    def wants(self, event: str) -> bool:
        """Returns True if the trainer or a callback handles the event."""
        return bool(self._handlers[event])

    def notify(self, event: str, step: int, *arguments: Any, applies_decisions: bool = True) -> bool:
        """Calls the methods for an event. All workers call it.

        Args:
          event: Name in EVENTS.
          step: Number of completed steps.
          arguments: Arguments of the methods.
          applies_decisions: False ignores the decisions of the methods.

        Returns:
          True if the run is to stop. An error of a method is stored in `failure`.
        """
        if not self._handlers[event] or self.failure is not None:
            return self.stopped or self.failure is not None
        results, error = [], None
        try:
            results = [method(*arguments) for method in self._handlers[event]]
        except Interrupted:  # by a signal, in an evaluation that a callback has called
            pass
        except Exception as e:
            if self._all_reduce.num_workers > 1 and isinstance(e, PEER_ERRORS):
                raise
            error = e
        measured = BestWeights(step)
        if event == "on_metrics":
            values, run = arguments[1], arguments[2]
            measured = BestWeights(step, run, {name: float(value) for name, value in values.items()})
        return self._settle(event, measured, results, error, applies_decisions)

    def raise_failure(self) -> None:
        """Raises the error of a callback or a hook, once."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def take_failure(self) -> Exception | None:
        """Returns and clears the failure."""
        failure, self.failure = self.failure, None
        return failure

    def carry_out(self, step: int, decisions: Sequence[Decision | None]) -> bool:
        """Executes the chief's decisions in `after_loop` on all workers; True if the run is to stop."""
        return self._settle("after_loop", BestWeights(step), decisions, None, True)

    def _settle(
        self,
        event: str,
        measured: BestWeights,
        results: Sequence[Any],
        error: Exception | None,
        applies: bool,
    ) -> bool:
        decisions = self._decisions_of_chief(event, results, error)
        if applies:
            self._execute(measured, decisions)
        return self.stopped or self.failure is not None

    def _execute(self, measured: BestWeights, decisions: Sequence[Decision]) -> None:
        step = measured.step
        for decision in decisions:
            if decision.stop:
                self.stopped = True
                self.stop_reason = decision.message.rstrip(".")
                self._warn("Stopping at step %d: %s.", step, decision.message or "a callback decided so")
            elif decision.message:
                self._warn("Step %d: %s.", step, decision.message)
            if decision.learning_rate_factor != 1.0:
                self._reduce(step, decision.learning_rate_factor, decision.lowest_learning_rate)
            if decision.learning_rate is not None:
                optimizer = self._adjustable_optimizer("learning_rate=...")
                if float(unwrap(optimizer.learning_rate).numpy()) != decision.learning_rate:
                    optimizer.learning_rate = decision.learning_rate
            if decision.keep_weights:
                self._remember()
                self.best = measured
            self._has_roll_back |= decision.roll_back
            if decision.export:
                self._export(decision)

    def _decisions_of_chief(
        self, event: str, results: Sequence[Any], error: Exception | None
    ) -> list[Decision]:
        """Returns the decisions of the chief's callbacks on every worker; none if a callback failed."""
        decisions = [Decision(stop=True) if d is True else d for d in results if d is not None]
        other = next((d for d in decisions if not isinstance(d, Decision)), None)
        if other is not None and error is None:
            error = UsageError(
                f"{event} returned {other!r}; expected a ctl.Decision(...), True to stop, or None."
            )
        self.failed = event
        if self._all_reduce.num_workers == 1:
            self.failure = error
            return [] if error else decisions
        is_chief = self._world.is_chief
        text = json.dumps([asdict(d) for d in decisions]).encode() if decisions and is_chief else b""
        size, failed = map(int, self._all_reduce.sum([float(len(text)), float(error is not None)]))
        if failed:
            self.failure = error or FailedElsewhere(event)
        if not size or failed:
            return []
        content = np.frombuffer(text, np.uint8) if is_chief else np.zeros(size)
        received = self._all_reduce.sum(content).astype(np.uint8).tobytes()
        return [Decision(**fields) for fields in json.loads(received)]

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able states of the callbacks, for the manifest."""
        states = {name: state for name, c in self._callbacks.items() if (state := c.state) is not None}
        return states if self.best is None else states | {_BEST_WEIGHTS: asdict(self.best)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the states that `state()` has returned."""
        for name, callback in self._callbacks.items():
            if name in saved:
                callback.state = saved[name]
        callbacks = self._callbacks.values()
        self.stopped = any(callback.has_stopped() for callback in callbacks)
        path = _weights_path(self._model_dir)
        if any(callback.restore_best for callback in callbacks) and path is not None:
            self._best_weights = _loaded(path) or _loaded(_temporary_path(path))
            if self._best_weights is not None and _BEST_WEIGHTS in saved:
                self.best = BestWeights(**saved[_BEST_WEIGHTS])

    @property
    def has_best_weights(self) -> bool:
        """True if the model gets stored weights when the run ends."""
        return self._best_weights is not None

    def end(self) -> None:
        """Ends the run: restores the best weights, if a callback has kept them."""
        if self._best_weights is None:
            return
        # those of a run without averages may be shorter
        for variable, value in zip(self._variables(), self._best_weights, strict=False):
            dtype = variable.dtype.as_numpy_dtype
            variable.assign(value.view(dtype) if value.dtype.kind == "V" else value)  # bfloat16 in .npz

    def _variables(self) -> list[tf.Variable]:
        averages = [average for _, average in self._task.moving_averages.pairs()]
        return [*(unwrap(v) for v in variables_of(self._task.model)), *averages]

    def _remember(self) -> None:
        self._best_weights = [v.numpy() for v in self._variables()]
        path = _weights_path(self._model_dir)
        if path is None or not self._world.is_chief:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_path(path)
        with temporary.open("wb") as file:
            np.savez(file, *self._best_weights)
        if paths.has_rename(path):
            temporary.replace(path)
        else:  # at every moment one of the two is whole
            paths.copy_tree(temporary, path)
            temporary.unlink()

    def _reduce(self, step: int, factor: float, lowest: float) -> None:
        optimizer = self._adjustable_optimizer("learning_rate_factor=...")
        old = float(unwrap(optimizer.learning_rate).numpy())
        new = max(old * factor, lowest)
        if new < old:
            optimizer.learning_rate = new
            self._warn("Step %d: the learning rate changes from %.3g to %.3g.", step, old, new)

    def _adjustable_optimizer(self, setting: str) -> Any:
        """Returns the optimizer. Raises UsageError if its learning rate cannot be changed."""
        optimizer = self._task.optimizer
        if not validation.has_variable_learning_rate(optimizer):
            raise UsageError(
                f"Decision({setting}): self.optimizer has a schedule, or no learning rate. Give the "
                "optimizer a number."
            )
        return optimizer

    def _export(self, decision: Decision) -> None:
        if decision.directory is None and not self._model_dir:
            raise UsageError("Decision(export=...) needs a directory: directory=..., or a model_dir.")
        targets = self._task.export_targets(decision.export)
        directory = decision.directory or f"{self._model_dir}/best"
        signatures = self._task.signatures()
        with self._task.moving_averages.in_place():
            export_lib.export(targets, directory, self._world.topology, signatures)
        self._world.wait_for_all_workers()  # until the chief has written

    def _warn(self, text: str, *values: Any) -> None:
        if self._world.is_chief:
            _log.warning(text, *values)


def _weights_path(model_dir: str) -> Path | None:
    return Path(model_dir) / "best" / "early_stopping.npz" if model_dir else None


def _temporary_path(path: Path) -> Path:
    """Returns the path at which weights are written before they replace the earlier ones."""
    return path.with_name(f".{path.name}")


def _loaded(path: Path) -> list[np.ndarray] | None:
    """Arrays of an .npz file; None without one, or if its writing was interrupted."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return [file[f"arr_{i}"] for i in range(len(file.files))]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def handlers_of(trainer: Any, task: Task, callbacks: Sequence[Callback]) -> dict[str, list[Callable]]:
    """Returns the methods for each event: the trainer's first, then those of the callbacks.

    Args:
      trainer: First argument of the hooks of callbacks.
      task: Methods of the trainer.
      callbacks: Callbacks.
    """
    handlers: dict[str, list[Callable]] = {event: [] for event in EVENTS}
    for event in _HOOKS:
        if event in task.methods:
            handlers[event].append(task.methods[event])
    for callback in callbacks:
        for event, method in callback.handlers().items():
            handlers[event].append(functools.partial(method, trainer) if event in _HOOKS else method)
    return handlers


def _by_name_in_checkpoints(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Returns the callbacks by the keys of their states; equal names get a number."""
    by_name: dict[str, Callback] = {}
    names: list[str] = []
    for callback in callbacks:
        name = callback.name or callback.class_name
        count = names.count(name)
        names.append(name)
        by_name[f"{name}_{count}" if count else name] = callback
    return by_name
