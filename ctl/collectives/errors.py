"""Errors of the collectives runtime."""

from ctl.collectives import contents
from ctl.errors import EXIT_RETRY, CtlError, UsageError

FAILURE_MARK = "ctl.hvd: "  # prefix that identifies the messages in TensorFlow's errors


class HorovodInternalError(CtlError, RuntimeError):
    """Error of a collective after the loss of a rank. `elastic.run` resumes from the last commit.

    If it is not caught, the process ends with `exit_code`, so that a launcher can retry the job.
    """

    exit_code = EXIT_RETRY
    runs_exit_functions = True


class PortInUseError(UsageError):
    """Error of a rank that cannot listen because another program uses its port."""


def create_exception(code: str, text: str) -> Exception:
    """Creates the exception of a collective without TensorFlow. `failures` creates TensorFlow's types.

    Args:
      code: "LOST" after the loss of a rank, or an error code of `requests`.
      text: Error message.
    """
    message = FAILURE_MARK + text + contents.describe_tensors(text)
    return HorovodInternalError(message) if code == "LOST" else UsageError(message)
