"""Exceptions of `ctl` and their exit codes.

The codes are an interface: launchers and platforms use them to decide on a restart of the job. Every
message states the received value, the expected value and the fix.
"""

EXIT_DONE = 0
EXIT_FAILED = 1  # error in user code, NaN or infinite values: a restart will not help
EXIT_USAGE = 2  # invalid flag, invalid TF_CONFIG, missing data: never retried
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_RETRY = 134  # lost peer or hang: the job should be retried
EXIT_PREEMPTED = 143  # preempted by a signal, after a checkpoint


class CtlError(Exception):
    """Base class of the errors that `ctl` raises.

    Attributes:
      exit_code: Exit code of a process that ends with this error.
      runs_exit_functions: If False, a process with EXIT_RETRY skips its exit functions, because they may
        wait for a lost peer. Processes with other exit codes always run them.
    """

    exit_code = EXIT_FAILED
    _keras_call_info_injected = True  # Keras does not add the arguments of its layers to the message
    runs_exit_functions = False


class UsageError(CtlError, ValueError):
    """Error for an invalid argument, setting or method of the user, raised before training starts."""

    exit_code = EXIT_USAGE


class CheckpointError(CtlError):
    """Error for a checkpoint that cannot be read, or cannot be restored into this model."""

    exit_code = EXIT_USAGE


class ReadError(CheckpointError, OSError):
    """Error for a temporary failure to read a checkpoint that may be intact. The job should be retried."""

    exit_code = EXIT_RETRY


class StorageError(CtlError):
    """Error for a temporary failure of storage, such as a full disk. The job should be retried."""

    exit_code = EXIT_RETRY


class SaveError(CheckpointError):
    """Error for a checkpoint that could not be written. Earlier checkpoints are unchanged."""

    exit_code = EXIT_FAILED


class NonFiniteError(CtlError, ArithmeticError):
    """Error for a NaN or infinite loss or gradient. The update of that step was not applied."""


class OutOfMemory(CtlError, MemoryError):
    """Error for exhausted memory of the host or of a device. A retry would fail in the same way."""


class Stopped(CtlError, SystemExit):
    """Exception that ends a run after a signal and a checkpoint.

    If it is not caught, the process ends with its exit code and without a traceback.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = self.code = exit_code


class LeaseLostError(CtlError):
    """Error if another job has taken over the model_dir, as this job did not renew its lease in time."""

    exit_code = EXIT_RETRY


class PeerLostError(CtlError):
    """Error for a worker that died or cannot be reached. The job should be retried."""

    exit_code = EXIT_RETRY
