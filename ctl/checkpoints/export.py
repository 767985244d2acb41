"""The trained model as files that need no `ctl`: `.keras`, SavedModel, weights.

Every worker writes, because reading some variables is a sum over workers; the chief's files are
moved into place when they are complete, the others' are removed. In object stores, which rename
nothing, they are copied there, and what makes a directory a SavedModel comes last.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import is_keras3
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io import paths

_FILES = {"keras": "model.keras", "saved_model": "saved_model", "weights": "model.weights.h5"}
FORMATS = tuple(_FILES)
SAVED_MODEL_MARK = "saved_model.pb"  # what makes a directory a SavedModel; written last
_METHODS = {"keras": "save", "saved_model": "export", "weights": "save_weights"}


def parse_formats(text: str) -> tuple[str, ...]:
    """`keras,saved_model` -> ("keras", "saved_model"); "none" or "" -> ()."""
    words = tuple(w.strip() for w in text.split(",") if w.strip())
    if words in ((), ("none",), ("0",)):
        return ()
    unknown = [w for w in words if w not in FORMATS]
    if unknown:
        raise UsageError(f"export is {text!r}; expected none, or some of {', '.join(FORMATS)} with commas.")
    return words


def possible(model: Any) -> tuple[str, ...]:
    """The formats that `model` can be written in."""
    keras_like = [w for w, method in _METHODS.items() if hasattr(model, method)]
    return tuple(keras_like) or (("saved_model",) if isinstance(model, tf.Module) else ())


def check_formats(model: Any, formats: Sequence[str]) -> None:
    """Raises UsageError for a word that is no format, or one that `model` cannot be written in."""
    can = possible(model)
    cannot = [w for w in parse_formats(",".join(formats)) if w not in can]
    if cannot:
        raise UsageError(
            f"export of {', '.join(cannot)}: self.model, a {type(model).__name__}, can be written as "
            f"{', '.join(can) or 'nothing: it is neither a Keras model nor a tf.Module'}."
        )


def signatures_of(trainer: object) -> dict[str, Any]:
    """What the trainer's optional `signatures()` says; raises UsageError for what cannot be served."""
    method = getattr(trainer, "signatures", None)
    if method is None:
        return {}
    found = method()
    good = isinstance(found, Mapping) and all(
        isinstance(n, str) and getattr(f, "input_signature", None) is not None for n, f in found.items()
    )
    if not good:
        raise UsageError(
            f"signatures() returned {found!r}; expected names and functions that know their arguments: "
            '{"serving_default": tf.function(self.serve, input_signature=[tf.TensorSpec(...)])}.'
        )
    return dict(found)


def export(
    model: Any,
    directory: str | os.PathLike,
    formats: Sequence[str],
    topology: Topology,
    signatures: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes `model` into `directory`; returns the paths, on the chief.

    Args:
      directory: a path, or a URL.
      formats: of "keras" (model.keras), "saved_model" (saved_model/), "weights" (model.weights.h5).
        A tf.Module has only "saved_model".
      signatures: name -> `tf.function` that the SavedModel serves, instead of the model's own.
    """
    check_formats(model, formats)
    goal = paths.path(directory)
    renamed = paths.has_rename(goal)
    beside = Path(directory) / f"workertemp_{topology.worker_index}"
    own = beside if renamed else Path(tempfile.mkdtemp(prefix="ctl-export-"))
    shutil.rmtree(own, ignore_errors=True)
    written = []
    try:
        own.mkdir(parents=True)
        for word in formats:
            path = own / _FILES[word]
            _write(model, word, path, signatures or {})
            if not topology.is_chief:
                continue
            final = goal / path.name
            if not renamed:
                paths.copy_tree(path, final, last=SAVED_MODEL_MARK)
            else:
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
