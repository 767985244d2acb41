"""Loading of a saved model for training. Its optimizer becomes a distributed one and keeps its state."""

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
    """Returns the model of a .keras or .h5 file, of Keras 3 or of tf_keras, depending on the file.

    Args:
      filepath: Path, or for .h5 an open h5py.File.
      custom_optimizers: Optimizer classes that are not part of Keras.
      custom_objects: Name -> object, as for `keras.models.load_model`. For an optimizer it may also be a
        function that creates it from its config.
      compression: Compression of the distributed optimizer.
      legacy_opts: Ignored. The file specifies the optimizer.
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
    """An adapter from a function to the class that Keras expects."""

    def __init__(self, function: Any):
        self._function = function

    def from_config(self, config: dict[str, Any]) -> Any:
        return self._function(**config)


def _keras_of(version: str) -> Any:
    """Returns `tf.keras`, or tf_keras if the file is of Keras 2 and the script has imported tf_keras."""
    return sys.modules.get("tf_keras", tf.keras) if version.startswith("2.") else tf.keras


def _lost_its_state(optimizer: Any) -> bool:
    """Returns True for an optimizer of an .h5 file, which Keras 3 builds without variables."""
    return (
        getattr(optimizer, "built", False)
        and not optimizer_attributes.trainable_variables(optimizer, default=True)
        and not hasattr(optimizer, "inner_optimizer")
    )


def _restore(optimizer: Any, variables: Sequence[Any], file: Any) -> None:
    optimizer.built = False  # otherwise `build` would return immediately
    optimizer.build(list(variables))
    group = file.get("optimizer_weights")
    names = [] if group is None else group.attrs.get("weight_names", [])
    saved = [group[n.decode() if isinstance(n, bytes) else n][()] for n in names]
    if [v.shape for v in optimizer.variables] == [value.shape for value in saved]:
        for variable, value in zip(optimizer.variables, saved, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def _hdf5(filepath: Any) -> Iterator[Any]:
    """Yields an open file unchanged, or opens the file at a path."""
    import h5py

    if isinstance(filepath, (str, os.PathLike)):
        with h5py.File(filepath) as file:
            yield file
    else:
        yield filepath


def _said(filepath: Any) -> tuple[str, str]:
    """Returns (version of Keras, class of the optimizer) of a file, "" for missing values."""
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
        return "", ""  # not a file of this type: Keras raises the error
    return version, _class_name(training.get("optimizer_config"))


def _text(attribute: Any) -> str:
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def _class_name(config: Any) -> str:
    return config.get("class_name", "") if isinstance(config, dict) else ""
