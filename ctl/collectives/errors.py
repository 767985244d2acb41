"""What the engine raises."""

from ctl.errors import EXIT_RETRY, CtlError, UsageError


class HorovodInternalError(CtlError, RuntimeError):
    """A collective failed because a rank is lost; `elastic.run` resumes from the last commit.

    If it is not caught, the process ends with `exit_code`, so that a launcher can retry the job.
    """

    exit_code = EXIT_RETRY
    runs_exit_functions = True


class PortInUseError(UsageError):
    """This rank cannot listen at its port, because another program does."""
