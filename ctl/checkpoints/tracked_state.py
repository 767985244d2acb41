"""Variables of a trainer under stable names, for checkpoints.

`tf.train.Checkpoint` omits the seed generators and metrics of Keras 3. They are added here, so that dropout
and running metrics continue after a restore.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3, is_keras3_variable, layers_of, unwrap
from ctl.distribute.topology import Topology
from ctl.errors import CheckpointError

_SMALL = 1024  # elements
_MAX_LINES = 20
_IGNORED = ("sync_every", "left_out_of_sums")  # state of reducers, which runs without them do not restore


class TrackedState:
    """The variables of a run, for checkpoint managers.

    Attributes:
      checkpoint: A `tf.train.Checkpoint` of `step`, the trainer's attributes, and the variables that Keras
        does not track.
      variables: Name -> `tf.Variable`. Names do not depend on Keras's counters for automatic names.
      paths: Name -> full path, such as "model/encoder_2/dense~1/kernel". "~" precedes a number that Keras
        assigned, "_" a number that the user chose.
      step: Number of completed steps, an int64 `tf.Variable` `[]`.
      topology: Topology of the job.

    Args:
      objects: Name -> object with variables.
      step: As above.
      topology: As above.
      optional: Further objects by name. If a checkpoint lacks one of their variables, all of them keep
        their values when it is restored.
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
        untracked = []
        trackable: dict[str, Any] = {}
        self._optional = frozenset(optional)
        added_ids = {id(step)}
        for name, owner in {**objects, **optional}.items():
            numbered_layers = layers_numbered_by_keras(owner)
            for variable in variables_of(owner):
                value = unwrap(variable)
                if id(value) not in added_ids:
                    added_ids.add(id(value))
                    unique_name = self._unique_name(f"{name}/{_path_without_numbers(variable)}")
                    self.variables[unique_name] = value
                    parts = [_mark_number(part, numbered_layers) for part in _path(variable).split("/")]
                    self.paths[unique_name] = "/".join([name, *parts])
            untracked += _untracked(owner)
            if _is_trackable(owner):
                trackable[name] = owner
        extra = tf.Module()
        extra.values = untracked
        checkpoint_class = _ChiefCheckpoint if "/job:ps" in step.device else tf.train.Checkpoint
        self.checkpoint = checkpoint_class(step=step, untracked=extra, **trackable)
        self._required_checkpoint = self.checkpoint
        if optional:
            required = {name: owner for name, owner in trackable.items() if name not in optional}
            self._required_checkpoint = checkpoint_class(step=step, untracked=extra, **required)

    def _unique_name(self, name: str) -> str:
        """Returns `name`, or `name#2`, `name#3`, ... if it is used already."""
        if name not in self.variables:
            return name
        number = 2
        while f"{name}#{number}" in self.variables:
            number += 1
        return f"{name}#{number}"

    def _is_optional(self, name: str) -> bool:
        return name.partition("/")[0] in self._optional

    def checkpoint_for(self, saved: Mapping[str, Any]) -> tf.train.Checkpoint:
        """Returns the object that reads a checkpoint with the variables `saved`.

        It excludes the optional objects if the checkpoint lacks one of their variables.
        """
        lacks_optional = any(n not in saved for n in self.variables if self._is_optional(n))
        return self._required_checkpoint if lacks_optional else self.checkpoint

    def spec(self) -> dict[str, dict]:
        """Returns name -> {"shape": [...], "dtype": "float32"}, for the manifest."""
        return {
            name: {"shape": v.shape.as_list(), "dtype": v.dtype.name} for name, v in self.variables.items()
        }

    def small_values(self) -> list[np.ndarray]:
        """Returns the values of variables with at most 1024 elements: learning rates, seeds, biases.

        All workers must call it, because reading some variables is a sum over workers.
        """
        variables = self.variables.values()
        small = [v for v in variables if (v.shape.num_elements() or 0) <= _SMALL and hasattr(v, "numpy")]
        return [v.numpy() for v in small]

    def check_matches(self, saved: Mapping[str, Mapping], where: str) -> None:
        """Raises CheckpointError if a checkpoint has other variables.

        The message lists missing and unexpected variables and those of another shape or dtype.

        Args:
          saved: Name -> shape and dtype of the variables in the checkpoint, as in `Manifest.variables`.
          where: Name of the checkpoint for the message.
        """
        specs = {n: spec for n, spec in self.spec().items() if n in saved or not self._is_optional(n)}
        lines = [f"  missing in the checkpoint: {n} {specs[n]['shape']}" for n in specs if n not in saved]
        unexpected = [n for n in saved if n not in specs and n.partition("/")[0] not in _IGNORED]
        lines += [f"  not in this model: {n} {saved[n]['shape']}" for n in unexpected]
        lines += [
            f"  differs: {n} is {saved[n]['dtype']}{saved[n]['shape']} in the checkpoint, "
            f"{specs[n]['dtype']}{specs[n]['shape']} in this model"
            for n in specs
            if n in saved and dict(saved[n]) != specs[n]
        ]
        if lines:
            suffix = [f"  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
            raise CheckpointError(
                f"The checkpoint {where} is of another model; no variable was restored.\n"
                + "\n".join(lines[:_MAX_LINES] + suffix)
                + "\nGive another --model_dir, or build the model of the checkpoint"
                + f"{_precision_hint(lines)}."
            )


def _precision_hint(lines: Sequence[str]) -> str:
    """Returns a hint if only the dtype policy seems to differ, for the end of the message."""
    text = "\n".join(lines)
    if "/loss_scale_optimizer/" in text or "bfloat16" in text:
        return ", with the --precision of its run (config.json in model_dir has it)"
    return ""


class _ChiefCheckpoint(tf.train.Checkpoint):
    """A checkpoint with all files on the chief, instead of on the disk of each parameter server."""

    def write(self, file_prefix: Any, options: Any = None) -> Any:
        return super().write(file_prefix, options or _ON_CHIEF)

    def read(self, save_path: Any, options: Any = None) -> Any:
        return super().read(save_path, options or _ON_CHIEF)


_ON_CHIEF = tf.train.CheckpointOptions(experimental_io_device="/job:chief/task:0/device:CPU:0")


def collect_owners(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a trainer that own variables, by name, without private ones (`_x`)."""
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith("_") and name != "step_variable" and list(variables_of(value))
    }


def statistics_of(attributes: Mapping[str, Any]) -> list[tf.Variable]:
    """Returns the floating-point variables that a step changes and that are neither weights nor slots.

    Examples are moving means, metrics and sums of the user.
    """
    owners = [o for o in collect_owners(attributes).values() if attribute(o, "apply_gradients") is None]
    variable_by_id = {id(unwrap(v)): unwrap(v) for owner in owners for v in variables_of(owner)}
    return [v for v in variable_by_id.values() if not v.trainable and v.dtype.is_floating]


def _items(value: Any) -> Collection[Any] | None:
    """Returns the items of a list, a tuple or a dictionary, and None for another object."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def weights_of(owner: Any) -> list[Any]:
    """Returns the parameters as Keras counts them: no variables of optimizers, metrics or seeds."""
    if (items := _items(owner)) is not None:
        return [v for item in items for v in weights_of(item)]
    if _is_optimizer_or_metric(owner):
        return []
    variables = list(variables_of(owner))
    if not _is_keras(owner) or is_keras3_variable(owner):
        return variables
    weight_ids = {id(unwrap(v)) for v in getattr(owner, "weights", ())}  # a SeedGenerator has none
    metric_ids = {id(unwrap(v)) for m in getattr(owner, "metrics", ()) for v in variables_of(m)}
    return [v for v in variables if id(unwrap(v)) in weight_ids - metric_ids]


def trained_weights_of(owner: Any) -> list[Any]:
    """Returns the parameters that are trained at present, without those of frozen layers."""
    if (items := _items(owner)) is not None:
        return [v for item in items for v in trained_weights_of(item)]
    trainable = attribute(owner, "trainable_variables")
    if trainable is None:
        return [v for v in weights_of(owner) if v.trainable]
    trainable_ids = {id(unwrap(v)) for v in trainable}
    return [v for v in weights_of(owner) if id(unwrap(v)) in trainable_ids]


def is_optimizer(value: Any) -> bool:
    """Returns True for an object that applies gradients."""
    has_apply = attribute(value, "apply") is not None and not is_model(value)
    return has_apply or attribute(value, "apply_gradients") is not None


def _is_optimizer_or_metric(value: Any) -> bool:
    names = ("apply_gradients", "apply", "update_state", "minimize")
    return any(attribute(value, name) is not None for name in names)


def is_model(value: Any) -> bool:
    """Returns True for an object that is called to make predictions, or a collection of such objects."""
    if (items := _items(value)) is not None:
        return bool(items) and all(is_model(item) for item in items)
    return not _is_optimizer_or_metric(value) and (isinstance(value, tf.Module) or callable(value))


def variables_of(owner: Any) -> Iterable[Any]:
    """Returns the variables of a Keras object, a tf.Module, a variable, or a collection of these."""
    if (items := _items(owner)) is not None:
        return [v for item in items for v in variables_of(item)]
    if isinstance(owner, tf.Variable) or is_keras3_variable(owner):
        return [owner]
    if isinstance(owner, tf.Module) or _is_keras(owner):
        variables = getattr(owner, "variables", ())
        variables = list(variables() if callable(variables) else variables)
        state = getattr(owner, "state", None)
        if not variables and is_keras3_variable(state):  # a Keras 3 SeedGenerator
            return [state]
        return variables
    return []


def _is_keras(value: Any) -> bool:
    return any(c.__module__.split(".")[0] in ("keras", "tf_keras") for c in type(value).__mro__)


def _is_trackable(value: Any) -> bool:
    if (items := _items(value)) is not None:
        return bool(items) and all(_is_trackable(item) for item in items)
    return isinstance(value, tf.__internal__.tracking.Trackable)


def _untracked(owner: Any) -> list[tf.Variable]:
    """Returns the variables of Keras 3 objects that `tf.train.Checkpoint` omits."""
    if (items := _items(owner)) is not None:
        return [v for item in items for v in _untracked(item)]
    if not is_keras3(owner):
        return []
    if not isinstance(owner, tf.__internal__.tracking.Trackable):
        return [unwrap(v) for v in variables_of(owner)]
    tracked = getattr(owner, "weights", None)
    if tracked is None:
        return []
    tracked_ids = {id(unwrap(v)) for v in tracked}
    return [unwrap(v) for v in variables_of(owner) if id(unwrap(v)) not in tracked_ids]


def _path(variable: Any) -> str:
    return (attribute(variable, "path") or variable.name).split(":")[0]


def _path_without_numbers(variable: Any) -> str:
    """Returns a variable's path without the counters of Keras: dense_3/kernel -> dense/kernel."""
    return re.sub(r"_\d+(?=[/_]|$)", "", _path(variable))


def layers_numbered_by_keras(owner: Any) -> set[str]:
    """Returns the names of layers that consist of the name of the class and a number, such as dense_3."""
    if (items := _items(owner)) is not None:
        return {name for item in items for name in layers_numbered_by_keras(item)}
    return {
        layer.name
        for layer in layers_of(owner)
        if re.sub(r"_\d+$", "", layer.name).replace("_", "") == type(layer).__name__.lower()
    }


def _mark_number(part: str, numbered_layers: set[str]) -> str:
    """Returns a part of a path with "~" before a number that Keras assigned."""
    if part in numbered_layers or re.fullmatch(r"seed_generator_\d+", part):
        return re.sub(r"_(\d+)$", r"~\1", part)
    return part
