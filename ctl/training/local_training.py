"""`--sync_every`: what a trainer may have with it, its parts, and where the workers' weights are equal."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ctl.callbacks.protocol import EVENTS, Callback
from ctl.callbacks.schedule import Action
from ctl.checkpoints import tracked_state
from ctl.checkpoints.tracked_state import collect, is_model, variables_of
from ctl.config import Config
from ctl.distribute import strategies
from ctl.distribute.keras_objects import attribute, layers_of, plain
from ctl.errors import UsageError
from ctl.step import optimizers
from ctl.step.local_steps import LocalSteps, OuterOptimizer
from ctl.step.worker_state import WorkerState
from ctl.training.optional_methods import is_defined_by_user
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")
_PLANNED = Action.SAVE | Action.EVALUATE


def check_settings(config: Config) -> None:
    """Raises UsageError for an outer optimizer that cannot be, or has nothing to do."""
    rate, momentum = config.outer_learning_rate, config.outer_momentum
    if rate <= 0 or momentum >= 1:
        raise UsageError(
            f"outer_learning_rate={rate:g}, outer_momentum={momentum:g}: expected a rate > 0 and a "
            "momentum < 1, such as 0.7 and 0.9."
        )
    if config.sync_every == 1 and not OuterOptimizer(rate, momentum).averages:
        raise UsageError(
            f"outer_learning_rate={rate:g} and outer_momentum={momentum:g} are for --sync_every, which is "
            "1: gradients are summed in every step. Write --sync_every=16, or leave the others out."
        )


def is_possible(trainer: TrainerProtocol) -> bool:
    """Whether each worker has one replica of its own; with one worker there is nothing to average."""
    unfit = strategies.word_of(trainer.strategy) in ("parameter_server", "central_storage", "tpu")
    return not unfit and trainer.topology.num_replicas == trainer.topology.num_workers


def check_trainer(trainer: TrainerProtocol, callbacks: Iterable[Callback]) -> None:
    """Raises UsageError for settings, layers and callbacks that `sync_every` excludes; after `build`."""
    every, word, place = trainer.config.sync_every, strategies.word_of(trainer.strategy), trainer.topology
    if every == 1:
        return
    said = f"sync_every={every}"
    if not is_possible(trainer):
        raise UsageError(
            f"{said} with strategy {word!r} and {place.num_replicas} replicas, workers: "
            f"{place.num_workers}; each worker makes steps of its own, on one replica. Write "
            "--strategy=multi_worker with one device per worker, or leave sync_every out."
        )
    if trainer.jit_compile == "loop":
        raise UsageError(f"{said} with jit_compile='loop', which has no collectives. Write 'step'.")
    can_roll_back = any(callback.rollback for callback in callbacks)
    if trainer.gradients.on_nonfinite == "rollback" or can_roll_back:
        raise UsageError(
            f"{said} with rollback: workers find what is not finite each by itself, and cannot go back "
            "together at that step. Write on_nonfinite='skip' or 'stop'."
        )
    if trainer.gradients.wire_dtype and outer_optimizer(trainer).averages:
        raise UsageError(
            f"{said} with wire_dtype={trainer.gradients.wire_dtype!r} would round the weights. Leave it "
            "out, or send differences: write --outer_learning_rate=0.7 --outer_momentum=0.5."
        )
    _check_averages(trainer, said)
    _check_layers(trainer, said)


def _check_averages(trainer: TrainerProtocol, said: str) -> None:
    for name, thing in vars(trainer).items():
        if optimizers.skips_what_is_not_finite(thing):
            raise UsageError(
                f"{said} with self.{name}, a LossScaleOptimizer: each worker would have a scale and skip "
                "steps of its own. Train with the policy 'mixed_bfloat16'."
            )
        if attribute(attribute(thing, "inner_optimizer") or thing, "use_ema"):
            raise UsageError(
                f"{said} with use_ema=True of self.{name}: its averages would be of one worker's weights. "
                "Leave use_ema out."
            )
    if is_defined_by_user(trainer, "moving_averages"):
        raise UsageError(
            f"{said} with moving_averages(), which would be of one worker's weights. Leave it out."
        )


def _check_layers(trainer: TrainerProtocol, said: str) -> None:
    for thing in collect(trainer).values():
        for layer in layers_of(thing):
            synchronised = getattr(layer, "synchronized", False) or "Sync" in type(layer).__name__
            if trainer.topology.num_replicas > 1 and synchronised and layer.trainable:
                raise UsageError(
                    f"{said} with the layer {layer.name!r}, which adds up over workers in every step. Use "
                    "another normalisation, such as keras.layers.LayerNormalization."
                )


def outer_optimizer(trainer: TrainerProtocol) -> OuterOptimizer:
    """That of the settings."""
    return OuterOptimizer(trainer.config.outer_learning_rate, trainer.config.outer_momentum)


@dataclass
class LocalTraining:
    """What a trainer with `sync_every` has.

    Attributes:
      steps: averages weights; None: on one worker, where an average is nothing.
      state: of the workers' optimizers, for checkpoints.
    """

    steps: LocalSteps | None
    state: WorkerState

    def tracked(self) -> dict[str, Any]:
        """What a checkpoint holds more, by name."""
        common = [] if self.steps is None else [*self.steps.common, *self.steps.momenta]
        return {tracked_state.SYNC_EVERY: [*self.state.variables, *common]}

    def begin(self, step: int) -> None:
        """Takes over what was restored, or the weights as they are, at `step`."""
        rows, workers = self.state.scatter(), self.state.num_workers
        if rows not in (0, workers):
            _log.warning(
                "The checkpoint of step %d has the optimizers of %d workers, here are %d: each goes on "
                "with their mean.",
                *(step, rows, workers),
            )
        if self.steps is not None:
            if not rows:
                self.steps.begin()
            self.steps.equal_at = step


def local_training(trainer: TrainerProtocol) -> LocalTraining | None:
    """Made after `build`; None where gradients are summed in every step."""
    every, outer = trainer.config.sync_every, outer_optimizer(trainer)
    if every == 1:
        return None
    place, steps, owned = trainer.topology, None, list(collect(trainer).values())
    if place.num_workers > 1 or not outer.averages:
        steps = LocalSteps(
            trainer.strategy,
            place,
            every=every,
            outer=outer,
            weights=_floats(v for t in owned for v in tracked_state.weights_of(t)),
            trained=lambda: _floats(v for t in collect(trainer).values() for v in _trained(t)),
            wire_dtype=lambda: trainer.gradients.wire_dtype,
        )
    elif not place.evaluates:
        _log.info("sync_every=%d has no effect on one worker.", every)
    found = {id(plain(v)): plain(v) for t in owned if _is_optimizer(t) for v in variables_of(t)}
    return LocalTraining(steps, WorkerState(trainer.strategy, place, list(found.values())))


def _is_optimizer(thing: Any) -> bool:
    applies = attribute(thing, "apply") is not None and not is_model(thing)
    return applies or attribute(thing, "apply_gradients") is not None


def _trained(thing: Any) -> Iterable[Any]:
    """Of the weights of a thing those that are trained now; a layer may be frozen."""
    if isinstance(thing, (list, tuple)):
        return [v for item in thing for v in _trained(item)]
    if isinstance(thing, Mapping):
        return [v for item in thing.values() for v in _trained(item)]
    chosen = attribute(thing, "trainable_variables")
    known = None if chosen is None else {id(plain(v)) for v in chosen}
    weights = tracked_state.weights_of(thing)
    return [v for v in weights if (v.trainable if known is None else id(plain(v)) in known)]


def _floats(variables: Iterable[Any]) -> list[Any]:
    """Each variable once, as TensorFlow's; the parameters that can be averaged."""
    found = {id(plain(v)): plain(v) for v in variables}
    return [v for v in found.values() if v.dtype.is_floating]


class EqualPoints:
    """After which steps workers have the same weights: what is saved, evaluated or shown is that of all.

    These are multiples of `every`, steps at which a save or an evaluation is due, and the last one: all
    known from the settings, so that numbers do not depend on a clock. What comes by itself, such as a
    signal, waits for the next one.

    Args:
      everywhere: also after every other loop, as somebody may look at the weights there.
    """

    def __init__(self, steps: LocalSteps, every: int, *, everywhere: bool):
        self._steps, self._every, self._everywhere = steps, every, everywhere

    def length(self, step: int, length: int) -> int:
        """Of the next loop, about as long, to a multiple of `every`."""
        return (
            max(1, (step + length) // self._every - step // self._every) * self._every - step % self._every
        )

    def reached(self, step: int, due: Action, *, ends: bool) -> bool:
        """Makes the weights equal if `step`, at the end of a loop, is such a step. Returns True if so."""
        equal = self._everywhere or ends or bool(due & _PLANNED) or step % self._every == 0
        if equal:
            self._steps.make_equal(step)
        return equal


def equal_points(
    trainer: TrainerProtocol, local: LocalTraining | None, wants: Callable[[str], bool]
) -> EqualPoints | None:
    """Those of a run; `wants`: whether a callback is told of an event."""
    if local is None or local.steps is None:
        return None
    everywhere = is_defined_by_user(trainer, "after_loop") or any(map(wants, EVENTS))
    return EqualPoints(local.steps, trainer.config.sync_every, everywhere=everywhere)
