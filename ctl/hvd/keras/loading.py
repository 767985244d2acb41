"""Loading of a saved model for training. Its optimizer becomes distributed and keeps its state."""

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
    """Loads the model of a .keras or .h5 file, with Keras 3 or tf_keras, depending on the file.

    Args:
      filepath: Path, or for .h5 an open h5py.File.
      custom_optimizers: Optimizer classes that are not part of Keras.
      custom_objects: Name -> object, as for `keras.models.load_model`. For an optimizer it may also be a
        function that creates it from its config.
      compression: Compression of the distributed optimizer.
      legacy_opts: Ignored. The file specifies the optimizer.
    """
    objects_by_name: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    version, optimizer_class = _read_versions(filepath)
    for name, custom_object in (custom_objects or {}).items():
        is_function = callable(custom_object) and not isinstance(custom_object, type)
        objects_by_name[name] = (
            _OptimizerFactory(custom_object) if is_function and name == optimizer_class else custom_object
        )
    model = _select_keras(version).models.load_model(filepath, custom_objects=objects_by_name)
    loaded_optimizer = getattr(model, "optimizer", None)
    if _has_lost_state(loaded_optimizer):
        with _open_hdf5(filepath) as file:
            _restore_optimizer(loaded_optimizer, model.trainable_variables, file)
    if loaded_optimizer is not None and not isinstance(loaded_optimizer, Distributed):
        model.optimizer = DistributedOptimizer(loaded_optimizer, compression=compression)
    return model


class _OptimizerFactory:
    """Adapter from a factory function to the class that Keras expects."""

    def __init__(self, function: Any):
        self._function = function

    def from_config(self, config: dict[str, Any]) -> Any:
        return self._function(**config)


def _select_keras(version: str) -> Any:
    """Returns tf_keras for a file of Keras 2 if the script has imported tf_keras, otherwise `tf.keras`."""
    return sys.modules.get("tf_keras", tf.keras) if version.startswith("2.") else tf.keras


def _has_lost_state(optimizer: Any) -> bool:
    """Returns True for an optimizer of an .h5 file, which Keras 3 builds without variables."""
    return (
        getattr(optimizer, "built", False)
        and not optimizer_attributes.trainable_variables(optimizer, default=True)
        and not hasattr(optimizer, "inner_optimizer")
    )


def _restore_optimizer(optimizer: Any, variables: Sequence[Any], file: Any) -> None:
    optimizer.built = False  # otherwise `build` would return immediately
    optimizer.build(list(variables))
    group = file.get("optimizer_weights")
    names = [] if group is None else group.attrs.get("weight_names", [])
    saved = [group[n.decode() if isinstance(n, bytes) else n][()] for n in names]
    if [v.shape for v in optimizer.variables] == [value.shape for value in saved]:
        for variable, value in zip(optimizer.variables, saved, strict=True):
            variable.assign(value)


@contextlib.contextmanager
def _open_hdf5(filepath: Any) -> Iterator[Any]:
    """Yields an open file unchanged, or opens the file at a path."""
    import h5py

    if isinstance(filepath, (str, os.PathLike)):
        with h5py.File(filepath) as file:
            yield file
    else:
        yield filepath


def _read_versions(filepath: Any) -> tuple[str, str]:
    """Returns (version of Keras, class of the optimizer) of a file, "" for missing values."""
    if isinstance(filepath, (str, os.PathLike)):
        if zipfile.is_zipfile(filepath):
            with zipfile.ZipFile(filepath) as archive:
                version = json.loads(archive.read("metadata.json")).get("keras_version", "")
                config = json.loads(archive.read("config.json")).get("compile_config") or {}
            return version, _read_class_name(config.get("optimizer"))
        if not os.path.isfile(filepath):
            return "2." if os.path.isdir(filepath) else "", ""
    try:
        with _open_hdf5(filepath) as file:
            version = _decode(file.attrs.get("keras_version", ""))
            training = json.loads(_decode(file.attrs.get("training_config", "{}")))
    except OSError:
        return "", ""  # not an HDF5 file: Keras raises an error
    return version, _read_class_name(training.get("optimizer_config"))


def _decode(attribute: Any) -> str:
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def _read_class_name(config: Any) -> str:
    return config.get("class_name", "") if isinstance(config, dict) else ""
