"""Access to TensorFlow's tensor files by literal paths, with file system errors as OSError."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from ctl.checkpoints import commit
from ctl.io.paths import AnyPath

_PATTERN_CHARACTERS = frozenset("*?[]\\")
_FILE_ERRORS = (
    tf.errors.ResourceExhaustedError,
    tf.errors.UnknownError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
    tf.errors.DataLossError,
    tf.errors.OutOfRangeError,
)


@contextlib.contextmanager
def state_prefix(directory: AnyPath) -> Iterator[str]:
    """Yields the prefix of the tensor files in a checkpoint directory; see `literal_prefix`."""
    with literal_prefix(directory / commit.STATE) as prefix:
        yield prefix


@contextlib.contextmanager
def literal_prefix(prefix: AnyPath) -> Iterator[str]:
    """Yields a prefix of tensor files for TensorFlow's readers.

    TensorFlow expands a prefix as a pattern, so `lr[1]/ckpt-5/state` matches no file. For a local path
    with such characters the prefix is an alias, which is valid within the block.
    """
    if not isinstance(prefix, Path) or _PATTERN_CHARACTERS.isdisjoint(str(prefix)):
        yield str(prefix)
        return
    directory = prefix.parent
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        alias = Path(f"/proc/self/fd/{descriptor}")
        if alias.exists():
            yield str(alias / prefix.name)
        else:  # systems without /proc
            with tempfile.TemporaryDirectory(prefix="ctl-alias-") as temporary:
                link = Path(temporary) / "checkpoint"
                link.symlink_to(directory.absolute(), target_is_directory=True)
                yield str(link / prefix.name)
    finally:
        os.close(descriptor)


def file_error(error: tf.errors.OpError) -> OSError | None:
    """Returns the OSError for a TensorFlow error that comes from a file, or None for another cause.

    TensorFlow's checkpoint reader raises the base class for most errors of the file system.
    """
    if isinstance(error, tf.errors.NotFoundError):
        return FileNotFoundError(errno.ENOENT, error.message)
    is_unknown = type(error) is tf.errors.OpError
    is_listing = "Failed to get matching files" in error.message
    if is_unknown or is_listing or isinstance(error, _FILE_ERRORS):
        return OSError(errno.EIO, error.message)
    return None
