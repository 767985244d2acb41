"""What a checkpoint holds: every variable that a trainer's attributes own, under a stable name.

Keras 3 leaves seed generators and metrics out of `tf.train.Checkpoint`; they are added here, so
that dropout and running metrics go on where they were.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3, is_keras3_variable, layers_of, plain
from ctl.distribute.topology import Topology
from ctl.errors import CheckpointError

_SMALL = 1024  # numbers
_NOT_NEEDED = ("sync_every", "left_out_of_sums")  # state of reducers, which other runs ignore


class TrackedState:
    """The variables of a run, for checkpoint managers.

    Attributes:
      checkpoint: a `tf.train.Checkpoint` over the trainer's attributes, `step`, and what Keras 3
        does not track.
      variables: name -> `tf.Variable`; names do not depend on Keras's counters for automatic names.
      paths: name -> its full path, such as "model/encoder_2/dense~1/kernel", where "~" is before a number
        that Keras gave, and "_" before one that a user chose.
      step: completed steps, a `tf.Variable` of int64.
      topology: which of the workers this process is.

    Args:
      optional: further objects, which a checkpoint to be restored may not have, or none of; these keep
        their values then.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        step: tf.Variable,
        topology: Topology,
        optional: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.step = step
        self.topology = topology
        self.variables: dict[str, tf.Variable] = {"step": step}
        self.paths: dict[str, str] = {}
        seen = {id(step)}
        untracked = []
        trackable: dict[str, Any] = {}
        self._optional = frozenset(optional)
        for name, thing in {**objects, **optional}.items():
            numbered = _numbered_by_keras(thing)
            for variable in variables_of(thing):
                value = plain(variable)
                if id(value) not in seen:
                    seen.add(id(value))
                    free = self._free_name(f"{name}/{_stable(variable)}")
                    self.variables[free] = value
                    parts = [_marked(part, numbered) for part in _path(variable).split("/")]
                    self.paths[free] = "/".join([name, *parts])
            untracked += _untracked(thing)
            if _is_trackable(thing):
                trackable[name] = thing
        extra = tf.Module()
        extra.values = untracked
        kind = _WrittenHere if "/job:ps" in step.device else tf.train.Checkpoint
        self.checkpoint = kind(step=step, untracked=extra, **trackable)
        needed = {name: thing for name, thing in trackable.items() if name not in self._optional}
        self._needed = kind(step=step, untracked=extra, **needed) if optional else self.checkpoint

    def _free_name(self, name: str) -> str:
        """`name`, or `name#2`, `name#3`, ... where it is taken."""
        if name not in self.variables:
            return name
        number = 2
        while f"{name}#{number}" in self.variables:
            number += 1
        return f"{name}#{number}"

    def _is_optional(self, name: str) -> bool:
        return name.partition("/")[0] in self._optional

    def readable(self, saved: Mapping[str, Any]) -> tf.train.Checkpoint:
        """What reads a checkpoint with the variables `saved`: without the optional ones if it lacks one."""
        lacks = any(n not in saved for n in self.variables if self._is_optional(n))
        return self._needed if lacks else self.checkpoint

    def spec(self) -> dict[str, dict]:
        """name -> {"shape": [...], "dtype": "float32"}, for the manifest."""
        return {
            name: {"shape": v.shape.as_list(), "dtype": v.dtype.name} for name, v in self.variables.items()
        }

    def small_values(self) -> list[np.ndarray]:
        """What every variable holds that is quickly read: learning rates, seeds, counters, biases.

        All workers must call it: some variables are summed when they are read.
        """
        variables = self.variables.values()
        small = [v for v in variables if (v.shape.num_elements() or 0) <= _SMALL and hasattr(v, "numpy")]
        return [v.numpy() for v in small]

    def check_matches(self, saved: Mapping[str, Mapping], where: str) -> None:
        """Raises CheckpointError that lists missing, unexpected and wrong-shape variables."""
        here = {n: spec for n, spec in self.spec().items() if n in saved or not self._is_optional(n)}
        lines = [f"  missing in the checkpoint: {n} {here[n]['shape']}" for n in here if n not in saved]
        others = [n for n in saved if n not in here and n.partition("/")[0] not in _NOT_NEEDED]
        lines += [f"  not in this model: {n} {saved[n]['shape']}" for n in others]
        lines += [
            f"  differs: {n} is {saved[n]['dtype']}{saved[n]['shape']} in the checkpoint, "
            f"{here[n]['dtype']}{here[n]['shape']} here"
            for n in here
            if n in saved and dict(saved[n]) != here[n]
        ]
        if lines:
            more = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
            raise CheckpointError(
                f"The checkpoint {where} is of another model; nothing was restored.\n"
                + "\n".join(lines[:20] + more)
                + "\nGive another --model_dir, or build the model that was saved there."
            )


class _WrittenHere(tf.train.Checkpoint):
    """The chief reads and writes all files; by itself each parameter server would, on its own disk."""

    def write(self, file_prefix: Any, options: Any = None) -> Any:
        return super().write(file_prefix, options or _ON_CHIEF)

    def read(self, save_path: Any, options: Any = None) -> Any:
        return super().read(save_path, options or _ON_CHIEF)


_ON_CHIEF = tf.train.CheckpointOptions(experimental_io_device="/job:chief/task:0/device:CPU:0")


def collect(trainer: object) -> dict[str, Any]:
    """The attributes of an object that own variables, by name; private ones (`_x`) are left out."""
    return {
        name: value
        for name, value in vars(trainer).items()
        if not name.startswith("_") and name != "step_variable" and list(variables_of(value))
    }


def statistics_of(trainer: object) -> list[tf.Variable]:
    """What a step changes besides weights and optimizers: moving means, metrics, own sums; floats only."""
    things = [t for t in collect(trainer).values() if attribute(t, "apply_gradients") is None]
    found = {id(plain(v)): plain(v) for t in things for v in variables_of(t)}
    return [v for v in found.values() if not v.trainable and v.dtype.is_floating]


def weights_of(thing: Any) -> list[Any]:
    """What counts as parameters, as in Keras: no optimizers, metrics, nor states of random generators."""
    if isinstance(thing, (list, tuple)):
        return [v for item in thing for v in weights_of(item)]
    if isinstance(thing, Mapping):
        return [v for item in thing.values() for v in weights_of(item)]
    if _updates(thing):
        return []
    variables = list(variables_of(thing))
    if not _is_keras(thing) or is_keras3_variable(thing):
        return variables
    weights = {id(plain(v)) for v in getattr(thing, "weights", ())}  # a SeedGenerator has none
    metrics = {id(plain(v)) for m in getattr(thing, "metrics", ()) for v in variables_of(m)}
    return [v for v in variables if id(plain(v)) in weights - metrics]


def trained_weights_of(thing: Any) -> list[Any]:
    """Returns the parameters that are trained now; a layer may be frozen."""
    if isinstance(thing, (list, tuple)):
        return [v for item in thing for v in trained_weights_of(item)]
    if isinstance(thing, Mapping):
        return [v for item in thing.values() for v in trained_weights_of(item)]
    chosen = attribute(thing, "trainable_variables")
    known = None if chosen is None else {id(plain(v)) for v in chosen}
    return [v for v in weights_of(thing) if (v.trainable if known is None else id(plain(v)) in known)]


def is_optimizer(thing: Any) -> bool:
    """Returns True for an object that applies gradients."""
    applies = attribute(thing, "apply") is not None and not is_model(thing)
    return applies or attribute(thing, "apply_gradients") is not None


def _updates(thing: Any) -> bool:
    """True for an optimizer or a metric."""
    names = ("apply_gradients", "apply", "update_state", "minimize")
    return any(attribute(thing, name) is not None for name in names)


def is_model(thing: Any) -> bool:
    """True for what is called to make predictions: neither an optimizer, a metric nor a variable."""
    if isinstance(thing, (list, tuple)):
        return bool(thing) and all(is_model(t) for t in thing)
    if isinstance(thing, Mapping):
        return bool(thing) and all(is_model(t) for t in thing.values())
    return not _updates(thing) and (isinstance(thing, tf.Module) or callable(thing))


def variables_of(thing: Any) -> Iterable[Any]:
    """Every variable a Keras object, a tf.Module, a variable, or a collection of these owns."""
    if isinstance(thing, (list, tuple)):
        return [v for item in thing for v in variables_of(item)]
    if isinstance(thing, Mapping):
        return [v for item in thing.values() for v in variables_of(item)]
    if isinstance(thing, tf.Variable) or is_keras3_variable(thing):
        return [thing]
    if isinstance(thing, tf.Module) or _is_keras(thing):
        variables = getattr(thing, "variables", ())
        variables = list(variables() if callable(variables) else variables)
        state = getattr(thing, "state", None)
        if not variables and is_keras3_variable(state):  # a Keras 3 SeedGenerator
            return [state]
        return variables
    return []


def _is_keras(thing: Any) -> bool:
    return any(c.__module__.split(".")[0] in ("keras", "tf_keras") for c in type(thing).__mro__)


def _is_trackable(thing: Any) -> bool:
    if isinstance(thing, (list, tuple)):
        return bool(thing) and all(_is_trackable(t) for t in thing)
    if isinstance(thing, Mapping):
        return bool(thing) and all(_is_trackable(t) for t in thing.values())
    return isinstance(thing, tf.__internal__.tracking.Trackable)


def _untracked(thing: Any) -> list[tf.Variable]:
    """Variables that `tf.train.Checkpoint` would miss in a Keras 3 object."""
    if isinstance(thing, (list, tuple)):
        return [v for item in thing for v in _untracked(item)]
    if isinstance(thing, Mapping):
        return [v for item in thing.values() for v in _untracked(item)]
    if not is_keras3(thing):
        return []
    if not isinstance(thing, tf.__internal__.tracking.Trackable):
        return [plain(v) for v in variables_of(thing)]
    tracked = getattr(thing, "weights", None)
    if tracked is None:
        return []
    known = {id(plain(v)) for v in tracked}
    return [plain(v) for v in variables_of(thing) if id(plain(v)) not in known]


def _path(variable: Any) -> str:
    return (attribute(variable, "path") or variable.name).split(":")[0]


def _stable(variable: Any) -> str:
    """A variable's path without the counters Keras adds: dense_3/kernel -> dense/kernel."""
    return re.sub(r"_\d+(?=[/_]|$)", "", _path(variable))


def _numbered_by_keras(thing: Any) -> set[str]:
    """Names of layers that are their class's with a number, as Keras gives them: Dense -> dense_3."""
    if isinstance(thing, (list, tuple)):
        return {name for item in thing for name in _numbered_by_keras(item)}
    if isinstance(thing, Mapping):
        return {name for item in thing.values() for name in _numbered_by_keras(item)}
    return {
        layer.name
        for layer in layers_of(thing)
        if re.sub(r"_\d+$", "", layer.name).replace("_", "") == type(layer).__name__.lower()
    }


def _marked(part: str, numbered: set[str]) -> str:
    """One part of a path, with "~" before a number that Keras gave."""
    if part in numbered or re.fullmatch(r"seed_generator_\d+", part):
        return re.sub(r"_(\d+)$", r"~\1", part)
    return part
