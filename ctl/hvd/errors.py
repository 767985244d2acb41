"""Errors of collectives, under the names that scripts catch."""

from ctl.collectives.errors import HorovodInternalError
from ctl.errors import CtlError, UsageError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "RefusedError",
    "UsageError",
]


class HostsUpdatedInterrupt(RuntimeError):
    """Interrupt because hosts were added or removed. `elastic.run` continues with a new set of ranks.

    Attributes:
      skip_sync: True if no rank was added, so no rank needs the state of another.
    """

    def __init__(self, skip_sync: bool):
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """An error that is never raised, because no compiled code depends on TensorFlow's version."""


class RefusedError(CtlError, NotImplementedError):
    """Error for an unsupported part of Horovod's API. The message names an alternative."""
