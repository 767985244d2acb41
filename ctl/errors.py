"""What can end a run, and the exit code each end has.

The codes are an interface: launchers and platforms decide on them whether to start a job again.
Every message says what came, what was expected and what to write instead.
"""

EXIT_DONE = 0
EXIT_FAILED = 1  # user code, numbers that are not finite: starting again will not help
EXIT_USAGE = 2  # a bad flag, a bad TF_CONFIG, missing data: never retried
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_RETRY = 134  # a peer was lost, something hung: worth another attempt
EXIT_PREEMPTED = 143  # asked to leave, after a checkpoint


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
    """Something given to `ctl` cannot be used; raised before any training."""

    exit_code = EXIT_USAGE


class CheckpointError(CtlError):
    """A checkpoint cannot be restored into this model, or cannot be read at all."""

    exit_code = EXIT_USAGE


class ReadError(CheckpointError, OSError):
    """A checkpoint could not be read for now, and is not known to be damaged; worth another attempt."""

    exit_code = EXIT_RETRY


class StorageError(CtlError):
    """A directory cannot be written because of an error that may pass, such as a full disk."""

    exit_code = EXIT_RETRY


class SaveError(CheckpointError):
    """A checkpoint could not be written; what was saved before is as it was."""

    exit_code = EXIT_FAILED


class NonFiniteError(CtlError, ArithmeticError):
    """A loss or a gradient became NaN or infinite; the weights of that step were not applied."""


class OutOfMemory(CtlError, MemoryError):
    """The memory of the host or of a device is used up; the same again would end the same."""


class Stopped(CtlError, SystemExit):
    """A signal asked the run to end; a checkpoint was saved first.

    Not caught, it ends the process with its exit code and without a traceback.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = self.code = exit_code


class LeaseLostError(CtlError):
    """Another job has taken this one's model_dir over, as it was silent for too long."""

    exit_code = EXIT_RETRY


class PeerLostError(CtlError):
    """Another worker died or cannot be reached; the job is worth another attempt."""

    exit_code = EXIT_RETRY
