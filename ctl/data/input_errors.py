"""Explanations of errors in the user's data: missing or damaged files, and failed pipeline functions."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf
from ctl.errors import UsageError
from ctl.io import error_report

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_INPUT_ERROR = re.compile(
    r"\[\[(\{\{node )?\S*IteratorGetNext\w*(\}\})?\]\]|Error in user-defined function passed to"
)
_FUNCTION_ERROR = re.compile(
    r"Error in user-defined function passed to (\w+)Dataset\S* .*?Iterator::\S+: (.*)"
)
_PYTHON_ERROR = re.compile(r"\w+(Error|Exception)\b")
_OWN_ERROR = re.compile(r"^ctl\.errors\.\w+: ")
_NO_MATCH = re.compile(r"No files matched pattern: ([^'\"]*)")
_MISSING_IN_PYTHON = re.compile(
    rf"((?:(one of the )?examples? [\d, ]+ of a \w+: )?\b({'|'.join(e.__name__ for e in _MISSING)}): .*)"
)
_CORRUPT = re.compile(r"(corrupted|truncated) record at (\d+)")


@contextlib.contextmanager
def explain_missing_files(method: str) -> Iterator[None]:
    """Context in which the user's `method` makes a dataset. Raises UsageError for missing files."""
    try:
        yield
    except _MISSING as e:
        raise UsageError(f"{method}() cannot read its data: {e}.") from e
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as e:
        match = _NO_MATCH.search(e.message)
        if match:
            raise UsageError(
                f"{method}() found no file: no name matches the pattern {match[1]!r}. Check the directory "
                "and the pattern."
            ) from e
        if isinstance(e, tf.errors.NotFoundError):
            raise UsageError(f"{method}() cannot read its data: {error_report.core(e.message)}.") from e
        raise


def explain_input_error(error: BaseException, method: str) -> UsageError | None:
    """Returns an explanation of an error that the data of `method` caused, or None for other errors.

    Transient errors, such as an unreachable file system, have no explanation, so that the job is restarted.
    """
    error_types = (
        tf.errors.NotFoundError,
        tf.errors.DataLossError,
        tf.errors.InvalidArgumentError,
        tf.errors.FailedPreconditionError,
        tf.errors.PermissionDeniedError,
        tf.errors.UnimplementedError,
    )
    missing = _MISSING_IN_PYTHON.search(error.message) if isinstance(error, tf.errors.OpError) else None
    if missing and _INPUT_ERROR.search(missing.string):
        return UsageError(
            f"{method} cannot be read: {missing[1].rstrip('.')}{error_report.user_line(missing.string)}."
        )
    if not isinstance(error, error_types) or not _INPUT_ERROR.search(error.message):
        return None
    text = _OWN_ERROR.sub("", error_report.core(error.message))
    corrupt = _CORRUPT.search(text)
    if corrupt:
        return UsageError(
            f"{method} has a damaged file: {corrupt[1]} record at byte {corrupt[2]} of a TFRecord file "
            "(TensorFlow reports no name). Write the file again, or leave it out."
        )
    function = _FUNCTION_ERROR.search(text)
    is_argument = isinstance(error, tf.errors.InvalidArgumentError)
    is_assertion = text.startswith("assertion failed")  # TensorFlow 2.16 does not name the function
    if is_argument and (function or is_assertion or _PYTHON_ERROR.match(text)):
        return None  # raised by the user's own code
    if function:
        failure = f"a function of its pipeline ({function[1].lower()}) failed"
        return UsageError(f"{method}: {failure}: {function[2].rstrip('.')}.")
    return UsageError(f"{method} cannot be read: {text.rstrip('.')}.")
