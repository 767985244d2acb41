"""The trained model as files that need no `ctl`: `.keras`, SavedModel, weights.

Every worker writes, because reading some variables is a sum over workers; the chief's files are
moved into place when they are complete, the others' are removed.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.strategies import Placement

_FILES = {"keras": "model.keras", "saved_model": "saved_model", "weights": "model.weights.h5"}
FORMATS = tuple(_FILES)


def parse_formats(text: str) -> tuple[str, ...]:
    """`keras,saved_model` -> ("keras", "saved_model"); "none" or "" -> ()."""
    words = tuple(w.strip() for w in text.split(",") if w.strip())
    if words in ((), ("none",), ("0",)):
        return ()
    unknown = [w for w in words if w not in FORMATS]
    if unknown:
        raise UsageError(
            f"export is {text!r}; expected none, or some of {', '.join(FORMATS)} with commas."
        )
    return words


def export(model: Any, directory, formats: Sequence[str], placement: Placement) -> list[str]:
    """Writes `model` into `directory`; returns the paths, on the chief.

    Args:
      formats: of "keras" (model.keras), "saved_model" (saved_model/), "weights" (model.weights.h5).
        A tf.Module has only "saved_model".
    """
    directory = Path(directory)
    own = directory / f"workertemp_{placement.worker_index}"
    shutil.rmtree(own, ignore_errors=True)
    written = []
    try:
        own.mkdir(parents=True)
        for word in parse_formats(",".join(formats)):
            path = own / _FILES[word]
            if not _write(model, word, path) or not placement.is_chief:
                continue
            final = directory / path.name
            if final.is_dir():
                shutil.rmtree(final)
            os.replace(path, final)
            written.append(str(final))
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return written


def _write(model: Any, word: str, path: Path) -> bool:
    if word == "keras" and hasattr(model, "save"):
        model.save(str(path))
    elif word == "weights" and hasattr(model, "save_weights"):
        model.save_weights(str(path))
    elif word == "saved_model" and hasattr(model, "export"):
        model.export(str(path), verbose=False)
    elif word == "saved_model" and isinstance(model, tf.Module):
        tf.saved_model.save(model, str(path))
    else:
        return False
    return True
