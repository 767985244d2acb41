"""Learning-rate range test: the loss of training steps with exponentially growing learning rates.

The method is described in Smith, "Cyclical Learning Rates for Training Neural Networks", 2017.

result = ctl.find_learning_rate(Mnist(global_batch_size=64), path="rates.png")
print(result.suggestion)
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.checkpoints.tracked_state import variables_of
from ctl.data.batches import Batches
from ctl.distribute.keras_objects import unwrap
from ctl.errors import UsageError
from ctl.io.console import print_message
from ctl.step import finiteness
from ctl.step.randomness import GeneratorStates
from ctl.tensorflow_patches import eager_context, optimizer_attributes, seed_generators
from ctl.trainer_checks import check_instance
from ctl.training import input_pipeline, run_metadata, validation
from ctl.training.loop_length import Interval
from ctl.training.prepared import PreparedTrainer
from ctl.training.task import Task

_DIVERGENCE = 4.0  # times the smallest smoothed loss
_MIN_STEPS = 5
_CLEAR_FALL = 4.0  # of the smoothed loss, in standard deviations of its noise
_FALL_AT_BEGIN = 0.2  # part of the fall after which the steepest descent is searched
_LEAST_SHARE = 0.1  # least suggestion, as a part of the rate with the smallest smoothed loss


@dataclass(frozen=True)
class LearningRateCurve:
    """Result of `find_learning_rate`.

    Attributes:
      rates: Learning rate of each step, ascending.
      losses: Smoothed loss of each step: an exponential average with the weight `smoothing`, not the loss
        that `train_step` returned.
      suggestion: Learning rate at which the smoothed loss falls fastest, but at least one tenth of the rate
        with the smallest smoothed loss. The first steps, with averages of few batches, and the steps
        before the loss has clearly fallen do not count. None: the loss does not fall by more than its
        noise.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None


def find_learning_rate(
    trainer: Any,
    *,
    min_rate: float = 1e-6,
    max_rate: float = 1.0,
    steps: int = 100,
    optimizer: str | None = None,
    metric: str = "loss",
    smoothing: float = 0.9,
    path: str | None = None,
) -> LearningRateCurve:
    """Trains with exponentially growing learning rates, and restores the trainer afterwards.

    Weights, slots of optimizers, the step, random numbers and the position in the data are those from
    before the call, so that a following `train` is the same as without it. Writes no checkpoints and
    metrics. All workers must call it. The search ends early if the loss is not finite, or more than 4 times
    its smallest value.

    Args:
      trainer: A `ctl.Trainer`.
      min_rate: First learning rate.
      max_rate: Learning rate of the last step.
      steps: Number of steps, at least 5.
      optimizer: Name of the trainer's attribute with the optimizer to vary. None: all optimizers; the rates
        are those of `self.optimizer`, and the other optimizers keep their ratio to it.
      metric: Name of the value of `train_step` to observe.
      smoothing: Weight of earlier losses in the exponential average, from 0 to below 1.
      path: File for a picture of the curve, such as "rates.png". Only the chief writes it. Requires
        matplotlib.

    Raises UsageError for an object that is no trainer, invalid arguments, a learning rate that is a
    schedule, or data that end too early.

    >>> rate = ctl.find_learning_rate(Mnist(global_batch_size=64)).suggestion
    """
    _check_arguments(min_rate, max_rate, steps, smoothing)
    check_instance("find_learning_rate", trainer)
    if trainer.topology.num_workers == 1:
        _check_picture(path)  # several workers agree on the result when they are connected
    task = Task.of(trainer)
    validation.check_methods(task, "train")
    validation.check_train_data(task)
    prepared = trainer._prepare_trainer()
    if prepared.activity.run is not None or trainer.topology.evaluates:
        raise UsageError("find_learning_rate() was called during a run; call it before train().")
    if prepared.world.is_asynchronous:
        raise UsageError(
            "find_learning_rate() got a trainer with parameter servers, whose workers are asynchronous. "
            "Search with strategy='mirrored' or 'default'."
        )
    _run_on_chief(prepared, lambda: _check_picture(path))
    rate_variables = _rate_variables(prepared.task, optimizer)
    with prepared.peer_errors(), _restored(trainer, prepared, [variable for variable, _ in rate_variables]):
        rates, losses = _run(prepared, rate_variables, (min_rate, max_rate), steps, metric, smoothing)
    smoothed = _smooth(losses, smoothing)
    curve = LearningRateCurve(tuple(rates), tuple(smoothed), _suggest(rates, losses, smoothing))
    _run_on_chief(prepared, lambda: _draw(curve, path, metric))
    return curve


def _run_on_chief(prepared: PreparedTrainer, function: Callable[[], None]) -> None:
    """Calls a function on the chief. If it fails there, all workers raise UsageError."""
    world, error = prepared.world, None
    if world.is_chief:
        try:
            function()
        except UsageError as e:
            error = e
    num_errors = world.host_all_reduce.sum(np.array([0.0 if error is None else 1.0]))
    if error is not None:
        raise error
    if num_errors[0]:
        raise UsageError("The chief cannot write the picture of find_learning_rate(); see its log.")


def _check_arguments(min_rate: float, max_rate: float, steps: int, smoothing: float) -> None:
    is_ascending = all(isinstance(r, (int, float)) for r in (min_rate, max_rate)) and (
        0 < min_rate < max_rate < math.inf
    )
    if not is_ascending:
        raise UsageError(
            f"min_rate is {min_rate!r} and max_rate is {max_rate!r}; expected 0 < min_rate < max_rate, "
            "such as 1e-6 and 1.0."
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < _MIN_STEPS:
        raise UsageError(f"steps is {steps!r}; expected an integer, {_MIN_STEPS} or more.")
    if not isinstance(smoothing, (int, float)) or not 0 <= smoothing < 1:
        raise UsageError(f"smoothing is {smoothing!r}; expected a number from 0 to below 1, such as 0.9.")


def _check_picture(path: str | None) -> None:
    """Raises UsageError if no picture can be written."""
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f"path is {str(path)!r}, and matplotlib is not installed. Run pip install matplotlib, or "
            "leave path out: the result has the rates and losses."
        ) from None
    suffixes = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".") not in suffixes:
        raise UsageError(f"path is {str(path)!r}; expected a file that ends with .{', .'.join(suffixes)}.")
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise UsageError(f"path is {str(path)!r}; expected a file in a directory that exists.")


def _rate_variables(task: Task, chosen: str | None) -> list[tuple[Any, float]]:
    """Returns (variable of a learning rate, its factor) for each optimizer to vary.

    The factors of several optimizers are their present ratios to the first one.
    """
    optimizers = run_metadata.named_optimizers(task.attributes)
    if chosen is not None:
        if chosen not in optimizers:
            names = ", ".join(optimizers) or "none"
            raise UsageError(f"optimizer is {chosen!r}; expected one of the trainer's optimizers: {names}.")
        optimizers = {chosen: optimizers[chosen]}
    if not optimizers:
        raise UsageError("find_learning_rate() needs an optimizer; set self.optimizer in build().")
    ordered = sorted(optimizers.items(), key=lambda item: item[1] is not task.optimizer)
    variables = [_rate_variable(name, optimizer) for name, optimizer in ordered]
    values = [float(variable.numpy()) for variable in variables]
    factors = [value / values[0] if values[0] else 1.0 for value in values]
    return list(zip(variables, factors, strict=True))


def _rate_variable(name: str, optimizer: Any) -> Any:
    """Returns the variable of the learning rate. Raises UsageError for schedules and unknown optimizers."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = optimizer_attributes.legacy_learning_rate(inner)
    if rate is None:
        rate = getattr(inner, "learning_rate", None)
    if hasattr(rate, "assign"):
        return unwrap(rate)
    if callable(rate):
        raise UsageError(
            f"the learning rate of self.{name} is the schedule {type(rate).__name__}, which the search "
            "would have to replace. Build the optimizer with a number for the search, such as "
            f"{type(inner).__name__}(1e-3), and scale the schedule by the suggestion."
        )
    raise UsageError(
        f"self.{name} ({type(inner).__name__}) has no variable learning rate; expected an optimizer of "
        "Keras, or an attribute learning_rate that is a tf.Variable. Name one: optimizer='optimizer'."
    )


@contextlib.contextmanager
def _restored(trainer: Any, prepared: PreparedTrainer, rate_variables: Sequence[Any]) -> Iterator[None]:
    """Restores variables, random numbers and the position in the data after the block."""
    variables = {id(variable): variable for variable in prepared.state.variables.values()}
    variables |= {id(variable): variable for variable in rate_variables}  # tf_keras does not list them
    for name, value in vars(trainer).items():
        if name not in ("strategy", "_prepared_trainer"):
            variables |= {id(unwrap(v)): unwrap(v) for v in variables_of(value)}
    if (generator := seed_generators.global_generator()) is not None:
        variables[id(unwrap(generator.state))] = unwrap(generator.state)
    local_results = prepared.world.strategy.experimental_local_results
    parts = [part for variable in variables.values() for part in local_results(variable)]
    copies = [tf.identity(part.read_value()) for part in parts]
    states = GeneratorStates.current()
    try:
        with eager_context.operation_seeds_kept():
            yield
    finally:
        for part, copy in zip(parts, copies, strict=True):
            part.assign(copy)
        states.restore()
        prepared.programs.reducer.begin(prepared.step)


def _run(
    prepared: PreparedTrainer,
    rate_variables: Sequence[tuple[Any, float]],
    limits: tuple[float, float],
    steps: int,
    metric: str,
    smoothing: float,
) -> tuple[list[float], list[float]]:
    """Returns the rates and the losses of the steps, until the loss diverges."""
    total, batches = input_pipeline.open_train_batches(prepared, prepared.step + steps, None)
    available = steps if total is None else min(steps, total - prepared.step)
    _check_data(available, steps)
    loop = prepared.programs.separate_train_loop(prepared.checkpointing.resumed)
    interval = Interval(loop.totals)
    rates, losses = list[float](), list[float]()
    try:
        for number in range(available):
            rate = limits[0] * (limits[1] / limits[0]) ** (number / (available - 1))
            for variable, factor in rate_variables:
                variable.assign(rate * factor)
            values = _step(prepared, loop, batches, interval)
            if values is None:
                _check_data(number, steps)
                break
            if metric not in values:
                raise UsageError(
                    f"metric is {metric!r}; expected a value that train_step returns: {', '.join(values)}."
                )
            if not math.isfinite(values[metric]) or values.get(finiteness.SKIPPED):
                break
            rates.append(rate)
            losses.append(values[metric])
            if _has_diverged(_smooth(losses, smoothing)):
                break
    finally:
        loop.release()
    return rates, losses


def _step(
    prepared: PreparedTrainer, loop: Any, batches: Batches, interval: Interval
) -> Mapping[str, float] | None:
    """Returns the values of one step: NaN if it was not finite, None if the data has ended."""
    interval.begin_steps()
    try:
        packed, ran = loop.run(batches, 1, interval.packed)
    except tf.errors.InvalidArgumentError as e:
        if finiteness.MESSAGE not in str(e):
            raise
        return _NotFinite()
    if not ran:
        return None
    interval.add(packed, ran, None)
    interval.fetch(prepared.world.host_all_reduce.sum)
    values = interval.means()
    interval.clear()
    return values


class _NotFinite(dict[str, float]):
    """The values of a step that TensorFlow has stopped: each is NaN."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return math.nan


def _check_data(available: int, steps: int) -> None:
    if available < _MIN_STEPS:
        raise UsageError(
            f"train_data ends after {available} steps; expected {steps}, at least {_MIN_STEPS}. Return a "
            "dataset that repeats, dataset.repeat(), or give a smaller global_batch_size."
        )


def _smooth(losses: Sequence[float], smoothing: float) -> list[float]:
    """Returns the exponential averages of the losses, without the bias of the first ones."""
    average, smoothed = 0.0, list[float]()
    for number, loss in enumerate(losses, 1):
        average = smoothing * average + (1 - smoothing) * loss
        smoothed.append(average / (1 - smoothing**number))
    return smoothed


def _has_diverged(smoothed: Sequence[float]) -> bool:
    """Returns True if the newest loss exceeds the first one, and 4 times the smallest one."""
    lowest = min(smoothed)
    limit = max(lowest + (_DIVERGENCE - 1) * abs(lowest), smoothed[0])
    return len(smoothed) > _MIN_STEPS and smoothed[-1] > limit


def _suggest(rates: Sequence[float], losses: Sequence[float], smoothing: float) -> float | None:
    """Returns `LearningRateCurve.suggestion`. `losses` are not smoothed."""
    if len(losses) < _MIN_STEPS:
        return None
    smoothed = np.asarray(_smooth(losses, smoothing))
    first = min(
        math.ceil(1 / (1 - smoothing)) - 1, len(losses) // 4
    )  # the averages before are of few losses
    lowest = first + int(np.argmin(smoothed[first:]))
    fall = smoothed[first] - smoothed[lowest]
    if fall <= _CLEAR_FALL * _noise(losses[: lowest + 1], smoothing):
        return None
    not_fallen = np.flatnonzero(smoothed[:lowest] >= smoothed[first] - _FALL_AT_BEGIN * fall)
    begin = int(not_fallen[-1])
    slopes = np.gradient(smoothed, np.log(rates))[begin : lowest + 1]
    steepest = begin + int(np.argmin(slopes))
    return float(max(rates[steepest], rates[lowest] * _LEAST_SHARE))


def _noise(losses: Sequence[float], smoothing: float) -> float:
    """Returns the standard deviation of smoothed losses, estimated from successive losses."""
    if len(losses) < 2:
        return 0.0
    variance = float(np.mean(np.diff(losses) ** 2)) / 2  # of independent batches
    return math.sqrt(variance * (1 - smoothing) / (1 + smoothing))


def _draw(curve: LearningRateCurve, path: str | None, metric: str) -> None:
    """Writes the picture. Raises UsageError if the file cannot be written."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="tight")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel=f"{metric} (smoothed)")
    axes.plot(curve.rates, curve.losses)
    if curve.suggestion is not None:
        axes.axvline(curve.suggestion, linestyle="--", label=f"suggestion: {curve.suggestion:.2g}")
        axes.legend()
    try:
        figure.savefig(path)
    except OSError as e:
        raise UsageError(f"path is {str(path)!r}; expected a file that can be written ({e}).") from e
    print_message(f"the learning-rate curve is in {path}")
