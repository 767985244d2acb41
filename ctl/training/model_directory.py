"""Check of a model directory before training."""

import contextlib
import logging
import os
from pathlib import Path

from ctl.checkpoints import commit
from ctl.errors import StorageError, UsageError
from ctl.io import disk_errors, paths

_PROBE_BYTES = 1 << 16
_log = logging.getLogger("ctl")


def check_model_directory(path: str) -> None:
    """Creates `path`, unless it is empty, and writes some bytes to its disk.

    Errors that may pass are retried for some seconds.

    Raises:
      UsageError: If a retry cannot succeed, for example without permission.
      StorageError: If the error may pass. A full disk is only a warning where checkpoints exist: the
        training can resume, and its disk may have space by the next save.
    """
    if not path:
        return
    _check_name(path)
    directory = paths.path(path)
    try:
        paths.call_with_retries(
            lambda: paths.probe(directory, _PROBE_BYTES),
            is_permanent=lambda error: not disk_errors.is_transient(error),
            where=directory,
        )
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"model_dir {path!r} {_obstacle(path)}; expected a directory.") from None
    except OSError as e:
        message = f"model_dir {path!r} cannot be written: {e.strerror or e}."
        if disk_errors.is_full(e) and _has_checkpoints(directory):
            _log.warning("%s Training resumes nevertheless; saves fail until there is space.", message)
        elif disk_errors.is_transient(e):
            raise StorageError(
                f"{message} Free some space, or repair the disk; then start the same command again."
            ) from None
        else:
            raise UsageError(
                f"{message} Give a directory this user may write to, on a disk with room."
            ) from None


def _check_name(path: str) -> None:
    """Raises UsageError for a name that is not UTF-8, which TensorFlow cannot open."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"model_dir is {os.fsencode(path)!r}, which Python could not decode as UTF-8, and TensorFlow "
            "takes UTF-8 only. Set PYTHONUTF8=1 or a UTF-8 locale (LC_ALL=C.UTF-8) for names with "
            "accents or other scripts, or give another name."
        ) from None


def _obstacle(path: str) -> str:
    """Returns why a directory cannot be made at `path`."""
    for part in (Path(path), *Path(path).parents):
        if part.is_symlink() and not part.exists():
            name = "" if part == Path(path) else f"lies in {str(part)!r}, which "
            return f"{name}is a symbolic link to {os.readlink(part)!r}, which does not exist"
    return "is a file, or lies in one"


def _has_checkpoints(model_dir: paths.AnyPath) -> bool:
    with contextlib.suppress(OSError):
        return bool(commit.list_checkpoints(model_dir / "checkpoints"))
    return False
