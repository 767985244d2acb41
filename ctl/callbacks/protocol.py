"""Base class of callbacks, and the decisions that they return.

    class StopAtAccuracy(ctl.Callback):
        def on_metrics(self, step, values, run):            # run: "train" or "eval"
            if run == "eval" and values["accuracy"] > 0.99:
                return ctl.Decision(stop=True, message="accurate enough")

    Mnist(callbacks=[ctl.EarlyStopping("loss"), StopAtAccuracy()]).train(1000)

Every worker calls every method with the same values, and executes the decisions of the chief. An error in
a method ends the run on all workers after a last save.

An object that has some of the methods of `Callback` is a callback, too; see `ctl.callbacks.adapter`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.errors import UsageError

EVENTS = ("on_metrics", "on_begin", "before_training", "after_epoch", "after_evaluation")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Actions that the run executes next. One decision can contain several actions.

    Attributes:
      stop: True to end the run successfully after this step.
      learning_rate_factor: Factor of the learning rate.
      lowest_learning_rate: Minimum of the learning rate after the multiplication by the factor.
      learning_rate: New learning rate. None: no change.
      keep_weights: True to store the current weights. At the end of the run the model gets the newest
        stored weights.
      roll_back: True to restore the newest checkpoint and to continue with later data.
      export: Formats to write: "keras", "saved_model", "weights".
      directory: Directory of the exported files. None: `model_dir/best`.
      message: Warning that the chief logs, or "".
    """

    stop: bool = False
    learning_rate_factor: float = 1.0
    lowest_learning_rate: float = 0.0
    learning_rate: float | None = None
    keep_weights: bool = False
    roll_back: bool = False
    export: Sequence[str] = ()
    directory: str | None = None
    message: str = ""

    def __post_init__(self) -> None:
        """Converts values to built-in types, because workers exchange decisions. Raises UsageError."""
        try:
            converted = {
                "stop": bool(self.stop),
                "learning_rate_factor": float(self.learning_rate_factor),
                "lowest_learning_rate": float(self.lowest_learning_rate),
                "learning_rate": None if self.learning_rate is None else float(self.learning_rate),
                "keep_weights": bool(self.keep_weights),
                "roll_back": bool(self.roll_back),
                "export": (self.export,) if isinstance(self.export, str) else tuple(map(str, self.export)),
                "directory": None if self.directory is None else str(self.directory),
                "message": str(self.message),
            }
        except (TypeError, ValueError) as e:
            raise UsageError(f"ctl.Decision got a value of the wrong type: {e}.") from None
        for name, value in converted.items():
            object.__setattr__(self, name, value)


class Callback:
    """Base class of callbacks. Its methods are no-ops; a subclass overrides those that it needs.

    Attributes:
      name: Key of the state in checkpoints; by default the name of the class.
      state: JSON-able state that checkpoints store, or None. It is assigned when a checkpoint is restored.
      monitored: The metric that the callback compares, or None.
      stopped_at: Step at which the callback has stopped the run, or None. The state should contain it.
      restore_best: True if the model gets the weights of the last `Decision(keep_weights=True)` at the end.
      rollback: True if the callback may return `Decision(roll_back=True)`; checked before a run.
    """

    name: str = ""
    state: Any = None
    monitored: BestValue | None = None
    stopped_at: int | None = None
    restore_best: bool = False
    rollback: bool = False

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Called at logs and evaluations.

        Args:
          step: Number of completed steps.
          values: Name -> mean.
          run: "train" for means of the steps since the last log, "eval" for those of an evaluation.
        """

    def on_begin(self, step: int, run: str) -> Decision | None:
        """Called before an evaluation, and before the steps that follow a log, an evaluation or a save.

        Args:
          step: Number of completed steps.
          run: "eval" before an evaluation. "train" before steps, also before the first one of a run.
        """

    def before_training(self, trainer: Any, step: int) -> Decision | bool | None:
        """Called before the first step of a run.

        Args:
          trainer: The trainer.
          step: Number of completed steps, more than 0 after a resume.
        """

    def after_epoch(
        self, trainer: Any, epoch: int, step: int, means: Mapping[str, float]
    ) -> Decision | bool | None:
        """Called when an epoch is complete.

        Args:
          trainer: The trainer.
          epoch: Number of completed epochs.
          step: Number of completed steps.
          means: The newest logged means by name.
        """

    def after_evaluation(
        self, trainer: Any, step: int, means: Mapping[str, float], metrics: Mapping[str, Any]
    ) -> Decision | bool | None:
        """Called after an evaluation.

        Args:
          trainer: The trainer.
          step: Number of completed steps.
          means: Name -> mean of the evaluation.
          metrics: Keras metrics by name.
        """

    @property
    def class_name(self) -> str:
        """Name of the class for messages."""
        return type(self).__name__

    def has_stopped(self) -> bool:
        """Returns True if the callback has stopped the run, or did so before its state was restored."""
        return self.stopped_at is not None

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Returns the overridden event methods by the names of the events."""
        methods: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "on_metrics": (self.on_metrics, Callback.on_metrics),
            "on_begin": (self.on_begin, Callback.on_begin),
            "before_training": (self.before_training, Callback.before_training),
            "after_epoch": (self.after_epoch, Callback.after_epoch),
            "after_evaluation": (self.after_evaluation, Callback.after_evaluation),
        }
        return {
            event: method
            for event, (method, default) in methods.items()
            if method != MethodType(default, self)
        }


class NullCallback(Callback):
    """A callback that returns no decision."""

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Returns None."""
        return None


class MemoryCallback(Callback):
    """A callback for tests and notebooks that stores the metrics as (run, step, values) in `seen`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, float]]] = []

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Appends the metrics to `seen`."""
        self.seen.append((run, step, dict(values)))
        return None
