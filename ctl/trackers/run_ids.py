"""Identifiers of runs, which survive a resume."""

import contextlib
import logging
import uuid

from ctl.io import paths

_FILE = "run_id"  # in model_dir
_MAX_LENGTH = 64
_log = logging.getLogger("ctl")


def run_id_of(model_dir: str, default: str = "") -> str:
    """Returns the identifier in `model_dir/run_id`. Creates the file if it is missing or damaged.

    Args:
      model_dir: Directory of the run, or an empty string.
      default: Identifier of a run that is new or has no directory. Empty: a random one.
    """
    run_id = default or new_run_id()
    if not model_dir:
        return run_id
    path = paths.path(model_dir) / _FILE
    try:
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            stored = paths.read_file(path).decode().strip()
            if stored.isalnum() and stored.isascii() and len(stored) <= _MAX_LENGTH:
                return stored
        paths.write_atomically(path, f"{run_id}\n")
    except OSError as e:
        _log.warning("%s cannot be read or written (%s); experiment trackers show a new run.", path, e)
    return run_id


def new_run_id() -> str:
    """Returns a random identifier of 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]
