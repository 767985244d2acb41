"""Processes of `mpirun` as seen by the process manager that started them."""

import contextlib
import os
from collections.abc import Mapping

from ctl.errors import UsageError

USAGE = "start the program with `mpirun -np N`, or use another communication than 'mpi'"
# variables that mpirun, mpiexec or srun set: Hydra and PMI, Open MPI, PMIx
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_CONNECTION_VARIABLE = "PMI_FD"
_FINALIZE, _MAX_RESPONSE = b"cmd=finalize\n", 256


def check_launcher(environ: Mapping[str, str]) -> None:
    """Raises UsageError if this process was not started by `mpirun`."""
    if not any(environ.get(name) for name in _RANK_VARIABLES):
        raise UsageError(f"communication over MPI outside of mpirun; {USAGE}.")


def count_processes(environ: Mapping[str, str], default: int) -> int:
    """Returns the number of processes that `mpirun` has started, or the default if it is unknown."""
    texts = [environ.get(name, "") for name in _SIZE_VARIABLES]
    return next((int(text) for text in texts if text.isdigit()), default)


class ManagerConnection:
    """Connection of this process to the process manager of MPICH.

    MPICH keeps the connection after MPI_Finalize and ends it in an exit function of the C library. A
    process that ends without exit functions (`io/exit_hook.py`) must end it before. Otherwise the process
    manager kills the other processes. Source: PMI version 1, command `finalize`.

    Args:
      environ: Environment of the process.
    """

    def __init__(self, environ: Mapping[str, str]):
        text = environ.get(_CONNECTION_VARIABLE, "")
        self._descriptor = int(text) if text.isdigit() else -1
        self._identity = self._identify()

    def end(self) -> None:
        """Ends the connection if MPI_Finalize has not closed it."""
        if self._identity is None or self._identify() != self._identity:
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, _FINALIZE)
            os.read(self._descriptor, _MAX_RESPONSE)

    def _identify(self) -> tuple[int, int] | None:
        """Returns device and inode of the connection, or None if it is closed."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino
