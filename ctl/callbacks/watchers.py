"""What watches a number of the run and acts: stop early, lower the learning rate, keep the best model.

    def build(self):
        ...
        self.early_stopping = ctl.EarlyStopping("loss", patience=3)
        self.plateau = ctl.ReduceOnPlateau("loss", factor=0.5, patience=2)
        self.save_best = ctl.SaveBest("accuracy")

A watcher is told each new value on every worker, answers with a `Verdict`, and its state is saved in
checkpoints: a resumed run decides as an unbroken one.

    class Watcher(Protocol):
        def saw(self, step, values, run): ...   # -> Verdict
        state: dict                             # JSON-able, assigned on a restore
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ctl.errors import UsageError

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")


def smaller_is_better(name: str, mode: str = "auto") -> bool:
    """What "min", "max" or, from the name of a metric, "auto" says."""
    return mode == "min" or (mode == "auto" and any(w in name.lower() for w in _SMALLER_IS_BETTER))


@dataclass(frozen=True)
class Verdict:
    """What is to be done: stop, lower the learning rate, remember the weights, write the model, ..."""

    stop: bool = False
    factor: float = 1.0  # of the learning rate
    lowest: float = 0.0  # that the learning rate may become
    remember: bool = False
    export: bool = False
    roll_back: bool = False  # to the newest checkpoint
    warning: str = ""


@runtime_checkable
class Watcher(Protocol):
    """Judges numbers as they come; equal on every worker."""

    state: dict[str, Any]

    def saw(self, step: int, values: Mapping[str, float], run: str) -> Verdict:
        """Takes note of the values of `run`, "train" or "eval", at `step`."""
        ...


class _Best:
    """The best value of one metric so far."""

    def __init__(self, metric: str, run: str, mode: str, min_delta: float):
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {metric!r}; expected the name of a number of the run.")
        if metric.startswith("val_"):  # as Keras calls those of an evaluation
            metric, run = metric.removeprefix("val_"), "eval"
        if run not in ("train", "eval"):
            raise UsageError(f"run is {run!r}; expected 'train' or 'eval'.")
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"mode is {mode!r}; expected 'max', 'min' or 'auto'.")
        self.metric, self.run = metric, run
        self._sign = -1.0 if smaller_is_better(metric, mode) else 1.0
        self._min_delta = abs(min_delta)
        self.value: float | None = None

    def of(self, values: Mapping[str, float], run: str) -> float | None:
        """The value, if it is in `values` of this run; raises UsageError if it should be."""
        if run != self.run:
            return None
        if self.metric not in values:
            raise UsageError(
                f"{self.metric!r} is watched, but the {run} numbers are {', '.join(sorted(values))}. "
                "Write one of these."
            )
        return float(values[self.metric])

    def beats(self, value: float, other: float | None) -> bool:
        """NaN beats nothing; anything else beats None."""
        if math.isnan(value):
            return False
        return other is None or (value - other) * self._sign > self._min_delta

    def note(self, value: float) -> bool:
        """True for a new best, which is kept."""
        better = self.beats(value, self.value)
        if better:
            self.value = value
        return better


class EarlyStopping:
    """Stops when a metric has not improved for `patience` values in a row.

    Args:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      patience: values without improvement that are still accepted.
      min_delta: what counts as an improvement at least.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      options: `baseline`, to be beaten first; `start_from`, values to ignore at the beginning;
        `restore_best`: give the model its best weights back at the end; `run`: "eval" or "train".

    Modelled on `keras.callbacks.EarlyStopping`.
    """

    def __init__(
        self, metric: str, *, patience: int = 0, min_delta: float = 0.0, mode: str = "auto", **options: Any
    ):
        known: dict[str, Any] = {"baseline": None, "start_from": 0, "restore_best": False, "run": "eval"}
        _check_options("EarlyStopping", options, known)
        options = known | options
        _check_count("patience", patience, 0)
        self._best = _Best(metric, options["run"], mode, min_delta)
        self._patience, self._start_from = patience, options["start_from"]
        self._baseline, self.restore_best = options["baseline"], bool(options["restore_best"])
        self._seen = self._waited = 0
        self.stopped_at: int | None = None
        self.best_step: int | None = None

    @property
    def metric(self) -> str:
        """What it watches, such as "eval loss"."""
        return f"{self._best.run} {self._best.metric}"

    @property
    def state(self) -> dict[str, Any]:
        """Best value, its step, and for how many values it has stood."""
        return {
            "best": self._best.value,
            "waited": self._waited,
            "seen": self._seen,
            "stopped_at": self.stopped_at,
            "best_step": self.best_step,
        }

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self._best.value, self._waited = saved["best"], saved["waited"]
        self._seen, self.stopped_at = saved["seen"], saved["stopped_at"]
        self.best_step = saved["best_step"]

    def saw(self, step: int, values: Mapping[str, float], run: str) -> Verdict:
        value = self._best.of(values, run)
        if value is None:
            return Verdict()
        self._seen += 1
        if self._seen <= self._start_from:
            return Verdict()
        better = self._best.note(value)
        self._waited += 1
        if better:
            self.best_step = step
            if self._baseline is None or self._best.beats(value, self._baseline):
                self._waited = 0
        stop = not better and self._waited >= max(1, self._patience)
        if stop:
            self.stopped_at = step
        return Verdict(stop=stop, remember=self.restore_best and better)


class ReduceOnPlateau:
    """Multiplies the learning rate by `factor` when a metric has not improved for `patience` values.

    Args:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      factor: of the learning rate, between 0 and 1.
      patience: values without improvement that are still accepted.
      cooldown: values after a reduction in which none are counted.
      min_delta: what counts as an improvement at least.
      options: `min_learning_rate`; `mode`: "max", "min", "auto"; `run`: "eval" or "train".

    Modelled on `keras.callbacks.ReduceLROnPlateau`.
    """

    def __init__(
        self,
        metric: str,
        *,
        factor: float = 0.1,
        patience: int = 10,
        cooldown: int = 0,
        min_delta: float = 1e-4,
        **options: Any,
    ):
        known: dict[str, Any] = {"min_learning_rate": 0.0, "mode": "auto", "run": "eval"}
        _check_options("ReduceOnPlateau", options, known)
        options = known | options
        _check_count("patience", patience, 0)
        _check_count("cooldown", cooldown, 0)
        if not 0 < factor < 1:
            raise UsageError(f"factor is {factor!r}; expected a number between 0 and 1.")
        self._best = _Best(metric, options["run"], options["mode"], min_delta)
        self._factor, self._patience, self._cooldown = factor, patience, cooldown
        self._lowest = options["min_learning_rate"]
        self._cooling = self._waited = 0

    @property
    def state(self) -> dict[str, Any]:
        """Best value, for how many values it has stood, and how many are not to be counted yet."""
        return {"best": self._best.value, "waited": self._waited, "cooling": self._cooling}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self._best.value, self._waited = saved["best"], saved["waited"]
        self._cooling = saved["cooling"]

    def saw(self, step: int, values: Mapping[str, float], run: str) -> Verdict:
        value = self._best.of(values, run)
        if value is None:
            return Verdict()
        if self._cooling:
            self._cooling -= 1
        if self._best.note(value):
            self._waited = 0
        elif not self._cooling:
            self._waited += 1
        if self._waited < max(1, self._patience):
            return Verdict()
        self._waited, self._cooling = 0, self._cooldown
        return Verdict(factor=self._factor, lowest=self._lowest)


class SaveBest:
    """Writes the model whenever a metric is better than ever before.

    Args:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      directory: where to; by default `model_dir/best`.
      formats: of "keras", "saved_model", "weights".
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      run: "eval" or "train".

    Modelled on `keras.callbacks.ModelCheckpoint` with `save_best_only=True`.
    """

    def __init__(
        self,
        metric: str,
        *,
        directory: str | None = None,
        formats: Sequence[str] = ("keras",),
        mode: str = "auto",
        run: str = "eval",
    ):
        self._best = _Best(metric, run, mode, 0.0)
        self.directory = directory
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)

    @property
    def state(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self._best.value}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self._best.value = saved["best"]

    def saw(self, step: int, values: Mapping[str, float], run: str) -> Verdict:
        value = self._best.of(values, run)
        return Verdict(export=value is not None and self._best.note(value))


def _check_options(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"{name} got {', '.join(unknown)}; expected of {', '.join(sorted(known))}.")


def _check_count(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise UsageError(f"{name} is {value!r}; expected a whole number >= {least}.")
