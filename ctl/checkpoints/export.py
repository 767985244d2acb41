"""Export of trained models to files that do not depend on `ctl`: `.keras`, SavedModel and weights.

Every worker writes, because reading some variables is a sum over workers. The chief moves its files into
place when they are complete; the other workers delete theirs. To object stores, which cannot rename, the
files are copied, and the file that marks a SavedModel is copied last.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io import paths

_FILES = {"keras": "model.keras", "saved_model": "saved_model", "weights": "model.weights.h5"}
FORMATS = tuple(_FILES)
SAVED_MODEL_MARK = "saved_model.pb"  # a directory without this file is not a SavedModel
_METHODS = {"keras": "save", "saved_model": "export", "weights": "save_weights"}


class HasModel(Protocol):
    """A trainer with a model."""

    model: Any


@dataclass(frozen=True)
class Target:
    """A model to export in one format.

    Attributes:
      model: The model.
      format: One of `FORMATS`.
      folder: Folder of the file, relative to the export directory.
    """

    model: Any
    format: str
    folder: str = "."


def parse_formats(text: str) -> tuple[str, ...]:
    """Parses a text such as `keras,generator:saved_model`.

    Args:
      text: Formats with commas. `format` is for `self.model`, `name:format` for the model `self.<name>`.

    Returns:
      The parts, such as ("keras", "generator:saved_model"). An empty tuple for "none", "0" or "".

    Raises:
      UsageError: For an unknown format.
    """
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if parts in ((), ("none",), ("0",)):
        return ()
    if any(part.rpartition(":")[2] not in FORMATS for part in parts):
        raise UsageError(
            f"export is {text!r}; expected none, or some of {', '.join(FORMATS)} with commas. For a model "
            "other than self.model write its name before the format, e.g. generator:keras."
        )
    return parts


def supported_formats(model: Any) -> tuple[str, ...]:
    """Returns the formats in which `model` can be written."""
    keras_formats = [f for f, method in _METHODS.items() if callable(attribute(model, method))]
    return tuple(keras_formats) or (("saved_model",) if isinstance(model, tf.Module) else ())


def targets(owner: object, formats: Sequence[str]) -> list[Target]:
    """Returns the models and formats to export.

    Args:
      owner: Object with the models as attributes, such as a trainer.
      formats: `format` for `self.model`, `name:format` for `self.<name>`; see `FORMATS`.

    Raises:
      UsageError: For an unknown format or model, or a format that the model does not support.
    """
    export_targets = []
    for part in parse_formats(",".join(formats)):
        name, colon, format_name = part.rpartition(":")
        name = name if colon else "model"
        model = getattr(owner, name, None)
        if format_name not in supported_formats(model):
            public = {n: v for n, v in vars(owner).items() if not n.startswith("_")}
            models = {n: v for n, v in public.items() if supported_formats(v)}
            raise UsageError(f"export of {part}: {_rejection_reason(name, model, models)}")
        export_targets.append(Target(model, format_name, name if colon else "."))
    return export_targets


def default_formats(owner: HasModel) -> tuple[str, ...]:
    """Returns the default formats of `self.model`. Raises UsageError if it cannot be exported."""
    formats = supported_formats(owner.model)[:2]
    if not formats:
        targets(owner, ("keras",))  # raises
    return formats


def _rejection_reason(name: str, model: Any, models: Mapping[str, Any]) -> str:
    """Returns the reason why `self.<name>` cannot be exported, and the fix. `models` are those that can."""
    if model is not None and (formats := supported_formats(model)):
        return f"self.{name}, of class {type(model).__name__}, can be written as {', '.join(formats)}."
    fault = "is not set" if model is None else f"is {model!r:.40}, which cannot be written"
    if not models:
        return f"self.{name} {fault}; expected a Keras model or a tf.Module. Set self.model in build()."
    first = next(iter(models))
    return (
        f"self.{name} {fault}; expected one of {', '.join(models)}. Write the name before the format, e.g. "
        f"--export={first}:{supported_formats(models[first])[0]}."
    )


def checked_signatures(signatures: Any) -> dict[str, Any]:
    """Returns the result of `Trainer.signatures` as a dictionary. Raises UsageError if it is not valid."""
    is_valid = isinstance(signatures, Mapping) and all(
        isinstance(name, str) and getattr(function, "input_signature", None) is not None
        for name, function in signatures.items()
    )
    if not is_valid:
        raise UsageError(
            f"signatures() returned {signatures!r}; expected a dictionary of functions with an input "
            'signature: {"serving_default": tf.function(self.serve, input_signature=[tf.TensorSpec(...)])}.'
        )
    return dict(signatures)


def export(
    targets: Sequence[Target],
    directory: str | os.PathLike[str],
    topology: Topology,
    signatures: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes models to model.keras, saved_model or model.weights.h5 in `directory`. All workers call it.

    Args:
      targets: The models and formats, from the function `targets`.
      directory: A local path or a URL.
      topology: Topology of the job. Only the chief's files remain.
      signatures: Name -> `tf.function` that the SavedModel of `self.model` serves instead of its default.

    Returns:
      The paths of the files on the chief, and an empty list on other workers.
    """
    destination = paths.path(directory)
    can_rename = paths.has_rename(destination)
    sibling = Path(directory) / f"workertemp_{topology.worker_index}"
    temporary = sibling if can_rename else Path(tempfile.mkdtemp(prefix="ctl-export-"))
    shutil.rmtree(temporary, ignore_errors=True)
    exported = []
    try:
        temporary.mkdir(parents=True)
        for target in targets:
            path = temporary / target.folder / _FILES[target.format]
            path.parent.mkdir(exist_ok=True)
            target_signatures = signatures if target.folder == "." else None
            _write_model(target.model, target.format, path, target_signatures or {})
            if not topology.is_chief:
                continue
            folder = destination if target.folder == "." else destination / target.folder
            final = folder / path.name
            if not can_rename:
                paths.copy_tree(path, final, last=SAVED_MODEL_MARK)
            else:
                Path(final).parent.mkdir(exist_ok=True)  # in the directory of `temporary`
                paths.replace(path, Path(final))
            exported.append(str(final))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported


def _write_model(model: Any, format_name: str, path: Path, signatures: Mapping[str, Any]) -> None:
    method = _METHODS[format_name]
    if format_name == "saved_model" and signatures:
        _write_with_signatures(model, path, signatures)
    elif not hasattr(model, method):
        tf.saved_model.save(model, str(path))
    elif format_name == "saved_model" and is_keras3(model):
        model.export(str(path), verbose=False)
    else:
        getattr(model, method)(str(path))


def _write_with_signatures(model: Any, path: Path, signatures: Mapping[str, Any]) -> None:
    if not is_keras3(model):
        tf.saved_model.save(model, str(path), signatures=dict(signatures))
        return
    from keras.export import ExportArchive

    archive = ExportArchive()
    archive.track(model)
    for name, function in signatures.items():
        function.get_concrete_function()  # an archive accepts traced functions only
        archive.add_endpoint(name, function)
    archive.write_out(str(path), verbose=False)
