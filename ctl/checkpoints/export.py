"""The trained model as files that need no `ctl`: `.keras`, SavedModel, weights.

Every worker writes, because reading some variables is a sum over workers; the chief's files are
moved into place when they are complete, the others' are removed. In object stores, which rename
nothing, they are copied there, and what makes a directory a SavedModel comes last.
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
SAVED_MODEL_MARK = "saved_model.pb"  # what makes a directory a SavedModel; written last
_METHODS = {"keras": "save", "saved_model": "export", "weights": "save_weights"}


class HasModel(Protocol):
    """A trainer."""

    model: Any


@dataclass(frozen=True)
class Target:
    """A model to export in one format; `folder` is relative to the export directory."""

    model: Any
    format: str
    folder: str = "."


def parse_formats(text: str) -> tuple[str, ...]:
    """Parses `keras,generator:saved_model` to ("keras", "generator:saved_model"); "none" or "" to ().

    A format alone is for `self.model`; `name:format` is for the model `self.<name>`.
    """
    words = tuple(w.strip() for w in text.split(",") if w.strip())
    if words in ((), ("none",), ("0",)):
        return ()
    unknown = [w for w in words if w.rpartition(":")[2] not in FORMATS]
    if unknown:
        raise UsageError(
            f"export is {text!r}; expected none, or some of {', '.join(FORMATS)} with commas. For a model "
            "other than self.model write its name before the format, e.g. generator:keras."
        )
    return words


def possible(model: Any) -> tuple[str, ...]:
    """The formats that `model` can be written in."""
    keras_like = [w for w, method in _METHODS.items() if callable(attribute(model, method))]
    return tuple(keras_like) or (("saved_model",) if isinstance(model, tf.Module) else ())


def targets(trainer: object, formats: Sequence[str]) -> list[Target]:
    """Returns the models and formats to export.

    Args:
      trainer: Its attributes are searched for models.
      formats: `format` for `self.model`, `name:format` for `self.<name>`; see FORMATS.

    Raises:
      UsageError: For an unknown format or model, or a format that the model cannot be written in.
    """
    found = []
    for word in parse_formats(",".join(formats)):
        name, colon, wanted = word.rpartition(":")
        name = name if colon else "model"
        model = getattr(trainer, name, None)
        if wanted not in possible(model):
            named = {n: v for n, v in vars(trainer).items() if not n.startswith("_") and possible(v)}
            raise UsageError(f"export of {word}: {_refusal(name, model, named)}")
        found.append(Target(model, wanted, name if colon else "."))
    return found


def default_formats(trainer: HasModel) -> tuple[str, ...]:
    """Returns the formats of `self.model` that are exported by default; raises UsageError without one."""
    formats = possible(trainer.model)[:2]
    if not formats:
        targets(trainer, ("keras",))
    return formats


def _refusal(name: str, model: Any, named: Mapping[str, Any]) -> str:
    """Returns the reason why `self.<name>` cannot be exported, and what to write instead."""
    if model is not None and possible(model):
        return (
            f"self.{name}, of class {type(model).__name__}, can be written as {', '.join(possible(model))}."
        )
    kind = "is not set" if model is None else f"is {model!r:.40}, which cannot be written"
    if not named:
        return f"self.{name} {kind}; expected a Keras model or a tf.Module. Set self.model in build()."
    first = next(iter(named))
    return (
        f"self.{name} {kind}; expected one of {', '.join(named)}. Write the name before the format, e.g. "
        f"--export={first}:{possible(named[first])[0]}."
    )


def checked_signatures(signatures: Any) -> dict[str, Any]:
    """Returns the result of `Trainer.signatures`; raises UsageError if it cannot be served."""
    is_valid = isinstance(signatures, Mapping) and all(
        isinstance(name, str) and getattr(function, "input_signature", None) is not None
        for name, function in signatures.items()
    )
    if not is_valid:
        raise UsageError(
            f"signatures() returned {signatures!r}; expected names and functions that know their "
            'arguments: {"serving_default": tf.function(self.serve, input_signature=[tf.TensorSpec(...)])}.'
        )
    return dict(signatures)


def export(
    targets: Sequence[Target],
    directory: str | os.PathLike,
    topology: Topology,
    signatures: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes models into `directory`, in files called model.keras, saved_model or model.weights.h5.

    Args:
      targets: The models and formats, from the function `targets`.
      directory: A path or a URL.
      topology: All workers must call this function; only the chief's files remain.
      signatures: Name -> `tf.function` that the SavedModel of `self.model` serves, instead of its own.

    Returns:
      The paths of the files on the chief, and an empty list on other workers.
    """
    goal = paths.path(directory)
    renamed = paths.has_rename(goal)
    beside = Path(directory) / f"workertemp_{topology.worker_index}"
    own = beside if renamed else Path(tempfile.mkdtemp(prefix="ctl-export-"))
    shutil.rmtree(own, ignore_errors=True)
    written = []
    try:
        own.mkdir(parents=True)
        for target in targets:
            path = own / target.folder / _FILES[target.format]
            path.parent.mkdir(exist_ok=True)
            served = signatures if target.folder == "." else None
            _write(target.model, target.format, path, served or {})
            if not topology.is_chief:
                continue
            folder = goal if target.folder == "." else goal / target.folder
            final = folder / path.name
            if not renamed:
                paths.copy_tree(path, final, last=SAVED_MODEL_MARK)
            else:
                Path(final).parent.mkdir(parents=True, exist_ok=True)
                paths.replace(path, Path(final))
            written.append(str(final))
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return written


def _write(model: Any, word: str, path: Path, signatures: Mapping[str, Any]) -> None:
    if word == "saved_model" and signatures:
        _write_served(model, path, signatures)
    elif not hasattr(model, _METHODS[word]):
        tf.saved_model.save(model, str(path))
    elif word == "saved_model" and is_keras3(model):
        model.export(str(path), verbose=False)
    else:
        getattr(model, _METHODS[word])(str(path))


def _write_served(model: Any, path: Path, signatures: Mapping[str, Any]) -> None:
    if not is_keras3(model):
        tf.saved_model.save(model, str(path), signatures=dict(signatures))
        return
    from keras.export import ExportArchive

    archive = ExportArchive()
    archive.track(model)
    for name, function in signatures.items():
        function.get_concrete_function()  # an archive takes what has been traced
        archive.add_endpoint(name, function)
    archive.write_out(str(path), verbose=False)
