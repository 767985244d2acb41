"""Errors of the collectives runtime."""

from ctl.errors import EXIT_RETRY, CtlError, UsageError


class HorovodInternalError(CtlError, RuntimeError):
    """Error of a collective after the loss of a rank. `elastic.run` resumes from the last commit.

    If it is not caught, the process ends with `exit_code`, so that a launcher can retry the job.
    """

    exit_code = EXIT_RETRY
    runs_exit_functions = True


class PortInUseError(UsageError):
    """Error of a rank that cannot listen because another program uses its port."""
