"""Callbacks: they see the numbers of a run and decide, the same on every worker.

    class StopAtAccuracy:
        def on_metrics(self, step, values, run):            # run: "train" or "eval"
            if run == "eval" and values["accuracy"] > 0.99:
                return ctl.Decision(stop=True, message="accurate enough")

    Mnist(callbacks=[ctl.EarlyStopping("loss"), StopAtAccuracy()]).train(1000)

Besides, or instead, a callback may have these methods; a subclass of `ctl.Trainer` may have them too,
without the argument `trainer`:

    def before_training(self, trainer, step): ...                       # before the first step of a run
    def after_epoch(self, trainer, epoch, step, means): ...             # an epoch is complete
    def after_evaluation(self, trainer, step, means, metrics): ...      # metrics: the Keras metrics by name

Every worker calls every method with the same values; the chief's decisions are carried out on all of
them. What a method raises ends the run on all workers after a last save. A callback with a JSON-able
attribute `state` that can be assigned has it saved in checkpoints.

A callback may also have `on_begin(step, run)`, which is called with "train" before the first step and
where steps go on after a log, an evaluation or a save, and with "eval" before an evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ctl.errors import UsageError

EVENTS = ("on_metrics", "on_begin", "before_training", "after_epoch", "after_evaluation")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the run is to do next; several can be combined.

    Attributes:
      stop: end the run after this step, as a success.
      learning_rate_factor: multiplies the learning rate, which becomes `lowest_learning_rate` at least.
      learning_rate: the learning rate from now on; None: as it is.
      keep_weights: remember these weights; the model gets the newest remembered ones when the run ends.
      roll_back: restore the newest checkpoint and go on with the data that come next.
      export: formats ("keras", "saved_model", "weights") to write into `directory`, or `model_dir/best`.
      message: a warning that the chief logs.
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
        """Plain values, whatever came: decisions travel between workers. Raises UsageError."""
        try:
            plain = {
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
            raise UsageError(f"a callback made a Decision with a value that cannot be: {e}.") from None
        for name, value in plain.items():
            object.__setattr__(self, name, value)


@runtime_checkable
class Callback(Protocol):
    """Sees the numbers of a run at each log and each evaluation."""

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Takes note of the means of `run`, "train" or "eval", at `step` completed steps."""
        ...


class NullCallback:
    """Decides nothing."""

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        return None


class MemoryCallback:
    """Keeps what it saw as (run, step, values), for tests and notebooks; decides nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, float]]] = []

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        self.seen.append((run, step, dict(values)))
        return None


def is_callback(thing: Any) -> bool:
    """Whether an object has a method for one of EVENTS, and is none of Keras, whose methods are others."""
    return any(callable(getattr(thing, n, None)) for n in EVENTS) and not hasattr(thing, "set_model")


def name_in_checkpoints(callback: Any) -> str:
    """What its state is called in a checkpoint: `name`, or the name of its class."""
    return str(getattr(callback, "name", type(callback).__name__))
