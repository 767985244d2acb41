"""Errors of the user's data: files that are missing or damaged, functions of a pipeline that fail."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf
from ctl.errors import UsageError
from ctl.io import error_report

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_OF_AN_INPUT = re.compile(
    r"\[\[(\{\{node )?\S*IteratorGetNext\w*(\}\})?\]\]|Error in user-defined function passed to"
)
_IN_A_FUNCTION = re.compile(
    r"Error in user-defined function passed to (\w+)Dataset\S* .*?Iterator::\S+: (.*)"
)
_PYTHON_ERROR = re.compile(r"\w+(Error|Exception)\b")
_NO_MATCH = re.compile(r"No files matched pattern: ([^'\"]*)")
_CORRUPT = re.compile(r"(corrupted|truncated) record at (\d+)")


@contextlib.contextmanager
def of_method(method: str) -> Iterator[None]:
    """Within the block the user's `method` makes a dataset; missing files raise UsageError."""
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
    """Returns the explanation of an error that came from the data of `method`; None for other errors.

    Errors that may pass, such as an unreachable file system, are not explained: they are worth a retry.
    """
    kinds = (
        tf.errors.NotFoundError,
        tf.errors.DataLossError,
        tf.errors.InvalidArgumentError,
        tf.errors.FailedPreconditionError,
        tf.errors.PermissionDeniedError,
        tf.errors.UnimplementedError,
    )
    if not isinstance(error, kinds) or not _OF_AN_INPUT.search(error.message):
        return None
    text = error_report.core(error.message)
    corrupt = _CORRUPT.search(text)
    if corrupt:
        return UsageError(
            f"{method} has a damaged file: {corrupt[1]} record at byte {corrupt[2]} of a TFRecord file "
            "(TensorFlow reports no name). Write the file again, or leave it out."
        )
    function = _IN_A_FUNCTION.search(text)
    is_argument = isinstance(error, tf.errors.InvalidArgumentError)
    if is_argument and (function or _PYTHON_ERROR.match(text)):
        return None  # raised by the user's own code
    if function:
        where = f"a function of its pipeline ({function[1].lower()}) failed"
        return UsageError(f"{method}: {where}: {function[2].rstrip('.')}.")
    return UsageError(f"{method} cannot be read: {text.rstrip('.')}.")
