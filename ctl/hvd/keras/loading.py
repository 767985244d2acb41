"""A saved model, to be trained on: its optimizer becomes a distributed one and keeps its state."""

import contextlib
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.hvd.compression import Compression
from ctl.hvd.keras.optimizers import DistributedOptimizer
from ctl.hvd.keras3_optimizers import Distributed
from ctl.tensorflow_patches import optimizer_attributes


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """The model of a .keras or .h5 file; of Keras 3, or of tf_keras where it was saved by that.

    Args:
      filepath: path, or for .h5 an open h5py.File.
      custom_optimizers: classes of optimizers that Keras does not know.
      custom_objects: by name, as for `keras.models.load_model`; an optimizer may also be a function
        that makes it, of its config.
      compression: of the distributed optimizer.
      legacy_opts: accepted; the file says which optimizer it is.
    """
    known: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    version, optimizer = _said(filepath)
    for name, thing in (custom_objects or {}).items():
        is_function = callable(thing) and not isinstance(thing, type)
        known[name] = _Made(thing) if is_function and name == optimizer else thing
    model = _keras_of(version).models.load_model(filepath, custom_objects=known)
    found = getattr(model, "optimizer", None)
    if _lost_its_state(found):
        with _hdf5(filepath) as file:
            _restore(found, model.trainable_variables, file)
    if found is not None and not isinstance(found, Distributed):
        model.optimizer = DistributedOptimizer(found, compression=compression)
    return model


class _Made:
    """A function where Keras expects a class."""

    def __init__(self, function: Any):
        self._function = function

    def from_config(self, config: dict[str, Any]) -> Any:
        return self._function(**config)


def _keras_of(version: str) -> Any:
    """`tf.keras`, unless the file is of Keras 2 and the script has imported tf_keras."""
    return sys.modules.get("tf_keras", tf.keras) if version.startswith("2.") else tf.keras


def _lost_its_state(optimizer: Any) -> bool:
    """Keras 3 builds the optimizer of an .h5 file for no variables at all."""
    return (
        getattr(optimizer, "built", False)
        and not optimizer_attributes.trainable_variables(optimizer, default=True)
        and not hasattr(optimizer, "inner_optimizer")
    )


def _restore(optimizer: Any, variables: Sequence[Any], file: Any) -> None:
    optimizer.built = False  # else it would return at once
    optimizer.build(list(variables))
    group = file.get("optimizer_weights")
    names = [] if group is None else group.attrs.get("weight_names", [])
    saved = [group[n.decode() if isinstance(n, bytes) else n][()] for n in names]
    if [v.shape for v in optimizer.variables] == [value.shape for value in saved]:
        for variable, value in zip(optimizer.variables, saved, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def _hdf5(filepath: Any) -> Iterator[Any]:
    """An open file, or the one at the path."""
    import h5py

    if isinstance(filepath, (str, os.PathLike)):
        with h5py.File(filepath) as file:
            yield file
    else:
        yield filepath


def _said(filepath: Any) -> tuple[str, str]:
    """(version of Keras, class of the optimizer) in a file; empty for what is not said."""
    if isinstance(filepath, (str, os.PathLike)):
        if zipfile.is_zipfile(filepath):
            with zipfile.ZipFile(filepath) as archive:
                version = json.loads(archive.read("metadata.json")).get("keras_version", "")
                config = json.loads(archive.read("config.json")).get("compile_config") or {}
            return version, _class_name(config.get("optimizer"))
        if not os.path.isfile(filepath):
            return "2." if os.path.isdir(filepath) else "", ""
    try:
        with _hdf5(filepath) as file:
            version = _text(file.attrs.get("keras_version", ""))
            training = json.loads(_text(file.attrs.get("training_config", "{}")))
    except OSError:
        return "", ""  # no file of this kind: Keras has the sentence
    return version, _class_name(training.get("optimizer_config"))


def _text(attribute: Any) -> str:
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def _class_name(config: Any) -> str:
    return config.get("class_name", "") if isinstance(config, dict) else ""
